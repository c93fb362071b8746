//! Operations between their send and their receive.

use tokenyard_core::abi;
use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::{Region, RegionLayout, RegionRows, SourceIndex};
use tokenyard_core::signature::Signature;

use crate::convert::FloatType;
use crate::moe::rows::moves::Move;

/// The type of a row of a combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowType {
    pub(crate) float: FloatType,
    pub(crate) bytes: usize,
    /// In LogFMT-10: `bytes` is the room of a row, which may take fewer.
    pub(crate) is_coded: bool,
}

/// A combine between send and receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CombineOp {
    pub(crate) operation: u64,
    pub(crate) handle: usize,
    pub(crate) signature: Signature,
    /// Rows of the caller, in and out.
    pub(crate) row: RowType,
    /// Rows on their way.
    pub(crate) partial: RowType,
    pub(crate) has_weights: bool,
    /// Returned weights are sums over ranks.
    pub(crate) sums_weights: bool,
    pub(crate) staging: Option<Region>,
    /// This rank's partial rows.
    pub(crate) partials: Offsets,
    /// Where partials from other owners arrive, if they are put.
    pub(crate) landing: Offsets,
    /// On the rail: one more row names the ranks that are left out of its peer's rows.
    pub(crate) says_left_out: bool,
    pub(crate) out: abi::TyTensor,
    pub(crate) out_weights: abi::TyTensor,
    pub(crate) missing: abi::TyTensor,
    pub(crate) bias: [abi::TyTensor; 2],
}

/// Arena offsets of rows and of their weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Offsets {
    pub(crate) x: u64,
    pub(crate) weights: u64,
}

impl Offsets {
    /// The offsets of a row further on.
    pub(crate) fn row(self, row: u64, widths: Widths) -> Self {
        Self { x: self.x + row * widths.x, weights: self.weights + row * widths.weights }
    }
}

/// Bytes of a row, and of its K weights.
#[derive(Clone, Copy)]
pub(crate) struct Widths {
    pub(crate) x: u64,
    pub(crate) weights: u64,
}

impl CombineOp {
    /// How often the row signal rises for each row.
    pub(crate) fn arrays(&self) -> u64 {
        1 + u64::from(self.has_weights)
    }

    pub(crate) fn biases(&self) -> [*const u8; 2] {
        self.bias.map(|bias| bias.data.cast_const())
    }
}

/// A dispatch between send and receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DispatchOp {
    pub(crate) operation: u64,
    pub(crate) handle: usize,
    pub(crate) signature: Signature,
    pub(crate) format: WireFormat,
    /// This rank's output, unless a dispatch whose rows land first was refused here.
    pub(crate) output: Option<Output>,
    /// Whether rows land in places that are fixed for their source, without a counting round.
    pub(crate) lands: bool,
}

impl DispatchOp {
    /// The move of its rows; those of group 0, unless stated otherwise.
    pub(crate) fn carry(&self, slot: usize) -> Move {
        Move {
            operation: self.operation,
            slot,
            handle: self.handle,
            group: 0,
            format: self.format,
            arrays: self.signature.arrays(),
        }
    }

    /// Where the scales of a packed row lie, in words. `room`: rows of an expert's block.
    pub(crate) fn scale_words(
        &self,
        row: usize,
        room: usize,
    ) -> impl Iterator<Item = usize> + use<> {
        let format = &self.format;
        let places = format.scale_layout.places(row as u64, room as u64, format.scale_cols);
        places.map(|at| at as usize)
    }

    /// The number of the source of a packed row, which came with `rank * M + token`.
    pub(crate) fn source_number(&self, source: i32, max_tokens: usize) -> i32 {
        match self.format.source_index {
            SourceIndex::RankAndToken => source,
            SourceIndex::Token => source % max_tokens as i32,
        }
    }
}

/// An operation between its send and its receive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    None,
    Dispatch(DispatchOp),
    Combine(CombineOp),
}

/// Where an output lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) region: Region,
    pub(crate) layout: RegionLayout,
    pub(crate) rows: RegionRows,
}
