//! What a test of the suite is. The lists of tests are in [`transport`](crate::transport) (L0),
//! [`ep`](crate::ep) (L1), [`concurrency`](crate::concurrency) (L2) and [`faults`](crate::faults)
//! (L3).

use std::sync::Arc;

use anyhow::{Context as _, Result};
use rustix::process::{Signal, getpid, kill_process};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::transport::Capabilities;

/// How much a test asks of a communicator.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Level {
    /// The transport alone: its contract, command by command.
    L0,
    /// The exchange against the oracle.
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
    /// Everything held, and the test has ended its world on purpose: others need a new one.
    PassAndOver,
    /// A capability that the component did not declare is missing; names it.
    NotSupported(String),
    /// Everything held so far, and the process of this rank is to be lost now, with all that it holds open.
    IsLost(Loss),
}

/// How a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// By SIGKILL.
    Killed,
    /// By SIGSTOP.
    Stopped,
}

impl Loss {
    /// Befalls this process.
    ///
    /// # Errors
    /// What the operating system refuses.
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
    /// What the transport of the config declares.
    pub capabilities: &'a Capabilities,
}

/// What every rank of a test runs. All ranks return; an error on any rank fails the test.
pub type Body = Box<dyn Fn(&Rank<'_>) -> Result<Outcome> + Send + Sync>;

/// One test.
pub struct Test {
    /// Unique and stable, for example `l0/payload_before_signal`.
    pub name: String,
    /// Its level.
    pub level: Level,
    /// How many ranks it runs on.
    pub ranks: u32,
    /// One line for people: what must hold.
    pub about: String,
    /// What every rank runs.
    pub body: Body,
    /// Whether the process of a rank is lost in it: then ranks must be processes.
    pub loses_rank: bool,
}

/// What breaks if the test of this name fails: numbers of `docs/invariants.md`.
pub fn invariants(test: &str, level: Level) -> &'static str {
    match level {
        Level::L0 => crate::transport::invariants(test),
        Level::L1 => {
            "a rule of the exchange; INV-1, INV-2 or INV-3 if only this transport fails it"
        }
        Level::L2 => {
            "a rule of the exchange; INV-2, INV-5 or INV-7 if only this transport fails it"
        }
        Level::L3 => "INV-6, INV-7; what is left behind: INV-8",
    }
}

/// The tests of L0 to L2, in order of their levels. Faults, which need processes of their own, are
/// in [`faults::list`](crate::faults::list).
///
/// With several domains, every domain has as many ranks as else the world.
pub fn tests(capabilities: &Capabilities, domains: u32) -> Vec<Test> {
    let mut tests = crate::transport::tests(capabilities);
    tests.extend(crate::ep::tests(domains));
    tests.extend(crate::concurrency::tests(domains));
    tests
}
