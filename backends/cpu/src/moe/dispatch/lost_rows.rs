//! Outputs of a dispatch whose source was lost before all its rows had come.

use tokenyard_core::moe::{Holder, Layout, Span};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::order::SlotOrder;
use crate::engine::places::Places;
use crate::moe::operation::{DispatchOp, Output};
use crate::moe::routing::RoutingTable;
use crate::moe::runner::Runner;

/// Makes an output whole that lacks rows of sources that are gone: their places hold zeros.
/// If a rank that was given up may still write there, the caller gets another region, and that one stays out
/// of use (INV-8).
#[cold]
pub(crate) fn complete_output(
    runner: &mut Runner,
    op: &DispatchOp,
    output: Output,
) -> Result<Output> {
    let sources = 0..runner.exchange.regions.ranks;
    let still_written = sources
        .clone()
        .filter(|source| lacks(&runner.routing, &runner.order, op, *source))
        .any(|source| {
            runner.order.losses().may_write(runner.exchange.member.forwarder(source), op.operation)
        });
    let whole = if still_written { move_away(&runner.places, op, &output)? } else { output };
    for source in sources {
        if lacks(&runner.routing, &runner.order, op, source) {
            clear_rows(&runner.routing, &runner.places, op, &whole, source);
        }
    }
    Ok(whole)
}

/// Whether rows that a source owes will not come.
pub(crate) fn lacks(
    routing: &RoutingTable,
    order: &SlotOrder,
    op: &DispatchOp,
    source: u32,
) -> bool {
    order.is_gone(source) && routing.handles[op.handle].recv.rows_from(source) > 0
}

/// A replay has the places of its dispatch. In the packed layout this includes the places of a
/// source that was given up, which hold zeros. Returns their number. Rows are spread by source, so
/// all sources before `source` are done.
#[cold]
pub(crate) fn unpack_lost(
    routing: &RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
    source: u32,
) -> u32 {
    let (recv, layout) = (&routing.handles[op.handle].recv, &output.layout);
    let (shape, state) = (&routing.exchange.regions, &routing.handles[op.handle]);
    if !state.is_made {
        return 0;
    }
    let room = (shape.ranks * state.max_tokens) as usize;
    let topk = shape.topk as usize;
    let entries = recv.row_base(source) as usize * topk;
    let end = entries + recv.rows_from(source) as usize * topk;
    let zero = |span: Span, row: usize, width: usize, byte: u8| {
        if span.bytes > 0 {
            // SAFETY: `row` is below El * R*M, checked below, in this rank's region; a word of scales is one of as
            // many rows.
            unsafe { places.array(output, span).add(row * width).write_bytes(byte, width) };
        }
    };
    for entry in entries..end {
        let row = state.slots[entry];
        // SAFETY: N rows of K slots, as the first output had; the counts and slots of this one are as large.
        unsafe {
            places.array(output, layout.slots).cast::<i32>().add(entry).write(row);
            let Ok(row) = usize::try_from(row) else { continue };
            debug_assert!(row / room < shape.local_experts() as usize, "{row}");
            *places.array(output, layout.expert_counts).cast::<i32>().add(row / room) += 1;
            zero(layout.x, row, op.format.row.x_bytes as usize, 0);
            op.scale_words(row, room).for_each(|at| zero(layout.scales, at, 4, 0));
            zero(layout.weights, row, 4, 0);
            zero(layout.source, row, 4, 0xff);
        }
    }
    recv.rows_from(source)
}

fn move_away(places: &Places, op: &DispatchOp, output: &Output) -> Result<Output> {
    let holder = Holder::Dispatch(op.operation);
    let region = places.arena().allocate(output.region.bytes, holder).map_err(|full| {
        // The other ranks go on, so this is not a refusal, which all ranks would get. Only this rank fails.
        Error::new(
            ErrorKind::Unsupported,
            "receive dispatch",
            format!(
                "a source of rows was lost, and there is no room to move them out of its reach: {}",
                full.detail()
            ),
        )
    })?;
    // SAFETY: both regions are this rank's, they do not overlap and have the same length. A
    // lost rank may write to the old one meanwhile, but only to rows that are cleared.
    unsafe {
        std::ptr::copy_nonoverlapping(
            places.arena_area.at(output.region.offset),
            places.arena_area.at(region.offset),
            output.layout.bytes as usize,
        );
    }
    places.arena().quarantine(output.region.id);
    Ok(Output { region, ..*output })
}

/// Zeroes the rows of a source, and marks that they have no source and no expert.
fn clear_rows(
    routing: &RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
    source: u32,
) {
    let recv = &routing.handles[op.handle].recv;
    let (layout, row) = (&output.layout, op.format.row);
    let fill = |span: Span, width: u64, (first, rows): (u32, u32), byte: u8| {
        if span.bytes == 0 {
            return;
        }
        let start = places.array(output, span).wrapping_add((u64::from(first) * width) as usize);
        // SAFETY: the rows of a source lie inside the arrays of this rank's region, which the
        // receive plan laid out.
        unsafe { start.write_bytes(byte, (u64::from(rows) * width) as usize) };
    };
    let k4 = 4 * u64::from(routing.exchange.regions.topk);
    let (x_bytes, scale_bytes) = (u64::from(row.x_bytes), u64::from(row.scale_bytes));
    let tokens = (recv.row_base(source), recv.rows_from(source));
    fill(layout.source, 4, tokens, 0xff);
    if routing.handles[op.handle].arrangement.layout == Layout::Flat {
        fill(layout.ids, k4, tokens, 0xff);
        fill(layout.x, x_bytes, tokens, 0);
        fill(layout.scales, scale_bytes, tokens, 0);
        fill(layout.weights, k4, tokens, 0);
        return;
    }
    fill(layout.slots, k4, tokens, 0xff);
    for expert in 0..routing.exchange.regions.local_experts() {
        // Rows that a cap drops have no place.
        let inside = |row: u32| row.min(recv.num_expert_rows());
        let first = inside(recv.expert_base(expert, source));
        let end = if source + 1 < routing.exchange.regions.ranks {
            inside(recv.expert_base(expert, source + 1))
        } else {
            let expert = expert as usize;
            recv.expert_starts()[expert] + recv.expert_counts()[expert]
        };
        let rows = (first, end - first);
        fill(layout.x, x_bytes, rows, 0);
        fill(layout.scales, scale_bytes, rows, 0);
        fill(layout.weights, 4, rows, 0);
    }
}
