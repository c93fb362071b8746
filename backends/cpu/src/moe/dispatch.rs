//! Dispatch with counting, and its replay.
//!
//! Counting is two half rounds: entries carry counts from sources to owners, grants carry places
//! back to the rank that moves the rows. A replay enters with its region's place
//! and needs no grant. No row moves before every rank has reported that it takes part.

pub(crate) mod expert_major;
pub(crate) mod landed;
pub(crate) mod lost_rows;
pub(crate) mod output;
pub(crate) mod packed;
pub(crate) mod rail;
pub(crate) mod rank_major;
pub(crate) mod source;
pub(crate) mod upstream;

use tokenyard_core::call::DispatchCall;
use tokenyard_core::moe::{Layout, RowCap, validate_topk};
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::control::{Header, Signal, Verdict};
use crate::engine::ends::{End, Exposed};
use crate::engine::order::SlotOrder;
use crate::engine::record::{Body, NewRecord, bad_record, refusal_record};
use crate::engine::sending::{RecordPlace, send_record};
use crate::engine::slots::leave_if_refused;
use crate::moe::agree::{announce, poll_entries, post_refusal};
use crate::moe::dispatch::expert_major::{clear_padding, spread_copies};
use crate::moe::dispatch::landed::{landed_recv, landed_send};
use crate::moe::dispatch::lost_rows::{complete_output, lacks};
use crate::moe::dispatch::output::{
    allocate_output, clear_ids, count_taken, describe, keep_copies, write_counts,
};
use crate::moe::dispatch::source::i64_slice;
use crate::moe::dispatch::upstream::{Rows, Upstream};
use crate::moe::entry::{Enter, Terms, missing_refusal};
use crate::moe::handle::Arrangement;
use crate::moe::operation::{DispatchOp, Operation, Output};
use crate::moe::routing::RoutingTable;
use crate::moe::runner::Runner;
use crate::moe::verdicts::{conclude, gather_entries, gather_grants};

/// # Safety
/// The call's tensors are valid until the operation is received.
pub(crate) unsafe fn dispatch_send(
    runner: &mut Runner,
    call: &DispatchCall<'_>,
    upstream: Option<&Upstream<'_>>,
) -> Result<()> {
    let slot = runner.order.open_slot(call.operation)?;
    let op = open_dispatch(runner, call, upstream)?;
    let enter = Enter {
        operation: call.operation,
        signature: call.signature,
        origin: runner.routing.origin(op.handle, call.refusal.is_some()),
        refusal: call.refusal,
    };
    let rows = Rows { call, upstream };
    if op.lands {
        // SAFETY: by this function's contract.
        return unsafe { landed_send(runner, &rows, slot, op, &enter) };
    }
    // SAFETY: by this function's contract.
    let sent = unsafe { dispatch_in_slot(runner, &rows, slot, &op, &enter) };
    leave_if_refused(&runner.places, &mut runner.order, slot, call.operation, sent)
}

/// Takes the routing of a fresh dispatch, and finds the groups of which no rows came.
fn open_dispatch(
    runner: &mut Runner,
    call: &DispatchCall<'_>,
    upstream: Option<&Upstream<'_>>,
) -> Result<DispatchOp> {
    let handle = call.handle as usize;
    runner.routing.open_handle(call.handle);
    for group in runner.exchange.member.domains.all() {
        let is_gone = upstream.is_some_and(|upstream| upstream.is_gone(group));
        runner.routing.gone[group as usize] = is_gone;
    }
    if call.refusal.is_none() {
        match (call.is_replay, upstream) {
            (true, None) => {}
            (true, Some(upstream)) => check_upstream(runner, handle, upstream)?,
            (false, upstream) => route(runner, call, upstream)?,
        }
    }
    Ok(DispatchOp {
        operation: call.operation,
        handle,
        signature: call.signature,
        format: call.format,
        output: None,
        lands: call.layout.has_fixed_places(),
    })
}

fn route(
    runner: &mut Runner,
    call: &DispatchCall<'_>,
    upstream: Option<&Upstream<'_>>,
) -> Result<()> {
    let RoutingTable { handles, topk, check, exchange, .. } = &mut runner.routing;
    let state = &mut handles[call.handle as usize];
    state.begin(call.operation, Arrangement::of(call), call.max_tokens);
    let Some(upstream) = upstream else {
        // SAFETY: `[T, K]` i64, contiguous and validated by the host.
        state.legs[0].route(unsafe { i64_slice(&call.topk_idx) });
        return Ok(());
    };
    for (leg, group) in state.legs.iter_mut().zip(0..) {
        topk.clear();
        topk.extend(upstream.ids(group)?.iter().map(|id| i64::from(*id)));
        let source = exchange.member.domains.place(group, exchange.member.domains.index);
        // This is a copy, because the source could change what it wrote.
        validate_topk(&exchange.shape, topk, check)
            .map_err(|error| bad_record(source, error.detail()))?;
        leg.route(topk);
    }
    Ok(())
}

