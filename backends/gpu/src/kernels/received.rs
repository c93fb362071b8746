//! What a dispatch leaves in the arena, as the ABI says it.

use tokenyard_core::abi;
use tokenyard_core::host::NO_TENSOR;
use tokenyard_core::moe::{DType, Layout, Span};

use super::engine::Engine;
use super::handle::Output;
use super::operation::DispatchOp;

impl Engine {
    pub(super) fn describe(&self, op: &DispatchOp) -> abi::TyReceived {
        let (shape, layout) = (&self.exchange.regions, &op.output.layout);
        let rows = op.output.rows_of(op.arrangement, shape);
        let (flat, packed) = (op.arrangement == Layout::Flat, op.arrangement == Layout::Packed);
        let exact = packed && !op.worst;
        let tokens = if exact { op.received } else { op.output.rows.tokens };
        let (local, ranks, topk) =
            (shape.local_experts().into(), shape.ranks.into(), shape.topk.into());
        let tensor = |span: Span, dtype: DType, shape: [u64; 2]| {
            self.tensor(&op.output, (span, dtype.code()), shape)
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
            x: self.tensor(&op.output, (layout.x, format.dtype), [rows, shape.hidden.into()]),
            scales: if format.scale_columns > 0 {
                let columns = [rows, format.scale_columns];
                self.tensor(&op.output, (layout.scales, format.scale_dtype), columns)
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
            source_counts: tensor(layout.rank_counts, DType::I32, [ranks, 1]),
            ranges: of(packed, (layout.ranges, DType::I64), [local, ranks]),
            totals: tensor(layout.totals, DType::I64, [2, 1]),
            lost: self.nobody_lost(),
        }
    }

    /// A lost rank ends a communicator on CUDA, so nobody is left out.
    fn nobody_lost(&self) -> abi::TyTensor {
        abi::TyTensor {
            data: self.lost.address() as *mut u8,
            dtype: DType::U8.code(),
            reserved: 0,
            shape: [self.exchange.regions.ranks.into(), 1],
            stride: [1, 1],
        }
    }

    fn tensor(
        &self,
        output: &Output,
        (span, dtype): (Span, u32),
        shape: [u64; 2],
    ) -> abi::TyTensor {
        abi::TyTensor {
            data: (output.address + span.offset) as *mut u8,
            dtype,
            reserved: 0,
            shape,
            stride: [shape[1] as i64, 1],
        }
    }
}
