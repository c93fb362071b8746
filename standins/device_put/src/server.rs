//! The thread that executes the commands of kernels: late, in another order, and not always right.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokenyard_core::transport::{Command, NO_EVENT, Transport as _};
use tokenyard_core::{Error, Result, abi};
use tokenyard_cuda::Nvlink;
use tokenyard_faulty::Rng;

use crate::config::Fault;
use crate::ring::{CAPACITY, Rings};

/// The delay of the wrong half of a command, where a fault splits it in two.
const LATE: Duration = Duration::from_millis(100);
/// One of this many puts is lost.
const LOST_OF: u64 = 64;
/// A thread without work sleeps for this long.
const NAP: Duration = Duration::from_micros(20);

/// The settings that decide when a command is executed, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Habits {
    pub(crate) seed: u64,
    pub(crate) rank: u32,
    pub(crate) hold: Duration,
    pub(crate) fault: Option<Fault>,
    /// Signals of one queue.
    pub(crate) signals: u32,
    /// The queue of `nvlink` that is the server's own.
    pub(crate) queue: u32,
}

/// A command that is to be executed.
#[derive(Clone, Copy, Debug)]
struct Held {
    command: Command,
    number: u64,
    due: Instant,
    /// Its slot is already free.
    is_done: bool,
}

/// The state of one queue.
#[derive(Debug, Default)]
struct Progress {
    taken: u64,
    done: u64,
    /// Whether the commands from `done` on are done.
    ended: VecDeque<bool>,
}

impl Progress {
    fn end(&mut self, number: u64) -> u64 {
        let index = (number - self.done) as usize;
        if let Some(ended) = self.ended.get_mut(index) {
            *ended = true;
        }
        while self.ended.front() == Some(&true) {
            self.ended.pop_front();
            self.done += 1;
        }
        self.done
    }
}

/// Serves the rings of one instance until it is dropped.
#[derive(Debug)]
pub(crate) struct RingServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RingServer {
    pub(crate) fn start(nvlink: Arc<Nvlink>, rings: Arc<Rings>, habits: Habits) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let mut worker = Worker {
            queues: (0..rings.queues()).map(|_| Progress::default()).collect(),
            rng: Rng::new(habits.seed, [habits.rank, 0]),
            held: Vec::with_capacity((rings.queues() * CAPACITY) as usize),
            nvlink,
            rings,
            habits,
        };
        let thread = std::thread::Builder::new()
            .name("device-put".into())
            .spawn(move || worker.run(&seen))
            .map_err(|e| Error::system("start server", "a thread cannot be made", e))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for RingServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of device-put panicked");
        }
    }
}

struct Worker {
    nvlink: Arc<Nvlink>,
    rings: Arc<Rings>,
    habits: Habits,
    queues: Vec<Progress>,
    held: Vec<Held>,
    rng: Rng,
}

impl Worker {
    fn run(&mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            match self.round() {
                Ok(true) => {}
                Ok(false) => std::thread::sleep(NAP),
                Err(status) => {
                    tracing::error!("device-put gave up with status {status}");
                    return self.rings.fail();
                }
            }
        }
    }

    /// One poll of everything; returns whether a command moved.
    fn round(&mut self) -> std::result::Result<bool, i32> {
        let moved = self.take();
        let moved = self.execute_one()? || moved;
        Ok(self.collect()? || moved)
    }

    fn take(&mut self) -> bool {
        let mut moved = false;
        for queue in 0..self.rings.queues() {
            let progress = &mut self.queues[queue as usize];
            while let Some(command) = self.rings.take(queue, progress.taken) {
                let hold = self.rng.below(self.habits.hold.as_micros() as u64 + 1);
                let due = Instant::now() + Duration::from_micros(hold);
                self.held.push(Held { command, number: progress.taken, due, is_done: false });
                progress.taken += 1;
                progress.ended.push_back(false);
                moved = true;
            }
        }
        moved
    }

    /// Executes any one of the commands whose time has come.
    fn execute_one(&mut self) -> std::result::Result<bool, i32> {
        let now = Instant::now();
        let due: Vec<usize> = (0..self.held.len()).filter(|i| self.held[*i].due <= now).collect();
        let Some(&index) = due.get(self.rng.below(due.len() as u64) as usize) else {
            return Ok(false);
        };
        let mut held = self.held.swap_remove(index);
        let is_put = held.command.op == abi::TY_OP_PUT_SIGNAL;
        match self.habits.fault.filter(|_| is_put && !held.is_done) {
            Some(Fault::Lost) if self.rng.below(LOST_OF) == 0 => {
                self.end(held.command.queue, held.number);
                return Ok(true);
            }
            Some(Fault::SignalFirst) => {
                self.post(&Held {
                    command: Command { op: abi::TY_OP_SIGNAL, ..held.command },
                    is_done: true,
                    ..held
                })?;
                held.command.op = abi::TY_OP_PUT;
                held.due = now + LATE;
                self.held.push(held);
                return Ok(true);
            }
            Some(Fault::DoneEarly) => {
                self.end(held.command.queue, held.number);
                self.held.push(Held { due: now + LATE, is_done: true, ..held });
                return Ok(true);
            }
            Some(Fault::WrongQueue) => {
                let all = self.habits.signals * self.rings.queues();
                held.command.signal = (held.command.signal + self.habits.signals) % all;
            }
            Some(Fault::Lost) | None => {}
        }
        self.post(&held)?;
        Ok(true)
    }

    fn post(&self, held: &Held) -> std::result::Result<(), i32> {
        let flags = if held.is_done { 0 } else { abi::TY_FLAG_NOTIFY };
        let tag = held.number << 8 | u64::from(held.command.queue);
        let command = Command { queue: self.habits.queue, flags, tag, ..held.command };
        // SAFETY: kernels leave the source alone until the command is done; the places that it names are
        // in range, because `nvlink` checks peers, windows and signals.
        while unsafe { self.nvlink.post(self.habits.queue, &[command]) }? == 0 {
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    fn collect(&mut self) -> std::result::Result<bool, i32> {
        let mut events = [NO_EVENT; 16];
        let count = self.nvlink.poll(self.habits.queue, &mut events)?;
        for event in &events[..count] {
            if event.kind != abi::TY_EVENT_DONE {
                return Err(event.status);
            }
            self.end((event.tag & 0xff) as u32, event.tag >> 8);
        }
        Ok(count > 0)
    }

    /// The slot of a command is free (INV-5).
    fn end(&mut self, queue: u32, number: u64) {
        let done = self.queues[queue as usize].end(number);
        self.rings.publish(queue, done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_done_in_the_order_of_their_numbers_whichever_ends_first() {
        let mut progress = Progress { ended: VecDeque::from([false; 3]), ..Progress::default() };
        assert_eq!([2, 0, 1].map(|number| progress.end(number)), [0, 1, 3]);
    }
}
