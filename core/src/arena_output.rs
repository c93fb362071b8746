//! The output of a dispatch in an arena, as it crosses the plugin ABI.

use crate::abi;
use crate::call::WireFormat;
use crate::host::NO_TENSOR;
use crate::moe::{DType, Layout, RegionLayout, ScaleLayout, Shape, Span};

/// An output that lies in its region. Kernel sets describe it to the host with [`describe`](Self::describe).
#[derive(Clone, Copy, Debug)]
pub struct ArenaOutput<'a> {
    /// The region's number.
    pub region: u64,
    /// Its first byte; it need not be memory that the host can read.
    pub address: *mut u8,
    /// Where its arrays are.
    pub layout: &'a RegionLayout,
    /// How its rows are arranged.
    pub arrangement: Layout,
    /// Tokens received, N, or the most that may be.
    pub tokens: u64,
    /// Rows of x: N (flat), X (expert-major), El * R*M (packed) or R*M (rank-major).
    pub rows: u64,
    /// How a row looks.
    pub format: &'a WireFormat,
    /// The shape of the world.
    pub shape: &'a Shape,
    /// `[R]` u8: ranks that are left out.
    pub lost: *mut u8,
}

fn tensor(data: *mut u8, dtype: u32, shape: [u64; 2]) -> abi::TyTensor {
    abi::TyTensor { data, dtype, reserved: 0, shape, stride: [shape[1] as i64, 1] }
}

