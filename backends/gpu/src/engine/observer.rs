//! The watch over operations that no caller waits for (INV-6): received in the order of a stream, they
//! continue while the host does something else. The observer does for them what a host's wait does: it
//! publishes what they wait for, passes the host's abort word on to the kernels, and stores the error.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::{Context, Pinned, RelaxedCapture, Stream};
use crate::engine::waits::{Seen, Wait, Waits};

/// How often it polls.
const LOOK: Duration = Duration::from_millis(1);

/// Polls without work before it sleeps until it is woken. A wake-up costs the caller a system call.
const IDLE_LOOKS: u32 = 100;

/// Capacity in operations: those that may be outstanding, one per slot, and those that ended since the
/// last poll.
const MOST: usize = 64;

/// An operation that was received and may not have ended.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    wait: Wait,
    /// Number that the device writes when the operation has ended.
    mark: u64,
}

/// The state that the observer polls.
trait Sight: Send + Sync + 'static {
    /// The value that the thread holds while it polls.
    type Held;
    /// The first step of the thread.
    fn begin(&self) -> Self::Held;
    /// The last number that the device has written.
    fn mark(&self) -> u64;
    /// Polls an operation that has not ended; an error ends it.
    fn look(&self, wait: Wait, seen: &mut Seen) -> Result<()>;
    /// Checks whether an operation that is over failed.
    fn judge(&self, wait: Wait) -> Result<()>;
    /// Ends all operations, and returns the reason.
    fn wind_up(&self, one: &Outstanding, error: Error) -> Error;
    /// Polls the waits of kernels that no host call launched; an error ends them all.
    fn look_around(&self, seen: &mut Seen) -> Result<()>;
}

/// The GPU.
#[derive(Debug)]
struct DeviceLooks {
    stream: Arc<Stream>,
    waits: Arc<Waits>,
    marks: Pinned<u64>,
    level: u64,
}

impl Sight for DeviceLooks {
    type Held = Option<RelaxedCapture>;

    fn begin(&self) -> Self::Held {
        let relaxed = RelaxedCapture::enter(self.stream.context());
        let warn = |error: &Error| {
            tracing::warn!("while a graph is captured, the observer may disturb that: {error}");
        };
        relaxed.inspect_err(warn).ok()
    }

    fn mark(&self) -> u64 {
        // SAFETY: pinned memory that lives as long as `self`; an aligned word. Reports of kernels from
        // before this word are read after it.
        unsafe { AtomicU64::from_ptr(self.marks.at(0)).load(Ordering::Acquire) }
    }

    fn look(&self, wait: Wait, seen: &mut Seen) -> Result<()> {
        self.waits.pass_on_losses();
        self.waits.look_at(wait, seen)?;
        self.stream.is_idle().map(|_| ())
    }

    fn judge(&self, wait: Wait) -> Result<()> {
        self.waits.look_away();
        self.waits.ended(wait)
    }

    fn wind_up(&self, one: &Outstanding, error: Error) -> Error {
        self.waits.look_away();
        let is_over = || self.stream.is_idle().map(|_| self.mark() >= one.mark);
        self.waits.wind_up(error, one.wait, &is_over)
    }

    fn look_around(&self, seen: &mut Seen) -> Result<()> {
        self.waits.pass_on_losses();
        self.waits.look_around(self.level, seen)
    }
}

/// The observer of one communicator. Its thread starts with the first operation that it watches.
#[derive(Debug)]
pub(crate) struct Observer {
    device: Arc<DeviceLooks>,
    watching: Watching<DeviceLooks>,
    marks: u64,
}

impl Observer {
    pub(crate) fn new(
        context: &Arc<Context>,
        stream: &Arc<Stream>,
        waits: &Arc<Waits>,
        level: u64,
    ) -> Result<Self> {
        let device = Arc::new(DeviceLooks {
            stream: Arc::clone(stream),
            waits: Arc::clone(waits),
            marks: Pinned::new(context, 1)?,
            level,
        });
        Ok(Self { watching: Watching::new(&device), device, marks: 0 })
    }

    /// Watches the operation whose kernels were launched last.
    pub(crate) fn watch(&mut self, wait: Wait) -> Result<()> {
        self.marks += 1;
        self.device.stream.write(self.device.marks.at(0) as u64, self.marks)?;
        self.watching.add(Outstanding { wait, mark: self.marks })
    }

    /// Watches from now on the waits of kernels that no host call waits for, and of kernels that
    /// graphs launch.
    pub(crate) fn stand(&mut self) -> Result<()> {
        self.watching.stand()
    }

    /// Stores an error for the next call.
    pub(crate) fn fail(&self, error: Error) {
        self.watching.shared.fail(&error);
    }

    /// The error of an operation that was watched, as long as this lives.
    pub(crate) fn check(&self) -> Result<()> {
        self.watching.shared.check()
    }

    /// Ends the thread.
    pub(crate) fn stop(&mut self) {
        self.watching.stop();
    }
}

