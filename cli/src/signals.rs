//! SIGUSR1 asks a running process for reports: each of its communicators writes one. A process
//! without a communicator prints this, and while it joins, the ranks that it waits for. A process
//! that started ranks passes the signal on to them. SIGTERM, SIGINT and SIGHUP end a process that
//! starts ranks in an orderly way ([`interrupt`]), and any other process as by default.
//!
//! The signals are blocked on every thread, and one thread waits for them, so nothing runs inside a
//! signal handler.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{SigHandler, SigSet, Signal};
use tokenyard_core::bootstrap::joins_under_way;
use tokenyard_core::communicator::write_reports;
use tokenyard_launch::interrupt;

use crate::output::People;

/// The number of SIGUSR1 so far.
static ASKED: AtomicU64 = AtomicU64::new(0);
/// Whether a process that started this one reads its standard output, and shows lines that are no
/// messages.
static LAUNCHED: AtomicBool = AtomicBool::new(false);
/// Whether this process started ranks, which answer in its place.
static HANDS_ON: AtomicBool = AtomicBool::new(false);
/// Signals that come faster are answered once.
const REST: Duration = Duration::from_millis(100);

/// Answers SIGUSR1 from here on, and in a process that is to start ranks also the signals that end
/// it. A write beyond `ulimit -f` becomes an error of the writer. It must be called before the
/// process has other threads: a signal that is not blocked on one of them would end the process.
pub(crate) fn answer(starts_ranks: bool) -> Result<()> {
    // SAFETY: no code runs at the signal, which is ignored from here on; the replaced action is the
    // default.
    unsafe { nix::sys::signal::signal(Signal::SIGXFSZ, SigHandler::SigIgn) }
        .context("ignore SIGXFSZ")?;
    let mut signals = if starts_ranks { interrupt::signals() } else { SigSet::empty() };
    signals.add(Signal::SIGUSR1);
    signals.thread_block().context("block signals")?;
    let listen = move || {
        while let Ok(signal) = signals.wait() {
            if signal != Signal::SIGUSR1 {
                interrupt::note(signal);
                continue;
            }
            ASKED.fetch_add(1, Ordering::Relaxed);
            tell(&write_reports("SIGUSR1"));
            std::thread::sleep(REST);
        }
    };
    std::thread::Builder::new()
        .name("tokenyard-asked".into())
        .spawn(listen)
        .context("start the thread that answers signals")?;
    Ok(())
}

/// From now on this process passes requests on to its ranks. Returns the count of [`asked`].
pub(crate) fn hand_on() -> u64 {
    HANDS_ON.store(true, Ordering::Relaxed);
    asked()
}

/// The number of SIGUSR1 that this process got so far.
pub(crate) fn asked() -> u64 {
    ASKED.load(Ordering::Relaxed)
}

/// Sets whether to print on standard output where reports are, for the process that started this
/// one.
pub(crate) fn report_to_launcher(launched: bool) {
    LAUNCHED.store(launched, Ordering::Relaxed);
}

fn tell(reports: &[tokenyard_core::Result<std::path::PathBuf>]) {
    let joins = joins_under_way();
    for join in &joins {
        say(&format!("no communicator yet: {join}"));
    }
    if reports.is_empty() && joins.is_empty() && !HANDS_ON.load(Ordering::Relaxed) {
        say("no report: no communicator is open or being opened in this process");
    }
    for report in reports {
        match report {
            Ok(path) => say(&format!("report: {}", path.display())),
            Err(error) => say(&format!("no report: {error}")),
        }
    }
}

fn say(line: &str) {
    if LAUNCHED.load(Ordering::Relaxed) {
        People::new(false).say(format_args!("{line}"));
    } else {
        People::errors().say(format_args!("tokenyard: {line}"));
    }
}
