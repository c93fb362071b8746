//! Combine: owners make one partial row per (token, rank), sources sum the partials.
//!
//! Where peers can be loaded from, sources read the partial rows in the owner's arena and then
//! raise `Done`. Otherwise owners put the rows into a region that the source names in its entry.

pub(crate) mod forwarded;
pub(crate) mod left_out;
pub(crate) mod merger;
pub(crate) mod partials;
pub(crate) mod sums;

use tokenyard_core::call::CombineCall;
use tokenyard_core::moe::{Compression, DType, Holder, Layout, REGION_ALIGN, logfmt};
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::convert::FloatType;
use crate::engine::ends::{End, Exposed};
use crate::engine::places::Places;
use crate::engine::record::Body;
use crate::engine::slots::leave_if_refused;
use crate::moe::agree::{announce, post_refusal};
use crate::moe::combine::merger::{Merger, Staged, make_partials, merger};
use crate::moe::combine::partials::{find_partials, sum_ranks};
use crate::moe::dispatch::source::float_type;
use crate::moe::entry::{Enter, Terms, missing_refusal};
use crate::moe::operation::{CombineOp, Offsets, Operation, RowType};
use crate::moe::routing::RoutingTable;
use crate::moe::rows::pieces::push;
use crate::moe::runner::Runner;
use crate::moe::verdicts::gather_entries;

