//! The state that the queues of a transport share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_sys_verbs::Context;
use tokenyard_sys_verbs::ffi::EVENT_PORT_ERR;
use tokenyard_verbs::{Blame, Failures, Port};

use super::failure::{FailedAt, Failure, Fault};
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
    pub(super) port: Port,
}

impl Shared {
    #[cold]
    pub(super) fn fail(&self, fault: Fault, place: Option<FailedAt>) -> i32 {
        let port_is_down = || self.port.is_down(&self.context);
        let peer = place.map(|place| place.peer);
        if let Some(blame) = self.failures.attribute(fault, peer, port_is_down) {
            self.failures.add(blame.peer(), Failure { fault, place, blame });
        }
        abi::TY_TRANSPORT
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
