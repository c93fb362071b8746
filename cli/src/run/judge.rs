//! Judges the config before ranks start, as `tokenyard config check` does: in a process of its own, because
//! a plugin that crashes or hangs while it is asked must not take this one with it.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tokenyard_core::config::Config;
use tokenyard_launch::{Event, Job, Stderr, interrupt};

use super::RunArgs;

/// How often the limit is looked at.
const TICK: Duration = Duration::from_millis(100);

/// What this reads of the document of `config check`.
#[derive(Deserialize)]
struct JudgeDocument {
    command: String,
    errors: Vec<String>,
}

/// What is wrong with a config, each with file and line.
#[derive(Debug)]
pub(crate) struct WrongConfig(pub(crate) Vec<String>);

impl std::fmt::Display for WrongConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for WrongConfig {}

/// Refuses a config in which a component finds an error. A component that crashes is left to the ranks, whose
/// diagnosis names it; ranks would wait for one that hangs, so it is refused.
///
/// # Errors
/// What is wrong, each with file and line; a component that hangs for `world.late_ms`; a signal that is to end this process; no process can be started.
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
    let mut errors = Vec::new();
    let done = || format!("0 of {} steps were done, and no rank was started", args.steps);
    while !running.all_exited() && Instant::now() < limit {
        let event =
            running.wait_event(TICK).map_err(|interrupted| interrupted.with_done(done()))?;
        // A plugin may print lines of its own.
        if let Some(Event::Line { line, .. }) = event
            && let Ok(document) = serde_json::from_str::<JudgeDocument>(&line)
            && document.command == "config check"
        {
            errors = document.errors;
        }
    }
    interrupt::check().map_err(|interrupted| interrupted.with_done(done()))?;
    ensure!(
        running.all_exited(),
        "{}: the components of this config did not say within {:?} (world.late_ms) whether they can run: a plugin \
         hangs while it is loaded or asked. Fix: take out plugins until `tokenyard config check` ends",
        config.name,
        config.world.late
    );
    if errors.is_empty() {
        return Ok(());
    }
    Err(WrongConfig(errors).into())
}
