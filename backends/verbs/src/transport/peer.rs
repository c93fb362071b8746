//! One queue's connection to one peer.

use std::net::Ipv6Addr;
use std::sync::Arc;

use tokenyard_sys_verbs::ffi::SendWr;
use tokenyard_sys_verbs::{CallError, Init, Qp, Rts};

use super::batch::Chain;
use super::flight::{Flight, Pending};
use crate::endpoint::{RemoteWindow, SignalArea};

/// A peer's memory.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) windows: Vec<RemoteWindow>,
    pub(super) signals: SignalArea,
}

/// The state of a connection.
#[derive(Debug)]
pub(super) enum Stage {
    /// It waits for the peer's endpoint.
    Waiting(Qp<Init>),
    Connected(Qp<Rts>, Arc<Remote>),
    /// The connection broke; the queue pair still returns posted commands.
    Broken {
        _qp: Qp<Rts>,
    },
    /// A connect failed, or the queue pair was destroyed.
    Gone,
}

/// Both ends of a connection, for people.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) number: u32,
    pub(super) remote_number: u32,
    pub(super) gid: [u8; 16],
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, remote_number, gid } = self;
        write!(f, "queue pair {number} to {remote_number} at {}", Ipv6Addr::from(*gid))
    }
}

/// A queue's connection to a peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) stage: Stage,
    /// The queue pair's number.
    pub(super) number: u32,
    /// First packet sequence number that this side sends.
    pub(super) psn: u32,
    /// Bytes of a payload that may be copied while it is posted.
    pub(super) inline: u32,
    pub(super) chain: Option<Chain>,
    pub(super) flight: Flight<Pending>,
}

impl Peer {
    pub(super) fn new(qp: Qp<Init>, psn: u32, depth: usize) -> Self {
        Self {
            number: qp.number(),
            psn,
            inline: qp.inline(),
            stage: Stage::Waiting(qp),
            chain: None,
            flight: Flight::new(depth),
        }
    }

    /// Accepts no more commands, and makes the device flush those in flight: each ends with its own
    /// error completion. False if the device refuses.
    #[cold]
    pub(super) fn give_up(&mut self) -> bool {
        let Stage::Connected(qp, _) = std::mem::replace(&mut self.stage, Stage::Gone) else {
            return false;
        };
        if let Err(error) = qp.give_up() {
            tracing::error!("cannot break a connection off: {error}");
            return false;
        }
        self.stage = Stage::Broken { _qp: qp };
        self.flight.watch_anew();
        true
    }

    /// Posts a list.
    ///
    /// # Safety
    /// As for [`Qp::post`].
    pub(super) unsafe fn post(&self, first: *mut SendWr) -> Result<(), (CallError, *mut SendWr)> {
        let Stage::Connected(qp, _) = &self.stage else { return Ok(()) };
        // SAFETY: by this function's contract.
        unsafe { qp.post(first) }
    }
}
