//! `cargo xtask vm`: runs a command of the repository in an emulated machine that has soft-RoCE.
//! `docs/testing-rdma.md` describes the hardware that it stands in for.
//!
//! Watched by the tests in these files; the step `vm` runs it.

mod guest;
mod image;
mod machine;
mod modules;
mod scratch;
pub(crate) mod suite;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use self::guest::{BOOT_LIMIT, Limits};
use self::machine::Task;
use crate::{needs, report, steps};

const DEFAULT_JOB_LIMIT: Duration = Duration::from_secs(300);

/// A command for the machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Job<'a> {
    limit: Duration,
    command: &'a [&'a str],
}

impl<'a> Job<'a> {
    /// Reads `[--limit SECONDS] -- COMMAND...`; `None` for any other arguments.
    pub(crate) fn read(args: &'a [&'a str]) -> Option<Self> {
        let (limit, command) = match args {
            ["--limit", seconds, "--", command @ ..] => {
                (Duration::from_secs(seconds.parse().ok()?), command)
            }
            ["--", command @ ..] => (DEFAULT_JOB_LIMIT, command),
            _ => return None,
        };
        (!command.is_empty()).then_some(Self { limit, command })
    }
}

/// Runs a job in the folder `root` of the machine, which has this machine's files, and returns its exit
/// code. Files that the job writes are lost, except those in `target/conformance`.
pub(crate) fn run(root: &Path, job: &Job<'_>) -> Result<u8> {
    ensure!(
        std::env::consts::ARCH == "x86_64",
        "run the test machine: found a host of {}, expected x86_64, whose programs it runs",
        std::env::consts::ARCH
    );
    needs::require(steps::VM_NEEDS, root)?;
    let target = report::target_folder(root);
    let (cache, results) = (target.join("vm"), target.join("conformance"));
    fs::create_dir_all(&results).with_context(|| format!("make {}", results.display()))?;
    let image = image::ready(&cache)?;
    let task = Task { folder: root, results: &results, command: job.command };
    let words = machine::command_line(&image, &task)?;
    let start = Instant::now();
    let ended = guest::run(&words, Limits { boot: BOOT_LIMIT, job: job.limit })?;
    let console = cache.join("console.log");
    fs::write(&console, &ended.console).with_context(|| format!("write {}", console.display()))?;
    println!(
        "vm: {:.1} s with the boot; the kernel's console is in {}",
        start.elapsed().as_secs_f32(),
        console.display()
    );
    ended.exit_code()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_what_follows_the_dashes() {
        let job = |limit, command| Job { limit: Duration::from_secs(limit), command };
        assert_eq!(Job::read(&["--", "ls", "--", "-l"]), Some(job(300, &["ls", "--", "-l"])));
        assert_eq!(Job::read(&["--limit", "9", "--", "ls"]), Some(job(9, &["ls"])));
        for bad in
            [&["ls"][..], &["--"], &[], &["--limit", "--", "ls"], &["--limit", "x", "--", "l"]]
        {
            assert_eq!(Job::read(bad), None, "{bad:?}");
        }
    }
}
