//! Rows without a counting round (decoding). They land in places that are fixed per source, one copy per
//! (token, rank); the entry carries how many there are. The owner then moves them to their rows of the output.
//! Landing places are free again when their owner has sent `Done`.

use tokenyard_core::moe::Layout;
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::{Result, abi};

use crate::engine::ends::End;
use crate::engine::record::bad_record;
use crate::engine::slots::was_refused;
use crate::moe::agree::{announce, poll_entries};
use crate::moe::dispatch::output::{allocate_output, describe};
use crate::moe::dispatch::packed::unpack;
use crate::moe::dispatch::rank_major::place_rows;
use crate::moe::dispatch::upstream::Rows;
use crate::moe::entry::{Agreed, Enter, missing_refusal};
use crate::moe::operation::{DispatchOp, Operation};
use crate::moe::runner::Runner;
use crate::moe::verdicts::share;

/// # Safety
/// The call's tensors are valid until the operation is received.
pub(crate) unsafe fn landed_send(
    runner: &mut Runner,
    rows: &Rows<'_>,
    slot: usize,
    mut op: DispatchOp,
    enter: &Enter<'_>,
) -> Result<()> {
    let mut enter = *enter;
    let mut text = String::new();
    if enter.refusal.is_none() {
        match allocate_output(&runner.routing, &runner.places, &op) {
            Ok(output) => op.output = Some(output),
            Err(error) => text = error.detail(),
        }
    }
    if !text.is_empty() {
        let rank = runner.exchange.member.rank;
        enter.refusal = Some(CallRefusal { rank, is_full: true, why: &text });
    }
    runner.operations[slot] = Operation::Dispatch(op);
    if enter.refusal.is_none() {
        // SAFETY: by this function's contract.
        unsafe { rows.move_all(runner, slot, &op)? };
    }
    let handle = op.handle;
    announce(runner, slot, &enter, &|routing, group, peer| {
        routing.rows_of_leg(handle, group, peer)
    })?;
    if !runner.exchange.member.has_groups() {
        return Ok(());
    }
    // Other domains wait for the report whether this one goes on.
    let refused = poll_entries(runner, slot, &enter)?;
    let refused = share(runner, slot, &enter, refused)?;
    runner.routing.agreed[slot] = Some(Agreed(refused));
    if refused.is_none() {
        return Ok(());
    }
    runner.operations[slot] = Operation::None;
    landed_recv(runner, slot, &op).map(drop)
}

pub(crate) fn landed_recv(
    runner: &mut Runner,
    slot: usize,
    op: &DispatchOp,
) -> Result<abi::TyReceived> {
    let operation = op.operation;
    let received = poll_entries(runner, slot, &runner.routing.landed_enter(op))?;
    let refused = runner.routing.agreed[slot].take().map_or(received, |Agreed(refused)| refused);
    let verdict = refused.map_or(Ok(()), |refusal| Err(refusal.error()));
    // Ranks that took part have sent their rows even if another rank refuses. The rows are counted,
    // so that the totals stay right, and then dropped.
    for source in runner.exchange.member.domains.places() {
        let entry = runner.routing.gathered.entries[source as usize];
        runner.order.wait_rows(slot, source, operation, entry.rows * entry.arrays)?;
    }
    for source in 0..runner.exchange.regions.ranks {
        if runner.order.is_gone(source) {
            runner.routing.forget_entry(source);
        }
    }
    let result = match (verdict, op.output) {
        (Ok(()), Some(output)) => check_rows(runner, op)
            .and_then(|()| match runner.routing.handles[op.handle].arrangement.layout {
                Layout::RankMajor { .. } => place_rows(runner, slot, op, &output),
                _ => unpack(runner, slot, op, &output),
            })
            .map(|()| describe(runner, op, &output)),
        (verdict, output) => {
            if let Some(output) = output {
                runner.places.arena().release(output.region.id);
            }
            verdict.and_then(|()| Err(missing_refusal()))
        }
    };
    let refused = result.as_ref().is_err_and(was_refused);
    runner.order.leave(slot, operation, if refused { End::Refused } else { End::Done })?;
    if let (Ok(_), Some(output)) = (&result, op.output)
        && op.signature.is_fresh()
    {
        runner.routing.remember_output(op.handle, &output);
    }
    result
}

/// Refuses rows that a source may not have: beyond M of the call, or in a replay other than its dispatch had.
fn check_rows(runner: &Runner, op: &DispatchOp) -> Result<()> {
    let state = &runner.routing.handles[op.handle];
    for source in 0..runner.exchange.regions.ranks {
        let came = runner.routing.gathered.entries[source as usize].rows;
        if op.signature.is_fresh() {
            let most = u64::from(state.max_tokens);
            if came > most {
                return Err(bad_record(source, format!("{came} rows of at most {most}")));
            }
            continue;
        }
        let expected = u64::from(state.recv.rows_from(source));
        if came != expected && !runner.order.is_gone(source) {
            return Err(bad_record(source, format!("{came} rows in a replay of {expected}")));
        }
    }
    Ok(())
}
