//! The values that ranks compare when they enter, and their objections.

use tokenyard_core::signature::Signature;
use tokenyard_core::{ErrorKind, Result};

use crate::driver::Launch;
use crate::engine::Engine;
use crate::engine::outcome::{Called, Refusal};
use crate::moe::args::{Common, ENTER, HEAD, THREADS};
use crate::moe::step::Step;

impl Engine {
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
        let (exchange, steps) = (&self.exchange, self.exchange.steps());
        Called {
            rank: exchange.world_rank(),
            team: exchange.team,
            operation: operation / u64::from(steps),
            steps,
            graphs: self.order.has_recorded,
        }
    }

    /// An objection of this rank itself.
    pub(crate) fn objection(&self, kind: ErrorKind, why: impl Into<String>) -> Refusal {
        Refusal::new(kind, self.exchange.world_rank(), why)
    }

    /// An operation without rows: this rank states what it knows, and learns what the others know.
    ///
    /// # Errors
    /// The first refusal, unless the host waits for it later.
    pub(crate) fn agree(
        &mut self,
        operation: u64,
        signature: Signature,
        refusal: Option<&Refusal>,
        step: &Step,
    ) -> Result<()> {
        let mut common = match refusal {
            Some(refusal) => self.refused(operation, refusal, false),
            None => self.common(operation, ENTER, &[], false),
        };
        step.follow(&mut common);
        self.routing.latest = operation;
        let called = self.sign(operation, &mut common, signature);
        let shared = 4 * HEAD * self.exchange.shape.ranks;
        let launch = Launch::of_threads(1, THREADS, shared);
        let slot = self.routing.slot(operation);
        // SAFETY: the kernel's type; it names memory of the engine only.
        let sent = unsafe { self.launch(&self.launcher.kernels.agree, launch, &common, slot) };
        let heard = match step.deferred {
            true => sent,
            false => sent.and_then(|()| self.wait_outcome(operation, &called).map(drop)),
        };
        self.abort_on_fatal(heard)
    }
}
