//! The life of a proxy thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

use super::bell::Bell;
use super::health::{Health, ProxyFailure};
use super::queue::Server;
use super::sync::Arc;
use super::{FabricShare, MAX_BATCH};
use crate::abi;
use crate::export::panic_text;
use crate::idle::{Idle, Rest};
use crate::transport::{Command, Event, NO_COMMAND, NO_EVENT};

/// The nap of a thread that has no share any more: only the bell gives it work.
const REFUSING_NAP: Duration = Duration::from_secs(1);

/// State that all threads of a proxy share.
#[derive(Debug, Default)]
pub(super) struct ProxyState {
    pub(super) health: Health,
    pub(super) stop: AtomicBool,
}

/// The state of a thread besides its share.
pub(super) struct ProxyWorker {
    pub(super) thread: u32,
    /// Number of threads: queue `thread + i * threads` is `queues[i]`.
    pub(super) threads: u32,
    pub(super) queues: Vec<Server>,
    pub(super) bell: Arc<Bell>,
    pub(super) shared: Arc<ProxyState>,
    pub(super) nap: Duration,
    pub(super) flush: Duration,
}

impl ProxyWorker {
    pub(super) fn run(mut self, mut share: impl FabricShare) {
        // Unwind safety: after a panic the share is dropped, and the queues change between its calls.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pin(self.thread, share.cpus());
            self.drive(&mut share)
        }));
        let failure = outcome.unwrap_or_else(|panic| {
            Err(ProxyFailure::Panic { thread: self.thread, text: panic_text(&*panic) })
        });
        let status = failure.as_ref().map_or_else(ProxyFailure::status, |()| abi::TY_ABORTED);
        if let Err(failure) = failure {
            self.shared.health.fail(failure);
        }
        // Dropped before any command is reported as ended: the share may not access its memory
        // afterwards (INV-8).
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(share))) {
            tracing::error!(
                thread = self.thread,
                "a share panicked in its drop: {}",
                panic_text(&*panic)
            );
        }
        self.refuse(status);
    }

    /// Works until the share fails, or until the proxy stops and all commands are flushed.
    fn drive(&mut self, share: &mut impl FabricShare) -> Result<(), ProxyFailure> {
        let (mut idle, mut give_up) = (Idle::default(), None);
        let (mut batch, mut events) = ([NO_COMMAND; MAX_BATCH], [NO_EVENT; MAX_BATCH]);
        loop {
            let mut worked = false;
            for queue in 0..self.queues.len() {
                if self.post(share, queue, &mut batch)? {
                    self.collect(share, &mut events)?;
                    worked = true;
                }
            }
            worked |= self.collect(share, &mut events)?;
            if self.shared.stop.load(Ordering::Acquire) {
                let give_up = *give_up.get_or_insert_with(|| Instant::now() + self.flush);
                if self.queues.iter_mut().all(Server::is_idle) || Instant::now() >= give_up {
                    return Ok(());
                }
            }
            if worked {
                idle = Idle::default();
            } else {
                self.pause(&mut idle);
            }
        }
    }

    /// Passes the share one batch of a queue. Returns whether it accepted any command.
    fn post(
        &mut self,
        share: &mut impl FabricShare,
        queue: usize,
        batch: &mut [Command],
    ) -> Result<bool, ProxyFailure> {
        let server = &mut self.queues[queue];
        let count = server.pick(batch);
        if count == 0 {
            return Ok(false);
        }
        // SAFETY: the callers of `Proxy::post` uphold the promises about these commands until their
        // ends are reported, which is after the share has ended them or was dropped.
        let accepted = unsafe { share.post(server.queue(), &batch[..count]) };
        let accepted = accepted.map_err(|status| self.failed("post", status))?;
        if accepted > count {
            let text = format!("post accepted {accepted} commands; expected {count} at most");
            return Err(ProxyFailure::Rules { thread: self.thread, text });
        }
        self.queues[queue].accepted(accepted);
        Ok(accepted > 0)
    }

    /// Reports the commands that the share has ended. Returns whether there were any.
    fn collect(
        &mut self,
        share: &mut impl FabricShare,
        events: &mut [Event],
    ) -> Result<bool, ProxyFailure> {
        let count = share.poll(events).map_err(|status| self.failed("poll", status))?;
        let Some(events) = events.get(..count) else {
            let text = format!("poll wrote {count} events; expected {MAX_BATCH} at most");
            return Err(ProxyFailure::Rules { thread: self.thread, text });
        };
        for event in events {
            self.end(event)?;
        }
        if count > 0 {
            self.queues.iter_mut().for_each(Server::publish);
        }
        Ok(count > 0)
    }

    fn end(&mut self, event: &Event) -> Result<(), ProxyFailure> {
        let result = match (event.kind, event.status) {
            (abi::TY_EVENT_DONE, _) => Ok(()),
            (_, status) => Err(if status < 0 { status } else { abi::TY_TRANSPORT }),
        };
        let mine = event.queue % self.threads == self.thread;
        let queue = self.queues.get_mut((event.queue / self.threads) as usize).filter(|_| mine);
        if queue.is_some_and(|queue| queue.end(event.tag, result)) {
            return Ok(());
        }
        let Event { queue, tag, .. } = event;
        let text = format!("poll ended tag {tag:#x} of queue {queue}, which is not in flight");
        Err(ProxyFailure::Rules { thread: self.thread, text })
    }

    #[cold]
    fn failed(&self, call: &'static str, status: i32) -> ProxyFailure {
        let status = if status < 0 { status } else { abi::TY_INTERNAL };
        ProxyFailure::Call { thread: self.thread, call, status }
    }

    /// Ends all commands with an error, now and until the proxy stops (INV-7).
    fn refuse(&mut self, status: i32) {
        loop {
            self.queues.iter_mut().for_each(|queue| queue.fail_all(status));
            if self.shared.stop.load(Ordering::Acquire) {
                return;
            }
            self.sleep(REFUSING_NAP);
        }
    }

    /// Waits a moment after a round without work.
    fn pause(&mut self, idle: &mut Idle) {
        match idle.next(Instant::now) {
            Rest::Spin => std::hint::spin_loop(),
            // After a nap the thread polls once, then sleeps again.
            Rest::Nap if !self.has_work() => {
                if self.sleep(self.nap) {
                    *idle = Idle::default();
                }
            }
            Rest::Yield | Rest::Nap => std::thread::yield_now(),
        }
    }

    fn has_work(&mut self) -> bool {
        self.shared.stop.load(Ordering::Acquire) || self.queues.iter_mut().any(Server::has_waiting)
    }

    /// Sleeps. Returns whether there is a reason to stay awake.
    fn sleep(&mut self, nap: Duration) -> bool {
        let bell = Arc::clone(&self.bell);
        bell.sleep(nap, || self.has_work())
    }
}

/// Pins this thread to `cpus`. A thread that runs elsewhere is slower, not wrong.
pub(crate) fn pin(thread: u32, cpus: &[u32]) {
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    let known = cpus.iter().filter(|cpu| (**cpu as usize) < CpuSet::MAX_CPU);
    known.for_each(|cpu| set.set(*cpu as usize));
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(thread, ?cpus, %error, "a proxy thread cannot be pinned and runs anywhere");
    }
}
