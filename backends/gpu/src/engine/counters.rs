//! The counters that reports read of the exchanges, in pinned memory. No read asks the device, so a
//! kernel that hangs hides no counter. The kernel that waits for an operation's signals stores three
//! words of each rank (`arrive` of the kernels); no kernel stores a word for each thing that it moves.

use std::sync::Arc;

use tokenyard_core::abi::TyPeerCounters;
use tokenyard_core::{Result, abi};

use crate::driver::{Context, Pinned};
use crate::engine::member::Member;

/// Bytes that one rank's counters are apart. Mirrored by `PeerCounters` of the kernels.
const BYTES: u64 = size_of::<TyPeerCounters>() as u64;

/// The counters of both levels, by world rank.
#[derive(Debug)]
pub(crate) struct Counters {
    ranks: u32,
    peers: Pinned<TyPeerCounters>,
}

/// The place of the counters of one exchange's team.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerCounters {
    /// The address of the first rank's counters.
    pub(crate) address: u64,
    /// The distance from one rank's counters to the next, in counters.
    pub(crate) step: u32,
}

impl Counters {
    pub(crate) fn new(context: &Arc<Context>, ranks: u32) -> Result<Self> {
        Ok(Self { ranks, peers: Pinned::new(context, 2 * ranks as usize)? })
    }

    pub(crate) fn of(&self, member: &Member) -> PeerCounters {
        place(self.peers.at(0) as u64, self.ranks, member)
    }

    /// The form that crosses the ABI. Kernels that load and store post no commands, so there is no
    /// queue; the host itself counts the commands of the others.
    pub(crate) fn as_abi(&self) -> abi::TyCounters {
        abi::TyCounters {
            size: size_of::<abi::TyCounters>(),
            ranks: self.ranks,
            signals: 0,
            queue_depth: [0; 2],
            peers: self.peers.at(0),
            raised: std::ptr::null(),
        }
    }
}

fn place(base: u64, ranks: u32, member: &Member) -> PeerCounters {
    let first = member.level * u64::from(ranks) + u64::from(member.team.first);
    PeerCounters { address: base + BYTES * first, step: member.team.step }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::path::Path;
    use tokenyard_core::domains::TeamRanks;

    #[test]
    fn each_level_counts_by_world_rank() {
        let at = |counters: PeerCounters, peer: u64| {
            (counters.address - 4096) / BYTES + peer * u64::from(counters.step)
        };
        let whole = Member {
            level: abi::TY_LEVEL_SCALE_OUT,
            team: TeamRanks { first: 0, step: 1 },
            rank: 5,
            ranks: 8,
            path: Path::STORE,
            slots: 2,
            steps: 1,
            is_whole: true,
        };
        assert_eq!([0, 7].map(|peer| at(place(4096, 8, &whole), peer)), [8, 15]);
        // Ranks 4 to 7 are this domain; 1 and 5 are its rail.
        let inside = Member {
            level: abi::TY_LEVEL_SCALE_UP,
            team: TeamRanks { first: 4, step: 1 },
            ..whole
        };
        let between = Member { team: TeamRanks { first: 1, step: 4 }, ..whole };
        assert_eq!([0, 3].map(|peer| at(place(4096, 8, &inside), peer)), [4, 7]);
        assert_eq!([0, 1].map(|peer| at(place(4096, 8, &between), peer)), [9, 13]);
    }
}
