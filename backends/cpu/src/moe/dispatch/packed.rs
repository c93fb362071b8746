//! The packed layout: landed rows are spread over the experts.

use tokenyard_core::Result;
use tokenyard_core::moe::{RegionLayout, Shape};

use crate::engine::places::Places;
use crate::engine::record::bad_record;
use crate::moe::dispatch::lost_rows::unpack_lost;
use crate::moe::dispatch::output::{clear_ids, keep_copies};
use crate::moe::operation::{DispatchOp, Output};
use crate::moe::routing::RoutingTable;
use crate::moe::runner::Runner;

/// A row in its landing place.
struct Landed<'a> {
    base: u64,
    layout: &'a RegionLayout,
    row: usize,
    source: u32,
    /// Rows of an expert's block.
    room: usize,
    shape: &'a Shape,
}

/// Spreads landed rows over the experts, by source rank, then source token.
pub(crate) fn unpack(
    runner: &mut Runner,
    slot: usize,
    op: &DispatchOp,
    output: &Output,
) -> Result<()> {
    let landing = runner.landing_layout(&op.format)?;
    let shape = runner.exchange.regions;
    let local = shape.local_experts() as usize;
    let room = (shape.ranks * runner.routing.handles[op.handle].max_tokens) as usize;
    let counts = runner.places.array(output, output.layout.expert_counts).cast::<i32>();
    let ranges = runner.places.array(output, output.layout.ranges).cast::<i64>();
    // SAFETY: the region is this rank's; no other thread writes these arrays.
    unsafe { counts.write_bytes(0, local) };
    let mut tokens = 0;
    for source in 0..shape.ranks {
        // SAFETY: as above; El counts and El * R ranges.
        let begin = |e: usize| unsafe { counts.add(e).read() };
        for e in 0..local {
            let range = ranges.wrapping_add(e * shape.ranks as usize + source as usize);
            // SAFETY: as above. The count is added once the rows are placed.
            unsafe { range.write(i64::from(begin(e)) << 32) };
        }
        let rows = runner.routing.gathered.entries[source as usize].rows as usize;
        if runner.order.is_gone(source) && !op.signature.is_fresh() {
            runner.routing.gathered.rows[source as usize] =
                unpack_lost(&runner.routing, &runner.places, op, output, source);
            tokens += runner.routing.gathered.rows[source as usize] as usize;
        }
        let base = runner.places.slots.landing(slot, source);
        for row in 0..rows {
            let from = Landed { base, layout: &landing, row, source, room, shape: &shape };
            unpack_row(&runner.places, op, output, &from, tokens)?;
            tokens += 1;
        }
        for e in 0..local {
            let range = ranges.wrapping_add(e * shape.ranks as usize + source as usize);
            // SAFETY: as above.
            unsafe {
                let start = range.read();
                range.write(start | (i64::from(begin(e)) - (start >> 32)));
            }
        }
    }
    debug_assert!(room * local >= tokens);
    finish_packed(&mut runner.routing, &runner.places, op, output, tokens)
}

fn unpack_row(
    places: &Places,
    op: &DispatchOp,
    output: &Output,
    from: &Landed<'_>,
    token: usize,
) -> Result<()> {
    let shape = from.shape;
    let topk = shape.topk as usize;
    let room = from.room;
    let (x_bytes, scale_bytes) =
        (op.format.row.x_bytes as usize, op.format.row.scale_bytes as usize);
    let landed = |span: tokenyard_core::moe::Span, width: usize| {
        places.control.at(from.base + span.offset).wrapping_add(from.row * width)
    };
    let counts = places.array(output, output.layout.expert_counts).cast::<i32>();
    let out = |span| places.array(output, span);
    for k in 0..topk {
        // SAFETY: landed rows are complete (their signal was seen) and have K ids each.
        let id = unsafe { landed(from.layout.ids, 4 * topk).cast::<i32>().add(k).read() };
        let slots = out(output.layout.slots).cast::<i32>().wrapping_add(token * topk + k);
        if id < 0 {
            // SAFETY: N <= R*M rows of K slots, in this rank's region.
            unsafe { slots.write(-1) };
            continue;
        }
        if id as u32 >= shape.local_experts() {
            return Err(bad_record(from.source, format!("local expert {id}")));
        }
        // SAFETY: expert `id` is in range. A valid routing selects it at most once per token, so
        // its block of R*M rows cannot overflow. This is checked too.
        let place = unsafe {
            let count = counts.add(id as usize);
            let place = count.read();
            count.write(place + 1);
            place as usize
        };
        if place >= room {
            return Err(bad_record(from.source, format!("more than {room} rows for expert {id}")));
        }
        let row = id as usize * room + place;
        // SAFETY: `row` is below El * R*M; source and target are different windows.
        unsafe {
            slots.write(row as i32);
            std::ptr::copy_nonoverlapping(
                landed(from.layout.x, x_bytes),
                out(output.layout.x).add(row * x_bytes),
                x_bytes,
            );
            let scales = landed(from.layout.scales, scale_bytes).cast::<u32>();
            for (column, at) in op.scale_words(row, room).enumerate() {
                out(output.layout.scales).cast::<u32>().add(at).write(scales.add(column).read());
            }
            if op.format.row.weights {
                let weight = landed(from.layout.weights, 4 * topk).cast::<f32>().add(k).read();
                out(output.layout.weights).cast::<f32>().add(row).write(weight);
            }
            let source = landed(from.layout.source, 4).cast::<i32>().read();
            let source = op.source_number(source, room / shape.ranks as usize);
            out(output.layout.source).cast::<i32>().add(row).write(source);
        }
    }
    Ok(())
}

/// Counts per source, totals, and the receive plan that combine works with.
fn finish_packed(
    routing: &mut RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
    tokens: usize,
) -> Result<()> {
    let layout = &output.layout;
    let local = routing.exchange.regions.local_experts() as usize;
    let ranks = routing.exchange.regions.ranks as usize;
    let ranges = places.array(output, layout.ranges).cast::<i64>();
    // SAFETY: the region is this rank's until it is released; all ranges were just written.
    unsafe {
        let counts = places.array(output, layout.rank_counts).cast::<u32>();
        for source in 0..ranks {
            counts.add(source).write(routing.gathered.rows[source]);
            for e in 0..local {
                let range = ranges.add(e * ranks + source).read();
                routing.gathered.counts[source * local + e] = range as u32;
            }
        }
    }
    let state = &mut routing.handles[op.handle];
    state.recv.build(1, &routing.gathered.rows, &routing.gathered.counts)?;
    state.tokens = tokens as u64;
    state.rows = state.recv.num_expert_rows().into();
    // SAFETY: as above.
    unsafe {
        let totals = places.array(output, layout.totals).cast::<i64>();
        totals.write(tokens as i64);
        totals.add(1).write(routing.handles[op.handle].rows as i64);
        let ends = places.array(output, layout.rank_ends).cast::<u32>();
        for source in 0..routing.exchange.regions.ranks {
            let recv = &routing.handles[op.handle].recv;
            ends.add(source as usize).write(recv.row_base(source) + recv.rows_from(source));
        }
    }
    clear_ids(routing, places, op, output);
    keep_copies(routing, places, op, output);
    Ok(())
}
