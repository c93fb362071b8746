//! The state that the queues of a transport share.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_sys_verbs::Context;
use tokenyard_sys_verbs::ffi::{EVENT_PORT_ERR, EVENT_QP_LAST_WQE_REACHED, PORT_ACTIVE};

use super::failure::{FailedAt, Failure, Fault};
use super::failures::{Blame, Failures};
use super::memory::Memory;
use super::signals::{Bad, Signals};

/// This rank's port.
#[derive(Debug)]
pub struct Port {
    number: u8,
    /// The longest time that a link may be down without breaking connections.
    patience: Duration,
    /// The time at which it was found down; `None` while it is up.
    down_since: Mutex<Option<Instant>>,
}

impl Port {
    /// A port that is up.
    pub fn new(number: u8, patience: Duration) -> Self {
        Self { number, patience, down_since: Mutex::new(None) }
    }

    /// Queries the port each time: it may be up again since the device's event.
    pub fn is_down(&self, context: &Context) -> bool {
        context.port(self.number).is_ok_and(|attr| attr.state != PORT_ACTIVE)
    }

    /// The device has reported that the port is down.
    pub fn went_down(&self, now: Instant) {
        if let Ok(mut down_since) = self.down_since.lock() {
            down_since.get_or_insert(now);
        }
    }

    /// Whether the port is down for longer than connections last. Then peers have given up their connections to
    /// this rank, which may have no commands in flight that would show this.
    pub fn is_cut(&self, context: &Context, now: Instant) -> bool {
        let Ok(mut down_since) = self.down_since.try_lock() else { return false };
        let Some(since) = *down_since else { return false };
        if !self.is_down(context) {
            *down_since = None;
        }
        down_since.is_some() && now.saturating_duration_since(since) >= self.patience
    }
}

/// The state that the queues of a transport share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Field order is drop order: peers' access to memory ends, then the device.
    pub(super) signals: Signals,
    pub(super) memory: Memory,
    pub(super) context: Arc<Context>,
    /// How long a connection may be stalled (INV-6).
    pub(super) deadline: Duration,
    pub(super) failures: Failures<Failure>,
    pub(super) port: Port,
    /// Number, queue and peer of every queue pair that leads to a peer, in ascending order.
    pub(super) numbers: Vec<(u32, u32, u32)>,
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

    /// Checks this rank's port.
    pub(super) fn look_at_port(&self, now: Instant) {
        if self.port.is_cut(&self.context, now) {
            let failure = Failure { fault: Fault::Cut, place: None, blame: Blame::Port };
            self.failures.add(None, failure);
        }
    }

    /// The queue and the peer of a queue pair; `None` for that of the read-back.
    fn place_of(&self, number: u32) -> Option<FailedAt> {
        let at = self.numbers.binary_search_by_key(&number, |(number, ..)| *number).ok()?;
        let (_, queue, peer) = self.numbers[at];
        Some(FailedAt { queue, peer, command: None })
    }

    /// Takes the asynchronous events of the device.
    pub(super) fn take_events(&self, now: Instant) {
        while let Some(event) = self.context.next_event() {
            if event.is_fatal() {
                let place = event.queue_pair.and_then(|number| self.place_of(number));
                self.fail(Fault::Event(event.event), place);
                continue;
            }
            if event.event == EVENT_PORT_ERR {
                self.port.went_down(now);
            }
            if event.event == EVENT_QP_LAST_WQE_REACHED {
                tracing::debug!(
                    "{}: a connection that broke takes no more receives",
                    self.context.name()
                );
            } else {
                let words = self.context.library().event_words(event.event);
                tracing::warn!("{} reports \"{words}\"", self.context.name());
            }
        }
    }

    /// Counts the signals that have arrived; whether there was one.
    #[inline]
    pub(super) fn drive_signals(&self) -> bool {
        self.signals.drive(&mut |Bad { fault, number }| {
            self.fail(fault, number.and_then(|number| self.place_of(number)));
        })
    }
}
