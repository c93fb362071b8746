//! A move of rows: which rows, and where they go.

use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::SendPlan;

/// Offsets of the first row in each array at one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spot {
    pub(super) window: u16,
    pub(super) x: u64,
    pub(super) scales: u64,
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) source: u64,
}

/// One move of rows.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) operation: u64,
    pub(super) slot: usize,
    pub(super) handle: usize,
    /// The group that the rows belong to.
    pub(super) group: u32,
    pub(super) format: WireFormat,
    /// How often the row signal rises for each row.
    pub(super) arrays: u64,
}

/// The load of a move: the rows of each peer, and `[rows, K]` experts.
pub(super) struct Carried<'a> {
    pub(super) send: &'a SendPlan,
    pub(super) topk: &'a [i32],
}
