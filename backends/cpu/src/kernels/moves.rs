//! A move of rows: which rows, over which link, and where they go.

use tokenyard_core::call::WireFormat;
use tokenyard_core::domains::Domains;
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

/// The rows that move, and the link that they move over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Rows that come from a domain, to the peers of this one.
    Leg(u32),
    /// This rank's rows, to the other domains.
    Rail,
}

impl Via {
    /// This rank's number among the peers of a move, and how many there are.
    pub(super) fn turn(self, domains: &Domains) -> (u32, u32) {
        match self {
            Self::Leg(_) => (domains.index, domains.size),
            Self::Rail => (domains.mine, domains.count),
        }
    }
}

/// One move of rows.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) operation: u64,
    pub(super) slot: usize,
    pub(super) handle: usize,
    pub(super) via: Via,
    pub(super) format: WireFormat,
    /// How often the row signal rises for each row.
    pub(super) arrays: u64,
}

/// The load of a move: the rows of each peer, and `[rows, K]` experts.
pub(super) struct Carried<'a> {
    pub(super) send: &'a SendPlan,
    pub(super) topk: &'a [i32],
}
