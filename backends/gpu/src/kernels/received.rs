//! The result of a dispatch in the arena, in the ABI's form.

use tokenyard_core::abi;
use tokenyard_core::host::NO_TENSOR;
use tokenyard_core::moe::{DType, Layout, Shape, Span};

use super::handle::Output;
use super::operation::DispatchOp;

/// The received tokens of a dispatch in regions of a shape. `lost`: the address of the list of ranks that are
/// left out.
pub(super) fn describe(op: &DispatchOp, shape: &Shape, lost: u64) -> abi::TyReceived {
    let layout = &op.output.layout;
    let rows = op.output.rows_of(op.arrangement, shape);
    let (flat, packed) = (op.arrangement == Layout::Flat, op.arrangement == Layout::Packed);
    let exact = packed && !op.worst;
    let tokens = if exact { op.received } else { op.output.rows.tokens };
    let (local, ranks, topk) =
        (shape.local_experts().into(), shape.ranks.into(), shape.topk.into());
    let tensor = |span: Span, dtype: DType, shape: [u64; 2]| {
        tensor_at(&op.output, span, dtype.code(), shape)
    };
    let of = |there: bool, (span, dtype): (Span, DType), shape: [u64; 2]| {
        if there { tensor(span, dtype, shape) } else { NO_TENSOR }
    };
    let format = &op.format;
    debug_assert!(op.received <= tokens);
    abi::TyReceived {
        size: size_of::<abi::TyReceived>(),
        region: op.output.region,
        tokens,
        rows,
        x: tensor_at(&op.output, layout.x, format.x_dtype, [rows, shape.hidden.into()]),
        scales: if format.scale_cols > 0 {
            let columns = [rows, format.scale_cols];
            tensor_at(&op.output, layout.scales, format.scale_dtype, columns)
        } else {
            NO_TENSOR
        },
        ids: of(flat, (layout.ids, DType::I32), [tokens, topk]),
        weights: of(
            format.row.weights,
            (layout.weights, DType::F32),
            if flat { [tokens, topk] } else { [rows, 1] },
        ),
        source: tensor(layout.source, DType::I32, [if packed { rows } else { tokens }, 1]),
        slots: of(!flat, (layout.slots, DType::I32), [tokens, topk]),
        expert_counts: tensor(layout.expert_counts, DType::I32, [local, 1]),
        expert_starts: of(!flat && !packed, (layout.expert_starts, DType::I32), [local, 1]),
        expert_ends: of(!flat && !packed, (layout.expert_ends, DType::I32), [local, 1]),
        source_counts: tensor(layout.rank_counts, DType::I32, [ranks, 1]),
        source_ends: tensor(layout.rank_ends, DType::I32, [ranks, 1]),
        ranges: of(packed, (layout.ranges, DType::I64), [local, ranks]),
        totals: tensor(layout.totals, DType::I64, [2, 1]),
        lost: nobody_lost(lost, shape),
    }
}

/// A lost rank ends a communicator on GPUs, so no rank is left out.
fn nobody_lost(lost: u64, shape: &Shape) -> abi::TyTensor {
    abi::TyTensor {
        data: lost as *mut u8,
        dtype: DType::U8.code(),
        reserved: 0,
        shape: [shape.ranks.into(), 1],
        stride: [1, 1],
    }
}

fn tensor_at(output: &Output, span: Span, dtype: u32, shape: [u64; 2]) -> abi::TyTensor {
    abi::TyTensor {
        data: (output.address + span.offset) as *mut u8,
        dtype,
        reserved: 0,
        shape,
        stride: [shape[1] as i64, 1],
    }
}
