//! Failures of transports over reliable connections: numbers on the hot path, and words afterwards.

use tokenyard_core::transport::Team;
use tokenyard_core::{Error, ErrorKind};
use tokenyard_sys_verbs::Library;

use super::failures::{Attributable, Blame};
use super::flight::Pending;

/// A fault without text: it is recorded on the hot path.
pub trait TransportFault: Attributable {
    /// This rank's port is down for longer than connections tolerate.
    const CUT: Self;
    /// The device reports a fault.
    fn event(event: i32) -> Self;
    /// The message and the fix.
    fn words(self, library: &Library) -> (String, &'static str);
}

/// The place of a failure.
#[derive(Clone, Copy, Debug)]
pub struct FailedAt {
    /// The number of the queue.
    pub queue: u32,
    /// The peer of the connection.
    pub peer: u32,
    /// The command, if it failed at one.
    pub command: Option<Pending>,
}

/// A failure.
#[derive(Clone, Copy, Debug)]
pub struct Failure<F> {
    /// The reason.
    pub fault: F,
    /// The connection, where it failed at one.
    pub place: Option<FailedAt>,
    /// The owner.
    pub blame: Blame,
}

impl<F: TransportFault> Failure<F> {
    /// The error in words; `link` describes the connection to the peer, or this rank's port.
    pub(super) fn to_error(self, library: &Library, team: &Team, link: String) -> Error {
        let world_rank = |peer: u32| team.world_ranks.get(peer as usize).copied();
        let (mut message, mut fix) = self.fault.words(library);
        if let (Blame::Port, Some(rank)) = (self.blame, self.place.and_then(|p| world_rank(p.peer)))
        {
            message = format!("{DOWN}: a command to rank {rank} failed: {message}");
            fix = PORT_FIX;
        }
        let mut error = Error::new(ErrorKind::Transport, "execute command", message).with_fix(fix);
        if let Some(rank) = self.blame.peer().and_then(world_rank) {
            error = error.with_rank(rank);
        }
        if let Some(place) = self.place {
            error = error.with_context("queue", place.queue).with_context("peer", place.peer);
            if let Some(command) = place.command {
                error = error
                    .with_context("op", command.op)
                    .with_context("bytes", command.bytes)
                    .with_context("window", command.window)
                    .with_context("signal", command.signal)
                    .with_context("tag", command.tag);
            }
        }
        error.with_context("link", link)
    }
}

const DOWN: &str = "the port of this rank is down";
const PORT_FIX: &str = "see `rdma link` and the kernel's log, then the cable and the switch";

/// The words of a port that is down for too long.
pub fn cut_words() -> (String, &'static str) {
    (format!("{DOWN}, for longer than connections repeat unanswered requests"), PORT_FIX)
}

/// The words of a fault that the device reports.
pub fn event_words(library: &Library, event: i32) -> (String, &'static str) {
    (
        format!("the device reports \"{}\" (event {event})", library.event_words(event)),
        "see the kernel's log for the device, and the errors of the peers",
    )
}
