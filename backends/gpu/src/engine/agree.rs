//! The operation without data: each rank states what it knows, and learns what the others know.

use tokenyard_core::Result;
use tokenyard_core::signature::Signature;

use crate::driver::Launch;
use crate::engine::Engine;
use crate::engine::args::{ENTER, HEAD, THREADS};
use crate::engine::outcome::Refusal;
use crate::engine::step::Step;

/// This rank states what it knows, and learns what the others know.
///
/// # Errors
/// The first refusal, unless the host waits for it later.
pub(crate) fn agree(
    engine: &mut Engine,
    operation: u64,
    signature: Signature,
    refusal: Option<&Refusal>,
    step: &Step,
) -> Result<()> {
    let mut common = match refusal {
        Some(refusal) => engine.refused(operation, refusal, false),
        None => engine.common(operation, ENTER, &[], false),
    };
    step.follow(&mut common);
    if let Some(stream) = step.aside {
        engine.order.turn_aside(stream);
    }
    engine.latest = operation;
    let called = engine.sign(operation, &mut common, signature);
    let launch = Launch::of_threads(1, THREADS, 4 * HEAD * engine.member.ranks);
    let slot = engine.slot(operation);
    // SAFETY: the kernel's type; it names memory of the engine only.
    let sent = unsafe { engine.launch(&engine.launcher.kernels.agree, launch, &common, slot) };
    let agreed = match step.deferred {
        true => sent,
        false => sent.and_then(|()| engine.wait_outcome(operation, &called).map(drop)),
    };
    engine.abort_on_fatal(agreed)
}

/// Waits for the outcome of such an operation that was deferred.
pub(crate) fn agreed(engine: &mut Engine, operation: u64) -> Result<()> {
    let agreed = engine.outcome_of(operation).map(drop);
    engine.abort_on_fatal(agreed)
}
