//! A pool of worker threads for the loops of the `cpu` kernel set.
//!
//! Why not rayon: a steady step must allocate nothing and must not depend on a pool that the rest
//! of the process shares and sizes. Rayon allocates for jobs that come from outside its pool, and
//! work stealing buys nothing for flat loops over tokens. See
//! `docs/decisions/0003-own-worker-pool.md`.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use tokenyard_core::{Error, ErrorKind, Result};

use sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, JoinHandle, Ordering, Thread, UnsafeCell};

const OPERATION: &str = "run tasks";

/// Worker threads that sleep between runs.
///
/// A run is a loop of independent tasks. The pool decides only which thread does which task, so results that
/// each depend on one task are the same for every number of threads.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads`, the caller of [`run`](Self::run) included. One thread means that runs
    /// stay on the caller and no thread is started.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidInput`] if `threads` is 0 or above 65,536.
    /// - [`ErrorKind::System`] if the system starts no more threads.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 || threads > State::JOINED as usize + 1 {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "start worker pool",
                format!("found {threads} threads; expected 1 to {}", State::JOINED + 1),
            )
            .with_fix("use at most as many threads as there are cores"));
        }
        let mut pool = Self { shared: Arc::new(PoolState::new()), workers: Vec::new() };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = sync::spawn(format!("tokenyard-cpu-{i}"), move || shared.serve());
            pool.workers.push(worker.map_err(|source| {
                Error::system("start worker pool", format!("no thread {i} of {threads}"), source)
            })?);
        }
        Ok(pool)
    }

    /// Threads that work on a run, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` with every number below `tasks`, once each and in no particular order, and
    /// returns when all calls have returned. Does not allocate.
    ///
    /// The wait is as long as the tasks take: a task that waits for others must have a deadline
    /// of its own (INV-6). If the pool is in use, by another thread or by the task that calls
    /// this, the caller does the tasks alone.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if a task panicked. Tasks that had not started are left out.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let helpers = self.workers.len().min(tasks.saturating_sub(1));
        if helpers == 0 || self.shared.busy.swap(true, Ordering::Acquire) {
            return (0..tasks).try_for_each(|i| call(task, i));
        }
        // SAFETY: `busy` was false, so this is the only run; it ends below before `task` does.
        unsafe { self.shared.open(Job::new(tasks, task)) };
        for worker in &self.workers[..helpers] {
            worker.thread().unpark();
        }
        self.shared.take_tasks(tasks, task);
        self.shared.close();
        let failure = lock(&self.shared.failure).take();
        self.shared.busy.store(false, Ordering::Release);
        failure.map_or(Ok(()), Err)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.fetch_or(State::STOP, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of tasks and has none of its own.
            let _ = worker.join();
        }
    }
}

/// One run, as its workers see it.
#[derive(Clone)]
struct Job {
    tasks: usize,
    /// Valid while the job is open or a thread has joined it.
    task: *const (dyn Fn(usize) + Sync + 'static),
    caller: Thread,
}

impl Job {
    fn new(tasks: usize, task: &(dyn Fn(usize) + Sync)) -> Self {
        let task: *const (dyn Fn(usize) + Sync + '_) = task;
        // SAFETY: only the lifetime of a pointer changes, which promises nothing. The code that follows the
        // pointer upholds that the task still lives.
        let task = unsafe {
            std::mem::transmute::<
                *const (dyn Fn(usize) + Sync + '_),
                *const (dyn Fn(usize) + Sync + 'static),
            >(task)
        };
        Self { tasks, task, caller: sync::current() }
    }
}

/// The bits of [`PoolState::state`].
struct State;

impl State {
    /// Workers that take tasks of the current job.
    const JOINED: u64 = 0xffff;
    /// Whether workers may join.
    const OPEN: u64 = 1 << 16;
    /// Whether workers must leave for good.
    const STOP: u64 = 1 << 17;
    /// The job's number, by which a worker knows that it has served it. It wraps: a worker that
    /// slept through 2^32 runs may sleep through one more.
    const JOB: u64 = 1 << 32;
}

struct PoolState {
    /// See [`State`]. A worker holds the job from when it joins until it leaves; `run` holds it
    /// while the state is closed and no thread is joined.
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// The next task to be taken.
    next: AtomicUsize,
    /// Whether a run is going on.
    busy: AtomicBool,
    /// The first panic of the run; touched only when there is one, and once at its end.
    failure: Mutex<Option<Error>>,
}

// SAFETY: all fields but `job` are Send and Sync. `job` is written by `open` and `close` only, when
// no thread is joined, and read by workers that have joined; `state` orders the two. The target of
// its pointer is Sync.
unsafe impl Send for PoolState {}
// SAFETY: as above.
unsafe impl Sync for PoolState {}

impl std::fmt::Debug for PoolState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolState").finish_non_exhaustive()
    }
}

impl PoolState {
    fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Lets workers join `job`.
    ///
    /// # Safety
    /// - The state is closed and no thread is joined.
    /// - The caller calls [`close`](Self::close) before the job's task ends to live.
    unsafe fn open(&self, job: Job) {
        // SAFETY: no other thread looks at the job, per this function's contract.
        self.job.with_mut(|cell| unsafe { *cell = Some(job) });
        self.next.store(0, Ordering::Relaxed);
        // `run` has no rival here: no thread is joined, and `drop` needs the pool for itself.
        let number = self.state.load(Ordering::Relaxed) / State::JOB;
        let state = number.wrapping_add(1).wrapping_mul(State::JOB) | State::OPEN;
        // Release: a thread that joins sees the job.
        self.state.store(state, Ordering::Release);
    }

