//! The host's half of the GPU ring: posts the commands of kernels that cannot post themselves.
//!
//! A kernel set whose kernels use a transport without a device API gives the host a ring of commands in
//! memory that both sides see ([`abi::TyGpuRing`]; the device's half is
//! `backends/gpu/device/common/gpu_ring.cuh`). A thread here takes commands out in order, posts them in batches
//! to the transport's host API, and reports finished commands and the totals of signals to the kernels.
//!
//! ```text
//!  kernel                      ring                       proxy thread            transport
//!   reserve a number ───────►  64 bytes, sequence last ─► check, batch  ───────►  post
//!   wait for done    ◄───────  done                    ◄─ in order      ◄───────  poll
//!   read_signal      ◄───────  totals                  ◄───────────────────────  read_signal
//! ```
//!
//! - **Many producers.** Kernels number commands by an atomic add on a word in their own memory, so they may
//!   write commands in any order. The thread takes commands by number, and waits for a late one.
//! - **Room** (INV-5). A slot is free when its command, and every one before it, is done.
//! - **Payload first** (INV-1). A total is read with acquire order and stored with release order. That
//!   suffices where the windows lie in host memory, which the device reads coherently. Windows in device
//!   memory that a NIC writes past the host need a read-back or a flush of the device between the two.
//! - **Errors** (INV-7). After the first failure the ring is dead: `failed` reports it to the kernel
//!   set, which ends its kernels' waits, and no more commands are posted.
//! - **The thread.** A transport with threads of its own may serve the ring itself (the ABI's `serve_ring`):
//!   its thread then posts to the fabric, and a command is handed over once. [`GpuRing::serve`] runs that
//!   thread, too.
//! - **Sleep.** A thread without work spins, then yields, then sleeps for short times: a device cannot
//!   wake it.
//!
//! [`proxy`](crate::proxy) has another purpose: it serves transports whose own calls are slow.
//!
//! Watched by the step `model` of `cargo xtask test` (all schedules), and `backends/cpu/tests/gpu_ring.rs`.

mod check;
mod counts;
mod ring;
mod thread;

#[cfg(all(test, feature = "loom"))]
mod model;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::link::Link;
use crate::transport::{Command, Event};
use crate::{Error, Result, abi};
use check::Limits;
pub(crate) use counts::Counts;
use counts::Tally;
use ring::{RingMemory, Taker};
use thread::RingWorker;

/// The queue to which the thread of a ring posts. Used by that thread alone; no call blocks.
pub trait Fabric: Send + 'static {
    /// Accepts the first n of `commands` and returns n. Every command has `TY_FLAG_NOTIFY`.
    ///
    /// # Errors
    /// A status `TY_*` below zero: the ring is dead then.
    ///
    /// # Safety
    /// As [`Transport::post`](crate::transport::Transport::post).
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32>;
    /// Drives the queue, fills `events` from the front and returns how many were written.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32>;
    /// The total of a signal on this rank, with acquire order (INV-1).
    fn read_signal(&mut self, id: u32) -> u64;
    /// False once an asynchronous error has occurred.
    fn is_healthy(&mut self) -> bool;
}

/// A ring that no thread serves yet.
#[derive(Debug)]
pub struct RingToServe {
    taker: Taker<RingMemory>,
    limits: Limits,
    queue: u32,
    tally: Tally,
}

impl RingToServe {
    /// A ring from its form in the ABI.
    ///
    /// # Safety
    /// `raw` follows [`abi::TyServeRing`]: the memory behind its pointers, except for the lists of the call,
    /// stays valid until the value, or the thread that serves it, has ended. The ring is all zeros; no other
    /// thread uses its queue. Kernels leave the sources of their commands unchanged until the commands are
    /// done, and no code uses destinations before their signals.
    pub unsafe fn new(raw: &abi::TyServeRing) -> Self {
        // SAFETY: by this function's contract.
        let (ring, windows) =
            unsafe { (&*raw.ring, std::slice::from_raw_parts(raw.windows, raw.window_count)) };
        let limits = Limits {
            peers: raw.peers,
            signals: ring.signals,
            largest_put: raw.largest_put,
            windows: windows.iter().map(|window| window.bytes).collect(),
        };
        // SAFETY: by this function's contract.
        let (memory, tally) =
            unsafe { (RingMemory::new(ring), Tally::new(raw.counters, raw.raised, ring.signals)) };
        let taker = Taker::new(memory, ring.capacity as usize);
        Self { taker, limits, queue: ring.queue, tally }
    }

    /// The queue on which commands are posted.
    pub fn queue(&self) -> u32 {
        self.queue
    }
}

/// One queue of a link.
struct RingQueue {
    link: Link,
    number: u32,
}

impl Fabric for RingQueue {
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32> {
        // SAFETY: by this function's contract; no other thread uses the queue.
        unsafe { self.link.post(self.number, commands) }
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        self.link.poll(self.number, events)
    }

    fn read_signal(&mut self, id: u32) -> u64 {
        self.link.read_signal(self.number, id)
    }

    fn is_healthy(&mut self) -> bool {
        self.link.health().is_ok()
    }
}

/// The thread that serves one ring. Its drop ends the thread: commands that are not posted by then are
/// never posted, and no code accesses link or ring after it.
#[derive(Debug)]
pub struct GpuRing {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GpuRing {
    /// Starts the thread that posts to a link.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    pub fn start(ring: RingToServe, link: Link) -> Result<Self> {
        let number = ring.queue;
        Self::serve(ring, RingQueue { link, number }, &[])
    }

    /// Starts the thread that serves a ring, on one of these processors; on any if there are none.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the system starts no more threads.
    pub fn serve(ring: RingToServe, fabric: impl Fabric, cpus: &[u32]) -> Result<Self> {
        let mut worker = RingWorker::new(fabric, ring);
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, cpus) = (Arc::clone(&stop), cpus.to_vec());
        let run = move || {
            crate::proxy::pin(0, &cpus);
            worker.run(&stopped);
        };
        let thread = std::thread::Builder::new()
            .name("tokenyard-ring".into())
            .spawn(run)
            .map_err(|e| Error::system("start GPU ring", "a thread cannot be made", e))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl GpuRing {
    /// Requests the end of the thread, and returns its handle to join. The memory that the thread uses
    /// stays valid meanwhile.
    pub(crate) fn stop(&mut self) -> Option<JoinHandle<()>> {
        self.stop.store(true, Ordering::Release);
        self.thread.take()
    }
}

impl Drop for GpuRing {
    fn drop(&mut self) {
        if let Some(thread) = self.stop()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a device's command ring panicked");
        }
    }
}
