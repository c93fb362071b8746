//! The routings that handles hold, and the operations that are open.

use crate::decode::steps::DecodeHalf;
use crate::driver::RawStream;
use crate::engine::mode::Mode;
use crate::moe::exchange::Exchange;
use crate::moe::handle::HandleState;
use crate::moe::operation::{DispatchOp, Operation};

/// States that no handle has. The memory of captured ones belongs to graphs, which write it whenever they are
/// launched: so only recorded operations use it again. Those run one after the other.
#[derive(Debug)]
struct Spares<T> {
    eager: Vec<T>,
    captured: Vec<T>,
}

impl<T> Spares<T> {
    /// Another state for a handle, if it needs or finds one; a recorded operation may turn an eager state into a
    /// captured one.
    fn other(
        &mut self,
        is_captured: bool,
        is_recorded: bool,
        make: impl FnOnce() -> T,
    ) -> Option<T> {
        match (is_captured, is_recorded) {
            (false, true) => self.captured.pop(),
            (true, false) => Some(self.eager.pop().unwrap_or_else(make)),
            _ => None,
        }
    }

    fn keep(&mut self, state: T, is_captured: bool) {
        if is_captured { self.captured.push(state) } else { self.eager.push(state) }
    }
}

/// Handles by number, operations by slot.
#[derive(Debug)]
pub(crate) struct RoutingTable {
    pub(crate) handles: Vec<HandleState>,
    spares: Spares<HandleState>,
    operations: Vec<Operation>,
    /// By slot: the kernel and arguments that receive an operation whose low-latency send was a separate
    /// call.
    pub(crate) halves: Vec<DecodeHalf>,
}

impl RoutingTable {
    /// A table for this many handles, whose tokens are counted by at most `blocks` blocks of `warps` warps each.
    pub(crate) fn new(exchange: &Exchange, handles: u32, blocks: u32, warps: u32) -> Self {
        Self {
            handles: (0..handles).map(|_| HandleState::new(blocks, warps)).collect(),
            spares: Spares { eager: Vec::new(), captured: Vec::new() },
            operations: vec![Operation::None; exchange.slots() as usize],
            halves: vec![DecodeHalf::None; exchange.slots() as usize],
        }
    }

    /// The slot of an operation.
    fn slot(&self, operation: u64) -> usize {
        (operation % self.operations.len() as u64) as usize
    }

    pub(crate) fn handle(&mut self, handle: u32) -> &mut HandleState {
        &mut self.handles[handle as usize]
    }

    /// Gives a handle whose caller has dropped it another state, where graphs use its own. `make` makes one.
    pub(crate) fn renew(
        &mut self,
        handle: u32,
        is_recorded: bool,
        make: impl FnOnce() -> HandleState,
    ) -> &mut HandleState {
        let state = &mut self.handles[handle as usize];
        let is_captured = state.is_captured;
        if let Some(other) = self.spares.other(is_captured, is_recorded, make) {
            let last = std::mem::replace(state, other);
            self.spares.keep(last, is_captured);
        }
        state
    }

    /// Notes that an operation uses a handle. A recorded operation uses it again at every launch of
    /// its graph.
    pub(crate) fn use_handle(&mut self, handle: u32, mode: &Mode) {
        self.handle(handle).is_captured |= mode.is_recorded();
    }

    /// Registers an operation until it is received.
    pub(crate) fn begin(&mut self, number: u64, operation: Operation) {
        let slot = self.slot(number);
        self.operations[slot] = operation;
    }

    /// Removes the operation with this number; changes nothing if the slot holds another one.
    pub(crate) fn take<T>(
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
    pub(crate) fn dispatch(&self, number: u64) -> Option<&DispatchOp> {
        match &self.operations[self.slot(number)] {
            Operation::Dispatch(op) if op.operation == number => Some(op),
            _ => None,
        }
    }

    /// Forgets a stream that has ended: no later call may name it.
    pub(crate) fn forget(&mut self, stream: RawStream) {
        self.handles.iter_mut().for_each(|h| h.stream = h.stream.filter(|s| *s != stream));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot whose state is a number, and whether graphs use that.
    struct Slot {
        state: u32,
        is_captured: bool,
    }

    fn renew(slot: &mut Slot, spares: &mut Spares<Slot>, is_recorded: bool, made: &mut u32) -> u32 {
        let make = || {
            *made += 1;
            Slot { state: 100 + *made, is_captured: false }
        };
        let was = slot.is_captured;
        if let Some(other) = spares.other(was, is_recorded, make) {
            let last = std::mem::replace(slot, other);
            spares.keep(last, was);
        }
        slot.is_captured |= is_recorded;
        slot.state
    }

    #[test]
    fn a_state_that_a_graph_uses_serves_recorded_operations_only() {
        let mut spares = Spares { eager: Vec::new(), captured: Vec::new() };
        let (mut slot, mut made) = (Slot { state: 1, is_captured: false }, 0);
        let mut step = |is_recorded| renew(&mut slot, &mut spares, is_recorded, &mut made);
        assert_eq!([step(false), step(true), step(true)], [1, 1, 1]);
        // From here on a graph uses 1.
        assert_eq!([step(false), step(false), step(true), step(false)], [101, 101, 1, 101]);
        for _ in 0..1000 {
            assert_eq!([step(true), step(false)], [1, 101]);
        }
        assert_eq!(made, 1, "nothing grows");
    }

    #[test]
    fn a_state_of_an_eager_dispatch_whose_combine_was_recorded_is_the_graph_s() {
        let mut spares = Spares { eager: Vec::new(), captured: Vec::new() };
        let (mut slot, mut made) = (Slot { state: 1, is_captured: false }, 0);
        renew(&mut slot, &mut spares, false, &mut made);
        slot.is_captured = true;
        assert_eq!(renew(&mut slot, &mut spares, false, &mut made), 101);
    }
}
