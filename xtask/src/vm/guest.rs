//! Runs the machine: shows the job's output, stores the console, kills a machine that does not end, and
//! reads its result from the console's lines `tokenyard-vm: ...`, which `init.sh` writes.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::exec;

/// A boot takes 8 s under emulation; the limit allows for a busy host.
pub(super) const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// The time for which output may arrive after the machine has ended.
const OUTPUT_GRACE: Duration = Duration::from_secs(5);
const MARK: &str = "tokenyard-vm: ";
/// The number of the console's last lines that a failure shows.
const SHOWN_LINES: usize = 30;

/// The time limits, counted from the start and from the job's start.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) boot: Duration,
    pub(super) job: Duration,
}

/// How a machine ended.
pub(super) struct Ended {
    pub(super) console: String,
    /// The limit that it passed, if any.
    late: Option<String>,
}

/// Runs a machine to its end, or to its limit, and then kills it. Its standard output is shown; its
/// standard error is the console.
pub(super) fn run(words: &[String], limits: Limits) -> Result<Ended> {
    let (program, args) = words.split_first().context("start the machine: no command")?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {program}"))?;
    let console = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&console);
    let ends = [
        each_piece(child.stdout.take(), |piece| {
            let mut out = std::io::stdout().lock();
            // A failed write has no reader to report to.
            let _ = out.write_all(piece).and_then(|()| out.flush());
        }),
        each_piece(child.stderr.take(), move |piece| {
            kept.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(piece);
        }),
    ];
    let text = || {
        let console = console.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&console).into_owned()
    };
    let late = wait(&mut child, limits, &text)?;
    let end = Instant::now() + OUTPUT_GRACE;
    for read_to_end in ends {
        // An error is the end of the output, or of the time for it.
        let _ = read_to_end.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
    Ok(Ended { console: text(), late })
}

/// Passes each piece of a pipe's output to `take`. The receiver disconnects at the end.
fn each_piece(
    pipe: Option<impl Read + Send + 'static>,
    mut take: impl FnMut(&[u8]) + Send + 'static,
) -> Receiver<()> {
    let (open, closed) = mpsc::channel();
    thread::spawn(move || {
        let _open = open;
        let Some(mut pipe) = pipe else { return };
        let mut bytes = [0; 8192];
        while let Ok(count @ 1..) = pipe.read(&mut bytes) {
            take(&bytes[..count]);
        }
    });
    closed
}

/// Waits for the machine. Returns the limit that it passed, if it was killed for that.
fn wait(
    child: &mut Child,
    limits: Limits,
    console: &impl Fn() -> String,
) -> Result<Option<String>> {
    let start = Instant::now();
    let mut up: Option<Instant> = None;
    loop {
        if child.try_wait().context("wait for the machine")?.is_some() {
            return Ok(None);
        }
        if up.is_none() && messages(&console()).any(|what| what == "up") {
            up = Some(Instant::now());
        }
        let late = match up {
            None if start.elapsed() > limits.boot => Some(("boot", limits.boot)),
            Some(up) if up.elapsed() > limits.job => Some(("end the job", limits.job)),
            _ => None,
        };
        if let Some((what, limit)) = late {
            exec::kill(child).context("kill the machine")?;
            return Ok(Some(format!("it did not {what} within {} s", limit.as_secs_f32())));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

impl Ended {
    /// The exit code of the job.
    pub(super) fn exit_code(&self) -> Result<u8> {
        let why = match (&self.late, verdict(&self.console)) {
            (None, Ok(code)) => return Ok(code),
            (Some(late), _) => late.clone(),
            (None, Err(why)) => why,
        };
        let lines: Vec<&str> = self.console.lines().collect();
        let last = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
        bail!("run the test machine: {why}; its console ended with\n{last}")
    }
}

/// Reads the exit code, or the reason why there is none.
fn verdict(console: &str) -> Result<u8, String> {
    if let Some(panic) = console.lines().find(|line| line.contains("Kernel panic")) {
        return Err(format!("its kernel gave up ({})", panic.trim()));
    }
    let last = messages(console).last().unwrap_or("nothing");
    if let Some(what) = last.strip_prefix("failed ") {
        return Err(format!("its start failed {what}"));
    }
    let code = last.strip_prefix("exit ").and_then(|code| code.parse().ok());
    code.ok_or_else(|| format!("it ended without an exit code, and its last message was `{last}`"))
}

/// The messages of `init.sh`. The kernel puts the time before each.
fn messages(console: &str) -> impl Iterator<Item = &str> {
    console.lines().filter_map(|line| Some(line.split_once(MARK)?.1.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(300);

    /// `sh` in place of QEMU.
    fn stand_in(script: &str, boot: Duration, job: Duration) -> Ended {
        let words = ["sh", "-c", script].map(String::from);
        run(&words, Limits { boot, job }).unwrap()
    }

    fn failure(ended: &Ended) -> String {
        ended.exit_code().unwrap_err().to_string()
    }

    #[test]
    fn the_exit_code_is_that_of_the_job_and_not_that_of_the_emulator() {
        let script = "echo '[ 4.1] tokenyard-vm: up' >&2; echo out
                      printf '[ 5.2] tokenyard-vm: exit 7\\r\\n' >&2; exit 1";
        assert_eq!(stand_in(script, LONG, LONG).exit_code().unwrap(), 7);
    }

    #[test]
    fn a_machine_that_never_boots_is_killed_and_its_console_shown() {
        let start = Instant::now();
        let ended = stand_in("echo BIOS >&2; sleep 60; true", SHORT, LONG);
        assert!(start.elapsed() < LONG);
        let text = failure(&ended);
        assert!(text.contains("it did not boot within 0.3 s"), "{text}");
        assert!(text.ends_with("\nBIOS"), "{text}");
    }

    #[test]
    fn a_job_that_never_ends_is_killed_with_all_that_holds_the_output() {
        let start = Instant::now();
        let ended = stand_in("echo tokenyard-vm: up >&2; sleep 60; true", LONG, SHORT);
        assert!(start.elapsed() < LONG);
        let text = failure(&ended);
        assert!(text.contains("it did not end the job within 0.3 s"), "{text}");
    }

    #[test]
    fn a_code_that_came_before_the_limit_does_not_count_after_it() {
        let script = "echo tokenyard-vm: up >&2; echo tokenyard-vm: exit 0 >&2; sleep 60; true";
        assert!(failure(&stand_in(script, LONG, SHORT)).contains("did not end"));
    }

    #[test]
    fn a_machine_that_ends_early_says_why() {
        let text = failure(&stand_in("echo 'qemu: no such device' >&2; exit 1", LONG, LONG));
        assert!(text.contains("without an exit code") && text.contains("`nothing`"), "{text}");
        assert!(text.ends_with("qemu: no such device"), "{text}");
        let why = verdict("tokenyard-vm: failed to load the kernel module veth.ko\n").unwrap_err();
        assert_eq!(why, "its start failed to load the kernel module veth.ko");
        let why =
            verdict("[1] tokenyard-vm: up\n[2] Kernel panic - not syncing: BUG\n").unwrap_err();
        assert_eq!(why, "its kernel gave up ([2] Kernel panic - not syncing: BUG)");
        let why = verdict("[1] tokenyard-vm: up\n[2] tokenyard-vm: exit many\n").unwrap_err();
        assert!(why.ends_with("its last message was `exit many`"), "{why}");
    }
}
