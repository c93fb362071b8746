use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};

use super::{Body, EXPERT_MAJOR, in_every_layout, open, open_with, small, test};
use crate::moe::exchange;
use crate::moe::oracle::rng::{Rng, Stream};
use crate::moe::oracle::{Case, Layout, Routing, Tokens};
use crate::moe::round::Round;
use crate::suite::{Rank, Test};

pub(super) fn tests() -> Vec<Test> {
    let every: [(&str, &str, u32, Body); 8] = [
        ("rounds_without_a_pause", "many exchanges, each with new data and routing", 3, rounds),
        ("one_rank_delayed_at_random", "no rank relies on the pace of another", 3, delays),
        ("live_handles_out_of_order", "several handles, combined in any order", 2, out_of_order),
        ("held_outputs_stay", "an output stays as it is while others come and go", 2, held),
        ("stale_arena", "what an output leaves in the arena never shows again", 2, stale),
        ("same_bits", "equal inputs give equal bits, in one communicator and in two", 4, same_bits),
        (
            "two_communicators_interleaved",
            "two communicators in one process, operations mixed",
            2,
            two_communicators,
        ),
        (
            "two_communicators_two_threads",
            "two communicators in one process, one thread each",
            2,
            two_threads,
        ),
    ];
    let mut tests: Vec<Test> = every
        .into_iter()
        .flat_map(|(name, about, ranks, body)| in_every_layout(name, about, ranks, body))
        .collect();
    let about = "an output may be dropped on any thread";
    tests.push(test("dropped_on_another_thread", about, EXPERT_MAJOR, 2, dropped_elsewhere));
    let about =
        "tens of MiB of rows that no arena holds are combined, as even and as uneven as may be";
    tests.push(test("many_rows_outside", about, Layout::Flat, 3, many_outside));
    tests
}

const ROUTINGS: [Routing; 6] = [
    Routing::Uniform,
    Routing::SomeNegative,
    Routing::OneExpert,
    Routing::Nothing,
    Routing::SomeNothing,
    Routing::OwnRank,
];

/// The case of round number `n`: its data, tokens and routing differ from those of the rounds next to it.
pub(super) fn nth(base: &Case, n: u64) -> Case {
    let routing = ROUTINGS[n as usize % ROUTINGS.len()];
    let tokens = if n % 5 == 3 { Tokens::OddRanksEmpty } else { Tokens::Ragged };
    Case { seed: n, routing, tokens, worst_case: n % 4 == 2, ..base.clone() }
}

fn rounds(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base)?;
    for n in 0..40 {
        Round::new(&nth(&base, n), comm.rank()).run(&mut comm).with_context(|| at(n))?;
    }
    Ok(vec![comm])
}

fn at(n: u64) -> String {
    format!("round {n}")
}

fn delays(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base)?;
    for n in 0..12 {
        let mut shared = Rng::new(n, Stream::Shared, 0);
        let late = shared.below(base.ranks) as u32 == comm.rank();
        let pause = |shared: &mut Rng| {
            let delay = Duration::from_micros(shared.below(8000) as u64);
            if late {
                std::thread::sleep(delay);
            }
        };
        let round = Round::new(&nth(&base, n), comm.rank());
        pause(&mut shared);
        let live = round.dispatch(&mut comm).with_context(|| at(n))?;
        pause(&mut shared);
        round.finish(&mut comm, &live).with_context(|| at(n))?;
    }
    Ok(vec![comm])
}

fn out_of_order(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let options = CommunicatorOptions { handles: 4, ..exchange::options(&base) };
    let mut comm = open_with(rank, options)?;
    for turn in 0..4 {
        let mut live = Vec::new();
        for n in 0..4 {
            // The outputs are small enough for four at once, whatever the size of the arena.
            let tokens = Tokens::Exactly(vec![3; base.ranks]);
            let case = Case { tokens, worst_case: false, ..nth(&base, 10 * turn + n) };
            let round = Round::new(&case, comm.rank());
            let one = round.dispatch(&mut comm).with_context(|| at(n))?;
            live.push(Some((round, one)));
        }
        for n in [2, 0, 3, 1] {
            let (round, one) = live[n].take().context("each handle is combined once")?;
            round.finish(&mut comm, &one).with_context(|| format!("turn {turn}, handle {n}"))?;
        }
    }
    Ok(vec![comm])
}

/// Sends so many rows that a backend may move them in parts. It does so more than once, so that leftovers
/// of one combine must not be taken for rows of the next.
fn many_outside(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let sizes = Case { hidden: 1024, max_tokens: 1500, ..small(rank, layout) };
    let base = Case { tokens: Tokens::Exactly(vec![1500, 1201, 1499]), ..sizes };
    let mut comm = open(rank, &base)?;
    for (n, routing) in
        [Routing::Uniform, Routing::OneExpert, Routing::Uniform].into_iter().enumerate()
    {
        let case = Case { seed: n as u64, routing, ..base.clone() };
        Round::new(&case, comm.rank()).run(&mut comm).with_context(|| at(n as u64))?;
    }
    Ok(vec![comm])
}

