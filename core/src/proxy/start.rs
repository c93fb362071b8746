//! The proxy from the view of a transport.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::FabricShare;
use super::bell::Bell;
use super::queue::{Queue, queue};
use super::sync::Arc;
use super::thread::{ProxyState, ProxyWorker};
use crate::abi;
use crate::transport::{Command, Event};
use crate::{Error, ErrorKind, Result};

const START: &str = "start proxy";

/// More than any queue needs; it bounds the allocation for a wrong number.
const MAX_DEPTH: u32 = 1 << 20;

/// The time beyond the flush after which the end of a share's thread is reported as overdue.
const OVERDUE: Duration = Duration::from_secs(5);

/// The interval at which a drop checks whether a thread has ended.
const LOOK: Duration = Duration::from_micros(200);

/// Sizes and times of a [`Proxy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyOptions {
    /// Queues 0 .. queues, at least 1.
    pub queues: u32,
    /// Commands of a queue that may be posted and not done: 1 to 1,048,576, rounded up to a power of
    /// two.
    pub queue_depth: u32,
    /// The length of a nap of an idle thread: data that arrives from the fabric meanwhile waits this
    /// long at most. Commands wake the thread at once.
    pub nap: Duration,
    /// Most time that the drop of the proxy waits for commands that are not done.
    pub flush: Duration,
}

impl ProxyOptions {
    /// The sizes, with naps of 50 µs and a flush of 1 s.
    pub fn new(queues: u32, queue_depth: u32) -> Self {
        let (nap, flush) = (Duration::from_micros(50), Duration::from_secs(1));
        Self { queues, queue_depth, nap, flush }
    }

    fn check(&self, shares: usize) -> Result<()> {
        let wrong = |what: &str, found: u64, expected: &str| {
            let text = format!("found {what} = {found}; expected {expected}");
            Err(Error::new(ErrorKind::InvalidInput, START, text))
        };
        if shares == 0 {
            return wrong("shares", 0, "at least 1");
        }
        if self.queues == 0 {
            return wrong("queues", 0, "at least 1");
        }
        if self.queue_depth == 0 || self.queue_depth > MAX_DEPTH {
            return wrong("queue_depth", self.queue_depth.into(), &format!("1 to {MAX_DEPTH}"));
        }
        Ok(())
    }
}

/// Proxy threads with their queues. See the [module](super) for their promises.
///
/// Threads: `post` and `poll` of one queue are called by one thread at a time, of different queues by
/// several at once; `health` by any thread.
///
/// Its drop lets the threads finish posted commands, for [`ProxyOptions::flush`] at most, then drops
/// the shares and returns. A share that blocks delays the drop, which is logged: memory that a
/// fabric may still access must not be freed.
#[derive(Debug)]
pub struct Proxy {
    queues: Box<[Guarded]>,
    threads: Vec<Running>,
    shared: Arc<ProxyState>,
    flush: Duration,
}

/// The poster's end of a queue. Two threads in it at once break the thread rule.
#[derive(Debug)]
#[repr(align(128))]
struct Guarded(Mutex<Queue>);

#[derive(Debug)]
struct Running {
    bell: Arc<Bell>,
    handle: JoinHandle<()>,
}

impl Proxy {
    /// Starts one thread per share.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidInput`] for sizes out of range.
    /// - [`ErrorKind::System`] if the system starts no more threads.
    pub fn start<E: FabricShare>(shares: Vec<E>, options: &ProxyOptions) -> Result<Self> {
        options.check(shares.len())?;
        let threads = shares.len() as u32;
        let bells: Vec<_> = shares.iter().map(|_| Arc::new(Bell::new())).collect();
        let mut servers: Vec<_> = shares.iter().map(|_| Vec::new()).collect();
        let mut queues = Vec::new();
        for number in 0..options.queues {
            let thread = (number % threads) as usize;
            let bell = Arc::clone(&bells[thread]);
            let (poster, server) = queue(number, options.queue_depth as usize, bell);
            queues.push(Guarded(Mutex::new(poster)));
            servers[thread].push(server);
        }
        // On an error below, its drop ends the threads that were started.
        let mut proxy = Self {
            queues: queues.into(),
            threads: Vec::new(),
            shared: Arc::default(),
            flush: options.flush,
        };
        let components = shares.into_iter().zip(servers).zip(bells);
        for (thread, ((share, queues), bell)) in (0..).zip(components) {
            let worker = ProxyWorker {
                thread,
                threads,
                queues,
                bell: Arc::clone(&bell),
                shared: Arc::clone(&proxy.shared),
                nap: options.nap,
                flush: options.flush,
            };
            proxy.threads.push(Running::start(worker, share, bell)?);
        }
        Ok(proxy)
    }

    /// Accepts the first n of `commands`, as many as there is room for in the queue, and returns n.
    ///
    /// # Errors
    /// `TY_INTERNAL` if there is no such queue or another thread is in it.
    ///
    /// # Safety
    /// As [`Transport::post`](crate::transport::Transport::post): source memory of an accepted command
    /// stays unchanged until the command has ended or the proxy is dropped.
    pub unsafe fn post(&self, queue: u32, commands: &[Command]) -> Result<usize, i32> {
        Ok(self.queue(queue)?.post(commands))
    }

    /// Fills `events` from the front with the ended commands of the queue, and returns how many were
    /// written: one per command with `TY_FLAG_NOTIFY`, one per command that failed.
    ///
    /// # Errors
    /// As [`post`](Self::post).
    pub fn poll(&self, queue: u32, events: &mut [Event]) -> Result<usize, i32> {
        Ok(self.queue(queue)?.poll(events))
    }

    /// The first failure of a share, if there was one; it is about no peer. It stays. A single
    /// command that fails is an event; a transport's health reports it too, with the peer that its
    /// share knows.
    ///
    /// # Errors
    /// The failure: [`ErrorKind::Transport`] if a call of the share failed, [`ErrorKind::Internal`] if
    /// it panicked or broke its rules.
    pub fn health(&self) -> Result<()> {
        self.shared.health.get()
    }

    fn queue(&self, queue: u32) -> Result<MutexGuard<'_, Queue>, i32> {
        match self.queues.get(queue as usize).ok_or(abi::TY_INTERNAL)?.0.try_lock() {
            Ok(queue) => Ok(queue),
            // A panic leaves no queue half changed.
            Err(TryLockError::Poisoned(queue)) => Ok(queue.into_inner()),
            Err(TryLockError::WouldBlock) => Err(abi::TY_INTERNAL),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.threads.iter().for_each(|thread| thread.bell.ring());
        for (number, thread) in self.threads.drain(..).enumerate() {
            thread.join(number, self.flush + OVERDUE);
        }
    }
}

impl Running {
    fn start(worker: ProxyWorker, share: impl FabricShare, bell: Arc<Bell>) -> Result<Self> {
        let thread = worker.thread;
        let handle = std::thread::Builder::new()
            .name(format!("ty-proxy-{thread}"))
            .spawn(move || worker.run(share))
            .map_err(|e| Error::system(START, format!("no thread {thread}"), e))?;
        Ok(Self { bell, handle })
    }

    fn join(self, number: usize, limit: Duration) {
        let start = Instant::now();
        while !self.handle.is_finished() && start.elapsed() < limit {
            std::thread::sleep(LOOK);
        }
        if !self.handle.is_finished() {
            tracing::error!(
                "proxy thread {number} has not ended {limit:?} after the request to end: its \
                 share blocks in post, poll or drop; waiting for it"
            );
        }
        if self.handle.join().is_err() {
            tracing::error!("proxy thread {number} panicked");
        }
    }
}
