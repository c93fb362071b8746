//! The launcher's order to the ranks, and their answers.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tokenyard_core::files;

use crate::pace::Pace;
use crate::suite::Outcome;

/// The largest order, in bytes: the names of all tests need less than 1 MiB.
const MAX_ORDER: u64 = 16 << 20;

/// The work of the ranks of one job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct JobSpec {
    /// The config file.
    pub(super) config: PathBuf,
    /// The pace of the machine.
    pub(super) pace: Pace,
    /// The work.
    pub(super) work: Work,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Work {
    /// These tests in this order, until one fails.
    Tests(Vec<String>),
    /// The fault of this name, on this many ranks.
    Fault { name: String, ranks: u32 },
}

impl JobSpec {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = files::read(path, MAX_ORDER).context("read order")?;
        serde_json::from_slice(&bytes)
            .with_context(|| format!("read order: {} is not an order", path.display()))
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, serde_json::to_vec(self)?)
            .with_context(|| format!("write order: {} cannot be written", path.display()))
    }
}

/// One line of a rank. Lines that are not answers (of a library that prints) are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "tokenyard", rename_all = "snake_case")]
pub(super) enum Answer {
    /// A test ended on this rank.
    Test { name: String, outcome: TestEnd },
    /// This rank uses these names, just before the fault happens on it: afterwards it may be too late to look.
    Uses { names: Vec<PathBuf> },
    /// The fault happens now on this rank.
    Faulty,
    /// A call ended with this error on this rank, and the run of a fault with it.
    Ended { error: String, rank: Option<u32> },
    /// The components do not have the operation of the fault, for this reason.
    Lacks { why: String },
    /// A call of this slot of a transport has not returned for some seconds; none any more.
    Stuck { slot: Option<String> },
    /// The folder where the ranks meet: it must be gone in the end.
    Meeting { path: PathBuf },
}

/// How a test ended on a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TestEnd {
    Pass,
    PassAndOver,
    NotSupported(String),
    Fail(String),
}

impl TestEnd {
    /// Whether the world ended with the test, on purpose.
    pub(super) fn is_over(&self) -> bool {
        matches!(self, Self::PassAndOver)
    }
}

impl From<Result<Outcome>> for TestEnd {
    fn from(result: Result<Outcome>) -> Self {
        match result {
            Ok(Outcome::Pass) => Self::Pass,
            Ok(Outcome::PassAndOver | Outcome::IsLost(_)) => Self::PassAndOver,
            Ok(Outcome::NotSupported(why)) => Self::NotSupported(why),
            Err(error) => Self::Fail(format!("{error:#}")),
        }
    }
}

impl Answer {
    /// Prints the answer as one line.
    pub(super) fn say(&self) -> Result<()> {
        use std::io::Write;
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        let mut out = std::io::stdout().lock();
        out.write_all(&line).and_then(|()| out.flush()).context("answer the launcher")
    }

    pub(super) fn read(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_survive_the_pipe_and_other_lines_are_none() {
        for answer in [
            Answer::Faulty,
            Answer::Uses { names: vec!["/dev/shm/a name".into()] },
            Answer::Test { name: "l1/x".into(), outcome: TestEnd::Fail("line\nbreak".into()) },
            Answer::Ended { error: "gone".into(), rank: Some(2) },
        ] {
            let line = serde_json::to_string(&answer).expect("plain data");
            assert!(!line.contains('\n'));
            assert_eq!(Answer::read(&line), Some(answer));
        }
        assert_eq!(Answer::read("hello"), None);
        assert_eq!(Answer::read("{\"tokenyard\":\"unknown\"}"), None);
    }
}
