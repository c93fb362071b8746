//! Outputs of dispatches: where they lie in the arena, and how the caller sees them.

use tokenyard_core::arena_output::ArenaOutput;
use tokenyard_core::moe::{Holder, Layout, RegionLayout, RegionSpec, Span};
use tokenyard_core::{Result, abi};

use crate::engine::order::SlotOrder;
use crate::engine::places::Places;
use crate::moe::operation::{DispatchOp, Output};
use crate::moe::routing::RoutingTable;
use crate::moe::runner::Runner;

/// # Safety
/// `target` has room for the values.
unsafe fn copy_u32(values: &[u32], target: *mut u8) {
    // SAFETY: by this function's contract; regions are aligned far beyond 4 bytes.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), target.cast(), values.len()) }
}

pub(crate) fn allocate_output(
    routing: &RoutingTable,
    places: &Places,
    op: &DispatchOp,
) -> Result<Output> {
    let state = &routing.handles[op.handle];
    let spec = RegionSpec {
        shape: state.shape_of(&routing.exchange.regions),
        layout: state.arrangement.layout,
        row: op.format.row,
        max_rows: state.arrangement.cap.map(|cap| cap.rows),
    };
    let rows = state.region_rows(&spec)?;
    let layout = RegionLayout::new(&spec, rows)?;
    let region = places.arena().allocate(layout.bytes, Holder::Dispatch(op.operation))?;
    Ok(Output { region, layout, rows })
}

/// Counts, starts and totals, from the receive plan.
pub(crate) fn write_counts(
    routing: &RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
) {
    let state = &routing.handles[op.handle];
    let layout = &output.layout;
    let by_token = state.arrangement.layout.has_a_row_per_token();
    let rows = if by_token { state.tokens } else { state.rows };
    // SAFETY: the region is this rank's until it is released; peers write only rows and their
    // side arrays, and have written them.
    unsafe {
        copy_u32(state.recv.expert_counts(), places.array(output, layout.expert_counts));
        if layout.expert_starts.bytes > 0 {
            copy_u32(state.recv.expert_starts(), places.array(output, layout.expert_starts));
        }
        let ends = places.array(output, layout.expert_ends).cast::<u32>();
        if layout.expert_ends.bytes > 0 {
            let starts = state.recv.expert_starts().iter();
            for (expert, (start, count)) in starts.zip(state.recv.expert_counts()).enumerate() {
                ends.add(expert).write(start + count);
            }
        }
        let counts = places.array(output, layout.rank_counts).cast::<u32>();
        let ends = places.array(output, layout.rank_ends).cast::<u32>();
        for peer in 0..routing.exchange.regions.ranks {
            let rows = state.recv.rows_from(peer);
            counts.add(peer as usize).write(rows);
            ends.add(peer as usize).write(state.recv.row_base(peer) + rows);
        }
        if layout.dropped.bytes > 0 {
            let dropped = state.recv.dropped();
            copy_u32(dropped, places.array(output, layout.dropped));
            let overflow = places.array(output, layout.dropped).cast::<u32>().add(dropped.len());
            overflow.write(dropped.iter().any(|rows| *rows > 0).into());
        }
        let totals = places.array(output, layout.totals).cast::<i64>();
        totals.write(state.tokens as i64);
        totals.add(1).write(rows as i64);
    }
}

/// Counts the rows of each local expert among flat rows of which a cap has dropped some: no count says which experts
/// the dropped ones had. Rows of a lost source, which have no ids, count as dropped then.
pub(crate) fn count_taken(
    routing: &mut RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
) {
    let topk = routing.exchange.regions.topk as usize;
    let state = &mut routing.handles[op.handle];
    let is_flat = state.arrangement.layout == Layout::Flat;
    if !is_flat || !op.signature.is_fresh() || !state.drops {
        return;
    }
    let ids = places.array(output, output.layout.ids).cast::<i32>().cast_const();
    // SAFETY: `[N, K]` in this rank's region, aligned and complete.
    let ids = unsafe { std::slice::from_raw_parts(ids, state.tokens as usize * topk) };
    state.recv.keep_rows(ids);
}

/// Rows behind the last token, where there is room for more, name no expert.
pub(crate) fn clear_ids(routing: &RoutingTable, places: &Places, op: &DispatchOp, output: &Output) {
    let width = 4 * u64::from(routing.exchange.regions.topk);
    let tokens = routing.handles[op.handle].tokens;
    let behind = (output.rows.tokens.saturating_sub(tokens) * width) as usize;
    for span in [output.layout.ids, output.layout.slots].iter().filter(|span| span.bytes > 0) {
        let end = places.array(output, *span).wrapping_add((tokens * width) as usize);
        // SAFETY: N rows of K in this rank's region, of which the last ones belong to no token.
        unsafe { end.write_bytes(0xff, behind) };
    }
}

/// Stores in the handle all that combines read of a dispatch, so that its output may be dropped.
pub(crate) fn keep_copies(
    routing: &mut RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
) {
    let layout = &output.layout;
    let state = &mut routing.handles[op.handle];
    if !op.signature.is_fresh() || layout.slots.bytes == 0 {
        return;
    }
    let entries = (state.tokens * u64::from(routing.exchange.regions.topk)) as usize;
    state.slots.clear();
    state.weights.clear();
    // SAFETY: `[N, K]` slots in this rank's region, complete and aligned.
    let slots = unsafe {
        std::slice::from_raw_parts(places.array(output, layout.slots).cast::<i32>(), entries)
    };
    state.slots.extend_from_slice(slots);
    if op.format.row.weights {
        let weights = places.array(output, layout.weights).cast::<f32>().cast_const();
        let weight = |slot: &i32| match usize::try_from(*slot) {
            // SAFETY: a slot is a row of the output, as it was checked when it came.
            Ok(slot) => unsafe { weights.add(slot).read() },
            Err(_) => 0.0,
        };
        state.weights.extend(slots.iter().map(weight));
    }
}

/// Marks the sources of which nothing counts any more.
fn write_lost(places: &Places, order: &SlotOrder, output: &Output) {
    let lost = places.array(output, output.layout.lost);
    for source in 0..places.member.places() {
        let flag = u8::from(order.is_gone(source));
        // SAFETY: R flags of this rank's region, which no other thread writes.
        unsafe { lost.add(source as usize).write(flag) };
    }
}

/// The output as the caller sees it.
pub(crate) fn describe(runner: &Runner, op: &DispatchOp, output: &Output) -> abi::TyReceived {
    write_lost(&runner.places, &runner.order, output);
    let state = &runner.routing.handles[op.handle];
    let shape = &runner.exchange.regions;
    let knows_tokens = op.lands && !state.arrangement.worst_case;
    ArenaOutput {
        region: output.region.id,
        address: runner.places.arena_area.at(output.region.offset),
        layout: &output.layout,
        arrangement: state.arrangement.layout,
        tokens: if knows_tokens { state.tokens } else { output.rows.tokens },
        rows: state.rows_of_output(shape, &output.rows),
        format: &op.format,
        shape,
        lost: runner.places.array(output, output.layout.lost),
    }
    .describe()
}

impl Places {
    /// Address of an array of an output.
    pub(crate) fn array(&self, output: &Output, span: Span) -> *mut u8 {
        self.arena_area.at(output.region.offset + span.offset)
    }
}