impl ArenaOutput<'_> {
    /// The output as the caller sees it. A tensor that belongs to the arrangement is there even if it has no rows.
    pub fn describe(&self) -> abi::TyReceived {
        let Self { layout, tokens, rows, format, shape, .. } = *self;
        let packed = self.arrangement == Layout::Packed;
        let grouped = matches!(self.arrangement, Layout::ExpertMajor { .. });
        let by_token = self.arrangement.has_a_row_per_token();
        let sources = if self.arrangement.has_fixed_places() { rows } else { tokens };
        let [local, ranks, topk] = [shape.local_experts(), shape.ranks, shape.topk].map(u64::from);
        let coded = |is_there: bool, span: Span, dtype: u32, shape: [u64; 2]| match is_there {
            true => tensor(self.address.wrapping_add(span.offset as usize), dtype, shape),
            false => NO_TENSOR,
        };
        let array = |is_there: bool, span: Span, dtype: DType, shape: [u64; 2]| {
            coded(is_there, span, dtype.code(), shape)
        };
        let scale_shape = match format.scale_layout {
            ScaleLayout::ColumnMajor if packed => [local * format.scale_cols, rows / local],
            _ => [rows, format.scale_cols],
        };
        let is_capped = layout.dropped.bytes > 0;
        let at_end = Span { offset: layout.dropped.offset + 4 * local, bytes: 4 };
        let weight_shape = [rows, if by_token { topk } else { 1 }];
        abi::TyReceived {
            size: size_of::<abi::TyReceived>(),
            region: self.region,
            tokens,
            rows,
            x: coded(true, layout.x, format.x_dtype, [rows, format.width.into()]),
            scales: coded(format.scale_cols > 0, layout.scales, format.scale_dtype, scale_shape),
            ids: array(by_token, layout.ids, DType::I32, [rows, topk]),
            weights: array(format.row.weights, layout.weights, DType::F32, weight_shape),
            source: array(true, layout.source, DType::I32, [sources, 1]),
            slots: array(grouped, layout.slots, DType::I32, [tokens, topk]),
            expert_counts: array(true, layout.expert_counts, DType::I32, [local, 1]),
            expert_starts: array(grouped, layout.expert_starts, DType::I32, [local, 1]),
            expert_ends: array(grouped, layout.expert_ends, DType::I32, [local, 1]),
            source_counts: array(true, layout.rank_counts, DType::I32, [ranks, 1]),
            source_ends: array(true, layout.rank_ends, DType::I32, [ranks, 1]),
            ranges: array(packed, layout.ranges, DType::I64, [local, ranks]),
            totals: array(true, layout.totals, DType::I64, [2, 1]),
            lost: tensor(self.lost, DType::U8.code(), [ranks, 1]),
            dropped: array(is_capped, layout.dropped, DType::I32, [local, 1]),
            overflow: array(is_capped, at_end, DType::I32, [1, 1]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::{RegionRows, RegionSpec, RowFormat, SourceIndex};

    const SHAPE: Shape = Shape { ranks: 2, experts: 4, topk: 2, hidden: 64, max_tokens: 8 };

    fn described(arrangement: Layout, rows: u64, scale_cols: u64) -> abi::TyReceived {
        described_as(arrangement, rows, scale_cols, ScaleLayout::RowMajor)
    }

    fn described_as(
        arrangement: Layout,
        rows: u64,
        scale_cols: u64,
        scale_layout: ScaleLayout,
    ) -> abi::TyReceived {
        described_under(None, arrangement, rows, scale_cols, scale_layout)
    }

    fn described_under(
        max_rows: Option<u64>,
        arrangement: Layout,
        rows: u64,
        scale_cols: u64,
        scale_layout: ScaleLayout,
    ) -> abi::TyReceived {
        let row = RowFormat { x_bytes: 128, scale_bytes: 4 * scale_cols as u32, weights: true };
        let spec = RegionSpec { max_rows, ..RegionSpec::new(SHAPE, arrangement, row) };
        let layout = RegionLayout::new(&spec, RegionRows { tokens: 5, experts: rows }).unwrap();
        let format = WireFormat {
            row,
            width: 64,
            x_dtype: 1,
            scale_dtype: 3,
            scale_cols,
            scale_layout,
            source_index: SourceIndex::default(),
        };
        let (address, lost) = (std::ptr::without_provenance_mut(1 << 20), std::ptr::dangling_mut());
        let (layout, format, shape) = (&layout, &format, &SHAPE);
        let output = ArenaOutput {
            region: 7,
            address,
            layout,
            arrangement,
            tokens: 5,
            rows,
            format,
            shape,
            lost,
        };
        output.describe()
    }

    fn is_there(tensor: &abi::TyTensor) -> bool {
        !tensor.data.is_null()
    }

    #[test]
    fn each_arrangement_has_the_tensors_that_belong_to_it() {
        let flat = described(Layout::Flat, 5, 0);
        assert_eq!(
            (flat.x.shape, flat.weights.shape, flat.source.shape),
            ([5, 64], [5, 2], [5, 1])
        );
        assert!(is_there(&flat.ids) && !is_there(&flat.slots) && !is_there(&flat.ranges));
        let grouped = described(Layout::ExpertMajor { alignment: 4, zero_padding: false }, 12, 1);
        assert_eq!((grouped.x.shape, grouped.weights.shape), ([12, 64], [12, 1]));
        assert_eq!((grouped.scales.shape, grouped.slots.shape), ([12, 1], [5, 2]));
        assert!(!is_there(&grouped.ids) && is_there(&grouped.expert_starts));
        let packed = described(Layout::Packed, 32, 0);
        assert_eq!((packed.source.shape, packed.ranges.shape), ([32, 1], [2, 2]));
        assert!(!is_there(&packed.slots) && !is_there(&packed.expert_ends));
        let by_rank = described(Layout::RankMajor { zero_padding: false }, 16, 0);
        assert_eq!(
            (by_rank.x.shape, by_rank.ids.shape, by_rank.weights.shape, by_rank.source.shape),
            ([16, 64], [16, 2], [16, 2], [16, 1])
        );
        assert!(!is_there(&by_rank.slots) && !is_there(&by_rank.ranges));
    }

    #[test]
    fn capped_rows_have_counts_of_those_that_were_dropped() {
        for arrangement in [Layout::Flat, Layout::ExpertMajor { alignment: 4, zero_padding: false }]
        {
            let free = described(arrangement, 8, 0);
            assert!(!is_there(&free.dropped) && !is_there(&free.overflow), "{arrangement:?}");
            let capped = described_under(Some(8), arrangement, 8, 0, ScaleLayout::RowMajor);
            let (dropped, overflow) = (capped.dropped, capped.overflow);
            assert_eq!((dropped.shape, overflow.shape), ([2, 1], [1, 1]));
            assert_eq!(overflow.data.addr(), dropped.data.addr() + 8, "{arrangement:?}");
        }
    }

    #[test]
    fn column_major_scales_are_the_columns_of_each_expert_in_the_same_place() {
        let by_row = described(Layout::Packed, 32, 3);
        let by_column = described_as(Layout::Packed, 32, 3, ScaleLayout::ColumnMajor);
        assert_eq!((by_row.scales.shape, by_row.scales.stride), ([32, 3], [3, 1]));
        assert_eq!((by_column.scales.shape, by_column.scales.stride), ([6, 16], [16, 1]));
        assert_eq!(by_column.scales.data, by_row.scales.data);
        assert_eq!(by_column.source.data, by_row.source.data);
        let flat = described_as(Layout::Flat, 5, 3, ScaleLayout::ColumnMajor);
        assert_eq!(flat.scales.shape, [5, 3]);
    }

    #[test]
    fn arrays_lie_at_their_offsets_and_do_not_overlap() {
        let found = described(Layout::Flat, 5, 1);
        let start = 1 << 20;
        let mut ends: Vec<(usize, u64)> =
            [found.x, found.scales, found.ids, found.weights, found.source]
                .iter()
                .map(|t| (t.data.addr(), t.shape[0] * t.shape[1]))
                .collect();
        ends.sort_unstable();
        assert!(ends[0].0 >= start);
        // The narrowest element has one byte.
        assert!(ends.windows(2).all(|pair| pair[0].0 + pair[0].1 as usize <= pair[1].0));
    }
}
