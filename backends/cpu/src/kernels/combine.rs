//! Combine: owners make one partial row per (token, rank), sources sum the partials.
//!
//! Where peers can be loaded from, sources read the partials in the owner's arena and then say
//! `Done`; otherwise owners put them into a region that the source names in its entry. For rows that
//! came over the rail the forwarder stands in for their source: see `domain_rows`.

use tokenyard_core::call::CombineCall;
use tokenyard_core::moe::{DType, Holder, Layout, REGION_ALIGN};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::agree::{ToDomain, ToPeer, announce_to_all, post_refusal, relay};
use super::control::Verdict;
use super::domain_rows::sum_domains;
use super::engine::Engine;
use super::entry::{Enter, Terms, missing_refusal};
use super::forward::{finish_forward, serve, take_forward};
use super::merger::{Merger, Staged, make_partials, merger};
use super::operation::{CombineOp, End, Exposed, Offsets, Operation, RowType};
use super::partials::{find_partials, sum_ranks};
use super::pieces::push;
use super::places::Places;
use super::record::Body;
use super::routing::RoutingTable;
use super::slots::leave_if_refused;
use super::source::float_type;
use super::verdicts::gather_entries;
use crate::convert::FloatType;

/// A region for the expert outputs of a handle.
pub(super) fn combine_input(
    routing: &RoutingTable,
    places: &mut Places,
    handle: u32,
    dtype: u32,
) -> Result<(u64, abi::TyTensor)> {
    let Some(state) = routing.handles.get(handle as usize) else {
        return Err(Error::new(ErrorKind::Internal, "combine input", "no such handle"));
    };
    let rows = state.output_rows;
    let element = DType::from_code(dtype).map_or(4, DType::bytes) as u64;
    let columns = u64::from(routing.world.shape.hidden);
    let region = places.arena.allocate(rows * columns * element, Holder::CombineInput(handle))?;
    let tensor = abi::TyTensor {
        data: places.arena_area.at(region.offset),
        dtype,
        reserved: 0,
        shape: [rows, columns],
        stride: [columns as i64, 1],
    };
    Ok((region.id, tensor))
}

/// # Safety
/// The call's tensors are valid until the operation is received.
pub(super) unsafe fn combine_send(engine: &mut Engine, call: &CombineCall<'_>) -> Result<()> {
    finish_forward(engine)?;
    let slot = engine.order.open_slot(call.operation)?;
    // SAFETY: by this function's contract.
    let sent = unsafe { combine_in_slot(engine, call, slot) };
    take_forward(&mut engine.order, slot);
    leave_if_refused(&mut engine.places, &mut engine.order, slot, call.operation, sent)
}

/// # Safety
/// As `combine_send`.
unsafe fn combine_in_slot(engine: &mut Engine, call: &CombineCall<'_>, slot: usize) -> Result<()> {
    let (signature, refused) = (call.signature, call.refusal);
    engine.routing.open_handle(call.handle);
    let enter = Enter {
        operation: call.operation,
        signature,
        origin: engine.routing.origin(call.handle as usize, refused.is_some()),
        refusal: refused.map(|text| (Verdict::Refused, text.as_bytes())),
    };
    if enter.refusal.is_some() {
        post_refusal(engine, slot, &enter)?;
        gather_entries(engine, slot, &enter)?;
        return Err(missing_refusal());
    }
    let float = float_type(call.x.dtype).ok_or_else(|| {
        Error::new(ErrorKind::Internal, "combine", format!("row type {}", call.x.dtype))
    })?;
    let hidden = engine.world.shape.hidden as usize;
    let row = |float: FloatType| RowType { float, bytes: hidden * float.bytes() };
    let partial = if call.round_once { FloatType::F32 } else { float };
    let mut op = CombineOp {
        operation: call.operation,
        handle: call.handle as usize,
        signature,
        row: row(float),
        partial: row(partial),
        has_weights: call.returns_weights(),
        sums_weights: call.sum_weights,
        staging: None,
        partials: Offsets::default(),
        landing: Offsets::default(),
        returned: Offsets::default(),
        outgoing: Offsets::default(),
        out: call.out,
        out_weights: call.out_weights,
        missing: call.missing,
        bias: call.bias,
    };
    let merger = merger(&engine.routing, call, &op)?;
    let staged = match stage(&engine.routing, &mut engine.places, call, &op, merger) {
        Ok(staged) => staged,
        Err(error) => {
            let text = error.detail();
            let refusal = Some((Verdict::Full, text.as_bytes()));
            let enter = Enter { refusal, ..enter };
            post_refusal(engine, slot, &enter)?;
            gather_entries(engine, slot, &enter)?;
            return Err(error);
        }
    };
    (op.staging, op.partials) = (staged.region, staged.partials);
    (op.landing, op.returned, op.outgoing) = (staged.landing, staged.returned, staged.outgoing);
    // SAFETY: by this function's contract.
    if let Err(error) = unsafe { post_combine_entry(engine, slot, &op, &enter, &staged) } {
        engine.order.exposed = Some(Exposed { region: op.staging });
        return Err(error);
    }
    engine.order.operations[slot] = Operation::Combine(op);
    Ok(())
}

