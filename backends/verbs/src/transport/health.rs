//! The health of a device whose connections a transport uses: its port, its events and the failures.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokenyard_core::transport::Team;
use tokenyard_core::{Result, abi};
use tokenyard_sys_verbs::ffi::{EVENT_PORT_ERR, EVENT_QP_LAST_WQE_REACHED, PORT_ACTIVE};
use tokenyard_sys_verbs::{Async, Context};

use super::failure::{FailedAt, Failure, TransportFault};
use super::failures::{Blame, Failures};
use crate::port::Port;

/// Whether this rank's port is up.
#[derive(Debug)]
struct PortState {
    number: u8,
    /// The longest time that a link may be down without breaking connections.
    patience: Duration,
    /// The time at which it was found down; `None` while it is up.
    down_since: Mutex<Option<Instant>>,
}

impl PortState {
    /// Queries the port each time: it may be up again since the device's event.
    fn is_down(&self, context: &Context) -> bool {
        context.port(self.number).is_ok_and(|attr| attr.state != PORT_ACTIVE)
    }

    /// The device has reported that the port is down.
    fn went_down(&self, now: Instant) {
        if let Ok(mut down_since) = self.down_since.lock() {
            down_since.get_or_insert(now);
        }
    }

    /// Whether the port is down for longer than connections last. Then peers have given up their connections to
    /// this rank, which may have no commands in flight that would show this.
    fn is_cut(&self, context: &Context, now: Instant) -> bool {
        let Ok(mut down_since) = self.down_since.try_lock() else { return false };
        let Some(since) = *down_since else { return false };
        if !self.is_down(context) {
            *down_since = None;
        }
        down_since.is_some() && now.saturating_duration_since(since) >= self.patience
    }
}

/// A device, and the failures of its connections.
#[derive(Debug)]
pub struct Health<F> {
    /// The device.
    pub context: Arc<Context>,
    /// How long a connection may be stalled (INV-6).
    pub deadline: Duration,
    failures: Failures<Failure<F>>,
    port: PortState,
}

impl<F: TransportFault> Health<F> {
    /// A device that is well. Its port may be down for `patience` without breaking connections, or for the deadline.
    pub fn new(port: &Port, team: &Team, deadline: Duration, patience: Duration) -> Self {
        Self {
            context: Arc::clone(&port.context),
            deadline,
            failures: Failures::new(team.world_ranks.len(), team.me),
            port: PortState {
                number: port.number,
                patience: patience.min(deadline),
                down_since: Mutex::new(None),
            },
        }
    }

    /// Records a fault, and returns the status for the caller of the hot path.
    #[cold]
    pub fn fail(&self, fault: F, place: Option<FailedAt>) -> i32 {
        let port_is_down = || self.port.is_down(&self.context);
        let peer = place.map(|place| place.peer);
        if let Some(blame) = self.failures.attribute(fault, peer, port_is_down) {
            self.failures.add(blame.peer(), Failure { fault, place, blame });
        }
        abi::TY_TRANSPORT
    }

    /// Checks this rank's port.
    pub fn look_at_port(&self, now: Instant) {
        if self.port.is_cut(&self.context, now) {
            let failure = Failure { fault: F::CUT, place: None, blame: Blame::Port };
            self.failures.add(None, failure);
        }
    }

    /// Takes the asynchronous events of the device. Each that is fatal is a fault at the place of its queue pair.
    pub fn take_events(&self, now: Instant, place: impl Fn(&Async) -> Option<FailedAt>) {
        while let Some(event) = self.context.next_event() {
            if event.is_fatal() {
                self.fail(F::event(event.event), place(&event));
                continue;
            }
            if event.event == EVENT_PORT_ERR {
                self.port.went_down(now);
            }
            let (name, words) =
                (self.context.name(), self.context.library().event_words(event.event));
            if event.event == EVENT_QP_LAST_WQE_REACHED {
                tracing::debug!("{name}: a connection that broke takes no more receives");
            } else {
                tracing::warn!("{name} reports \"{words}\"");
            }
        }
    }

    /// The next failure in words; `link` describes the connection to a peer, or this rank's port.
    ///
    /// # Errors
    /// There is a failure.
    pub fn check(&self, team: &Team, link: impl Fn(Option<u32>) -> String) -> Result<()> {
        let Some(failure) = self.failures.next() else { return Ok(()) };
        let link = link(failure.place.map(|place| place.peer));
        Err(failure.to_error(self.context.library(), team, link))
    }
}
