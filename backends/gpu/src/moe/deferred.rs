//! Exchanges among several domains that the host waits for later: see [`step`](crate::engine::step). T of the second is
//! read on the device.

use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::moe::combine::Combine;
use crate::moe::dispatch::Dispatch;
use crate::moe::operation::Operation;

/// The data that a forwarder hands on inside a domain: device addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouped {
    /// i32 `source rank * M + source token` of each token.
    pub(crate) sources: u64,
    /// i32, tokens of each group.
    pub(crate) counts: u64,
}

impl Dispatch<'_> {
    /// Queues the wait for the rows of a deferred dispatch. Returns its output, which has room for the most rows.
    pub(crate) fn arrives(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.engine.arrive(operation, abi::TY_PHASE_ROWS)?;
        self.output(operation)
    }

    /// Waits for a deferred dispatch and its rows; returns N. Its region is the caller's to release.
    pub(crate) fn concluded(&mut self, operation: u64) -> Result<u64> {
        let of = |op: &Operation| match op {
            Operation::Dispatch(op) if op.operation == operation => Some(*op),
            _ => None,
        };
        let op = self.moe.routing.take(operation, of).ok_or_else(|| not_queued(operation))?;
        let waited = self.engine.outcome_of(operation).and_then(|outcome| {
            self.engine.finish(operation, abi::TY_PHASE_ROWS).map(|()| outcome.tokens)
        });
        if waited.is_err() {
            self.engine.order.order_refused(self.engine.slot(operation), &op.mode);
        }
        self.moe.unstage(self.engine, op.staging, op.handle, &op.mode);
        let tokens = self.engine.abort_on_fatal(waited)?;
        self.moe.routing.handle(op.handle).received = tokens;
        Ok(tokens)
    }
}

impl Combine<'_> {
    /// Queues the end of a deferred combine: other ranks read no rows of this one behind it.
    pub(crate) fn ends(&mut self, operation: u64) -> Result<()> {
        // Where kernels put, the wait for the returned rows has also waited until these rows have left.
        let puts = self.moe.exchange.path.puts();
        self.engine.arrive_unless(puts, operation, abi::TY_PHASE_DONE)
    }

    /// Waits for the outcome of a deferred combine, which is still to be received.
    pub(crate) fn agreed(&mut self, operation: u64) -> Result<()> {
        let agreed = self.engine.outcome_of(operation).map(drop);
        if agreed.is_err()
            && let Some(op) = self.take(operation)
        {
            self.engine.order.order_refused(self.engine.slot(operation), &op.mode);
            self.moe.unstage(self.engine, op.staging, op.handle, &op.mode);
        }
        self.engine.abort_on_fatal(agreed)
    }

    /// Waits for a deferred combine and its end.
    pub(crate) fn concluded(&mut self, operation: u64) -> Result<()> {
        self.agreed(operation)?;
        let op = self.take(operation).ok_or_else(|| not_queued(operation))?;
        let done = self.engine.finish(operation, abi::TY_PHASE_DONE);
        self.moe.unstage(self.engine, op.staging, op.handle, &op.mode);
        self.engine.abort_on_fatal(done)
    }
}

fn not_queued(operation: u64) -> Error {
    let message = format!("no operation with number {operation} was queued");
    Error::new(ErrorKind::Internal, "conclude exchange", message)
}
