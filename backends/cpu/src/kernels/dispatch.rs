//! Dispatch with counting, and its replay.
//!
//! Counting is two half rounds: entries carry counts from sources to owners, grants carry places
//! back to the rank that moves the rows: the source, or its forwarder. A replay enters with its region's place
//! and needs no grant. No row moves before every rank has reported that it takes part.

use tokenyard_core::call::DispatchCall;
use tokenyard_core::moe::Layout;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::agree::{ToDomain, ToPeer, announce_to_all, poll_entries, post_refusal, relay};
use super::control::{Header, Signal, Verdict};
use super::engine::Engine;
use super::entry::{Enter, Terms, missing_refusal};
use super::expert_major::{clear_padding, spread_copies};
use super::forward::{finish_forward, serve, take_forward};
use super::handle::Arrangement;
use super::mend::{lacks, mend};
use super::moves::{Move, Via};
use super::operation::{DispatchOp, End, Exposed, Operation, Output};
use super::order::Order;
use super::output::{allocate_output, clear_ids, describe, keep_copies, write_counts};
use super::packed::{packed_recv, packed_send};
use super::rail::Rail;
use super::record::{Body, NewRecord, bad_record, refusal_record};
use super::routing::RoutingTable;
use super::sending::send_record;
use super::slots::leave_if_refused;
use super::transfer::{move_to_regions, send_out};
use super::verdicts::{conclude, gather_entries, gather_grants};
use super::void::find_void;

/// # Safety
/// The tensor is contiguous i64 and valid for `'a`.
unsafe fn i64_slice<'a>(tensor: &abi::TyTensor) -> &'a [i64] {
    let count = (tensor.shape[0] * tensor.shape[1]) as usize;
    if count == 0 {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(tensor.data.cast(), count) }
}

/// # Safety
/// The call's tensors are valid until the operation is received.
pub(super) unsafe fn dispatch_send(engine: &mut Engine, call: &DispatchCall<'_>) -> Result<()> {
    finish_forward(engine)?;
    let slot = engine.order.open_slot(call.operation)?;
    // SAFETY: by this function's contract.
    let sent = unsafe { dispatch_in_slot(engine, call, slot) };
    take_forward(&mut engine.order, slot);
    leave_if_refused(&mut engine.places, &mut engine.order, slot, call.operation, sent)
}

/// # Safety
/// As `dispatch_send`.
unsafe fn dispatch_in_slot(
    engine: &mut Engine,
    call: &DispatchCall<'_>,
    slot: usize,
) -> Result<()> {
    let (refused, signature, format) = (call.refusal, call.signature, call.format);
    let arrangement = Arrangement { layout: call.layout, worst_case: call.worst_case };
    let op = DispatchOp {
        operation: call.operation,
        handle: call.handle as usize,
        signature,
        format,
        output: None,
        packed: arrangement.layout == Layout::Packed,
    };
    engine.routing.open_handle(call.handle);
    if !call.is_replay && refused.is_none() {
        // SAFETY: `[T, K]` i64, contiguous and validated by the host.
        let topk = unsafe { i64_slice(&call.topk_idx) };
        let state = &mut engine.routing.handles[op.handle];
        let here = engine.routing.rail.as_mut().map(Rail::routing);
        state.route(call.operation, topk, &engine.world, here);
        state.arrangement = arrangement;
        state.max_tokens = call.max_tokens;
    }
    let enter = Enter {
        operation: call.operation,
        signature,
        origin: engine.routing.origin(op.handle, refused.is_some()),
        refusal: refused.map(|text| (Verdict::Refused, text.as_bytes())),
    };
    if op.packed {
        // SAFETY: by this function's contract.
        return unsafe { packed_send(engine, call, slot, op, &enter) };
    }
    if enter.refusal.is_some() {
        post_refusal(engine, slot, &enter)?;
        gather_entries(engine, slot, &enter)?;
        return Err(missing_refusal());
    }
    let output = if call.is_replay {
        post_replay_entry(engine, slot, &op, &enter)?
    } else {
        post_counting_entry(engine, slot, &op, &enter)?
    };
    engine.order.operations[slot] = Operation::Dispatch(DispatchOp { output: Some(output), ..op });
    // SAFETY: by this function's contract.
    unsafe {
        let source = engine.launcher.row_source(call, &format)?;
        send_out(engine, slot, &op, &source)?;
        let mine = engine.world.domains.mine;
        let m = Move { via: Via::Leg(mine), ..op.carry(slot) };
        move_to_regions(engine, &m, mine, &source)
    }
}

