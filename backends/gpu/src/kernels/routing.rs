//! The routings that handles hold, and the operations that are open.

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
    /// By slot: the kernel and arguments that receive an operation whose staged send was a separate
    /// call.
    pub(super) halves: Vec<StagedHalf>,
    /// The last operation that was sent.
    pub(super) latest: u64,
}

impl RoutingTable {
    /// A table for this many handles, whose tokens are counted by `blocks` blocks of `warps` warps each.
    pub(super) fn new(
        context: &Arc<Context>,
        exchange: &Exchange,
        handles: u32,
        blocks: u32,
        warps: u32,
    ) -> Result<Self> {
        let handle = |_| HandleState::new(context, exchange, blocks, warps);
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

    /// Registers an operation until it is received.
    pub(super) fn begin(&mut self, number: u64, operation: Operation) {
        let slot = self.slot(number);
        self.operations[slot] = operation;
    }

    /// Removes the operation with this number; changes nothing if the slot holds another one.
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

    /// Refuses an operation that was never sent, or whose slot has passed to another.
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

    /// Forgets a stream that has ended: no later call may name it.
    pub(super) fn forget(&mut self, stream: RawStream) {
        self.handles.iter_mut().for_each(|h| h.stream = h.stream.filter(|s| *s != stream));
    }
}
