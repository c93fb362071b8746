//! The expert-major layout: copies of rows, and padding.

use tokenyard_core::Result;

use crate::engine::places::Places;
use crate::engine::record::bad_record;
use crate::moe::operation::{DispatchOp, Output};
use crate::moe::routing::RoutingTable;

/// Copies each row from its first expert's place to the others, with its scales and weights.
pub(crate) fn spread_copies(
    routing: &RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
) -> Result<()> {
    let state = &routing.handles[op.handle];
    let layout = &output.layout;
    let topk = routing.exchange.regions.topk as usize;
    let (x_bytes, scale_bytes) =
        (op.format.row.x_bytes as usize, op.format.row.scale_bytes as usize);
    let (x, slots) = (places.array(output, layout.x), places.array(output, layout.slots));
    let (scales, landed_scales) =
        (places.array(output, layout.scales), places.array(output, layout.landed_scales));
    let (weights, landed_weights) =
        (places.array(output, layout.weights), places.array(output, layout.landed_weights));
    for token in 0..state.tokens as usize {
        let mut first = None;
        for k in 0..topk {
            // SAFETY: the arrays have N rows; what peers wrote there is complete.
            let slot = unsafe { slots.cast::<i32>().add(token * topk + k).read() };
            let Ok(slot) = usize::try_from(slot) else { continue };
            if slot as u64 >= output.rows.experts {
                return Err(bad_record(
                    routing.source_of_row(op.handle, token),
                    format!("expert-major row {slot} of {}", output.rows.experts),
                ));
            }
            let from = *first.get_or_insert(slot);
            // SAFETY: both rows were just checked against X; they differ, so do not overlap.
            unsafe {
                if slot != from {
                    std::ptr::copy_nonoverlapping(
                        x.add(from * x_bytes),
                        x.add(slot * x_bytes),
                        x_bytes,
                    );
                }
                std::ptr::copy_nonoverlapping(
                    landed_scales.add(token * scale_bytes),
                    scales.add(slot * scale_bytes),
                    scale_bytes,
                );
                if op.format.row.weights {
                    let weight = landed_weights.cast::<f32>().add(token * topk + k).read();
                    weights.cast::<f32>().add(slot).write(weight);
                }
            }
        }
    }
    Ok(())
}

pub(crate) fn clear_padding(
    routing: &RoutingTable,
    places: &Places,
    op: &DispatchOp,
    output: &Output,
) {
    let recv = &routing.handles[op.handle].recv;
    let layout = &output.layout;
    let row = op.format.row;
    let widths = [
        (layout.x, row.x_bytes as usize),
        (layout.scales, row.scale_bytes as usize),
        (layout.weights, if row.weights { 4 } else { 0 }),
    ];
    let starts = recv.expert_starts();
    for (expert, count) in recv.expert_counts().iter().enumerate() {
        let begin = (starts[expert] + count) as usize;
        let end = starts[expert + 1] as usize;
        for (span, width) in widths {
            // SAFETY: rows [begin, end) are padding inside the region's X rows.
            unsafe {
                places.array(output, span).add(begin * width).write_bytes(0, (end - begin) * width);
            }
        }
    }
}