/// Sends counts, receives counts, and turns them into places on both sides.
fn post_counting_entry(
    engine: &mut Engine,
    slot: usize,
    op: &DispatchOp,
    enter: &Enter<'_>,
) -> Result<Output> {
    let handle = op.handle;
    announce_to_all(
        engine,
        slot,
        enter,
        &|routing, domain| routing.counts_of_domain(handle, domain),
        &|routing, domain, peer| {
            let send = &routing.handles[handle].legs[domain as usize].send;
            let local = routing.world.shape.local_experts() as usize;
            let counts = &send.expert_counts()[peer as usize * local..][..local];
            let rows = send.rank_counts()[peer as usize];
            Terms { body: Body::Counts([counts, &[]]), ..Terms::rows(rows) }
        },
    )?;
    relay(engine, slot, op.operation, &|routing, domain, peer| {
        let announced = routing.rail.as_ref().map(|rail| rail.announced(domain, peer));
        let (rows, counts) = announced.unwrap_or((0, &[]));
        Terms { body: Body::Counts([counts, &[]]), ..Terms::rows(rows) }
    })?;
    let refused = poll_entries(engine, slot, enter)?;
    if refused.is_some() {
        conclude(engine, slot, enter, refused)?;
    }
    let state = &mut engine.routing.handles[op.handle];
    let alignment = state.arrangement.layout.alignment();
    let built =
        state.recv.build(alignment, &engine.routing.gathered.rows, &engine.routing.gathered.counts);
    state.tokens = state.recv.num_rows().into();
    state.rows = state.recv.num_expert_rows().into();
    let output = built.and_then(|()| allocate_output(&engine.routing, &mut engine.places, op));
    send_grants(engine, slot, op, &output)?;
    let heard = gather_grants(engine, slot, op.operation, op.signature, op.handle);
    let output = match (heard, output) {
        (Ok(()), Ok(output)) => output,
        (Err(error), Ok(output)) => {
            engine.order.exposed = Some(Exposed { region: Some(output.region) });
            return Err(error);
        }
        // A peer whose counts contradict each other is out of step, not short of room.
        (_, Err(own)) if own.kind() == ErrorKind::Protocol => return Err(own),
        (Err(error), Err(_)) | (Ok(()), Err(error)) => return Err(error),
    };
    engine.routing.remember_output(op.handle, &output);
    Ok(output)
}

/// Announces to each rank that moves rows where those of each source go, or why there is no room.
fn send_grants(
    engine: &Engine,
    slot: usize,
    op: &DispatchOp,
    output: &Result<Output>,
) -> Result<()> {
    let recv = &engine.routing.handles[op.handle].recv;
    let text = output.as_ref().err().map(|error| error.detail());
    for source in engine.world.domains.places() {
        let record = match (output, &text) {
            (Ok(o), _) => NewRecord {
                header: Header([
                    op.operation,
                    Verdict::Go as u64,
                    o.region.offset,
                    o.rows.tokens,
                    o.rows.experts,
                    recv.row_base(source).into(),
                    0,
                    0,
                ]),
                body: Body::Counts([recv.expert_bases(source), &[]]),
            },
            (Err(_), text) => {
                let text = text.as_deref().unwrap_or("").as_bytes();
                refusal_record(op.operation, Verdict::Full, engine.world.rank, text)
            }
        };
        send_record(engine, Signal::Grant, slot, source, record)?;
    }
    Ok(())
}

