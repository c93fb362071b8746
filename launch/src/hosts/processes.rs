//! The processes on a host.

use std::fs;

use anyhow::{Context, Result};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::spaces::Spaces;

pub(super) fn list(spaces: &Spaces) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("list processes")? {
        let name = entry.context("list processes")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        if spaces.holds(pid)? {
            found.push(pid);
        }
    }
    found.sort_unstable();
    Ok(found)
}

pub(super) fn signal_all(spaces: &Spaces, signal: Signal) -> Result<()> {
    for pid in list(spaces)? {
        let Some(number) = Pid::from_raw(pid.cast_signed()) else { continue };
        let Ok(pidfd) = pidfd_open(number, PidfdFlags::empty()) else { continue };
        // Another process may have received the number before it was opened.
        if spaces.holds(pid)? {
            // Fails if the process has ended by itself.
            let _ = pidfd_send_signal(&pidfd, signal);
        }
    }
    Ok(())
}
