//! The exchange on the rail, with the ranks of other domains that have this rank's index there.
//!
//! Rows land in places that are fixed per source, as packed ones do, and the entry follows with their number. So
//! nothing is granted. The rank at the other end, the *forwarder*, dispatches them inside its domain from their
//! landing places. A dispatch ends here with a round without rows; after it the landing places are free again.

use tokenyard_core::Result;
use tokenyard_core::call::{AgreeCall, DispatchCall};

use crate::engine::ends::End;
use crate::engine::record::bad_record;
use crate::engine::slots::was_refused;
use crate::moe::agree::{announce, poll_entries, post_refusal};
use crate::moe::dispatch::source::i64_slice;
use crate::moe::dispatch::upstream::landed_ids;
use crate::moe::entry::Enter;
use crate::moe::handle::Arrangement;
use crate::moe::rows::moves::Move;
use crate::moe::rows::transfer::move_to_landing;
use crate::moe::runner::Runner;
use crate::moe::verdicts::agree_on_rail;

/// Sends this rank's rows, and waits for those of other domains.
///
/// # Safety
/// The call's tensors are valid until the operation is received.
pub(crate) unsafe fn cross(runner: &mut Runner, call: &DispatchCall<'_>) -> Result<()> {
    let call = &call.on_rail();
    let (operation, handle) = (call.operation, call.handle as usize);
    let slot = runner.order.open_slot(operation)?;
    runner.routing.open_handle(call.handle);
    if !call.is_replay && call.refusal.is_none() {
        let state = &mut runner.routing.handles[handle];
        let arrangement = Arrangement::of(call);
        state.begin(operation, arrangement, call.max_tokens);
        // SAFETY: `[T, K]` i64, contiguous and validated by the host.
        state.legs[0].route(unsafe { i64_slice(&call.topk_idx) });
    }
    let enter = Enter {
        operation,
        signature: call.signature,
        origin: runner.routing.origin(handle, call.refusal.is_some()),
        refusal: call.refusal,
    };
    if enter.refusal.is_some() {
        post_refusal(runner, slot, &enter)?;
    } else {
        let (format, arrays) = (call.format, call.signature.arrays());
        let m = Move { operation, slot, handle, group: 0, format, arrays };
        // SAFETY: by this function's contract.
        unsafe {
            let source = runner.launcher.row_source(call, &format)?;
            move_to_landing(runner, &m, &source)?;
        }
        announce(runner, slot, &enter, &|routing, group, peer| {
            routing.rows_of_leg(handle, group, peer)
        })?;
    }
    let refused = poll_entries(runner, slot, &enter)?;
    wait_landed(runner, slot, operation)?;
    if let Some(refusal) = refused {
        return Err(refusal.error());
    }
    match call.is_replay {
        true => check_rows(runner, handle),
        false => learn(runner, slot, call),
    }
}

/// Waits for the rows that were announced. They are counted even where some rank refused, so that the totals
/// stay right.
fn wait_landed(runner: &mut Runner, slot: usize, operation: u64) -> Result<()> {
    for source in runner.exchange.member.domains.places() {
        let entry = runner.routing.gathered.entries[source as usize];
        let came = runner.order.wait_rows(slot, source, operation, entry.rows * entry.arrays)?;
        if !came || runner.order.is_gone(source) {
            runner.routing.forget_entry(source);
            runner.routing.gathered.entries[source as usize].gone = true;
        }
    }
    Ok(())
}

/// A replay has as many rows as its dispatch had.
fn check_rows(runner: &Runner, handle: usize) -> Result<()> {
    let recv = &runner.routing.handles[handle].recv;
    for source in runner.exchange.member.domains.places() {
        let entry = &runner.routing.gathered.entries[source as usize];
        let expected = u64::from(recv.rows_from(source));
        if !entry.gone && entry.rows != expected {
            let text = format!("{} rows in a replay of {expected}", entry.rows);
            return Err(bad_record(runner.exchange.member.source(source), text));
        }
    }
    Ok(())
}

/// Reads how many rows came from each source: a combine returns one for each. The owners' exchange checks the
/// experts that the rows name.
fn learn(runner: &mut Runner, slot: usize, call: &DispatchCall<'_>) -> Result<()> {
    let local = runner.exchange.regions.local_experts() as usize;
    for source in runner.exchange.member.domains.places() {
        let ids = landed_ids(runner, slot, &call.format, source)?;
        let counts = &mut runner.routing.gathered.counts[source as usize * local..][..local];
        counts.fill(0);
        for id in ids.iter().filter_map(|id| usize::try_from(*id).ok()) {
            counts.get_mut(id).into_iter().for_each(|count| *count += 1);
        }
    }
    let routing = &mut runner.routing;
    let state = &mut routing.handles[call.handle as usize];
    state.recv.build(1, &routing.gathered.rows, &routing.gathered.counts)?;
    (state.tokens, state.is_made) = (state.recv.num_rows().into(), true);
    state.output_rows = state.tokens;
    Ok(())
}

/// A round without rows: the last of a dispatch, or the first of a combine.
pub(crate) fn agree(runner: &mut Runner, call: &AgreeCall<'_>) -> Result<()> {
    if call.is_combine {
        let slot = runner.order.open_slot(call.operation)?;
        return agree_on_rail(runner, slot, call);
    }
    let slot = runner.order.slot(call.operation);
    let agreed = agree_on_rail(runner, slot, call);
    match &agreed {
        Ok(()) => runner.order.leave(slot, call.operation, End::Done)?,
        Err(error) if was_refused(error) => {
            runner.order.leave(slot, call.operation, End::Refused)?;
        }
        Err(_) => {}
    }
    agreed
}
