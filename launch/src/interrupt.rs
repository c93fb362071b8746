//! A signal that ends the launcher: SIGTERM, SIGINT or SIGHUP.
//!
//! By default such a signal ends a process at once, and its temporary folders remain. A launcher
//! that blocks these signals and calls [`note`] gets an error from its next wait instead
//! ([`Running::wait_event`](crate::Running::wait_event)). It returns the error to its callers, so
//! all its ranks, folders and hosts are dropped. Then it ends with [`Interrupted::exit_code`].

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal, raise};

use crate::event::Exit;

/// The signals that end a launcher.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
/// A signal that follows the first within this time is the same request: `timeout` of the coreutils
/// sends one to its child, and one to the process group of both.
const SAME: Duration = Duration::from_millis(200);
/// The interval at which a wait checks whether a signal is to end this process.
pub(crate) const LOOK: Duration = Duration::from_millis(50);
/// How long the signal of this process may come after the end of a rank by the same signal: both come at once from a
/// terminal, but on a busy machine the thread that waits for signals runs late.
const FOLLOWS: Duration = Duration::from_secs(2);

/// The first signal that is to end this process, and when it came.
static FIRST: OnceLock<(Signal, Instant)> = OnceLock::new();

/// A signal is to end this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted by {signal}{}", done.as_ref().map_or(String::new(), |done| format!("; {done}")))]
pub struct Interrupted {
    signal: Signal,
    done: Option<String>,
}

impl Interrupted {
    /// Adds the progress so far to the text, for people: `3 of 10 steps were done`.
    #[must_use]
    pub fn with_done(self, done: String) -> Self {
        Self { done: Some(done), ..self }
    }

    /// The exit code that a shell reports for a process ended by the signal: 128 plus the signal's
    /// number.
    pub fn exit_code(&self) -> u8 {
        128 + self.signal as u8
    }
}

/// Whether a signal is to end this process, as an error. Always `Ok` in a program that does not
/// call [`note`].
///
/// # Errors
/// The signal came.
pub fn check() -> Result<(), Interrupted> {
    match FIRST.get() {
        None => Ok(()),
        Some((signal, _)) => Err(Interrupted { signal: *signal, done: None }),
    }
}

/// The time until which a signal is expected that ended a child of this process, where it may come here, too.
#[derive(Debug, Default)]
pub struct Expected(Option<Instant>);

impl Expected {
    /// Waits for a signal to this process after a child ended in this way, where that is the way of a process that gets
    /// a signal of [`signals`]. Several children that one signal ends are waited for once.
    ///
    /// # Errors
    /// The signal came.
    pub fn after(&mut self, end: Exit) -> Result<(), Interrupted> {
        check()?;
        let is_same = |signal: &Signal| Exit::Signal(*signal as i32) == end;
        let Some(signal) = ENDING.into_iter().find(is_same) else { return Ok(()) };
        // A program that catches signals blocks them on all threads.
        let is_caught = SigSet::thread_get_mask().is_ok_and(|mask| mask.contains(signal));
        if !is_caught || ignored() >> (signal as u32 - 1) & 1 == 1 {
            return Ok(());
        }
        let until = *self.0.get_or_insert_with(|| Instant::now() + FOLLOWS);
        while Instant::now() < until {
            check()?;
            std::thread::sleep(LOOK);
        }
        check()
    }
}

/// The signals for [`note`]: those that end a process by default, less those that this process
/// inherited as ignored (from `nohup`, or from a shell that runs it in the background). A thread
/// that waits for signals must wait for these; they must be blocked on all threads.
pub fn signals() -> SigSet {
    let ignored = ignored();
    ENDING.into_iter().filter(|signal| ignored >> (*signal as u32 - 1) & 1 == 0).collect()
}

/// Notes that a signal of [`signals`] came. The first makes every wait return. A second ends this
/// process at once, as if the signal were not caught; the kernel then ends its ranks.
pub fn note(signal: Signal) {
    let (_, first) = FIRST.get_or_init(|| (signal, Instant::now()));
    if first.elapsed() > SAME {
        let _ = SigSet::from(signal).thread_unblock().and_then(|()| raise(signal));
        // Reached only by process 1 of a container, which such a signal does not end.
        std::process::exit(128 + signal as i32);
    }
}

/// Unblocks the signals in a child of this process, which would inherit that they are blocked.
pub(crate) fn restore_in(command: &mut Command) {
    let unblock = || Ok(ENDING.into_iter().collect::<SigSet>().thread_unblock()?);
    // SAFETY: between fork and exec the closure fills a value on its stack and makes one system call. It
    // takes no lock and allocates nothing, also where it fails.
    unsafe { command.pre_exec(unblock) };
}

/// A bit for each signal that this process ignores, the lowest for signal 1.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
