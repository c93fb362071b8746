use anyhow::{Result, bail, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};

use super::{close, expect_error, in_every_layout, l2, open_with, small};
use crate::moe::exchange;
use crate::moe::oracle::{Case, Layout, Routing, Tokens};
use crate::moe::round::Round;
use crate::suite::{Outcome, Rank, Test};

pub(super) fn tests() -> Vec<Test> {
    let arena: [(&str, &str, Holders); 2] = [
        ("arena_full", "outputs held on all ranks fill the arena: an error that names them", All),
        ("arena_full_on_one_rank", "outputs held on one rank: all ranks learn which", LastRank),
    ];
    let mut tests: Vec<Test> = arena
        .into_iter()
        .map(|(name, about, holders)| l2(name, about, 2, move |rank| arena_full(rank, holders)))
        .collect();
    let about = "no free handle is an error on all ranks, and the communicator goes on";
    tests.extend(in_every_layout("handles_taken", about, 2, handles_taken));
    let about = "no free handle on one rank is an error on all ranks, and the communicator goes on";
    tests.extend(in_every_layout("handles_taken_on_one_rank", about, 3, handles_taken_on_one));
    tests
}

/// Ranks that hold outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holders {
    All,
    LastRank,
}
use Holders::{All, LastRank};

/// More worst-case outputs than any sensible arena has room for.
const MOST_OUTPUTS: u64 = 64;

fn arena_full(rank: &Rank<'_>, holders: Holders) -> Result<Outcome> {
    let base = Case {
        hidden: 1024,
        max_tokens: 64,
        tokens: Tokens::Full,
        routing: Routing::Uniform,
        worst_case: true,
        ..small(rank, Layout::Packed)
    };
    let options = CommunicatorOptions { handles: MOST_OUTPUTS as u32, ..exchange::options(&base) };
    let mut comm = open_with(rank, options)?;
    let (me, last) = (comm.rank(), rank.world.ranks() - 1);
    let round = Round::new(&base, me);
    let holds = holders == All || me == last;
    let mut held = Vec::new();
    for turn in 0..MOST_OUTPUTS {
        let dispatched = comm.dispatch(&round.tensors.dispatch_on(&comm)?);
        let error = match dispatched {
            Ok(output) if holds => {
                held.push(output);
                continue;
            }
            Ok(_) => continue,
            Err(error) => error,
        };
        if turn == 0 {
            bail!("the first output does not fit an empty arena: {error}");
        }
        // The rank's own error may be in other words than those that the others receive.
        let named = error.rank();
        expect_error::<()>(Err(error), &[ErrorKind::Full], &["dispatch 0"])?;
        if holders == LastRank {
            ensure!(named == Some(last), "found rank {named:?} in the error; expected rank {last}");
        }
        held.clear();
        round.run(&mut comm)?;
        return close(vec![comm]);
    }
    close(vec![comm])?;
    Ok(Outcome::NotSupported(format!("the arena holds {MOST_OUTPUTS} worst-case outputs")))
}

/// A case of which many outputs fit the arena.
fn tiny(rank: &Rank<'_>, layout: Layout) -> Case {
    let case = small(rank, layout);
    Case { tokens: Tokens::Exactly(vec![1; case.ranks]), ..case }
}

fn handles_taken(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = tiny(rank, layout);
    let mut comm = open_with(rank, CommunicatorOptions { handles: 2, ..exchange::options(&base) })?;
    let round = Round::new(&base, comm.rank());
    let live = [round.dispatch(&mut comm)?, round.dispatch(&mut comm)?];
    for _ in 0..3 {
        let third = comm.dispatch(&round.tensors.dispatch_on(&comm)?);
        expect_error(third, &[ErrorKind::Full], &["all 2 handles"])?;
    }
    for live in live {
        round.finish(&mut comm, &live)?;
    }
    round.run(&mut comm)?;
    Ok(vec![comm])
}

fn handles_taken_on_one(rank: &Rank<'_>, layout: Layout) -> Result<Vec<Communicator>> {
    let base = tiny(rank, layout);
    let mut comm = open_with(rank, CommunicatorOptions { handles: 2, ..exchange::options(&base) })?;
    let round = Round::new(&base, comm.rank());
    let mut live = vec![round.dispatch(&mut comm)?, round.dispatch(&mut comm)?];
    if comm.rank() == 1 {
        let third = comm.dispatch(&round.tensors.dispatch_on(&comm)?);
        expect_error(third, &[ErrorKind::Full], &["all 2 handles"])?;
    } else {
        live.clear();
        let third = comm.dispatch(&round.tensors.dispatch_on(&comm)?);
        let kinds = [ErrorKind::Refused, ErrorKind::Full];
        expect_error(third, &kinds, &["rank 1", "all 2 handles"])?;
    }
    drop(live);
    round.run(&mut comm)?;
    Ok(vec![comm])
}
