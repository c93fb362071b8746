//! The traffic among domains: each row once per (token, domain), and one row back; and the model of
//! both levels. There is one test, because counters belong to rank numbers.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use tokenyard_bench::counting::{self, Counts};
use tokenyard_bench::job::Sizes;
use tokenyard_bench::levels::{CostModel, LevelCost, RankRows, TwoLevels};
use tokenyard_bench::workload::Workload;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::config::{ComponentChoice, ComponentTable, Config};
use tokenyard_core::moe::{Layout, RowFormat};
use tokenyard_cpu::kernels::PIECE_BYTES;

const RANKS: u32 = 4;
const DOMAINS: u64 = 2;
const SIZES: Sizes = Sizes { tokens: 512, hidden: 7168, topk: 8, experts: 32 };

const ROW: u64 = 2 * SIZES.hidden as u64;
/// K ids, K weights and the source of a row.
const SIDE: u64 = 8 * SIZES.topk as u64 + 4;
const HEADER: u64 = 64;

const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 1, zero_padding: false };

/// The level whose transport counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    /// Between domains.
    Out,
    /// Inside, by loads and stores.
    Stores,
    /// Inside, by puts.
    Puts,
}

/// `configs/domains.toml`, with a transport that counts at one level.
fn config(counted: Counted) -> Config {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/domains.toml");
    let mut config = Config::load(&file).unwrap();
    let stores = counted == Counted::Stores;
    let table = ComponentTable::from_text(&format!("load_store = {stores}\n"), &config.name);
    let choice = ComponentChoice { name: counting::NAME.to_owned(), line: 0, table };
    match counted {
        Counted::Out => config.scale_out = vec![choice],
        Counted::Stores | Counted::Puts => config.scale_up = Some(choice),
    }
    config
}

/// The counts of each rank, for a dispatch and for the combine.
fn counted(layout: Layout, counted: Counted) -> Vec<[Counts; 2]> {
    let config = config(counted);
    in_threads(RANKS, &config, |world| {
        let mut comm = Communicator::open(world, &config, Workload::options(&SIZES)).unwrap();
        assert!(comm.rail_link().is_some_and(|words| words.starts_with(&config.scale_out[0].name)));
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

/// By the model, for the same routing: a dispatch and a combine of each rank.
fn modelled(layout: Layout, counted: Counted) -> Vec<[LevelCost; 2]> {
    let levels = TwoLevels {
        domains: DOMAINS as u32,
        domain_ranks: RANKS / DOMAINS as u32,
        experts: SIZES.experts,
        topk: SIZES.topk,
    };
    let routings: Vec<Vec<i64>> =
        (0..RANKS).map(|rank| Workload::new(&SIZES, rank, RANKS).topk_idx().to_vec()).collect();
    let row = RowFormat { x_bytes: ROW as u32, scale_bytes: 0, weights: true };
    let model = CostModel {
        levels,
        layout,
        row,
        back: RowFormat { weights: false, ..row },
        stores: counted != Counted::Puts,
        piece_bytes: PIECE_BYTES,
    };
    let costs = RankRows::exact(&levels, &routings).into_iter().map(|rows| {
        let operations = [model.dispatch(&rows), model.combine(&rows)];
        operations.map(|cost| if counted == Counted::Out { cost.out } else { cost.inside })
    });
    costs.collect()
}

fn expect_as_modelled(layout: Layout, level: Counted) {
    let all = counted(layout, level).into_iter().zip(modelled(layout, level));
    for (rank, (found, expected)) in all.enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            // Rows that are stored or loaded are no commands.
            let rows = if level == Counted::Stores { 0.0 } else { expected.row_bytes };
            let expected = Counts {
                puts: expected.puts as u64,
                signals: expected.signals as u64,
                bytes: (rows + expected.record_bytes) as u64,
            };
            assert_eq!(*found, expected, "{layout:?}, {level:?}, rank {rank}");
        }
    }
}

#[test]
fn a_row_crosses_once_per_domain_and_one_comes_back_and_both_levels_are_as_modelled() {
    tokenyard_bench::link();
    counting::provide();
    // Rows of this rank's tokens that select experts in the other domain.
    let pairs: Vec<u64> = (0..RANKS)
        .map(|rank| Workload::new(&SIZES, rank, RANKS).crossings(DOMAINS as u32))
        .collect();
    let ranks = u64::from(RANKS) / DOMAINS;
    for layout in [Layout::Flat, EXPERT_MAJOR] {
        for (rank, [dispatch, combine]) in counted(layout, Counted::Out).iter().enumerate() {
            let (sent, partner) = (pairs[rank], pairs[(rank + ranks as usize) % RANKS as usize]);
            // Fewer than the (token, rank) pairs that the direct algorithm would send there.
            let direct: u64 = {
                let sends = Workload::new(&SIZES, rank as u32, RANKS).sends().to_vec();
                let mine = rank / ranks as usize;
                let there = sends.iter().enumerate();
                there.filter(|(to, _)| to / ranks as usize != mine).map(|(_, rows)| rows).sum()
            };
            assert!(sent < direct && direct < 2 * sent, "rank {rank}: {sent} of {direct}");
            // An entry, and whether the domains go on: to each rank of the rail, this one included.
            let records = DOMAINS * 2 * HEADER;
            assert_eq!(dispatch.bytes, records + sent * (ROW + SIDE), "rank {rank}: {dispatch:?}");
            // The same; then one row for each that the partner sent here.
            assert_eq!(combine.bytes, records + partner * ROW, "rank {rank}: {combine:?}");
            assert!(dispatch.bytes * 100 <= sent * ROW * 102);
            assert!(combine.bytes * 100 <= partner * ROW * 102);
        }
    }
    let rank_major = Layout::RankMajor { zero_padding: false };
    for layout in [Layout::Flat, EXPERT_MAJOR, Layout::Packed, rank_major] {
        for level in [Counted::Out, Counted::Stores, Counted::Puts] {
            expect_as_modelled(layout, level);
        }
    }
}
