//! How the host learns that operations of an engine have ended, and with which result.

use tokenyard_core::signature::Signature;
use tokenyard_core::{ErrorKind, Result, abi};

use crate::engine::Engine;
use crate::engine::args::{Common, Outcome};
use crate::engine::outcome::{Called, Refusal, numbered, reported_late, ticket};
use crate::engine::waits::Wait;

impl Engine {
    /// Waits until all launched work has ended, and streams have passed the regions that were taken
    /// back.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.check()?;
        self.take_back_late();
        let wait = self.wait(self.latest, abi::TY_PHASE_DONE);
        let is_over = || self.order.stream.is_idle();
        self.waits.until(wait, &|| matches!(is_over(), Ok(true)), &is_over)?;
        self.waits.ended(wait)?;
        self.order.regions.settle()?;
        self.check()
    }

    /// Checks whether an operation has failed that no caller waited for.
    ///
    /// # Errors
    /// The failure; the communicator cannot continue.
    pub(crate) fn check(&self) -> Result<()> {
        self.observer.check()?;
        let Some(outcome) = self.launcher.late_outcome() else { return Ok(()) };
        let called = self.called(numbered(outcome.epoch, self.latest));
        let refusal = Refusal::of(&outcome, &called, &*self.faults);
        self.abort_on_fatal(refusal.map_or(Ok(()), |refusal| Err(reported_late(&refusal.error()))))
    }

    /// Waits until the kernel of an operation has written its outcome.
    pub(crate) fn wait_outcome(&mut self, operation: u64, ours: &Called) -> Result<Outcome> {
        let slot = self.slot(operation);
        let ticket = u64::from(ticket(operation));
        let wait = self.wait(operation, abi::TY_PHASE_ENTRY);
        let (launcher, event) = (&self.launcher, &self.order.events[slot]);
        let is_there = || launcher.epoch(slot) == ticket;
        let waited = self.waits.until(wait, &is_there, &|| event.is_done());
        // Kernels enter no more operations once one has failed that no caller waited for.
        waited.map_err(|error| self.check().err().unwrap_or(error))?;
        let outcome = self.launcher.outcome(slot);
        let refusal = Refusal::of(&outcome, ours, &*self.faults);
        refusal.map_or(Ok(outcome), |refusal| Err(refusal.error()))
    }

    /// Waits for the outcome of an operation that another one was queued behind.
    pub(crate) fn outcome_of(&mut self, operation: u64) -> Result<Outcome> {
        let called = self.called(operation);
        self.wait_outcome(operation, &called)
    }

    /// Waits until all launched work of an operation has ended well.
    pub(crate) fn finish(&self, operation: u64, phase: u64) -> Result<()> {
        let slot = self.slot(operation);
        let (waits, event) = (&self.waits, &self.order.events[slot]);
        let wait = self.wait(operation, phase);
        waits.until(wait, &|| matches!(event.is_done(), Ok(true)), &|| event.is_done())?;
        waits.ended(wait)?;
        if !tracing::enabled!(tracing::Level::TRACE) {
            return Ok(());
        }
        let trace = self.launcher.trace(self.order.context(), slot)?;
        let since = |at: u64| at.wrapping_sub(trace.begun) as i64;
        tracing::trace!(
            operation,
            phase,
            counted_ns = since(trace.counted),
            entered_ns = since(trace.entered),
            moved_ns = since(trace.moved),
            arrived_ns = since(trace.arrived),
            "times of an operation, from the start of its kernel"
        );
        Ok(())
    }

    /// The times of an operation whose kernels have ended.
    pub(crate) fn trace(&self, operation: u64) -> Result<abi::TyTrace> {
        self.check_recent(operation)?;
        let t = self.launcher.trace(self.order.context(), self.slot(operation))?;
        Ok(abi::TyTrace {
            size: size_of::<abi::TyTrace>(),
            begun: t.begun,
            counted: t.counted,
            entered: t.entered,
            moved: t.moved,
            arrived: t.arrived,
        })
    }

    /// The wait for an operation, as far as the host knows it by itself.
    pub(crate) fn wait(&self, operation: u64, phase: u64) -> Wait {
        let member = &self.member;
        let rank = member.team.rank((member.rank + 1) % member.ranks);
        Wait { operation: member.number(operation), phase, level: member.level, rank }
    }

    /// See [`Waits::abort_on_fatal`](crate::engine::waits::Waits::abort_on_fatal).
    pub(crate) fn abort_on_fatal<T>(&self, result: Result<T>) -> Result<T> {
        self.waits.abort_on_fatal(result)
    }

    /// Stores for later calls the refusal of this rank of a call that no caller waits for: the other
    /// ranks do not continue past it.
    pub(crate) fn report_no_host_sync<T>(
        &self,
        no_host_sync: bool,
        outcome: Result<T>,
    ) -> Result<T> {
        outcome.inspect_err(|error| {
            if no_host_sync {
                self.observer.fail(reported_late(error));
            }
        })
    }

    /// Starts to watch calls that no caller waits for: a later call gets the error of a call that fails.
    pub(crate) fn watch_no_host_sync(&mut self) -> Result<()> {
        let stood = self.observer.stand();
        self.abort_on_fatal(stood)
    }

    /// The arguments of an operation in which this rank does not take part.
    pub(crate) fn refused(&self, operation: u64, refusal: &Refusal, no_host_sync: bool) -> Common {
        let (objector, why) = (refusal.objector, refusal.why.as_bytes());
        Common { objector, ..self.common(operation, refusal.verdict(), why, no_host_sync) }
    }

    /// Writes into `common` the values that ranks compare.
    pub(crate) fn sign(&self, operation: u64, common: &mut Common, signature: Signature) -> Called {
        common.signature = signature.word;
        self.called(operation)
    }

    /// This rank, and the operation that its caller has given this number.
    pub(crate) fn called(&self, operation: u64) -> Called {
        let member = &self.member;
        Called {
            rank: member.world_rank(),
            team: member.team,
            operation: member.number(operation),
            steps: member.steps,
            graphs: self.order.has_recorded,
        }
    }

    /// An objection of this rank itself.
    pub(crate) fn objection(&self, kind: ErrorKind, why: impl Into<String>) -> Refusal {
        Refusal::new(kind, self.member.world_rank(), why)
    }
}
