//! The rank's side of the rule that no rank outlives its launcher.

use std::env;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Process id of the launcher, set for every rank.
pub(crate) const LAUNCHER: &str = "TOKENYARD_LAUNCHER";

/// Ties this process to its launcher: when the launcher dies, by SIGKILL too, the kernel kills this
/// process. A rank calls it first, on any thread. Returns whether a [`Job`](crate::Job) started
/// this process; for a process of torchrun or Slurm this does nothing, as it has no such launcher.
///
/// # Errors
/// The launcher is already gone, or is not the parent of this process; the rank must then exit.
pub fn adopt() -> Result<bool> {
    let Some(value) = env::var_os(LAUNCHER) else { return Ok(false) };
    let launcher: i32 = value.to_str().and_then(|text| text.parse().ok()).with_context(|| {
        format!("adopt: found {LAUNCHER}={value:?}, expected the launcher's process id")
    })?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("adopt: the kernel refused a parent death signal")?;
    // The launcher may have died before the line above. Then nothing would kill this process.
    let parent = Pid::as_raw(getppid());
    if parent != launcher {
        bail!(
            "adopt: found parent process {parent}, expected launcher {launcher} of {LAUNCHER}: \
             the launcher is gone, or another process stands between it and this rank"
        );
    }
    Ok(true)
}
