//! Values that an operation holds between its halves, and the remains of an operation that is never
//! received.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use super::components::Components;
use super::output::{Handle, Received, RoutingClaim};

/// Values that a caller gave to an operation to hold.
type Owners = Vec<Box<dyn Any + Send>>;

/// The values of operations that were never received. Other ranks may still read the operations' inputs
/// and use the slots of their handles, so the values live as long as the communicator.
#[derive(Debug, Default)]
pub(super) struct Abandoned(Mutex<Vec<Left>>);

/// Held for their drop.
#[derive(Debug)]
struct Left {
    _owners: Owners,
    _routing: Option<RoutingClaim>,
    _input: Option<Received>,
}

/// An operation between its send and its receive. It holds its communicator, because numbers and slots
/// have a meaning there only.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) components: Arc<Components>,
    pub(super) operation: u64,
    pub(super) owners: Owners,
    /// The handle that it reads.
    routing: Option<RoutingClaim>,
    /// The output of an earlier operation that it reads.
    input: Option<Received>,
    /// Takes both over if the operation is not received.
    abandoned: Arc<Abandoned>,
}

impl Sent {
    pub(super) fn new(
        components: &Arc<Components>,
        operation: u64,
        abandoned: &Arc<Abandoned>,
    ) -> Self {
        let (components, abandoned) = (Arc::clone(components), Arc::clone(abandoned));
        Self { components, operation, owners: Vec::new(), routing: None, input: None, abandoned }
    }

    /// The same operation, which reads a handle.
    pub(super) fn of(mut self, handle: &Handle) -> Self {
        self.routing = Some(handle.routing.again());
        self
    }

    /// The same operation, which reads another output, if there is one.
    pub(super) fn with(mut self, input: Option<Received>) -> Self {
        self.input = input;
        self
    }

    /// The operation was received: no rank uses its values any more.
    pub(super) fn end(mut self) {
        self.owners.clear();
        (self.routing, self.input) = (None, None);
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let (owners, routing) = (std::mem::take(&mut self.owners), self.routing.take());
        let input = self.input.take();
        if owners.is_empty() && routing.is_none() {
            return;
        }
        let mut all = self.abandoned.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Left { _owners: owners, _routing: routing, _input: input });
    }
}
