//! Exchanges among several domains that the host waits for later: see [`step`](crate::engine::step). T of the second is
//! read on the device.

use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::mode::Mode;
use crate::moe::combine::Combine;
use crate::moe::dispatch::Dispatch;
use crate::moe::operation::{CombineOp, DispatchOp, Operation};

/// The data that a forwarder hands on inside a domain: device addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouped {
    /// i32 `source rank * M + source token` of each token.
    pub(crate) sources: u64,
    /// i32, tokens of each group.
    pub(crate) counts: u64,
}

impl Dispatch<'_> {
    /// The output of a deferred dispatch, which has room for the most rows. The exchange behind it waits for its rows.
    /// Those that come in runs are forwarded meanwhile, so the wait for them is queued with its end: streams may share
    /// a queue of the device, where it would hold up the exchange inside.
    pub(crate) fn arrives(&mut self, operation: u64) -> Result<abi::TyReceived> {
        if self.moe.runs.is_none() {
            self.engine.arrive(operation, abi::TY_PHASE_ROWS)?;
        }
        self.output(operation)
    }

    /// Waits until a deferred dispatch has counted; returns N. Its rows may still be on their way.
    pub(crate) fn counted(&mut self, operation: u64) -> Result<u64> {
        let outcome = self.engine.outcome_of(operation);
        match self.engine.abort_on_fatal(outcome) {
            Ok(outcome) => {
                let op = self.moe.routing.dispatch(operation);
                let handle = op.ok_or_else(|| not_queued(operation))?.handle;
                self.moe.routing.handle(handle).received = outcome.tokens;
                Ok(outcome.tokens)
            }
            Err(error) => {
                let op = self.take(operation)?;
                self.engine.order.order_refused(self.engine.slot(operation), &op.mode);
                self.moe.unstage(self.engine, op.staging, op.handle, &op.mode);
                Err(error)
            }
        }
    }

    /// Ends a deferred dispatch that was counted: its stream continues behind its rows, or the host waits for them.
    /// Its region is the caller's to release.
    pub(crate) fn ended(&mut self, operation: u64) -> Result<()> {
        let op = self.take(operation)?;
        self.end(&op, &op.mode)
    }

    /// The same where the operation is refused: the host waits.
    pub(crate) fn abandoned(&mut self, operation: u64) -> Result<()> {
        let op = self.take(operation)?;
        self.end(&op, &Mode { stream: None, ..op.mode })
    }

    /// Queues the wait for rows that come in runs, and leaves as the mode says.
    fn end(&mut self, op: &DispatchOp, mode: &Mode) -> Result<()> {
        let (operation, is_queued) = (op.operation, self.moe.runs.is_none());
        let left = self
            .engine
            .resume(mode)
            .and_then(|()| self.engine.arrive_unless(is_queued, operation, abi::TY_PHASE_ROWS))
            .and_then(|()| self.engine.leave(operation, abi::TY_PHASE_ROWS, mode));
        self.moe.unstage(self.engine, op.staging, op.handle, mode);
        self.engine.abort_on_fatal(left)
    }

    fn take(&mut self, operation: u64) -> Result<DispatchOp> {
        let of = |op: &Operation| match op {
            Operation::Dispatch(op) if op.operation == operation => Some(*op),
            _ => None,
        };
        self.moe.routing.take(operation, of).ok_or_else(|| not_queued(operation))
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

    /// Ends a deferred combine that was agreed: its stream continues behind it, or the host waits for it. `is_queued`:
    /// the wait for its end is.
    pub(crate) fn ended(&mut self, operation: u64, is_queued: bool) -> Result<()> {
        let op = self.take(operation).ok_or_else(|| not_queued(operation))?;
        self.end(&op, &op.mode, is_queued)
    }

    /// The same where the operation is refused on the rail: the host waits.
    pub(crate) fn abandoned(&mut self, operation: u64, is_queued: bool) -> Result<()> {
        let op = self.take(operation).ok_or_else(|| not_queued(operation))?;
        self.end(&op, &Mode { stream: None, ..op.mode }, is_queued)
    }

    /// Queues the wait for its end, unless that is queued, and leaves as the mode says.
    fn end(&mut self, op: &CombineOp, mode: &Mode, is_queued: bool) -> Result<()> {
        let operation = op.operation;
        let left = self
            .engine
            .resume(mode)
            .and_then(|()| if is_queued { Ok(()) } else { self.ends(operation) })
            .and_then(|()| self.engine.leave(operation, abi::TY_PHASE_DONE, mode));
        self.moe.unstage(self.engine, op.staging, op.handle, mode);
        self.engine.abort_on_fatal(left)
    }
}

fn not_queued(operation: u64) -> Error {
    let message = format!("no operation with number {operation} was queued");
    Error::new(ErrorKind::Internal, "conclude exchange", message)
}