/// A region for the expert outputs of a handle.
pub(crate) fn combine_input(
    routing: &RoutingTable,
    places: &Places,
    handle: u32,
    dtype: u32,
) -> Result<(u64, abi::TyTensor)> {
    let Some(state) = routing.handles.get(handle as usize) else {
        return Err(Error::new(ErrorKind::Internal, "combine input", "no such handle"));
    };
    let rows = state.output_rows;
    let element = DType::from_code(dtype).map_or(4, DType::bytes) as u64;
    let columns = u64::from(routing.exchange.regions.hidden);
    let region = places.arena().allocate(rows * columns * element, Holder::CombineInput(handle))?;
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
pub(crate) unsafe fn combine_send(runner: &mut Runner, call: &CombineCall<'_>) -> Result<()> {
    let slot = runner.order.open_slot(call.operation)?;
    // SAFETY: by this function's contract.
    let sent = unsafe { post_combine(runner, call, slot, |_| Ok(())) };
    let sent = sent.map(|op| runner.operations[slot] = Operation::Combine(op));
    leave_if_refused(&runner.places, &mut runner.order, slot, call.operation, sent)
}

/// Enters a combine, and runs all steps that need no rows of other ranks. `make_room` allocates the rest of
/// the operation's memory; if there is none, this rank refuses.
///
/// # Safety
/// As `combine_send`.
pub(crate) unsafe fn post_combine(
    runner: &mut Runner,
    call: &CombineCall<'_>,
    slot: usize,
    make_room: impl FnOnce(&CombineOp) -> Result<()>,
) -> Result<CombineOp> {
    runner.routing.open_handle(call.handle);
    let enter = Enter {
        operation: call.operation,
        signature: call.signature,
        origin: runner.routing.origin(call.handle as usize, call.refusal.is_some()),
        refusal: call.refusal,
    };
    if enter.refusal.is_some() {
        post_refusal(runner, slot, &enter)?;
        gather_entries(runner, slot, &enter)?;
        return Err(missing_refusal());
    }
    let mut op = new_combine(runner, call)?;
    let merger = merger(&runner.routing, call, &op)?;
    let staged = stage(&runner.routing, &runner.places, call, &op, merger);
    let room = staged.and_then(|staged| match make_room(&op) {
        Ok(()) => Ok(staged),
        Err(error) => {
            staged.region.iter().for_each(|region| runner.places.arena().release(region.id));
            Err(error)
        }
    });
    let staged = match room {
        Ok(staged) => staged,
        Err(error) => {
            let (text, rank) = (error.detail(), runner.exchange.member.rank);
            let refusal = Some(CallRefusal { rank, is_full: true, why: &text });
            let enter = Enter { refusal, ..enter };
            post_refusal(runner, slot, &enter)?;
            gather_entries(runner, slot, &enter)?;
            return Err(error);
        }
    };
    (op.staging, op.partials, op.landing) = (staged.region, staged.partials, staged.landing);
    // SAFETY: by this function's contract.
    if let Err(error) = unsafe { post_combine_entry(runner, slot, &op, &enter, &staged) } {
        runner.order.exposed = Some(Exposed { region: op.staging });
        return Err(error);
    }
    Ok(op)
}

fn new_combine(runner: &Runner, call: &CombineCall<'_>) -> Result<CombineOp> {
    let float = float_type(call.x.dtype).ok_or_else(|| {
        Error::new(ErrorKind::Internal, "combine", format!("row type {}", call.x.dtype))
    })?;
    let hidden = runner.exchange.shape.hidden as usize;
    let row = |float: FloatType| RowType { float, bytes: hidden * float.bytes(), is_coded: false };
    let partial = match call.compression {
        Compression::LogFmt10 => {
            RowType { float, bytes: logfmt::most_bytes(hidden), is_coded: true }
        }
        Compression::None => row(if call.round_once { FloatType::F32 } else { float }),
    };
    Ok(CombineOp {
        operation: call.operation,
        handle: call.handle as usize,
        signature: call.signature,
        row: row(float),
        partial,
        has_weights: call.returns_weights(),
        sums_weights: call.sum_weights,
        staging: None,
        partials: Offsets::default(),
        landing: Offsets::default(),
        says_left_out: runner.exchange.member.is_rail() && runner.order.losses().are_masked(),
        out: call.out,
        out_weights: call.out_weights,
        missing: call.missing,
        bias: call.bias,
    })
}

/// Enters. Where peers read the partial rows, the entry states that they are there.
///
/// # Safety
/// As `combine_send`.
unsafe fn post_combine_entry(
    runner: &mut Runner,
    slot: usize,
    op: &CombineOp,
    enter: &Enter<'_>,
    staged: &Staged,
) -> Result<()> {
    if runner.places.stores() {
        let all = 0..runner.routing.handles[op.handle].tokens as usize;
        // SAFETY: by this function's contract.
        unsafe { make_partials(&runner.places, &runner.launcher, staged, all)? };
    }
    send_entries(runner, slot, op, enter, staged)?;
    let has_groups = runner.exchange.member.has_groups();
    if has_groups || !runner.places.stores() {
        gather_entries(runner, slot, enter)?;
    }
    if has_groups {
        find_partials(runner, op)?;
    }
    if runner.places.stores() {
        return Ok(());
    }
    // SAFETY: by this function's contract.
    unsafe { push(runner, slot, op, staged) }
}

/// Returns the memory of a combine that is over.
pub(crate) fn unstage(runner: &Runner, op: &CombineOp) {
    let Some(region) = op.staging else { return };
    if is_still_written(runner, op) {
        runner.places.arena().quarantine(region.id);
    } else {
        runner.places.arena().release(region.id);
    }
}

/// Owners put partial rows into the region of a combine. An owner that was given up may still do so later
/// (INV-8).
fn is_still_written(runner: &Runner, op: &CombineOp) -> bool {
    let state = &runner.routing.handles[op.handle];
    let from_owner = |peer: u32| {
        let owes = state.legs.iter().any(|leg| leg.taken[peer as usize] > 0);
        owes && runner.order.losses().may_write(runner.exchange.member.rank_of(peer), op.operation)
    };
    !runner.places.stores() && runner.exchange.member.domains.peers().any(from_owner)
}

/// Decides what must be copied, and takes the room for it in one region.
pub(crate) fn stage(
    routing: &RoutingTable,
    places: &Places,
    call: &CombineCall<'_>,
    op: &CombineOp,
    merger: Merger,
) -> Result<Staged> {
    let state = &routing.handles[op.handle];
    let in_flat_order = state.arrangement.layout == Layout::Flat;
    let widths = routing.widths(op);
    let in_arena = |tensor: &abi::TyTensor, width: u64| {
        let bytes = state.tokens * width;
        let offset = places.arena_area.offset_of(tensor.data, bytes)?;
        (in_flat_order && offset.is_multiple_of(16)).then_some(offset)
    };
    let x = in_arena(&call.x, widths.x);
    let weights = in_arena(&call.weights, widths.weights);
    let copies_weights = op.has_weights && weights.is_none();
    let landing = if places.stores() { 0 } else { routing.landed_before(op.handle, u32::MAX) };
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
    let landing = rooms(landing, back(landing));
    let region = match end {
        0 => None,
        bytes => Some(places.arena().allocate(bytes, Holder::Combine(op.operation))?),
    };
    let base = region.map_or(0, |r| r.offset);
    let at = |area: Offsets| Offsets { x: base + area.x, weights: base + area.weights };
    Ok(Staged {
        region,
        merger,
        partials: Offsets {
            x: x.unwrap_or(at(made).x),
            weights: weights.unwrap_or(at(made).weights),
        },
        copies_x: x.is_none(),
        copies_weights,
        landing: at(landing),
    })
}

/// Announces to each peer where its rows are (to be read) or where this rank's rows go (to be put).
fn send_entries(
    runner: &Runner,
    slot: usize,
    op: &CombineOp,
    enter: &Enter<'_>,
    staged: &Staged,
) -> Result<()> {
    let (handle, widths) = (op.handle, runner.routing.widths(op));
    let (partials, landing) = (staged.partials, staged.landing);
    let terms = |rows: u32, first: u64, area: Offsets| {
        let Offsets { x: base_x, weights: base_weights } = area.row(first, widths);
        Terms { rows: rows.into(), base_x, base_weights, body: Body::Nothing }
    };
    let stores = runner.places.stores();
    announce(runner, slot, enter, &|routing, group, peer| {
        let state = &routing.handles[handle];
        if stores {
            let source = routing.exchange.member.domains.place(group, peer);
            let first = state.recv.row_base(source);
            return terms(state.recv.rows_from(source), first.into(), partials);
        }
        let leg = &state.legs[group as usize];
        let first = u64::from(leg.send.rank_offsets()[peer as usize]);
        let first = first + routing.landed_before(handle, group);
        terms(leg.taken[peer as usize], first, landing)
    })
}

pub(crate) fn combine_recv(runner: &mut Runner, operation: u64) -> Result<()> {
    let slot = runner.order.slot(operation);
    let op = match std::mem::replace(&mut runner.operations[slot], Operation::None) {
        Operation::Combine(op) if op.operation == operation => op,
        other => {
            runner.operations[slot] = other;
            return Err(Error::new(
                ErrorKind::Internal,
                "receive combine",
                format!("no combine with number {operation} was sent"),
            ));
        }
    };
    let result = finish_combine(runner, slot, &op);
    match result {
        Ok(()) => unstage(runner, &op),
        Err(_) => runner.order.exposed = Some(Exposed { region: op.staging }),
    }
    leave_if_refused(&runner.places, &mut runner.order, slot, operation, result)
}

/// Sums the partial rows, and raises `Done` at their owners.
fn finish_combine(runner: &mut Runner, slot: usize, op: &CombineOp) -> Result<()> {
    sum_ranks(runner, slot, op)?;
    end_combine(runner, slot, op)
}

/// Raises `Done` at the owners of partial rows, and waits until no peer reads those of this rank.
pub(crate) fn end_combine(runner: &mut Runner, slot: usize, op: &CombineOp) -> Result<()> {
    // The puts of this rank must have ended before its region is freed.
    runner.order.wait_posted(slot, op.operation)?;
    runner.order.leave(slot, op.operation, End::Done)?;
    if runner.places.stores() {
        // The caller may change its rows after this, so no peer may still be reading them.
        runner.order.wait_done(slot, op.operation, abi::TY_PHASE_DONE)?;
    }
    Ok(())
}
