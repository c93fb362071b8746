//! The messages of a rank to the process that started it: one JSON document per line of standard
//! output.

use serde::{Deserialize, Serialize};
use tokenyard_core::{Error, ErrorKind};

use crate::output::error_text;

/// One message.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(crate) enum Message {
    /// The rank found nothing wrong of its own, and waits for the others to join.
    Joining,
    /// All ranks have joined.
    Joined,
    /// The communicator is open.
    Opened(Opened),
    /// This many steps are done and checked.
    Step { done: u32 },
    /// All steps are done.
    Done(RankResult),
    /// The rank ends because of an error.
    Failed(Failure),
    /// A warning of its log.
    Warned { text: String },
    /// The rank is about to make this call of a component; empty: it has left the last one.
    Calls { call: String },
}

/// Facts of an open communicator; the same on all ranks except for the window sizes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// The choices, and their reasons: [`tokenyard_core::communicator::BringUpReport`].
    pub(crate) report: serde_json::Value,
    /// Load of the busiest expert over the mean load, in the first step; 0 without any load.
    pub(crate) busiest_over_mean: f64,
}

/// The result of one rank, over all steps unless stated otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankResult {
    pub(crate) rank: u32,
    /// T, in each step.
    pub(crate) tokens: u64,
    /// (token, rank) pairs that this rank's tokens make.
    pub(crate) rows_sent: u64,
    /// (token, rank) pairs that this rank received.
    pub(crate) rows_received: u64,
    /// Bytes of the received rows, scales included.
    pub(crate) bytes_received: u64,
    /// Bytes of the rows that combine returned to this rank.
    pub(crate) bytes_returned: u64,
    /// Bytes that this rank put to ranks of other domains, records included; none where they are not counted.
    #[serde(default)]
    pub(crate) out_bytes: Option<u64>,
    /// Bytes of the rows that its tokens send to other domains and get back: one row each way for each (token, other
    /// domain) pair.
    #[serde(default)]
    pub(crate) out_row_bytes: u64,
    /// The clock of the times.
    pub(crate) clock: Clock,
    /// Median over the steps.
    pub(crate) dispatch_us: f64,
    /// Median over the steps.
    pub(crate) combine_us: f64,
    /// Row elements that were compared with the oracle's.
    pub(crate) elements_checked: u64,
    /// Ranks without which this rank's communicator went on, in order.
    pub(crate) lost: Vec<Loss>,
    /// Tokens of this rank whose sum lacked an expert of a lost rank.
    pub(crate) tokens_missing_experts: u64,
}

/// The clock that measured the time of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Clock {
    /// The device's clock: from the start of an operation's first kernel to the end of its last.
    Device,
    /// The host's clock: from the call to its return.
    #[default]
    Host,
}

/// A rank without which a communicator went on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Loss {
    pub(crate) rank: u32,
    /// The first step, from 1, in or before which it was lost.
    pub(crate) from_step: u32,
}

/// The reason why a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) cause: Cause,
    /// The rank that the error is about, if it is about one.
    pub(crate) about: Option<u32>,
    pub(crate) text: String,
}

/// The cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cause {
    /// The process died without a message.
    Died,
    /// The result differs from the oracle's.
    Check,
    /// This rank's own error.
    Own,
    /// The fault of another rank: it was lost or did not come in time, or its input was refused.
    Peer,
}

impl Failure {
    /// The failure for a difference from the oracle.
    pub(crate) fn check(error: &anyhow::Error) -> Self {
        Self { cause: Cause::Check, about: None, text: error_text(error) }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        let core = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
        let about = core.and_then(Error::rank);
        let cause = match core.map(Error::kind) {
            Some(ErrorKind::PeerLost | ErrorKind::Refused) => Cause::Peer,
            // A deadline error names the rank that did not come.
            Some(ErrorKind::Deadline) if about.is_some() => Cause::Peer,
            _ => Cause::Own,
        };
        Self { cause, about, text: error_text(&error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_another_rank_caused_are_distinguished_from_a_rank_s_own() {
        let failure = |kind, rank: Option<u32>| {
            let error = Error::new(kind, "wait", "too long");
            let error = match rank {
                Some(rank) => error.with_rank(rank),
                None => error,
            };
            Failure::from(anyhow::Error::from(error).context("dispatch"))
        };
        let lost = failure(ErrorKind::PeerLost, Some(2));
        assert_eq!((lost.cause, lost.about), (Cause::Peer, Some(2)));
        assert_eq!(lost.text, "dispatch: wait: too long");
        assert_eq!(failure(ErrorKind::Deadline, Some(2)).cause, Cause::Peer);
        assert_eq!(failure(ErrorKind::Deadline, None).cause, Cause::Own);
        assert_eq!(failure(ErrorKind::Config, None).cause, Cause::Own);
    }
}
