//! Many exchanges in one communicator, with every disturbance that may occur between them.

use std::time::Duration;

use anyhow::{Context, Result};
use tokenyard_core::communicator::Communicator;

use super::{LAYOUTS, chains, close, open, small};
use crate::oracle::rng::{Rng, Stream};
use crate::oracle::{Case, Layout};
use crate::round::Round;
use crate::suite::{Level, Outcome, Rank, Test};

/// The variable that sets another number of rounds than the suite's own.
const ROUNDS: &str = "TOKENYARD_SOAK_ROUNDS";

/// The suite's own number.
const USUAL: u64 = 100;

/// The longest pause of a rank.
const PAUSE_US: usize = 5000;

pub(super) fn tests() -> Vec<Test> {
    vec![Test {
        name: "l2/soak".to_owned(),
        level: Level::L2,
        ranks: 2,
        about: format!("{USUAL} rounds, or {ROUNDS}: late ranks, poisoned outputs, every layout"),
        loses_rank: false,
        body: Box::new(soak),
    }]
}

fn rounds() -> Result<u64> {
    let Ok(text) = std::env::var(ROUNDS) else { return Ok(USUAL) };
    text.parse().with_context(|| format!("{ROUNDS}: found {text}; expected a number"))
}

fn soak(rank: &Rank<'_>) -> Result<Outcome> {
    let base = small(rank, Layout::Flat);
    let mut comm = open(rank, &base)?;
    for n in 0..rounds()? {
        round(&mut comm, &base, n).with_context(|| format!("round {n}"))?;
    }
    close(vec![comm])
}

/// One round. All ranks draw the same numbers, so that they agree on which rank is late.
fn round(comm: &mut Communicator, base: &Case, n: u64) -> Result<()> {
    let mut shared = Rng::new(n, Stream::Shared, 0);
    let (_, layout) = LAYOUTS[shared.below(LAYOUTS.len())];
    let round = Round::new(&Case { layout, ..chains::nth(base, n) }, comm.rank());
    pause(comm, base, &mut shared);
    let mut live = round.dispatch(comm)?;
    pause(comm, base, &mut shared);
    // The combine reads copies, so nothing below reads the rows that are poisoned here. A row that the next
    // dispatch does not write shows.
    let mut buffers = round.experts(&live.received)?;
    let rows = live.received.x().to_vec()?.len();
    live.received.x_mut().write(&vec![0xff; rows])?;
    let got = {
        let arguments = buffers.arguments(&round.tensors, &live.handle)?;
        comm.combine(&live.handle, arguments).context("combine")?;
        buffers.into_got()?
    };
    round.check_combined(&got)
}

/// One rank is late in one of four rounds.
fn pause(comm: &Communicator, base: &Case, shared: &mut Rng) {
    let (late, turn) = (shared.below(base.ranks), shared.below(4));
    let time = Duration::from_micros(shared.below(PAUSE_US) as u64);
    if turn == 0 && late == comm.rank() as usize {
        std::thread::sleep(time);
    }
}
