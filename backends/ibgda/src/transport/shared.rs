//! The state that the queues of a transport share.

use std::time::Instant;

use tokenyard_verbs::connection::{Health, Memory};

use super::fault::Fault;

/// The state that the queues of a transport share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Field order is drop order: peers' access to memory ends, then the device.
    pub(super) memory: Memory,
    pub(super) health: Health<Fault>,
}

impl Shared {
    /// Takes the asynchronous events of the device, and checks this rank's port.
    pub(super) fn take_events(&self, now: Instant) {
        self.health.take_events(now, |_| None);
        self.health.look_at_port(now);
    }
}