/// Enters, and goes as far as this rank can without its caller's outputs. Where peers read the partial
/// rows, the entry states that they are there.
///
/// # Safety
/// As `combine_send`.
unsafe fn post_combine_entry(
    engine: &mut Engine,
    slot: usize,
    op: &CombineOp,
    enter: &Enter<'_>,
    staged: &Staged,
) -> Result<()> {
    if engine.places.stores() {
        let all = 0..engine.routing.handles[op.handle].tokens as usize;
        // SAFETY: by this function's contract.
        unsafe { make_partials(&engine.places, &engine.launcher, staged, all)? };
    }
    send_entries(engine, slot, op, enter, staged)?;
    let several = engine.order.rail.is_some();
    if several || !engine.places.stores() {
        gather_entries(engine, slot, enter)?;
    }
    if several {
        // Stored now: the next operation's entries take the place of these.
        find_partials(engine, op)?;
    }
    if engine.places.stores() {
        return Ok(());
    }
    // SAFETY: by this function's contract.
    unsafe { push(engine, slot, op, staged) }
}

fn unstage(engine: &mut Engine, op: &CombineOp) {
    let Some(region) = op.staging else { return };
    if is_still_written(engine, op) {
        engine.places.arena.quarantine(region.id);
    } else {
        engine.places.arena.release(region.id);
    }
}

/// Owners put partials into the region of a combine, and forwarders put rows of other domains. One that
/// was given up may still be about to (INV-8).
fn is_still_written(engine: &Engine, op: &CombineOp) -> bool {
    let state = &engine.routing.handles[op.handle];
    let from_owner = |peer: u32| {
        let owner = engine.world.domains.place(engine.world.domains.mine, peer);
        let owes = state.legs.iter().any(|leg| leg.send.rank_counts()[peer as usize] > 0);
        owes && engine.order.losses.may_write(owner, op.operation)
    };
    let from_forwarder = |domain: u32| {
        let forwarder = engine.world.domains.place(domain, engine.world.domains.index);
        let rows = state.outward.as_ref().map(|o| o.send.rank_counts()[domain as usize]);
        rows.is_some_and(|rows| rows > 0) && engine.order.losses.may_write(forwarder, op.operation)
    };
    !engine.places.stores() && engine.world.domains.peers().any(from_owner)
        || engine.world.domains.others().any(from_forwarder)
}

/// Decides what must be copied, and takes the room for it in one region.
pub(super) fn stage(
    routing: &RoutingTable,
    places: &mut Places,
    call: &CombineCall<'_>,
    op: &CombineOp,
    merger: Merger,
) -> Result<Staged> {
    let state = &routing.handles[op.handle];
    let flat = state.arrangement.layout == Layout::Flat;
    let widths = routing.widths(op);
    let in_arena = |tensor: &abi::TyTensor, width: u64| {
        let bytes = state.tokens * width;
        let offset = places.arena_area.offset_of(tensor.data, bytes)?;
        (flat && offset.is_multiple_of(16)).then_some(offset)
    };
    let x = in_arena(&call.x, widths.x);
    let weights = in_arena(&call.weights, widths.weights);
    let copies_weights = op.has_weights && weights.is_none();
    let landing = if places.stores() { 0 } else { routing.landed_before(op.handle, u32::MAX) };
    let returned = state.outward.as_ref().map_or(0, |o| o.send.tokens().len() as u64);
    let outgoing = routing.outgoing_before(op.handle, u32::MAX);
    let mut end = 0;
    let mut room = |rows: u64, width: u64| {
        let start = end;
        end += (rows * width).next_multiple_of(REGION_ALIGN);
        start
    };
    let mut rooms = |rows: u64, weighted: u64| Offsets {
        x: room(rows, widths.x),
        weights: room(weighted, widths.weights),
    };
    let back = |rows: u64| if op.has_weights { rows } else { 0 };
    let made = rooms(
        if x.is_none() { state.tokens } else { 0 },
        if copies_weights { state.tokens } else { 0 },
    );
    let areas = [landing, returned, outgoing].map(|rows| rooms(rows, back(rows)));
    let region = match end {
        0 => None,
        bytes => Some(places.arena.allocate(bytes, Holder::Combine(op.operation))?),
    };
    let base = region.map_or(0, |r| r.offset);
    let at = |area: Offsets| Offsets { x: base + area.x, weights: base + area.weights };
    let [landing, returned, outgoing] = areas.map(at);
    Ok(Staged {
        region,
        merger,
        partials: Offsets {
            x: x.unwrap_or(at(made).x),
            weights: weights.unwrap_or(at(made).weights),
        },
        copies_x: x.is_none(),
        copies_weights,
        landing,
        returned,
        outgoing,
    })
}

