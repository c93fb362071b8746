//! The state that the queues of a transport share, and the attribution of faults.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_sys_verbs::Context;
use tokenyard_sys_verbs::ffi::EVENT_PORT_ERR;
use tokenyard_verbs::{Failures, Port};

use super::failure::{Blame, FailedAt, Failure, Fault};
use super::memory::Memory;

/// The state that the queues of a transport share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Field order is drop order: peers' access to memory ends, then the device.
    pub(super) memory: Memory,
    pub(super) context: Arc<Context>,
    /// How long a connection may be stalled (INV-6).
    pub(super) deadline: Duration,
    pub(super) failures: Failures<Failure>,
    /// This rank's index in the team.
    pub(super) me: u32,
    pub(super) port: Port,
}

impl Shared {
    #[cold]
    pub(super) fn fail(&self, fault: Fault, place: Option<FailedAt>) -> i32 {
        // A fault that only follows from an earlier failure needs no check of the port. An unknown op follows from
        // none.
        let follows = fault != Fault::UnknownOp;
        if !place.is_some_and(|place| follows && self.failures.hide(place.peer)) {
            let failure = Failure { fault, place, blame: self.blame(fault, place) };
            self.failures.add(failure.about(), failure);
        }
        abi::TY_TRANSPORT
    }

    /// No rank can go on without its own device, so failures of the device are not those of a peer. Nor is the host's
    /// own mistake.
    fn blame(&self, fault: Fault, place: Option<FailedAt>) -> Blame {
        match place {
            None => Blame::Here,
            Some(_) if fault == Fault::UnknownOp => Blame::Here,
            Some(_) if fault.is_silence() && self.port.is_down(&self.context) => Blame::Port,
            Some(place) if place.peer == self.me => Blame::Here,
            Some(place) => Blame::Peer(place.peer),
        }
    }

    /// Takes the asynchronous events of the device, and checks this rank's port.
    pub(super) fn take_events(&self, now: Instant) {
        while let Some(event) = self.context.next_event() {
            if event.is_fatal() {
                self.fail(Fault::Event(event.event), None);
            } else {
                if event.event == EVENT_PORT_ERR {
                    self.port.went_down(now);
                }
                let words = self.context.library().event_words(event.event);
                tracing::warn!("{} reports \"{words}\"", self.context.name());
            }
        }
        if self.port.is_cut(&self.context, now) {
            let failure = Failure { fault: Fault::Cut, place: None, blame: Blame::Port };
            self.failures.add(None, failure);
        }
    }
}
