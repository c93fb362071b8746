//! What an operation keeps between its halves, and what stays of one that nobody receives.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use super::components::Components;
use super::output::{Handle, Received, RoutingClaim};

/// Values that a caller gave to an operation to be kept.
type Owners = Vec<Box<dyn Any + Send>>;

/// What operations kept that were never received. Others may still read their inputs, and use the slots of
/// their handles, so it lives as long as the communicator.
#[derive(Debug, Default)]
pub(super) struct Abandoned(Mutex<Vec<Left>>);

/// Held for their drop.
#[derive(Debug)]
struct Left {
    _owners: Owners,
    _routing: Option<RoutingClaim>,
    _brought: Option<Received>,
}

/// An operation between its send and its receive. The communicator it belongs to is kept, because numbers
/// and slots mean something there only.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) components: Arc<Components>,
    pub(super) operation: u64,
    pub(super) owners: Owners,
    /// The handle that it reads.
    routing: Option<RoutingClaim>,
    /// What an operation before it has brought for it.
    brought: Option<Received>,
    /// Where it leaves both if it is not received.
    abandoned: Arc<Abandoned>,
}

impl Sent {
    pub(super) fn new(
        components: &Arc<Components>,
        operation: u64,
        abandoned: &Arc<Abandoned>,
    ) -> Self {
        let (components, abandoned) = (Arc::clone(components), Arc::clone(abandoned));
        Self { components, operation, owners: Vec::new(), routing: None, brought: None, abandoned }
    }

    /// One that reads a handle.
    pub(super) fn of(mut self, handle: &Handle) -> Self {
        self.routing = Some(handle.routing.again());
        self
    }

    /// One that reads another output, if any.
    pub(super) fn with(mut self, brought: Option<Received>) -> Self {
        self.brought = brought;
        self
    }

    /// It was received: nobody uses what it kept.
    pub(super) fn end(mut self) {
        self.owners.clear();
        (self.routing, self.brought) = (None, None);
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let (owners, routing) = (std::mem::take(&mut self.owners), self.routing.take());
        let brought = self.brought.take();
        if owners.is_empty() && routing.is_none() {
            return;
        }
        let mut all = self.abandoned.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Left { _owners: owners, _routing: routing, _brought: brought });
    }
}
