//! The traffic between domains: each row once per (token, domain), and one row back. There is one
//! test, because counters belong to rank numbers.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use tokenyard_bench::counting::{self, Counts};
use tokenyard_bench::job::Sizes;
use tokenyard_bench::workload::Workload;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::config::Config;
use tokenyard_core::moe::Layout;

const RANKS: u32 = 4;
const DOMAINS: u64 = 2;
const SIZES: Sizes = Sizes { tokens: 512, hidden: 7168, topk: 8, experts: 32 };

const ROW: u64 = 2 * SIZES.hidden as u64;
/// K ids, K weights and the source of a row.
const SIDE: u64 = 8 * SIZES.topk as u64 + 4;
const HEADER: u64 = 64;

/// The counts of a rank on its rail, for a dispatch and for the combine.
fn counted(layout: Layout) -> Vec<[Counts; 2]> {
    // Only the transport between domains counts.
    let text = format!(
        "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n\
         [transport.scale_out]\nuse = \"{}\"\n\
         [transport.scale_out.{0}]\nload_store = false\n[topology]\ndomains = {DOMAINS}\n",
        counting::NAME
    );
    let config = Config::parse(&text, "test.toml").unwrap();
    in_threads(RANKS, &config, |world| {
        let mut comm = Communicator::open(world, &config, Workload::options(&SIZES)).unwrap();
        let mut workload = Workload::new(&SIZES, world.rank(), RANKS);
        let counts = || counting::counts(world.rank());
        let start = counts();
        let (received, handle) =
            comm.dispatch(&workload.dispatch(layout, Cast::None).unwrap()).unwrap();
        workload.check(&received).unwrap();
        let half = counts();
        comm.combine(&handle, workload.combine(&received).unwrap()).unwrap();
        [half.since(&start), counts().since(&half)]
    })
    .unwrap()
}

#[test]
fn a_row_crosses_once_per_domain_and_one_comes_back() {
    tokenyard_bench::link();
    counting::provide();
    // Rows of this rank's tokens that select experts in the other domain.
    let pairs: Vec<u64> = (0..RANKS)
        .map(|rank| Workload::new(&SIZES, rank, RANKS).crossings(DOMAINS as u32))
        .collect();
    let (ranks, experts) = (u64::from(RANKS) / DOMAINS, u64::from(SIZES.experts) / DOMAINS);
    let others = DOMAINS - 1;
    for layout in [Layout::Flat, Layout::ExpertMajor { alignment: 1, zero_padding: false }] {
        for (rank, [dispatch, combine]) in counted(layout).iter().enumerate() {
            let (sent, partner) = (pairs[rank], pairs[(rank + ranks as usize) % RANKS as usize]);
            // Fewer than the (token, rank) pairs that the direct algorithm would send there.
            let direct: u64 = {
                let sends = Workload::new(&SIZES, rank as u32, RANKS).sends().to_vec();
                let mine = rank / ranks as usize;
                let there = sends.iter().enumerate();
                there.filter(|(to, _)| to / ranks as usize != mine).map(|(_, rows)| rows).sum()
            };
            assert!(sent < direct && direct < 2 * sent, "rank {rank}: {sent} of {direct}");
            // An entry with a count per rank and expert of the domain, and a grant.
            let records = others * (HEADER + 4 * (ranks + experts) + HEADER);
            assert_eq!(dispatch.bytes, records + sent * (ROW + SIDE), "rank {rank}: {dispatch:?}");
            // An entry; then one row for each that the partner sent here.
            assert_eq!(combine.bytes, others * HEADER + partner * ROW, "rank {rank}: {combine:?}");
            assert!(dispatch.bytes * 100 <= sent * ROW * 102);
            assert!(combine.bytes * 100 <= partner * ROW * 102);
        }
    }
}