/// Enters with the place of this rank's region; the counts are those of the handle.
fn post_replay_entry(
    engine: &mut Engine,
    slot: usize,
    op: &DispatchOp,
    enter: &Enter<'_>,
) -> Result<Output> {
    let output = match allocate_output(&engine.routing, &mut engine.places, op) {
        Ok(output) => output,
        Err(error) => {
            let text = error.detail();
            let refusal = Some((Verdict::Full, text.as_bytes()));
            let enter = Enter { refusal, ..*enter };
            post_refusal(engine, slot, &enter)?;
            gather_entries(engine, slot, &enter)?;
            return Err(error);
        }
    };
    let (handle, base_x) = (op.handle, output.region.offset);
    let to_domain: &ToDomain<'_> = &|routing, domain| routing.rows_of_domain(handle, domain);
    let to_peer: &ToPeer<'_> = &|routing, domain, peer| {
        let send = &routing.handles[handle].legs[domain as usize].send;
        Terms { base_x, ..Terms::rows(send.rank_counts()[peer as usize]) }
    };
    announce_to_all(engine, slot, enter, to_domain, to_peer)?;
    relay(engine, slot, op.operation, to_peer)?;
    if let Err(error) = gather_entries(engine, slot, enter) {
        engine.order.exposed = Some(Exposed { region: Some(output.region) });
        return Err(error);
    }
    check_replay(&mut engine.routing, &engine.order, op.handle)?;
    Ok(output)
}

/// A replay has as many rows as its dispatch had.
fn check_replay(routing: &mut RoutingTable, order: &Order, handle: usize) -> Result<()> {
    let state = &routing.handles[handle];
    let wrong = |source: u32, rows: u64, expected: u64| {
        Err(bad_record(source, format!("{rows} rows in a replay of {expected}")))
    };
    for source in 0..routing.world.shape.ranks {
        let entry = routing.gathered.entries[source as usize];
        let expected = u64::from(state.recv.rows_from(source));
        if entry.rows != expected && !order.is_gone(source) {
            return wrong(source, entry.rows, expected);
        }
        routing.gathered.regions[source as usize] = entry.base_x;
    }
    Ok(())
}

/// Where the output of a dispatch that was sent will lie. Where ranks may be left out, it may still move.
pub(super) fn dispatch_output(
    engine: &mut Engine,
    operation: u64,
) -> Result<Option<abi::TyReceived>> {
    match &engine.order.operations[engine.order.slot(operation)] {
        Operation::Dispatch(op) if op.operation == operation => {
            let output = op.output.filter(|_| !engine.order.losses.are_masked());
            Ok(output.map(|output| describe(engine, op, &output)))
        }
        _ => Err(not_sent(operation)),
    }
}

fn not_sent(operation: u64) -> Error {
    let message = format!("no dispatch with number {operation} was sent");
    Error::new(ErrorKind::Internal, "receive dispatch", message)
}

pub(super) fn dispatch_recv(engine: &mut Engine, operation: u64) -> Result<abi::TyReceived> {
    let slot = engine.order.slot(operation);
    let op = match std::mem::replace(&mut engine.order.operations[slot], Operation::None) {
        Operation::Dispatch(op) if op.operation == operation => op,
        other => {
            engine.order.operations[slot] = other;
            return Err(not_sent(operation));
        }
    };
    serve(engine, slot, &Operation::Dispatch(op))?;
    if op.packed {
        return packed_recv(engine, slot, &op);
    }
    let Some(output) = op.output else {
        return Err(Error::new(ErrorKind::Internal, "receive dispatch", "it has no output"));
    };
    for source in engine.world.domains.places() {
        let rows = u64::from(engine.routing.handles[op.handle].recv.rows_from(source));
        if engine.order.losses.is_handed_on(source, operation)
            && engine.order.wait_rows(slot, source, operation, rows * op.signature.arrays())?
        {
            find_void(engine, &op, &output, source);
        }
    }
    let torn = (0..engine.world.shape.ranks)
        .any(|source| lacks(&engine.routing, &engine.order, &op, source));
    let output = if torn { mend(engine, &op, output)? } else { output };
    engine.order.leave(slot, operation, End::Done)?;
    write_counts(&engine.routing, &engine.places, &op, &output);
    clear_ids(&engine.routing, &engine.places, &op, &output);
    if let Layout::ExpertMajor { zero_padding, .. } =
        engine.routing.handles[op.handle].arrangement.layout
    {
        spread_copies(&engine.routing, &engine.places, &op, &output)?;
        if zero_padding {
            clear_padding(&engine.routing, &engine.places, &op, &output);
        }
        keep_copies(&mut engine.routing, &engine.places, &op, &output);
    }
    Ok(describe(engine, &op, &output))
}
