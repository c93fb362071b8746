//! A signal that ends the launcher: SIGTERM, SIGINT or SIGHUP.
//!
//! By default such a signal ends a process where it stands, and its temporary folders stay behind. A
//! launcher that blocks them and calls [`note`] gets an error from its next wait instead
//! ([`Running::wait_event`](crate::Running::wait_event)). It hands the error on, so everything that it made is
//! dropped on the way: ranks, folders, hosts. Then it ends with [`Interrupted::exit_code`].

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal, raise};

/// The signals that end a launcher.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
/// Signals that come so soon after the first are the same wish: `timeout` of the coreutils sends one to its
/// child, and one to the process group that both are in.
const SAME: Duration = Duration::from_millis(200);

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
    /// With what was done by then, for people: `3 of 10 steps were done`.
    #[must_use]
    pub fn with_done(self, done: String) -> Self {
        Self { done: Some(done), ..self }
    }

    /// What a shell says of a process that the signal has ended: 128 and the signal's number.
    pub fn exit_code(&self) -> u8 {
        128 + self.signal as u8
    }
}

/// Whether a signal is to end this process, as an error. Always `Ok` where nobody calls [`note`].
///
/// # Errors
/// The signal came.
pub fn check() -> Result<(), Interrupted> {
    match FIRST.get() {
        None => Ok(()),
        Some((signal, _)) => Err(Interrupted { signal: *signal, done: None }),
    }
}

/// The signals that [`note`] takes: those that end a process by default, less those that whoever started this
/// process lets it ignore (`nohup`, and a shell that runs it in the background). A thread that waits for
/// signals must wait for these; they must be blocked on all threads.
pub fn signals() -> SigSet {
    let ignored = ignored();
    ENDING.into_iter().filter(|signal| ignored >> (*signal as u32 - 1) & 1 == 0).collect()
}

/// Notes that a signal of [`signals`] came. The first lets every wait return; a second ends this process at
/// once, as if it had not been caught: the kernel then ends its ranks.
pub fn note(signal: Signal) {
    let (_, first) = FIRST.get_or_init(|| (signal, Instant::now()));
    if first.elapsed() > SAME {
        let _ = SigSet::from(signal).thread_unblock().and_then(|()| raise(signal));
        // Reached by process 1 of a container only, which the kernel spares.
        std::process::exit(128 + signal as i32);
    }
}

/// Lets a child of this process be ended by the signals again: it would inherit that they are blocked.
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