/// Announces to each peer where its rows are (to be read) or where this rank's rows go (to be put), and
/// each other domain where its rows go.
fn send_entries(
    engine: &mut Engine,
    slot: usize,
    op: &CombineOp,
    enter: &Enter<'_>,
    staged: &Staged,
) -> Result<()> {
    let (handle, widths) = (op.handle, engine.routing.widths(op));
    let (partials, landing, returned) = (staged.partials, staged.landing, staged.returned);
    let terms = |rows: u32, first: u64, area: Offsets| {
        let Offsets { x: base_x, weights: base_weights } = area.row(first, widths);
        Terms { rows: rows.into(), base_x, base_weights, body: Body::Nothing }
    };
    let stores = engine.places.stores();
    let to_domain: &ToDomain<'_> = &|routing, domain| {
        let Some(outward) = &routing.handles[handle].outward else { return Terms::rows(0) };
        let first = outward.send.rank_offsets()[domain as usize];
        terms(outward.send.rank_counts()[domain as usize], first.into(), returned)
    };
    let to_peer: &ToPeer<'_> = &|routing, domain, peer| {
        let state = &routing.handles[handle];
        if stores {
            let source = routing.world.domains.place(domain, peer);
            let first = state.recv.row_base(source);
            return terms(state.recv.rows_from(source), first.into(), partials);
        }
        let send = &state.legs[domain as usize].send;
        let first = u64::from(send.rank_offsets()[peer as usize]);
        let first = first + routing.landed_before(handle, domain);
        terms(send.rank_counts()[peer as usize], first, landing)
    };
    announce_to_all(engine, slot, enter, to_domain, to_peer)?;
    relay(engine, slot, op.operation, to_peer)
}

pub(super) fn combine_recv(engine: &mut Engine, operation: u64) -> Result<()> {
    let slot = engine.order.slot(operation);
    let op = match std::mem::replace(&mut engine.order.operations[slot], Operation::None) {
        Operation::Combine(op) if op.operation == operation => op,
        other => {
            engine.order.operations[slot] = other;
            return Err(Error::new(
                ErrorKind::Internal,
                "receive combine",
                format!("no combine with number {operation} was sent"),
            ));
        }
    };
    let result = finish_combine(engine, slot, &op);
    match result {
        Ok(()) => unstage(engine, &op),
        Err(_) => engine.order.exposed = Some(Exposed { region: op.staging }),
    }
    leave_if_refused(&mut engine.places, &mut engine.order, slot, operation, result)
}

/// Sums the partials, and lets their owners go.
fn finish_combine(engine: &mut Engine, slot: usize, op: &CombineOp) -> Result<()> {
    let operation = op.operation;
    if engine.order.rail.is_some() {
        serve(engine, slot, &Operation::Combine(*op))?;
        sum_domains(engine, slot, op)?;
    } else {
        sum_ranks(engine, slot, op)?;
    }
    // Puts of this rank must have left before its region goes.
    engine.order.wait_posted(slot, operation)?;
    engine.order.leave(slot, operation, End::Done)?;
    if engine.places.stores() {
        // Peers may be receiving the next operation already, for a refused one is received
        // where it is sent: they wait for this rank's pending forward there, and it for their `Done` here.
        finish_forward(engine)?;
        // The caller may change its rows after this, so no peer may still be reading them.
        engine.order.wait_done(slot, operation, abi::TY_PHASE_DONE)?;
    }
    Ok(())
}
