//! Judges the config before ranks start, as `tokenyard config check` does: in a separate process,
//! because a plugin that crashes or hangs during the check must not end or block this process.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tokenyard_core::config::Config;
use tokenyard_launch::{Event, Job, Stderr, interrupt};

use super::RunArgs;
use crate::preload;

/// The interval at which the limit is checked.
const TICK: Duration = Duration::from_millis(100);

/// The fields that are read of the document of `config check`.
#[derive(Deserialize)]
struct JudgeDocument {
    command: String,
    errors: Vec<String>,
}

/// The errors of a config, each with file and line.
#[derive(Debug)]
pub(crate) struct WrongConfig(pub(crate) Vec<String>);

impl std::fmt::Display for WrongConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for WrongConfig {}

/// Refuses a config in which a component finds an error, and one with a plugin that ends its process
/// while it is loaded: it may end all ranks at once, so that none is left to name it. A component
/// that crashes later is no error here, as the diagnosis of the ranks names it. A component that
/// hangs is refused, as ranks would wait for it.
///
/// # Errors
/// The config has errors, each with file and line; a plugin cannot be loaded; a component hangs for
/// `world.late_ms`; a signal is to end this process; or no process can be started.
pub(super) fn refuse_wrong(args: &RunArgs, config: &Config, ranks: u32) -> Result<()> {
    let words = ["config", "check", "--json", "--ranks", &ranks.to_string(), "--"];
    let job = Job {
        program: std::env::current_exe().context("find this program")?,
        args: words.map(OsString::from).into_iter().chain([args.config.clone().into()]).collect(),
        ranks: 1,
        env: Vec::new(),
        stderr: Stderr::Capture,
    };
    let mut running = job.start()?;
    let limit = Instant::now() + config.world.late;
    let mut errors = None;
    let done = || format!("0 of {} steps were done, and no rank was started", args.steps);
    while !running.all_exited() && Instant::now() < limit {
        let event =
            running.wait_event(TICK).map_err(|interrupted| interrupted.with_done(done()))?;
        // A plugin may print its own lines.
        if let Some(Event::Line { line, .. }) = event
            && let Ok(document) = serde_json::from_str::<JudgeDocument>(&line)
            && document.command == "config check"
        {
            errors = Some(document.errors);
        }
    }
    interrupt::check().map_err(|interrupted| interrupted.with_done(done()))?;
    let hangs = !running.all_exited();
    // It kills the process.
    drop(running);
    let Some(errors) = errors.filter(|_| !hangs) else {
        preload::try_within(config, config.world.late)?;
        ensure!(
            !hangs,
            "{}: the components of this config did not report within {:?} (world.late_ms) whether they can run: one \
             hangs while it is probed. Fix: remove plugins until `tokenyard config check` ends",
            config.name,
            config.world.late
        );
        return Ok(());
    };
    if errors.is_empty() {
        return Ok(());
    }
    Err(WrongConfig(errors).into())
}
