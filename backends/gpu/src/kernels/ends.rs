//! How the host learns that operations of an engine have ended, and how.

use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::abi;
use tokenyard_core::wait::WaitFor;
use tokenyard_core::{Error, ErrorKind, Result};

use super::args::Outcome;
use super::engine::Engine;
use super::outcome::{Called, Refusal, ticket};
use super::waits::Wait;

impl Engine {
    /// Waits until everything has ended that was launched, and streams have passed the regions that
    /// were taken back.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.check()?;
        self.take_back_late();
        let wait = self.wait(self.latest, abi::TY_PHASE_DONE);
        let is_over = || self.stream.is_idle();
        self.waits.until(wait, &|| matches!(is_over(), Ok(true)), &is_over)?;
        self.waits.ended(wait)?;
        self.order.settle()?;
        self.check()
    }

    /// Waits until the kernel of an operation has told what it came to.
    pub(super) fn hear_outcome(&mut self, operation: u64, ours: &Called) -> Result<Outcome> {
        let slot = self.slot(operation);
        let ticket = u64::from(ticket(operation));
        let at = self.outcomes.at(slot);
        // SAFETY: pinned memory that lives as long as `self`; the epoch is a word that the kernel
        // writes last, with release order.
        let heard = || unsafe { AtomicU64::from_ptr(&raw mut (*at).epoch).load(Ordering::Acquire) };
        let wait = self.wait(operation, abi::TY_PHASE_ENTRY);
        let waited = self.waits.until(wait, &|| heard() == ticket, &|| self.events[slot].is_done());
        // Kernels enter nothing more once an operation has failed that nobody waited for.
        waited.map_err(|error| self.check().err().unwrap_or(error))?;
        // SAFETY: the kernel has written it and does not touch it again.
        let outcome = unsafe { at.read_volatile() };
        self.refusal = Refusal::of(&outcome, ours, &self.shape);
        self.refusal.as_ref().map_or(Ok(outcome), |refusal| Err(refusal.error()))
    }

    /// Waits until everything of an operation that was launched has ended well.
    pub(super) fn finish(&self, operation: u64, phase: u64) -> Result<()> {
        let event = &self.events[self.slot(operation)];
        let wait = self.wait(operation, phase);
        self.waits.until(wait, &|| matches!(event.is_done(), Ok(true)), &|| event.is_done())?;
        self.waits.ended(wait)?;
        // SAFETY: pinned memory that lives as long as `self`; no kernel of the operation runs.
        let trace = unsafe { self.traces.at(self.slot(operation)).read_volatile() };
        let since = |at: u64| at.wrapping_sub(trace.begun) as i64;
        tracing::trace!(
            operation,
            phase,
            counted_ns = since(trace.counted),
            heard_ns = since(trace.heard),
            moved_ns = since(trace.moved),
            arrived_ns = since(trace.arrived),
            "times of an operation, from the start of its kernel"
        );
        Ok(())
    }

    /// When things happened in an operation whose kernels have ended.
    pub(super) fn trace(&self, operation: u64) -> Result<abi::TyTrace> {
        let slots = self.operations.len() as u64;
        if operation > self.latest || operation + slots <= self.latest {
            let text = format!(
                "found operation {operation}; expected one of the {slots} up to {}",
                self.latest
            );
            return Err(Error::new(ErrorKind::InvalidInput, "trace operation", text));
        }
        // SAFETY: pinned memory that lives as long as `self`; no kernel of the operation runs.
        let t = unsafe { self.traces.at(self.slot(operation)).read_volatile() };
        Ok(abi::TyTrace {
            size: size_of::<abi::TyTrace>(),
            begun: t.begun,
            counted: t.counted,
            heard: t.heard,
            moved: t.moved,
            arrived: t.arrived,
        })
    }

    pub(super) fn wait(&self, operation: u64, phase: u64) -> Wait {
        let exchange = &self.exchange;
        let rank = exchange.team.rank((exchange.rank + 1) % self.shape.ranks);
        let operation = operation / u64::from(exchange.steps());
        Wait { operation, phase, level: exchange.level, rank }
    }

    /// Waits until everything that kernels have put is done (INV-4). No kernel runs.
    pub(super) fn flush_puts(&self) -> Result<()> {
        let Some(ring) = &self.waits.ring else { return Ok(()) };
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: self.exchange.world_rank(),
            signal: 0,
            expected: ring.numbered()?,
            operation: 0,
            level: self.exchange.level,
        };
        self.waits.waiter.until(&what, || ring.done(), || ring.explain())
    }

    /// Ends every wait of this rank's kernels after an error that closes the communicator: nobody else does,
    /// and memory must not go while a kernel runs.
    pub(super) fn abort_on_fatal<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            if !matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full) {
                self.waits.end_all();
            }
        })
    }
}
