//! The tests of the suite. The lists of tests are in [`transport`](crate::transport) (L0),
//! [`moe::cases`](crate::moe::cases) (L1), [`moe::concurrency`](crate::moe::concurrency) (L2),
//! [`ops`] (L1 and L2 of each operation beside MoE) and [`faults`](crate::faults) (L3).

use std::sync::Arc;

use anyhow::{Context as _, Result};
use rustix::process::{Signal, getpid, kill_process};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::transport::Capabilities;

use crate::ops::{self, OperationCase};

/// The level of a test: how much it demands of a communicator.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Level {
    /// The transport alone: its contract, command by command.
    L0,
    /// Exchanges against the oracle, and what other operations pass, byte by byte.
    L1,
    /// Concurrency and chaining.
    L2,
    /// Faults: killed, stopped and misled ranks.
    L3,
}

/// How a test ended without failing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything held.
    Pass,
    /// Everything held, and the test has ended its world on purpose: the next test needs a new world.
    PassAndOver,
    /// A capability that the component did not declare is missing; the text names it.
    NotSupported(String),
    /// Everything held so far. Now the process of this rank must be lost, with everything that it holds
    /// open.
    IsLost(Loss),
}

/// The way in which a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// By SIGKILL.
    Killed,
    /// By SIGSTOP.
    Stopped,
}

impl Loss {
    /// Applies the loss to this process.
    ///
    /// # Errors
    /// The operating system refuses the signal.
    pub fn befall(self) -> Result<()> {
        let signal = match self {
            Self::Killed => Signal::KILL,
            Self::Stopped => Signal::STOP,
        };
        kill_process(getpid(), signal).context("signal this process")
    }
}

/// One rank's view while a test runs.
#[derive(Clone, Copy)]
pub struct Rank<'a> {
    /// All ranks of the test.
    pub world: &'a Arc<World>,
    /// The config under test.
    pub config: &'a Config,
    /// The declarations of the config's transport.
    pub capabilities: &'a Capabilities,
}

/// The body that every rank of a test runs. All ranks return; an error on any rank fails the test.
pub type Body = Box<dyn Fn(&Rank<'_>) -> Result<Outcome> + Send + Sync>;

/// One test.
pub struct Test {
    /// Unique and stable, for example `l0/payload_before_signal`.
    pub name: String,
    /// Its level.
    pub level: Level,
    /// The number of ranks that it runs on.
    pub ranks: u32,
    /// One line for reports: the rule that must hold.
    pub about: String,
    /// The body that every rank runs.
    pub body: Body,
    /// Whether its ranks must be processes: it loses one, or counts what a process holds.
    pub in_processes: bool,
    /// The capability that it needs and the transport did not declare: its ranks do nothing and report so. None where
    /// only ranks find out.
    pub lacks: Option<String>,
}

/// The invariants that a failure of this test breaks: numbers of `docs/invariants.md`.
pub fn invariants(test: &str, level: Level) -> &'static str {
    match level {
        Level::L0 => crate::transport::invariants(test),
        Level::L1 => {
            "a rule of the operation; INV-1, INV-2 or INV-3 if only this transport fails it"
        }
        Level::L2 => {
            "a rule of the operation; INV-2, INV-5 or INV-7 if only this transport fails it"
        }
        Level::L3 => "INV-6, INV-7; what is left behind: INV-8",
    }
}

/// The tests of L0 to L2, in order of their levels. Faults need processes of their own; they are in
/// [`faults::list`](crate::faults::list).
///
/// With several domains, every domain has as many ranks as the world has otherwise.
pub fn tests(capabilities: &Capabilities, domains: u32) -> Vec<Test> {
    let mut tests = crate::transport::tests(capabilities);
    tests.extend(crate::moe::cases::tests(domains));
    tests.extend(ops::values().map(|case| of_operation(Level::L1, domains, case)));
    tests.extend(crate::moe::concurrency::tests(domains));
    tests.extend(ops::order().map(|case| of_operation(Level::L2, domains, case)));
    tests
}

fn of_operation(level: Level, domains: u32, case: OperationCase) -> Test {
    let word = format!("{level:?}").to_lowercase();
    let OperationCase { name, about, ranks, body } = case;
    Test {
        name: format!("{word}/{name}"),
        level,
        ranks: ranks * domains,
        about: about.to_owned(),
        in_processes: false,
        lacks: None,
        body: Box::new(move |rank| match body(rank.world, rank.config)? {
            Some(why) => Ok(Outcome::NotSupported(why)),
            None => Ok(Outcome::Pass),
        }),
    }
}
