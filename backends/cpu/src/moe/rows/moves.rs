//! A move of rows: which rows, and where they go.

use tokenyard_core::call::WireFormat;
use tokenyard_core::moe::SendPlan;

/// Offsets of the first row in each array at one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spot {
    pub(crate) window: u16,
    pub(crate) x: u64,
    pub(crate) scales: u64,
    pub(crate) ids: u64,
    pub(crate) weights: u64,
    pub(crate) source: u64,
}

/// One move of rows.
#[derive(Clone, Copy)]
pub(crate) struct Move {
    pub(crate) operation: u64,
    pub(crate) slot: usize,
    pub(crate) handle: usize,
    /// The group that the rows belong to.
    pub(crate) group: u32,
    pub(crate) format: WireFormat,
    /// How often the row signal rises for each row.
    pub(crate) arrays: u64,
}

/// The load of a move: the rows of each peer, and `[rows, K]` experts.
pub(crate) struct Carried<'a> {
    pub(crate) send: &'a SendPlan,
    /// By peer: rows that it gets, the first of those of the plan.
    pub(crate) taken: &'a [u32],
    pub(crate) topk: &'a [i32],
}
