//! Runs tests: on threads of this process, or on processes of their own.
//!
//! As processes, one world of n ranks runs the tests of that size one after the other, until one fails. The
//! next test then gets a new world, so that one failure does not end the others. The ranks are this program
//! again, started with the arguments of [`Program`] and an order file; they answer with JSON lines on
//! standard output. `work` is the rank's side; `watch` (tests) and `play` (faults) are the launcher's.

mod load;
mod order;
mod play;
mod watch;
mod work;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::host::Registry;
use tokenyard_core::transport::Capabilities;

use crate::pace::Pace;
use crate::ranks::in_threads;
use crate::suite::{Outcome, Rank, Test};
use crate::transport;

pub use play::{run_fault, run_faults};
pub use watch::{Finished, RunEvent, Verdict, run_in_processes};
pub use work::rank_main;

/// The longest deadline of a test, so that a wait that never ends shows soon.
const MOST_DEADLINE: Duration = Duration::from_secs(10);
/// The longest lateness of a test.
const MOST_LATE: Duration = Duration::from_secs(20);

/// The program that ranks run: it must pass its last argument to [`rank_main`].
#[derive(Clone, Debug)]
pub struct Program {
    /// An executable file.
    pub path: PathBuf,
    /// The arguments before the order file, for example `conformance --rank`.
    pub arguments: Vec<OsString>,
    /// The time after which a test counts as hanging, at the usual pace. Longer than every wait of a test.
    pub limit: Duration,
    /// The pace of this machine.
    pub pace: Pace,
}

impl Program {
    /// A program with the usual limit of a minute, at the usual pace.
    pub fn new(path: PathBuf, arguments: Vec<OsString>) -> Self {
        Self { path, arguments, limit: Duration::from_secs(60), pace: Pace::USUAL }
    }
}

/// The config under test, and the declarations of its transport.
#[derive(Clone, Debug)]
pub struct Settings {
    config: Config,
    capabilities: Capabilities,
}

impl Settings {
    /// Probes the transport of `config`. Its deadline and its lateness are cut to 10 s and 20 s: waits of a
    /// test are short.
    ///
    /// # Errors
    /// A plugin that fails the handshake, an unknown component, or no transport that probes.
    pub fn new(config: Config) -> Result<Self> {
        Self::at(Pace::USUAL, config)
    }

    /// Probes as [`new`](Self::new) does, for a slower machine, where waits are longer.
    ///
    /// # Errors
    /// The errors of [`Settings::new`].
    pub fn at(pace: Pace, mut config: Config) -> Result<Self> {
        config.world.deadline = config.world.deadline.min(pace.stretch(MOST_DEADLINE));
        config.world.late = config.world.late.min(pace.stretch(MOST_LATE));
        // The runner starts the ranks, as threads or by the launcher; both set where rank 0 is.
        config.world.bootstrap = "env".to_owned();
        let registry = Registry::for_config(&config)?;
        registry.choose_kernels(&config.kernels)?.probe(&config.kernels.table)?;
        registry.choose_topology(&config.topology)?;
        let capabilities = transport::probe(&config)?;
        Ok(Self { config, capabilities })
    }

    /// The config, with the deadlines of tests.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The declarations of the transport under test.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Domains that the config splits the world into.
    pub fn domains(&self) -> u32 {
        self.config.domains.unwrap_or(1)
    }

    /// The most ranks that the transport takes: those of its team; in each domain, where it works inside
    /// domains.
    pub fn most_ranks(&self) -> u32 {
        let teams = if self.config.scale_up.is_some() { self.domains() } else { 1 };
        self.capabilities.max_peers.saturating_mul(teams)
    }

    /// Runs one test on a world of threads.
    ///
    /// # Errors
    /// The failure, with its rank.
    pub fn run_in_threads(&self, test: &Test) -> Result<Outcome> {
        if test.in_processes {
            return Ok(Outcome::NotSupported("its ranks must be processes".to_owned()));
        }
        let results = in_threads(test.ranks, &self.config, |world| self.run_on(world, test))?;
        let mut outcome = Outcome::Pass;
        let mut failures = Vec::new();
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Ok(Outcome::Pass | Outcome::PassAndOver | Outcome::IsLost(_)) => {}
                Ok(not_supported) => outcome = not_supported,
                Err(error) => failures.push(format!("rank {rank}: {error:#}")),
            }
        }
        if failures.is_empty() { Ok(outcome) } else { Err(anyhow!(failures.join("\n"))) }
    }

    /// One rank of a test. A panic is a failure of this rank.
    fn run_on(&self, world: &Arc<World>, test: &Test) -> Result<Outcome> {
        let rank = Rank { world, config: &self.config, capabilities: &self.capabilities };
        let result = catch_unwind(AssertUnwindSafe(|| (test.body)(&rank)))
            .unwrap_or_else(|panic| Err(anyhow!("panicked: {}", panic_text(&*panic))))
            .with_context(|| test.name.clone());
        if let Err(error) = &result {
            // The others must not wait for a rank that has failed.
            world.report_failure(&format!("{error:#}"));
        }
        result
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}
