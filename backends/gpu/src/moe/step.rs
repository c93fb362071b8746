//! How the exchanges of one operation follow each other among several domains.
//!
//! The host queues both, the second behind the first: T of the second is read on the device, and so is the refusal of
//! the first, which the second passes on. The host learns the outcome of each once all are queued. Then it waits for
//! them in their order, so that a wait that lasts names the level and the rank.

use std::mem::offset_of;

use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::Engine;
use crate::moe::args::{Common, State};
use crate::moe::operation::Operation;

/// The data that a forwarder hands on inside a domain: device addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouped {
    /// i32 `source rank * M + source token` of each token.
    pub(crate) sources: u64,
    /// i32, tokens of each group.
    pub(crate) counts: u64,
}

/// An exchange that another one follows, as its kernels leave it: device addresses; zeros where there is none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Former {
    cell: u64,
    outcome: u64,
    stopped: u64,
}

/// The place of an exchange in its operation. The default is an exchange by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Step {
    pub(crate) former: Former,
    /// The host waits for its outcome later.
    pub(crate) deferred: bool,
    /// The groups that are passed on, in a dispatch inside a domain.
    pub(crate) grouped: Option<Grouped>,
}

impl Step {
    /// An exchange that the host waits for later.
    pub(crate) const DEFERRED: Self =
        Self { former: Former { cell: 0, outcome: 0, stopped: 0 }, deferred: true, grouped: None };

    /// Writes into the arguments of an exchange which one it follows.
    pub(crate) fn follow(&self, common: &mut Common) {
        common.former = self.former.cell;
        common.former_outcome = self.former.outcome;
        common.former_stopped = self.former.stopped;
    }
}

/// Whether ranks go on after an error: it is a refusal, which all of them get.
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full)
}

impl Engine {
    /// An operation of this exchange, for the exchange behind it.
    pub(crate) fn former(&self, operation: u64) -> Former {
        let slot = self.routing.slot(operation);
        Former {
            cell: self.launcher.cell(slot),
            outcome: self.launcher.outcomes.at(slot) as u64,
            stopped: self.launcher.memory.state.address() + offset_of!(State, stopped) as u64,
        }
    }

    /// The next kernels of this exchange run behind the last kernel that `former` has queued for an operation.
    pub(crate) fn queue_behind(&self, former: &Self, operation: u64) -> Result<()> {
        former.order.events[former.routing.slot(operation)].hold(self.order.stream.name())
    }

    /// Queues the wait for the rows of a deferred dispatch. Returns its output, which has room for the most rows.
    pub(crate) fn dispatch_arrives(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.arrive(operation, abi::TY_PHASE_ROWS)?;
        self.dispatch_output(operation)
    }

    /// Waits for a deferred dispatch and its rows; returns N. Its region is the caller's to release.
    pub(crate) fn dispatch_concluded(&mut self, operation: u64) -> Result<u64> {
        let of = |op: &Operation| match op {
            Operation::Dispatch(op) if op.operation == operation => Some(*op),
            _ => None,
        };
        let op = self.routing.take(operation, of).ok_or_else(|| not_queued(operation))?;
        let waited = self.outcome_of(operation).and_then(|outcome| {
            self.finish(operation, abi::TY_PHASE_ROWS).map(|()| outcome.tokens)
        });
        if waited.is_err() {
            self.order.order_refused(self.routing.slot(operation), &op.mode);
        }
        self.unstage(op.staging, op.handle, &op.mode);
        let tokens = self.abort_on_fatal(waited)?;
        self.routing.handle(op.handle).received = tokens;
        Ok(tokens)
    }

    /// Queues the end of a deferred combine: other ranks read no rows of this one behind it.
    pub(crate) fn combine_ends(&mut self, operation: u64) -> Result<()> {
        // Where kernels put, the wait for the returned rows has also waited until these rows have left.
        self.arrive_unless(self.exchange.path.puts(), operation, abi::TY_PHASE_DONE)
    }

    /// Waits for the outcome of a deferred combine, which is still to be received.
    pub(crate) fn combine_agreed(&mut self, operation: u64) -> Result<()> {
        let agreed = self.outcome_of(operation).map(drop);
        if agreed.is_err()
            && let Some(op) = self.take_combine(operation)
        {
            self.order.order_refused(self.routing.slot(operation), &op.mode);
            self.unstage(op.staging, op.handle, &op.mode);
        }
        self.abort_on_fatal(agreed)
    }

    /// Waits for a deferred combine and its end.
    pub(crate) fn combine_concluded(&mut self, operation: u64) -> Result<()> {
        self.combine_agreed(operation)?;
        let op = self.take_combine(operation).ok_or_else(|| not_queued(operation))?;
        let done = self.finish(operation, abi::TY_PHASE_DONE);
        self.unstage(op.staging, op.handle, &op.mode);
        self.abort_on_fatal(done)
    }

    /// Waits for the outcome of a deferred round without rows.
    pub(crate) fn round_agreed(&mut self, operation: u64) -> Result<()> {
        let agreed = self.outcome_of(operation).map(drop);
        self.abort_on_fatal(agreed)
    }
}

fn not_queued(operation: u64) -> Error {
    let message = format!("no operation with number {operation} was queued");
    Error::new(ErrorKind::Internal, "conclude exchange", message)
}
