//! The bits of results do not depend on the number of threads, on the path of rows, nor on the time of
//! their arrival.

// Helpers of tests may panic as tests may.
#![allow(clippy::unwrap_used)]

use tokenyard_conformance::moe::exchange;
use tokenyard_conformance::moe::oracle::{
    Case, Combine, Input, Layout, RowType, Scales, Sums, Tokens,
};
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::Config;

const RANKS: usize = 3;

/// Splits the ranks.
fn split(domains: usize) -> String {
    format!(
        "[transport.scale_out]\nuse = \"shm\"\n[transport.scale_out.shm]\nload_store = false\n\
         [topology]\ndomains = {domains}\n"
    )
}

const STORES: &str = "use = \"shm\"";
const PUTS: &str = "use = \"shm\"\nshm.load_store = false";

/// The bytes that every rank received, and those that it got back.
fn bits(case: &Case, threads: u32, transport: &str) -> Vec<[Vec<u8>; 2]> {
    let more = if case.domains > 1 { split(case.domains) } else { String::new() };
    let text = format!(
        "[world]\ndeadline_ms = 30000\nlate_ms = 60000\n\
         [kernels]\nuse = \"cpu\"\n[kernels.cpu]\nthreads = {threads}\n\
         [transport.scale_up]\n{transport}\n{more}"
    );
    let config = Config::parse(&text, "same_bits").unwrap();
    let results = in_threads(case.ranks as u32, &config, |world| -> anyhow::Result<_> {
        let mut comm = Communicator::open(world, &config, exchange::options(case))?;
        let round = Round::new(case, comm.rank());
        let live = round.dispatch(&mut comm)?;
        // Rows of the packed layout that hold no token are unspecified; there only the sums are compared.
        let packed = case.layout == Layout::Packed;
        let arrived = if packed { &[][..] } else { live.received.x().bytes() }.to_vec();
        let got = round.finish(&mut comm, &live)?;
        comm.close()?;
        Ok([arrived, got.x.bytes().to_vec()])
    });
    results.unwrap().into_iter().collect::<anyhow::Result<_>>().unwrap()
}

fn case(ranks: usize, domains: usize, layout: Layout) -> Case {
    Case {
        ranks,
        domains,
        experts: 4 * ranks,
        topk: 4,
        hidden: 1040,
        max_tokens: 48,
        tokens: Tokens::Ragged,
        input: Input::Cast(RowType::Bf16, Scales::F32),
        combine: Combine {
            row: RowType::Bf16,
            biases: 2,
            weighted: !layout.has_a_row_per_token(),
            sums: Sums::ByRank,
        },
        layout,
        ..Case::default()
    }
}

const LAYOUTS: [Layout; 4] = [
    Layout::Flat,
    Layout::ExpertMajor { alignment: 8, zero_padding: true },
    Layout::Packed,
    Layout::RankMajor { zero_padding: true },
];

/// Sums of several domains are rounded once more, so only what arrives is compared with one domain.
#[test]
fn domains_bring_the_same_rows_as_one_domain_with_any_number_of_threads() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    for layout in LAYOUTS {
        let direct = bits(&case(4, 1, layout), 1, STORES);
        let first = bits(&case(4, 2, layout), 1, STORES);
        for (rank, (direct, split)) in direct.iter().zip(&first).enumerate() {
            assert!(direct[0] == split[0], "{layout}: rank {rank} received other bytes");
        }
        for (threads, transport) in [(4, STORES), (1, PUTS), (4, PUTS)] {
            let now = bits(&case(4, 2, layout), threads, transport);
            assert!(now == first, "{layout}: {threads} threads, {transport}");
        }
    }
}

#[test]
fn every_number_of_threads_row_path_and_bad_day_gives_the_same_bits() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let faulty: Vec<_> = (1..=8)
        .map(|seed| format!("use = \"faulty\"\nfaulty = {{ inner = \"shm\", seed = {seed} }}"))
        .collect();
    for layout in LAYOUTS {
        let case = case(RANKS, 1, layout);
        let first = bits(&case, 1, STORES);
        let ways = [(4, STORES), (1, PUTS), (4, PUTS)].into_iter();
        for (threads, transport) in ways.chain(faulty.iter().map(|text| (1, text.as_str()))) {
            let now = bits(&case, threads, transport);
            assert!(now == first, "{case}: {threads} threads, {transport}");
        }
    }
}

/// A row of 16 KiB: a piece of the rows that are put has 16 of them per thread.
#[test]
fn rows_that_are_put_in_several_pieces_arrive_and_come_back_as_those_that_are_stored() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    tokenyard_faulty::link();
    let faulty = "use = \"faulty\"\nfaulty = { inner = \"shm\", seed = 5 }";
    for layout in LAYOUTS {
        let large = |ranks, domains| Case {
            hidden: 8192,
            max_tokens: 100,
            input: Input::Plain(RowType::Bf16),
            ..case(ranks, domains, layout)
        };
        let first = bits(&large(RANKS, 1), 1, STORES);
        for (threads, transport) in [(1, PUTS), (3, PUTS), (1, faulty)] {
            let now = bits(&large(RANKS, 1), threads, transport);
            assert!(now == first, "{layout}: {threads} threads, {transport}");
        }
        let split = bits(&large(4, 2), 1, STORES);
        assert!(bits(&large(4, 2), 3, PUTS) == split, "{layout}: two domains");
    }
}
