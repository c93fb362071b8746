//! Operations between their send and their receive.

use tokenyard_core::abi;
use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::{Region, RegionLayout, RegionRows, SourceIndex};
use tokenyard_core::signature::Signature;

use super::moves::Move;
use crate::convert::FloatType;

/// The type of a row of a combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowType {
    pub(super) float: FloatType,
    pub(super) bytes: usize,
    /// In LogFMT-10: `bytes` is the room of a row, which may take fewer.
    pub(super) is_coded: bool,
}

/// A combine between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct CombineOp {
    pub(super) operation: u64,
    pub(super) handle: usize,
    pub(super) signature: Signature,
    /// Rows of the caller, in and out.
    pub(super) row: RowType,
    /// Rows on their way.
    pub(super) partial: RowType,
    pub(super) has_weights: bool,
    /// Returned weights are sums over ranks.
    pub(super) sums_weights: bool,
    pub(super) staging: Option<Region>,
    /// This rank's partial rows.
    pub(super) partials: Offsets,
    /// Where partials from other owners arrive, if they are put.
    pub(super) landing: Offsets,
    /// On the rail: one more row names the ranks that are left out of its peer's rows.
    pub(super) says_left_out: bool,
    /// On the rail: the sums that are its rows.
    pub(super) sums: Option<Region>,
    pub(super) out: abi::TyTensor,
    pub(super) out_weights: abi::TyTensor,
    pub(super) missing: abi::TyTensor,
    pub(super) bias: [abi::TyTensor; 2],
}

/// Arena offsets of rows and of their weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offsets {
    pub(super) x: u64,
    pub(super) weights: u64,
}

impl Offsets {
    /// The offsets of a row further on.
    pub(super) fn row(self, row: u64, widths: Widths) -> Self {
        Self { x: self.x + row * widths.x, weights: self.weights + row * widths.weights }
    }
}

/// The sums that a combine inside the domain made for the rows of the rail.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    pub(super) region: Option<Region>,
    pub(super) at: Offsets,
}

/// Bytes of a row, and of its K weights.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) x: u64,
    pub(super) weights: u64,
}

impl CombineOp {
    /// How often the row signal rises for each row.
    pub(super) fn arrays(&self) -> u64 {
        1 + u64::from(self.has_weights)
    }

    pub(super) fn biases(&self) -> [*const u8; 2] {
        self.bias.map(|bias| bias.data.cast_const())
    }
}

/// A dispatch between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct DispatchOp {
    pub(super) operation: u64,
    pub(super) handle: usize,
    pub(super) signature: Signature,
    pub(super) format: WireFormat,
    /// This rank's output, unless a dispatch whose rows land first was refused here.
    pub(super) output: Option<Output>,
    /// Whether rows land in places that are fixed for their source, without a counting round.
    pub(super) lands: bool,
}

impl DispatchOp {
    /// The move of its rows; those of group 0, unless stated otherwise.
    pub(super) fn carry(&self, slot: usize) -> Move {
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
    pub(super) fn scale_words(
        &self,
        row: usize,
        room: usize,
    ) -> impl Iterator<Item = usize> + use<> {
        let format = &self.format;
        let places = format.scale_layout.places(row as u64, room as u64, format.scale_cols);
        places.map(|at| at as usize)
    }

    /// The number of the source of a packed row, which came with `rank * M + token`.
    pub(super) fn source_number(&self, source: i32, max_tokens: usize) -> i32 {
        match self.format.source_index {
            SourceIndex::RankAndToken => source,
            SourceIndex::Token => source % max_tokens as i32,
        }
    }
}

/// An operation between its send and its receive.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    None,
    Dispatch(DispatchOp),
    Combine(CombineOp),
}

/// Where an output lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub(super) region: Region,
    pub(super) layout: RegionLayout,
    pub(super) rows: RegionRows,
}

/// How an operation ended on a rank: how far it raises `Done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Refused = 1,
    Done = 2,
}

/// Memory that other ranks may read or write, because they do not know yet that the operation is
/// refused: memory of this rank's caller, and a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exposed {
    pub(super) region: Option<Region>,
}
