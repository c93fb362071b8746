//! The cost of a step grows with the (token, rank) pairs and the number of ranks, and with nothing
//! else. There is one test, because counters belong to rank numbers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::Path as File;

use tokenyard_bench::job::Sizes;
use tokenyard_bench::scaling::{Path, RANKS, ScalingFigures, ScalingTask, measure};
use tokenyard_bench::workload::Workload;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::config::Config;

const ROW: u64 = 2 * 1024;
/// K ids, K weights and the source of a row, for K = 4.
const SIDE: u64 = 4 * 4 + 4 * 4 + 4;
/// Rows of a piece: 256 KiB.
const PIECE: u64 = (256 << 10) / ROW;

fn counted(ranks: u32) -> Vec<Vec<ScalingFigures>> {
    let file = File::new(env!("CARGO_MANIFEST_DIR")).join("../configs/cpu.toml");
    let config = Config::load(&file).unwrap();
    let task = ScalingTask { steps: 2, ..ScalingTask::new(ranks) };
    assert_eq!((task.sizes.hidden, task.sizes.topk), (1024, 4));
    in_threads(ranks, &config, |world| measure(world, &config, &task).unwrap()).unwrap()
}

#[test]
fn commands_grow_with_ranks_alone_and_bytes_with_pairs_alone() {
    tokenyard_bench::link();
    for ranks in RANKS {
        let r = u64::from(ranks);
        for (rank, all) in counted(ranks).iter().enumerate() {
            for found in all {
                let at = format!("rank {rank} of {ranks}: {found:?}");
                println!("{at}");
                assert_eq!(found.counted, found.predicted, "{at}");
                // Two records of 64 bytes and 4 per local expert, and one without experts, per peer.
                // "Done" to each peer ends each of the two operations.
                let fixed = 3 * r + 2 * r;
                let records = r * (3 * 64 + 2 * 4 * 4);
                let sizes = Sizes { tokens: found.tokens, ..ScalingTask::new(ranks).sizes };
                let mut sends = Workload::new(&sizes, rank as u32, ranks).sends().to_vec();
                let own = sends.remove(rank);
                let (sent, received) = (found.pairs_sent - own, found.pairs_received - own);
                let (commands, bytes) = match found.path {
                    // Rows in pieces and three more arrays to each other rank, one array back to it,
                    // and "rows are there" to this rank itself.
                    Path::Put => (
                        fixed + sends.iter().map(|n| n.div_ceil(PIECE) + 3 + 1).sum::<u64>() + 1,
                        records + sent * (ROW + SIDE) + received * ROW,
                    ),
                    // "Rows are there" to each peer; the rows themselves need no command.
                    Path::LoadStore => (fixed + r, records),
                };
                assert_eq!(found.counted.commands(), commands, "{at}");
                assert_eq!(found.counted.bytes, bytes, "{at}");
            }
            for path in [Path::Put, Path::LoadStore] {
                let of: Vec<_> = all.iter().filter(|found| found.path == path).collect();
                let [one, two, four] = of[..] else { panic!("found {} sizes", of.len()) };
                assert_eq!((two.tokens, four.tokens), (2 * one.tokens, 4 * one.tokens));
                assert!(one.pairs_sent < two.pairs_sent && two.pairs_sent < four.pairs_sent);
            }
        }
    }
}