fn held(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = Case { tokens: Tokens::Exactly(vec![5, 4]), ..small(rank, layout) };
    let mut comm = open(rank, &base)?;
    let first = Round::new(&base, comm.rank());
    let live = first.dispatch(&mut comm)?;
    for seed in 1..12 {
        let tokens = Tokens::Exactly(vec![4, 5]);
        let case = Case { seed, tokens, ..base.clone() };
        Round::new(&case, comm.rank()).run(&mut comm).with_context(|| at(seed))?;
    }
    first.check_received(&live.received).context("held output")?;
    first.finish(&mut comm, &live).context("held output")?;
    Ok(vec![comm])
}

fn stale(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base)?;
    for n in 0..8 {
        let round = Round::new(&nth(&base, n), comm.rank());
        let mut live = round.dispatch(&mut comm).with_context(|| at(n))?;
        let buffers = round.experts(&live.received)?;
        drop(buffers);
        round.finish(&mut comm, &live).with_context(|| at(n))?;
        let bytes = live.received.x().to_vec()?.len();
        live.received.x_mut().write(&vec![0xff; bytes])?;
    }
    Ok(vec![comm])
}

fn same_bits(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comms = [open(rank, &base)?, open(rank, &base)?];
    let round = Round::new(&base, rank.world.rank());
    let mut first: Option<[Vec<u8>; 2]> = None;
    for turn in 0..6 {
        let comm = &mut comms[turn % 2];
        let live = round.dispatch(comm)?;
        let arrived = live.received.x().to_vec()?;
        let got = round.finish(comm, &live)?.x.bytes().to_vec();
        // Rows behind the counts of these layouts are unspecified.
        let is_unspecified =
            matches!(layout, Layout::Packed | Layout::RankMajor { zero_padding: false });
        let arrived = if is_unspecified { Vec::new() } else { arrived };
        let now = [arrived, got];
        if *first.get_or_insert_with(|| now.clone()) != now {
            bail!("turn {turn}: found other bits than in turn 0; expected the same");
        }
    }
    Ok(comms.into())
}

/// A small case in a layout, and another that differs in all that a communicator fixes.
pub(super) fn two_cases(rank: &Rank<'_>, layout: Layout) -> [Case; 2] {
    let first = small(rank, layout);
    let other = Case { hidden: 136, topk: 2, max_tokens: 7, layout: Layout::Flat, ..first.clone() };
    [first, other]
}

fn two_communicators(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let [small_case, other] = two_cases(rank, layout);
    let (one, two) = (open(rank, &small_case)?, open(rank, &other)?);
    interleaved([(one, small_case), (two, other)])
}

/// Exchanges of two communicators, in turns and within each other.
pub(super) fn interleaved(comms: [(Communicator, Case); 2]) -> Result<Vec<Communicator>> {
    let [(mut one, small_case), (mut two, other)] = comms;
    for n in 0..6 {
        let first = Round::new(&nth(&small_case, n), one.rank());
        let second = Round::new(&nth(&other, n + 1), two.rank());
        let dispatch = first.tensors.dispatch_on(&one)?;
        let sent = one.dispatch_send(&dispatch)?;
        let live_two =
            second.dispatch(&mut two).with_context(|| format!("second communicator, {}", at(n)))?;
        let (received, handle) = one.dispatch_recv(sent)?;
        first.check_received(&received).with_context(|| at(n))?;
        second
            .finish(&mut two, &live_two)
            .with_context(|| format!("second communicator, {}", at(n)))?;
        first
            .finish(&mut one, &crate::moe::round::Live { received, handle })
            .with_context(|| at(n))?;
    }
    Ok(vec![one, two])
}

fn two_threads(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    beside(vec![open(rank, &base)?, open(rank, &base)?], &base)
}

/// Exchanges of communicators of one case, each on a thread of its own.
pub(super) fn beside(comms: Vec<Communicator>, base: &Case) -> Result<Vec<Communicator>> {
    let work = |mut comm: Communicator, first: u64| -> Result<Communicator> {
        for n in first..first + 10 {
            Round::new(&nth(base, n), comm.rank()).run(&mut comm).with_context(|| at(n))?;
        }
        Ok(comm)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .zip([0, 100])
            .map(|(comm, first)| scope.spawn(move || work(comm, first)))
            .collect();
        let comm = |thread: std::thread::ScopedJoinHandle<'_, Result<Communicator>>| {
            let panicked = "a thread panicked; expected two exchanges beside each other";
            thread.join().unwrap_or_else(|_| Err(anyhow!(panicked)))
        };
        threads.into_iter().map(comm).collect()
    })
}

fn dropped_elsewhere(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = small(rank, layout);
    let mut comm = open(rank, &base)?;
    for n in 0..8 {
        let round = Round::new(&nth(&base, n), comm.rank());
        let live = round.dispatch(&mut comm).with_context(|| at(n))?;
        let output = exchange::run_experts(&round.case, comm.rank() as usize, &live.received)?;
        let crate::moe::round::Live { received, handle } = live;
        let dropper = std::thread::spawn(move || drop(received));
        let placed = exchange::Placed::Outside;
        let got = exchange::combine(&mut comm, &round.tensors, &handle, &output, placed)?;
        round.check_combined(&got).with_context(|| at(n))?;
        if dropper.join().is_err() {
            bail!("dropping an output panicked");
        }
    }
    Ok(vec![comm])
}
