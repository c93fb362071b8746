//! What handles remember of a routing, and what operations are under way.

use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};

use super::exchange::Exchange;
use super::handle::HandleState;
use super::operation::{DispatchOp, Operation};
use super::staged::StagedHalf;
use crate::driver::{Context, RawStream};

/// Handles by number, operations by slot.
#[derive(Debug)]
pub(super) struct RoutingTable {
    pub(super) handles: Vec<HandleState>,
    operations: Vec<Operation>,
    /// What operations that are sent apart by staging are received by, by slot.
    pub(super) halves: Vec<StagedHalf>,
    /// The last operation that was sent.
    pub(super) latest: u64,
}

impl RoutingTable {
    /// For so many handles, whose tokens so many blocks count.
    pub(super) fn new(
        context: &Arc<Context>,
        exchange: &Exchange,
        handles: u32,
        blocks: u32,
    ) -> Result<Self> {
        let handle = |_| HandleState::new(context, exchange, blocks);
        Ok(Self {
            handles: (0..handles).map(handle).collect::<Result<_>>()?,
            operations: vec![Operation::None; exchange.slots() as usize],
            halves: vec![StagedHalf::None; exchange.slots() as usize],
            latest: 0,
        })
    }

    /// The slot of an operation.
    pub(super) fn slot(&self, operation: u64) -> usize {
        (operation % self.operations.len() as u64) as usize
    }

    pub(super) fn handle(&mut self, handle: u32) -> &mut HandleState {
        &mut self.handles[handle as usize]
    }

    /// Puts an operation under way, until it is received.
    pub(super) fn begin(&mut self, number: u64, operation: Operation) {
        let slot = self.slot(number);
        self.operations[slot] = operation;
    }

    /// Takes out the operation with this number; of another one nothing changes.
    pub(super) fn take<T>(
        &mut self,
        number: u64,
        of: impl FnOnce(&Operation) -> Option<T>,
    ) -> Option<T> {
        let slot = self.slot(number);
        let taken = of(&self.operations[slot])?;
        self.operations[slot] = Operation::None;
        Some(taken)
    }

    /// The dispatch with this number, if it was sent and not received.
    pub(super) fn dispatch(&self, number: u64) -> Option<&DispatchOp> {
        match &self.operations[self.slot(number)] {
            Operation::Dispatch(op) if op.operation == number => Some(op),
            _ => None,
        }
    }

    /// Refuses an operation whose slot is another's by now, or that was never sent.
    pub(super) fn check_recent(&self, operation: u64) -> Result<()> {
        let slots = self.operations.len() as u64;
        if operation > self.latest || operation + slots <= self.latest {
            let text = format!(
                "found operation {operation}; expected one of the {slots} up to {}",
                self.latest
            );
            return Err(Error::new(ErrorKind::InvalidInput, "trace operation", text));
        }
        Ok(())
    }

    /// A stream has ended, and nobody may name it any more.
    pub(super) fn forget(&mut self, stream: RawStream) {
        self.handles.iter_mut().for_each(|h| h.stream = h.stream.filter(|s| *s != stream));
    }
}