/// A replay forwards as many rows as its dispatch did.
fn check_upstream(runner: &Runner, handle: usize, upstream: &Upstream<'_>) -> Result<()> {
    for (leg, group) in runner.routing.handles[handle].legs.iter().zip(0..) {
        let (rows, expected) = (upstream.rows(group), leg.send.num_tokens());
        if !upstream.is_gone(group) && rows != expected {
            let source =
                runner.exchange.member.domains.place(group, runner.exchange.member.domains.index);
            let text = format!("{rows} rows in a replay of {expected}");
            return Err(bad_record(source, text));
        }
    }
    Ok(())
}

/// # Safety
/// As `dispatch_send`.
unsafe fn dispatch_in_slot(
    runner: &mut Runner,
    rows: &Rows<'_>,
    slot: usize,
    op: &DispatchOp,
    enter: &Enter<'_>,
) -> Result<()> {
    if enter.refusal.is_some() {
        post_refusal(runner, slot, enter)?;
        gather_entries(runner, slot, enter)?;
        return Err(missing_refusal());
    }
    let output = if rows.call.is_replay {
        post_replay_entry(runner, slot, op, enter)?
    } else {
        post_counting_entry(runner, slot, op, enter)?
    };
    runner.operations[slot] = Operation::Dispatch(DispatchOp { output: Some(output), ..*op });
    // SAFETY: by this function's contract.
    unsafe { rows.move_all(runner, slot, op) }
}

/// Sends counts, receives counts, and turns them into places on both sides.
fn post_counting_entry(
    runner: &mut Runner,
    slot: usize,
    op: &DispatchOp,
    enter: &Enter<'_>,
) -> Result<Output> {
    let handle = op.handle;
    announce(runner, slot, enter, &|routing, group, peer| {
        let send = &routing.handles[handle].legs[group as usize].send;
        let local = routing.exchange.regions.local_experts() as usize;
        let counts = &send.expert_counts()[peer as usize * local..][..local];
        Terms { body: Body::Counts(counts), ..Terms::rows(send.rank_counts()[peer as usize]) }
    })?;
    let refused = poll_entries(runner, slot, enter)?;
    if refused.is_some() {
        conclude(runner, slot, enter, refused)?;
    }
    let state = &mut runner.routing.handles[op.handle];
    let alignment = state.arrangement.layout.alignment();
    let built =
        state.recv.build(alignment, &runner.routing.gathered.rows, &runner.routing.gathered.counts);
    let built = built.and_then(|()| state.take_counts());
    let output = built.and_then(|()| allocate_output(&runner.routing, &runner.places, op));
    send_grants(runner, slot, op, &output)?;
    let received = gather_grants(runner, slot, op.operation, op.handle);
    let output = match (received, output) {
        (Ok(()), Ok(output)) => output,
        (Err(error), Ok(output)) => {
            runner.order.exposed = Some(Exposed { region: Some(output.region) });
            return Err(error);
        }
        // A peer whose counts contradict each other is out of step. It is not short of room.
        (_, Err(own)) if own.kind() == ErrorKind::Protocol => return Err(own),
        (Err(error), Err(_)) | (Ok(()), Err(error)) => return Err(error),
    };
    runner.routing.remember_output(op.handle, &output);
    Ok(output)
}

/// Announces the places of each source's rows to the rank that moves them, or the reason why there
/// is no room.
fn send_grants(
    runner: &Runner,
    slot: usize,
    op: &DispatchOp,
    output: &Result<Output>,
) -> Result<()> {
    let state = &runner.routing.handles[op.handle];
    let (recv, drops) = (&state.recv, state.arrangement.cap.is_some_and(RowCap::drops));
    let text = output.as_ref().err().map(|error| error.detail());
    for source in runner.exchange.member.domains.places() {
        let record = match (output, &text) {
            (Ok(o), _) => NewRecord {
                header: Header([
                    op.operation,
                    Verdict::Go as u64,
                    o.region.offset,
                    o.rows.tokens,
                    o.rows.experts,
                    recv.row_base(source).into(),
                    drops.into(),
                    0,
                ]),
                body: Body::Counts(recv.expert_bases(source)),
            },
            (Err(_), text) => {
                let why = text.as_deref().unwrap_or("");
                let rank = runner.exchange.member.rank;
                refusal_record(op.operation, &CallRefusal { rank, is_full: true, why })
            }
        };
        let to = RecordPlace { signal: Signal::Grant, slot, place: source };
        send_record(&runner.order, &runner.places, to, record)?;
    }
    Ok(())
}

