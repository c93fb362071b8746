//! This rank among those that an engine connects.

use tokenyard_core::domains::TeamRanks;

use crate::engine::path::Path;

/// See the [module](self).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// One of `TY_LEVEL_*`.
    pub(crate) level: u64,
    pub(crate) team: TeamRanks,
    /// This rank in the team.
    pub(crate) rank: u32,
    /// Ranks of the team.
    pub(crate) ranks: u32,
    /// How data leaves.
    pub(crate) path: Path,
    /// Operations whose records have places of their own.
    pub(crate) slots: u32,
    /// Numbers of the engine that one operation of a caller takes.
    pub(crate) steps: u32,
    /// Whether an operation is one exchange. Else the host composes it of several, and waits for each.
    pub(crate) is_whole: bool,
}

impl Member {
    pub(crate) fn world_rank(&self) -> u32 {
        self.team.rank(self.rank)
    }

    /// World ranks of the team.
    pub(crate) fn world_ranks(&self) -> Vec<u32> {
        (0..self.ranks).map(|peer| self.team.rank(peer)).collect()
    }

    /// The number that a caller has given an operation.
    pub(crate) fn number(&self, operation: u64) -> u64 {
        operation / u64::from(self.steps)
    }
}
