//! The faults of this transport, and their words.

use tokenyard_sys_mlx5::cqe::syndrome;
use tokenyard_sys_verbs::Library;
use tokenyard_verbs::connection::{Attributable, TransportFault, cut_words, event_words};

use crate::fault::QueueFault;

/// A fault without text: it is recorded on the hot path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A command with an unknown op.
    UnknownOp,
    /// A command for a peer whose connection broke before.
    BrokenBefore,
    /// An error completion.
    Completion(QueueFault),
    /// No command of a connection ended within the deadline.
    Stalled,
    /// A queue pair of kernels is broken; its completions lie where the host does not read them.
    Broken,
    /// The device reports a fault.
    Event(i32),
    /// This rank's port is down for longer than connections tolerate.
    Cut,
    /// The signals of this rank cannot be read.
    Unreadable,
}

const FIRST: &str = "see the first error of this peer, on either side";

impl Attributable for Fault {
    fn is_of_the_host(self) -> bool {
        self == Self::UnknownOp
    }

    fn is_silence(self) -> bool {
        matches!(self, Self::Stalled)
            || matches!(self, Self::Completion(fault) if fault.syndrome == syndrome::RETRIES)
    }
}

impl TransportFault for Fault {
    const CUT: Self = Self::Cut;

    fn event(event: i32) -> Self {
        Self::Event(event)
    }

    fn words(self, library: &Library) -> (String, &'static str) {
        match self {
            Self::UnknownOp => (
                "the op is unknown; expected 1 to 5".into(),
                "report this: the caller that posted the command broke the transport contract",
            ),
            Self::BrokenBefore => ("the connection to the peer broke before".into(), FIRST),
            Self::Completion(fault) => (fault.to_string(), fix(fault.syndrome)),
            Self::Stalled => (
                "no command of the connection ended within the deadline".into(),
                "see the kernel's log for the device; raise deadline_ms if the network is only slow",
            ),
            Self::Broken => ("a queue pair of kernels is broken".into(), FIRST),
            Self::Event(event) => event_words(library, event),
            Self::Cut => cut_words(),
            Self::Unreadable => (
                "the GPU's driver does not copy signals from its memory".into(),
                "see the first error of the GPU",
            ),
        }
    }
}

/// The fix for the reason of an error completion.
fn fix(reason: u8) -> &'static str {
    match reason {
        syndrome::RETRIES => {
            "see whether the peer runs and whether ib_write_bw works between both GIDs; on RoCE check PFC/ECN and \
             `traffic_class`; raise `timeout` or `retry_count` if links flap"
        }
        syndrome::REMOTE_ACCESS => "see whether the peer has closed; else report this",
        syndrome::REMOTE_INVALID_REQUEST => {
            "see that both devices have remote atomics (`ibv_devinfo -v`, atomic_cap), else use verbs"
        }
        syndrome::REMOTE_OPERATION | syndrome::REMOTE_ABORTED => {
            "see the kernel's log on the peer for its device"
        }
        syndrome::LOCAL_PROTECTION => {
            "see that the window's memory is still there; else report this"
        }
        syndrome::FLUSHED => FIRST,
        syndrome::BAD_RESPONSE => {
            "see that both ports have the same mtu, and the kernel's log of both"
        }
        _ => "report this, with the vendor's code",
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::transport::Team;
    use tokenyard_verbs::connection::{Blame, FailedAt, Failure};

    use super::*;

    #[test]
    fn a_peer_that_does_not_answer_is_named_with_queue_pair_reason_and_fix() {
        let queue =
            QueueFault { peer: 1, queue: 0, number: 0x47, index: 9, syndrome: 0x15, vendor: 0x81 };
        let place = Some(FailedAt { queue: 0, peer: 1, command: None });
        let (fault, team) = (Fault::Completion(queue), Team::new(0, vec![4, 8]));
        assert!(fault.is_silence());
        let failure = Failure { fault, place, blame: Blame::Peer(1) };
        // The words of completions need no library.
        let (message, fix) = match failure.fault {
            Fault::Completion(fault) => (fault.to_string(), super::fix(fault.syndrome)),
            other => panic!("{other:?}"),
        };
        assert!(
            message.contains("queue pair 0x47 to peer 1") && message.contains("does not answer")
        );
        assert!(fix.contains("ib_write_bw"));
        assert_eq!((failure.blame.peer(), team.world_ranks[1]), (Some(1), 8));
    }

    #[test]
    fn what_follows_from_a_break_points_to_the_first_error() {
        assert_eq!(fix(syndrome::FLUSHED), FIRST);
        assert!(!Fault::BrokenBefore.is_silence());
    }
}
