//! A thread that stands still inside `post` or `poll`, as on a busy machine: `progress` does not wait for it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use tokenyard_core::abi;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::clock::Clock;
use super::needs::Needs;
use super::progress::{drive, of_rank};
use super::rig::{self, Rig};
use super::{Body, TransportCase};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "progress_returns_at_once",
    about: "with TY_CAP_MANUAL_PROGRESS `progress` waits for no thread that stands still inside `post` or `poll`",
    invariants: "INV-6",
    ranks: &[2],
    flags: abi::TY_CAP_MANUAL_PROGRESS,
    needs: Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL },
    body: Body::OwnProcess(progress_returns_at_once),
    ..TransportCase::BARE
}];

/// Times that the thread stands still. One that has no lock then shows nothing.
const STOPS: u32 = 32;
/// As many at least, where a busy machine takes long for each.
const FEWEST: u32 = 16;
/// The signal that lets it: by default it does nothing.
const SIGNAL: libc::c_int = libc::SIGURG;
const NAP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 200_000 };

/// How often a thread has stopped, and gone on; and whether it may go on.
static STOPPED: AtomicU32 = AtomicU32::new(0);
static WENT_ON: AtomicU32 = AtomicU32::new(0);
static MAY_GO_ON: AtomicBool = AtomicBool::new(true);
/// The naps after which it goes on by itself: a `progress` that waits for it ends then.
static NAPS: AtomicU32 = AtomicU32::new(0);

/// The handler of the signal.
extern "C" fn stand_still(_: libc::c_int) {
    // SAFETY: the error number of this thread, which the code around the handler may still read.
    let errno = unsafe { *libc::__errno_location() };
    STOPPED.fetch_add(1, Ordering::AcqRel);
    for _ in 0..NAPS.load(Ordering::Acquire) {
        if MAY_GO_ON.load(Ordering::Acquire) {
            break;
        }
        // SAFETY: a handler may call it; it reads a constant.
        unsafe { libc::nanosleep(&NAP, std::ptr::null_mut()) };
    }
    WENT_ON.fetch_add(1, Ordering::AcqRel);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// The handler in its place, until this is dropped.
struct Handler(libc::sigaction);

impl Handler {
    fn set() -> Result<Self> {
        // SAFETY: zeros are a valid action, and an empty mask.
        let [mut action, mut before]: [libc::sigaction; 2] = unsafe { std::mem::zeroed() };
        action.sa_sigaction = stand_still as extern "C" fn(libc::c_int) as usize;
        // A call that it interrupts goes on.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler calls nothing that a handler may not call.
        let set = unsafe { libc::sigaction(SIGNAL, &raw const action, &raw mut before) };
        ensure!(set == 0, "sigaction: {}", std::io::Error::last_os_error());
        Ok(Self(before))
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // SAFETY: the action from before.
        unsafe { libc::sigaction(SIGNAL, &raw const self.0, std::ptr::null_mut()) };
    }
}

fn progress_returns_at_once(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let mut rig = Rig::bring_up(rank, needs)?;
    let posted = beside_a_thread_that_stands(&mut rig, rig::short(rank) / 10)?;
    // The other rank may still look: this one takes its puts until then.
    rig.barrier("both ranks have looked")?;
    let previous = rig.previous();
    let total = of_rank(rig.world, previous as usize, &posted.to_le_bytes())?;
    rig.wait_signal(0, rig.signal(0, 0, previous), total)?;
    rig.end(true)?;
    Ok(Outcome::Pass)
}

/// A thread posts long puts and polls, and stands still now and then; this one calls `progress` meanwhile. Returns the
/// number of puts.
fn beside_a_thread_that_stands(rig: &mut Rig<'_>, limit: Duration) -> Result<u64> {
    let _handler = Handler::set()?;
    NAPS.store((3 * limit.as_nanos() / NAP.tv_nsec as u128) as u32, Ordering::Release);
    let (op, signal) = (abi::TY_OP_PUT_SIGNAL, rig.signal(0, 0, rig.me()));
    let (peer, bytes) = (rig.next(), rig.put_bytes(1 << 18) as u64);
    let put = Command { op, peer, signal, add: 1, dst_window: 1, bytes, ..NO_COMMAND };
    let (is_over, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let (deadline, enough) = (rig.needs.deadline, Instant::now() + rig.needs.deadline / 2);
    let (transport, queue) = (&rig.transport, &mut rig.queues[0]);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| -> Result<u64> {
            // SAFETY: the number of this thread.
            let _ = sender.send(unsafe { libc::pthread_self() });
            let mut posted = 0;
            while !is_over.load(Ordering::Acquire) {
                posted += queue.try_post(transport, &[put])? as u64;
                queue.drive(transport)?;
                calls.fetch_add(1, Ordering::AcqRel);
            }
            Ok(posted)
        });
        let clock = Clock::new(limit);
        let thread = receiver.recv().context("the thread of the queue");
        let wait = |what: &dyn Fn() -> bool| comes(deadline, || what() || worker.is_finished());
        let looked: Result<()> = thread.and_then(|thread| {
            for round in 1..=STOPS {
                let before = calls.load(Ordering::Acquire);
                wait(&|| calls.load(Ordering::Acquire) > before)?;
                // Not always at the same place.
                std::thread::sleep(Duration::from_micros(u64::from(round) * 37 % 200));
                if worker.is_finished() || round > FEWEST && Instant::now() > enough {
                    break;
                }
                look(transport, thread, &clock, wait)?;
            }
            Ok(())
        });
        is_over.store(true, Ordering::Release);
        // The error of the thread is the cause of others.
        let posted = worker.join().map_err(|_| anyhow!("the thread of the queue panicked"))??;
        looked.map(|()| posted)
    })
}

/// Calls `progress` while the thread stands still.
fn look(
    transport: &OpenTransport,
    thread: libc::pthread_t,
    clock: &Clock,
    wait: impl Fn(&dyn Fn() -> bool) -> Result<()>,
) -> Result<()> {
    let (stopped, went_on) = (STOPPED.load(Ordering::Acquire), WENT_ON.load(Ordering::Acquire));
    MAY_GO_ON.store(false, Ordering::Release);
    // SAFETY: the thread is not joined yet.
    let sent = unsafe { libc::pthread_kill(thread, SIGNAL) };
    ensure!(sent == 0, "pthread_kill: {}", std::io::Error::from_raw_os_error(sent));
    let stands = wait(&|| STOPPED.load(Ordering::Acquire) != stopped);
    let driven = clock.time("progress", || drive(transport));
    MAY_GO_ON.store(true, Ordering::Release);
    wait(&|| WENT_ON.load(Ordering::Acquire) != went_on)?;
    let meanwhile = "while the thread of a queue stands still inside post or poll";
    stands.and(driven.context(meanwhile)?)
}

fn comes(deadline: Duration, what: impl Fn() -> bool) -> Result<()> {
    let until = Instant::now() + deadline;
    while !what() {
        ensure!(Instant::now() < until, "the thread of the queue does not run, on a busy machine");
        std::thread::yield_now();
    }
    Ok(())
}
