//! The counters that reports read of the exchanges, in pinned memory. No read asks the device, so a
//! kernel that hangs hides no counter. The kernel that waits for an operation's signals stores three
//! words of each rank (`arrive` of the kernels); no kernel stores a word per row.

use std::sync::Arc;

use tokenyard_core::abi::TyPeerCounters;
use tokenyard_core::{Result, abi};

use crate::driver::{Context, Pinned};
use crate::moe::exchange::Exchange;

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

    pub(crate) fn of(&self, exchange: &Exchange) -> PeerCounters {
        place(self.peers.at(0) as u64, self.ranks, exchange)
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

fn place(base: u64, ranks: u32, exchange: &Exchange) -> PeerCounters {
    let first = exchange.level * u64::from(ranks) + u64::from(exchange.team.first);
    PeerCounters { address: base + BYTES * first, step: exchange.team.step }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::KernelShape;

    use super::*;
    use crate::engine::path::Path;

    #[test]
    fn each_level_counts_by_world_rank() {
        let shape = KernelShape {
            size: size_of::<KernelShape>(),
            reserved: 0,
            rank: 5,
            ranks: 8,
            domains: 2,
            experts: 16,
            topk: 2,
            hidden: 64,
            max_tokens: 4,
            in_flight: 2,
            handles: 2,
        };
        let at = |counters: PeerCounters, peer: u64| {
            (counters.address - 4096) / BYTES + peer * u64::from(counters.step)
        };
        let whole = Exchange::whole(&shape, abi::TY_LEVEL_SCALE_OUT, Path::STORE);
        assert_eq!([0, 7].map(|peer| at(place(4096, 8, &whole), peer)), [8, 15]);
        let [inside, between] = Exchange::levels(&shape, [Path::STORE; 2]);
        // Ranks 4 to 7 are this domain; 1 and 5 are its rail.
        assert_eq!([0, 3].map(|peer| at(place(4096, 8, &inside), peer)), [4, 7]);
        assert_eq!([0, 1].map(|peer| at(place(4096, 8, &between), peer)), [9, 13]);
    }
}
