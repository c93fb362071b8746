//! Doorbells, and the thread of the host that rings them for kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use tokenyard_sys_mlx5::doorbell::{Ring, record_word};

use crate::pages::order_stores;

/// The thread naps once it has found nothing for this long.
const IDLE: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);
/// Turns between two looks at the clock.
const TURNS: u32 = 256;

/// The doorbell of a queue pair: its record in memory of the host, and its register.
#[derive(Clone, Copy, Debug)]
pub struct Bell {
    pub(crate) record: *const AtomicU32,
    pub(crate) register: *mut u64,
    pub(crate) number: u32,
}

impl Bell {
    /// Tells the device that requests up to `next`, counted since the beginning, are ready. All stores to them come
    /// before, in the order of this thread.
    ///
    /// # Safety
    /// The queue pair lives.
    pub unsafe fn ring(&self, next: u64) {
        // The index counts modulo 2^16.
        let next = next as u16;
        order_stores();
        // SAFETY: the record lives by this function's contract; all code accesses it by atomics.
        let record = unsafe { &*self.record };
        record.store(u32::from_ne_bytes(record_word(next)), Ordering::Relaxed);
        order_stores();
        let bytes = Ring::NextIndex { next, qpn: self.number }.to_bytes();
        // SAFETY: the register lives, and is aligned to 8 bytes; every store to it is whole.
        let register = unsafe { AtomicU64::from_ptr(self.register) };
        register.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
    }
}

/// A doorbell, and the word in which kernels store the requests that are ready.
#[derive(Clone, Copy, Debug)]
pub struct KernelBell {
    /// The doorbell.
    pub bell: Bell,
    /// A word of host memory, 0 at first; the doorbell of the queue in `DeviceQueue` with `HOST_RINGS`.
    pub word: *const AtomicU64,
}

// SAFETY: addresses; `Ringer::start` states who may use them.
unsafe impl Send for KernelBell {}

/// A thread that rings for kernels. It ends when this is dropped.
#[derive(Debug)]
pub struct Ringer {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ringer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's error where it starts no thread.
    ///
    /// # Safety
    /// The queue pairs and the words live until the result is dropped, and no other thread rings.
    pub unsafe fn start(bells: Vec<KernelBell>) -> std::io::Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let thread = Builder::new().name("tokenyard-ibgda".to_owned()).spawn(move || {
            // SAFETY: by the contract of `start`; the thread is joined when the `Ringer` is dropped.
            unsafe { serve(&bells, &seen) };
        })?;
        Ok(Self { ends, thread: Some(thread) })
    }
}

/// # Safety
/// As for [`Ringer::start`].
unsafe fn serve(bells: &[KernelBell], ends: &AtomicBool) {
    let mut rung = vec![0; bells.len()];
    let (mut last, mut turns) = (Instant::now(), 0_u32);
    while !ends.load(Ordering::Relaxed) {
        let mut moved = false;
        for (KernelBell { bell, word }, rung) in bells.iter().zip(&mut rung) {
            // Acquire order: the kernel has released the requests, and all that they name, with this word.
            // SAFETY: by this function's contract.
            let ready = unsafe { (**word).load(Ordering::Acquire) };
            if ready != *rung {
                // SAFETY: by this function's contract.
                unsafe { bell.ring(ready) };
                *rung = ready;
                moved = true;
            }
        }
        turns = turns.wrapping_add(1);
        if moved {
            last = Instant::now();
        } else if turns.is_multiple_of(TURNS) && last.elapsed() > IDLE {
            std::thread::sleep(NAP);
            // One look after each nap.
            turns = TURNS - 1;
        } else {
            std::hint::spin_loop();
        }
    }
}

impl Drop for Ringer {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has ended it, too.
            let _ = thread.join();
        }
    }
}