/// The thread, and the state that it shares with its callers.
#[derive(Debug)]
struct Watching<S> {
    shared: Arc<Shared<S>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<S> {
    sight: Arc<S>,
    state: Mutex<ObserverState>,
    changed: Condvar,
}

#[derive(Debug)]
struct ObserverState {
    /// Operations in the order of the device's stream.
    outstanding: VecDeque<Outstanding>,
    /// Stored as data: every later call makes a fresh error of it.
    failure: Option<(ErrorKind, Option<u32>, String)>,
    /// Kernels may wait that belong to none of these operations.
    stands: bool,
    sleeps: bool,
    stop: bool,
}

impl<S: Sight> Watching<S> {
    fn new(sight: &Arc<S>) -> Self {
        let state = ObserverState {
            outstanding: VecDeque::with_capacity(MOST),
            failure: None,
            stands: false,
            sleeps: false,
            stop: false,
        };
        let (sight, changed) = (Arc::clone(sight), Condvar::new());
        Self { shared: Arc::new(Shared { sight, state: Mutex::new(state), changed }), thread: None }
    }

    fn start(&mut self) -> Result<()> {
        if self.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new()
                .name("tokenyard-gpu".into())
                .spawn(move || shared.run())
                .map_err(|e| Error::system("start observer", "a thread cannot be made", e))?;
            self.thread = Some(thread);
        }
        Ok(())
    }

    fn stand(&mut self) -> Result<()> {
        self.start()?;
        let mut state = self.shared.state();
        state.stands = true;
        if state.sleeps {
            self.shared.changed.notify_one();
        }
        Ok(())
    }

    fn add(&mut self, one: Outstanding) -> Result<()> {
        self.start()?;
        let ended = self.shared.sight.mark();
        let mut state = self.shared.state();
        if state.outstanding.len() == MOST {
            // A failure shows at the operations that follow.
            state.outstanding.retain(|other| other.mark > ended);
        }
        state.outstanding.push_back(one);
        if state.sleeps {
            self.shared.changed.notify_one();
        }
        Ok(())
    }
}

impl<S> Watching<S> {
    fn stop(&mut self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the observer of the kernel set panicked");
        }
    }
}

impl<S> Drop for Watching<S> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<S> Shared<S> {
    fn state(&self) -> MutexGuard<'_, ObserverState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: &Error) {
        let failure = (error.kind(), error.rank(), error.detail());
        self.state().failure.get_or_insert(failure);
    }

    fn check(&self) -> Result<()> {
        match &self.state().failure {
            None => Ok(()),
            Some((kind, rank, text)) => {
                let error = Error::new(*kind, "watch operation", text.clone());
                Err(match rank {
                    Some(rank) => error.with_rank(*rank),
                    None => error,
                })
            }
        }
    }

    /// Waits for a moment, or until a new operation arrives.
    fn pause<'a>(
        &'a self,
        mut state: MutexGuard<'a, ObserverState>,
        sleeps: bool,
    ) -> MutexGuard<'a, ObserverState> {
        if sleeps {
            state.sleeps = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.sleeps = false;
            return state;
        }
        let waited = self.changed.wait_timeout(state, LOOK);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl<S: Sight> Shared<S> {
    fn run(&self) {
        let _held = self.sight.begin();
        while let Some(one) = self.next() {
            let seen = self.see_through(&one);
            let Err(error) = seen else {
                self.state().outstanding.retain(|other| other.mark > one.mark);
                continue;
            };
            self.fail(&error);
            // The kernels of all others end by the same word.
            self.state().outstanding.clear();
        }
    }

    /// The operation that ends next; none once the observer has stopped.
    fn next(&self) -> Option<Outstanding> {
        let (mut looks, mut seen) = (0, Seen::default());
        let mut state = self.state();
        loop {
            if state.stop {
                return None;
            }
            if let Some(one) = state.outstanding.front() {
                return Some(*one);
            }
            if state.stands {
                drop(state);
                self.look_around(&mut seen);
                state = self.state();
            }
            let sleeps = !state.stands && looks == IDLE_LOOKS;
            state = self.pause(state, sleeps);
            looks = (looks + 1).min(IDLE_LOOKS);
        }
    }

    fn look_around(&self, seen: &mut Seen) {
        if let Err(error) = self.sight.look_around(seen) {
            self.fail(&error);
            // All waits were ended, and no operation begins any more.
            self.state().stands = false;
        }
    }

    /// Polls an operation until it is over.
    fn see_through(&self, one: &Outstanding) -> Result<()> {
        let mut seen = Seen::default();
        loop {
            if self.sight.mark() >= one.mark {
                return self.sight.judge(one.wait);
            }
            if let Err(error) = self.sight.look(one.wait, &mut seen) {
                return Err(self.sight.wind_up(one, error));
            }
            let state = self.pause(self.state(), false);
            if state.stop {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests;