/// Enters with the place of this rank's region; the counts are those of the handle.
fn post_replay_entry(
    runner: &mut Runner,
    slot: usize,
    op: &DispatchOp,
    enter: &Enter<'_>,
) -> Result<Output> {
    let output = match allocate_output(&runner.routing, &runner.places, op) {
        Ok(output) => output,
        Err(error) => {
            let text = error.detail();
            let refusal =
                Some(CallRefusal { rank: runner.exchange.member.rank, is_full: true, why: &text });
            let enter = Enter { refusal, ..*enter };
            post_refusal(runner, slot, &enter)?;
            gather_entries(runner, slot, &enter)?;
            return Err(error);
        }
    };
    let (handle, base_x) = (op.handle, output.region.offset);
    announce(runner, slot, enter, &|routing, group, peer| {
        let taken = routing.handles[handle].legs[group as usize].taken[peer as usize];
        Terms { base_x, ..Terms::rows(taken) }
    })?;
    if let Err(error) = gather_entries(runner, slot, enter) {
        runner.order.exposed = Some(Exposed { region: Some(output.region) });
        return Err(error);
    }
    check_replay(&mut runner.routing, &runner.order, op.handle)?;
    Ok(output)
}

/// A replay has as many rows as its dispatch had.
fn check_replay(routing: &mut RoutingTable, order: &SlotOrder, handle: usize) -> Result<()> {
    let state = &routing.handles[handle];
    let wrong = |source: u32, rows: u64, expected: u64| {
        let text = format!("{rows} rows in a replay of {expected}");
        Err(bad_record(routing.exchange.member.source(source), text))
    };
    for source in 0..routing.exchange.regions.ranks {
        let entry = routing.gathered.entries[source as usize];
        let expected = u64::from(state.recv.rows_from(source));
        if entry.rows != expected && !order.is_gone(source) {
            return wrong(source, entry.rows, expected);
        }
        routing.gathered.regions[source as usize] = entry.base_x;
    }
    Ok(())
}

/// The place of the output of a dispatch that was sent. If ranks may be left out, the output may still
/// move.
pub(crate) fn dispatch_output(
    runner: &mut Runner,
    operation: u64,
) -> Result<Option<abi::TyReceived>> {
    match &runner.operations[runner.order.slot(operation)] {
        Operation::Dispatch(op) if op.operation == operation => {
            let output = op.output.filter(|_| !runner.order.losses().are_masked());
            Ok(output.map(|output| describe(runner, op, &output)))
        }
        _ => Err(not_sent(operation)),
    }
}

fn not_sent(operation: u64) -> Error {
    let message = format!("no dispatch with number {operation} was sent");
    Error::new(ErrorKind::Internal, "receive dispatch", message)
}

pub(crate) fn dispatch_recv(runner: &mut Runner, operation: u64) -> Result<abi::TyReceived> {
    let slot = runner.order.slot(operation);
    let op = match std::mem::replace(&mut runner.operations[slot], Operation::None) {
        Operation::Dispatch(op) if op.operation == operation => op,
        other => {
            runner.operations[slot] = other;
            return Err(not_sent(operation));
        }
    };
    if op.lands {
        return landed_recv(runner, slot, &op);
    }
    let Some(output) = op.output else {
        return Err(Error::new(ErrorKind::Internal, "receive dispatch", "it has no output"));
    };
    for source in runner.exchange.member.domains.places() {
        let rows = u64::from(runner.routing.handles[op.handle].recv.rows_from(source));
        let is_handed_on = !runner.exchange.member.has_groups()
            || runner.order.losses().is_handed_on(source, operation);
        if is_handed_on {
            runner.order.wait_rows(slot, source, operation, rows * op.signature.arrays())?;
        }
    }
    let torn = (0..runner.exchange.regions.ranks)
        .any(|source| lacks(&runner.routing, &runner.order, &op, source));
    let output = if torn { complete_output(runner, &op, output)? } else { output };
    runner.order.leave(slot, operation, End::Done)?;
    count_taken(&mut runner.routing, &runner.places, &op, &output);
    write_counts(&runner.routing, &runner.places, &op, &output);
    clear_ids(&runner.routing, &runner.places, &op, &output);
    if let Layout::ExpertMajor { zero_padding, .. } =
        runner.routing.handles[op.handle].arrangement.layout
    {
        spread_copies(&runner.routing, &runner.places, &op, &output)?;
        if zero_padding {
            clear_padding(&runner.routing, &runner.places, &op, &output);
        }
        keep_copies(&mut runner.routing, &runner.places, &op, &output);
    }
    Ok(describe(runner, &op, &output))
}
