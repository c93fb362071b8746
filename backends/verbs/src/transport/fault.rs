//! The faults of this transport, and their words.

use tokenyard_sys_verbs::Library;
use tokenyard_sys_verbs::ffi;

use super::failure::{TransportFault, cut_words, event_words};
use super::failures::Attributable;

/// A fault without text: it is recorded on the hot path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A command with an unknown op.
    UnknownOp,
    /// A command for a peer whose connection broke before.
    BrokenBefore,
    /// An error completion of a command.
    Completion { status: i32, vendor: u32 },
    /// A work request that was not posted.
    Post { errno: i32 },
    /// No command of a connection ended within the deadline.
    Stalled,
    /// A completion queue cannot be polled.
    Queue { errno: i32 },
    /// An error completion of a receive.
    Receive { status: i32, vendor: u32 },
    /// A signal that this rank does not have.
    UnknownSignal { id: u32 },
    /// The device reports a fault.
    Event(i32),
    /// This rank's port is down for longer than connections tolerate.
    Cut,
    /// An error completion of the read-back.
    ReadBack { status: i32, vendor: u32 },
}

const CONTRACT: &str =
    "report this: the caller that posted the command broke the transport contract";

impl Attributable for Fault {
    fn is_of_the_host(self) -> bool {
        self == Self::UnknownOp
    }

    fn is_silence(self) -> bool {
        matches!(self, Self::Completion { .. } | Self::Stalled)
    }
}

impl TransportFault for Fault {
    const CUT: Self = Self::Cut;

    fn event(event: i32) -> Self {
        Self::Event(event)
    }

    fn words(self, library: &Library) -> (String, &'static str) {
        let completion = |what: &str, status: i32, vendor: u32| {
            let (meaning, fix) = meaning(status);
            let words = library.status_words(status);
            (
                format!(
                    "{what}: \"{words}\" (status {status}, vendor error {vendor:#x}): {meaning}"
                ),
                fix,
            )
        };
        let system = |call: &str, errno: i32| {
            let why = std::io::Error::from_raw_os_error(errno);
            (format!("{call}: {why}"), "see the kernel's log for the device")
        };
        match self {
            Self::UnknownOp => ("the op is unknown; expected 1 to 5".into(), CONTRACT),
            Self::BrokenBefore => (
                "the connection to the peer broke before".into(),
                "see the first error of this peer",
            ),
            Self::Completion { status, vendor } => completion("a command failed", status, vendor),
            Self::Receive { status, vendor } => completion("a receive failed", status, vendor),
            Self::ReadBack { status, vendor } => completion("a read-back failed", status, vendor),
            Self::Post { errno } => system("ibv_post_send", errno),
            Self::Queue { errno } => system("ibv_poll_cq or ibv_post_srq_recv", errno),
            Self::Stalled => (
                "no command of the connection ended within the deadline".into(),
                "see whether the peer still polls; with rnr_retry = 7 a peer that has run out of \
                 receives is waited for: raise `receive_depth`, or deadline_ms if it is only slow",
            ),
            Self::UnknownSignal { id } => {
                (format!("a peer raised signal {id}, which this rank does not have"), CONTRACT)
            }
            Self::Cut => cut_words(),
            Self::Event(event) => event_words(library, event),
        }
    }
}

/// The usual meaning of a completion's status, and the fix.
fn meaning(status: i32) -> (&'static str, &'static str) {
    match status {
        ffi::WC_RETRY_EXC_ERR => (
            "the peer did not answer: its process or host is gone, the cable or switch is down, \
             packets are dropped, or the addresses do not reach each other",
            "see whether the peer runs and whether ib_write_bw works between both GIDs; on RoCE \
             check PFC/ECN and `traffic_class`; raise `timeout` or `retry_count` if links flap",
        ),
        ffi::WC_RNR_RETRY_EXC_ERR => (
            "the peer had no receive left for a signal: it did not poll for too long",
            "set rnr_retry = 7, or raise `receive_depth` on the peer",
        ),
        ffi::WC_REM_ACCESS_ERR => (
            "the peer's device refused the access: the place is outside of its window, or its \
             registration has ended",
            "see whether the peer has closed; else report this",
        ),
        ffi::WC_REM_INV_REQ_ERR => (
            "the peer's device found the request wrong: too long, or an atomic that it cannot do",
            "see that both sides run the same version; try the other value of `signals`",
        ),
        ffi::WC_REM_OP_ERR => {
            ("the peer's device could not do it", "see the kernel's log on the peer for its device")
        }
        ffi::WC_LOC_PROT_ERR => (
            "this device may not touch the local memory: a key or an address is wrong",
            "see that the window's memory is still there; else report this",
        ),
        ffi::WC_LOC_LEN_ERR => ("the payload is too long for the port", "lower the largest put"),
        ffi::WC_LOC_QP_OP_ERR => (
            "this device refused the request, or its port is down",
            "see `rdma link` and the vendor error; try signals = \"immediate\"",
        ),
        ffi::WC_WR_FLUSH_ERR => (
            "given up because the connection broke before: a consequence, not the cause",
            "see the first error of this peer, on either side",
        ),
        ffi::WC_BAD_RESP_ERR => (
            "the peer's answer made no sense",
            "see that both ports have the same mtu, and the kernel's log of both",
        ),
        ffi::WC_FATAL_ERR => ("the device failed", "see the kernel's log; reset the device"),
        _ => ("unusual", "look the vendor error up"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decoded_status_says_what_it_means_and_what_to_do() {
        let decoded = [
            ffi::WC_LOC_LEN_ERR,
            ffi::WC_LOC_QP_OP_ERR,
            ffi::WC_LOC_PROT_ERR,
            ffi::WC_WR_FLUSH_ERR,
            ffi::WC_BAD_RESP_ERR,
            ffi::WC_REM_INV_REQ_ERR,
            ffi::WC_REM_ACCESS_ERR,
            ffi::WC_REM_OP_ERR,
            ffi::WC_RETRY_EXC_ERR,
            ffi::WC_RNR_RETRY_EXC_ERR,
            ffi::WC_FATAL_ERR,
        ];
        let mut seen: Vec<_> = decoded.iter().map(|status| meaning(*status).0).collect();
        seen.push(meaning(-1).0);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), decoded.len() + 1, "each has words of its own");
        assert!(meaning(ffi::WC_RNR_RETRY_EXC_ERR).1.contains("rnr_retry"));
        assert!(meaning(ffi::WC_RETRY_EXC_ERR).1.contains("timeout"));
        assert!(meaning(ffi::WC_WR_FLUSH_ERR).1.contains("first error"));
    }
}