    /// Lets no thread join any more, and waits until all that joined have left.
    fn close(&self) {
        self.state.fetch_and(!State::OPEN, Ordering::Relaxed);
        let mut spins = 0;
        // Acquire: sees what the tasks of other threads did.
        while self.state.load(Ordering::Acquire) & State::JOINED != 0 {
            pause(&mut spins);
        }
        // SAFETY: the state is closed and no thread is joined.
        self.job.with_mut(|cell| unsafe { *cell = None });
    }

    /// The life of a worker.
    fn serve(&self) {
        let mut served = 0;
        while let Some(number) = self.join(served) {
            served = number;
            // SAFETY: this worker has joined, so the job is not written until it leaves.
            let job = self.job.with(|cell| unsafe { (*cell).clone() });
            let Some(job) = job else { return };
            // SAFETY: as this worker has joined, `run` has not returned, which borrows the task.
            self.take_tasks(job.tasks, unsafe { &*job.task });
            // Release: `run` sees what the tasks did. Nothing of the job is used from here on but
            // the thread handle, which is a copy.
            let before = self.state.fetch_sub(1, Ordering::Release);
            if before & (State::OPEN | State::JOINED) == 1 {
                job.caller.unpark();
            }
        }
    }

    /// Waits for a job other than number `served` and joins it; `None` if the pool is to end.
    fn join(&self, served: u64) -> Option<u64> {
        let mut spins = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            let number = state / State::JOB;
            if state & State::STOP != 0 {
                return None;
            } else if state & State::OPEN == 0 || number == served {
                pause(&mut spins);
            } else if self
                .state
                // Acquire: sees the job.
                .compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
            {
                return Some(number);
            }
        }
    }

    fn take_tasks(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= tasks {
                return;
            }
            if let Err(error) = call(task, i) {
                self.next.fetch_max(tasks, Ordering::Relaxed);
                lock(&self.failure).get_or_insert(error);
            }
        }
    }
}

/// Spins for some microseconds, then sleeps until another thread unparks this one.
fn pause(spins: &mut u32) {
    if *spins < sync::SPINS {
        *spins += 1;
        std::hint::spin_loop();
    } else {
        sync::park();
    }
}

fn call(task: &(dyn Fn(usize) + Sync), i: usize) -> Result<()> {
    // Unwind safety: after a panic the caller gets an error and does not use what the tasks wrote.
    catch_unwind(AssertUnwindSafe(|| task(i))).map_err(|payload| panicked(i, payload))
}

#[cold]
fn panicked(i: usize, payload: Box<dyn Any + Send>) -> Error {
    let message = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(message), _) => message,
        (_, Some(message)) => message.as_str(),
        (None, None) => "no message",
    };
    let error = Error::new(ErrorKind::Internal, OPERATION, format!("task {i} panicked: {message}"));
    // Its drop may panic, which no caller would catch.
    std::mem::forget(payload);
    error
}

fn lock(failure: &Mutex<Option<Error>>) -> std::sync::MutexGuard<'_, Option<Error>> {
    failure.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The types that loom replaces in model checks.
#[cfg(not(feature = "loom"))]
mod sync {
    pub(super) use std::sync::Arc;
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(super) use std::thread::{JoinHandle, Thread, current, park};

    /// About as long as waking a thread takes.
    pub(super) const SPINS: u32 = 1000;

    pub(super) fn spawn(
        name: String,
        f: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(f)
    }

    /// `std::cell::UnsafeCell` with the interface of loom's.
    pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(feature = "loom")]
mod sync {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::sync::Arc;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::thread::{JoinHandle, Thread, current, park};

    pub(super) const SPINS: u32 = 1;

    pub(super) fn spawn(
        name: String,
        f: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        loom::thread::Builder::new().name(name).spawn(f)
    }
}

#[cfg(test)]
mod tests;
