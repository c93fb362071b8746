//! The state that the queues of a transport share.

use std::time::Instant;

use super::failure::FailedAt;
use super::fault::Fault;
use super::health::Health;
use super::memory::Memory;
use super::signals::{Bad, Signals};

/// The state that the queues of a transport share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Field order is drop order: peers' access to memory ends, then the device.
    pub(super) signals: Signals,
    pub(super) memory: Memory,
    pub(super) health: Health<Fault>,
    /// Number, queue and peer of every queue pair that leads to a peer, in ascending order.
    pub(super) numbers: Vec<(u32, u32, u32)>,
}

impl Shared {
    /// The queue and the peer of a queue pair; `None` for that of the read-back.
    fn place_of(&self, number: u32) -> Option<FailedAt> {
        let at = self.numbers.binary_search_by_key(&number, |(number, ..)| *number).ok()?;
        let (_, queue, peer) = self.numbers[at];
        Some(FailedAt { queue, peer, command: None })
    }

    /// Takes the asynchronous events of the device.
    pub(super) fn take_events(&self, now: Instant) {
        self.health.take_events(now, |event| event.queue_pair.and_then(|it| self.place_of(it)));
    }

    /// Counts the signals that have arrived; whether there was one.
    #[inline]
    pub(super) fn drive_signals(&self) -> bool {
        self.signals.drive(&mut |Bad { fault, number }| {
            self.health.fail(fault, number.and_then(|number| self.place_of(number)));
        })
    }
}
