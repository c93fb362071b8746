//! L2: operations that follow each other, overlap, or are refused.
//!
//! `chains`: rounds, several handles, several communicators · `shared`: several in one session · `halves`: send
//! and receive apart · `replay`: replays and backward passes · `limits`: a full resource is an error and does no
//! further harm · `bad_input`: a mistake of one rank is refused on all ranks · `streams`: calls in the order of a
//! stream · `graphs`: calls without synchronisation, captured and not · `soak`: all of these for a long time.
//!
//! Watched by `conformance/tests/{in_threads,call_forms}.rs` and `mutants`.

mod bad_input;
mod chains;
mod graphs;
mod halves;
mod limits;
mod replay;
mod shared;
mod soak;
mod streams;

use anyhow::{Context, Result, bail};
use tokenyard_core::communicator::{CallForm, Communicator, CommunicatorOptions};
use tokenyard_core::{Error, ErrorKind};

use crate::moe::exchange;
use crate::moe::oracle::{Case, Layout, Routing, Tokens};
use crate::suite::{Level, Outcome, Rank, Test};

const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: true };
const RANK_MAJOR: Layout = Layout::RankMajor { zero_padding: false };
const LAYOUTS: [(&str, Layout); 4] = [
    ("flat", Layout::Flat),
    ("expert_major", EXPERT_MAJOR),
    ("packed", Layout::Packed),
    ("rank_major", RANK_MAJOR),
];

/// The tests of this level, for a world of `domains` domains.
pub fn tests(domains: u32) -> Vec<Test> {
    let mut tests = chains::tests();
    tests.extend(shared::tests());
    tests.extend(halves::tests());
    tests.extend(replay::tests());
    tests.extend(limits::tests());
    tests.extend(bad_input::tests());
    tests.extend(streams::tests());
    tests.extend(graphs::tests());
    tests.extend(soak::tests());
    for test in &mut tests {
        test.ranks *= domains;
    }
    tests
}

/// The body that every rank of a test runs. It returns the communicators that it opened, in the same order on
/// all ranks, so that they are closed together. On a network, a communicator that is dropped early may lose
/// the last messages to a slower rank.
type Body = fn(&Rank<'_>, Layout) -> Result<Vec<Communicator>>;

/// Closes the communicators of a test that has passed on this rank.
fn close(comms: Vec<Communicator>) -> Result<Outcome> {
    for comm in comms {
        comm.close().context("close the communicator")?;
    }
    Ok(Outcome::Pass)
}

/// A test of this level.
fn l2(
    name: &str,
    about: &str,
    ranks: u32,
    body: impl Fn(&Rank<'_>) -> Result<Outcome> + Send + Sync + 'static,
) -> Test {
    Test {
        name: format!("l2/{name}"),
        level: Level::L2,
        ranks,
        about: about.to_owned(),
        in_processes: false,
        lacks: None,
        body: Box::new(body),
    }
}

/// A test that passes or fails, in one layout.
fn test(name: &str, about: &str, layout: Layout, ranks: u32, body: Body) -> Test {
    l2(name, about, ranks, move |rank| match lacked(rank, layout)? {
        Some(form) => Ok(Outcome::NotSupported(form.to_string())),
        None => close(body(rank, layout)?),
    })
}

/// The layout, if the kernel set does not take it. Collective.
fn lacked(rank: &Rank<'_>, layout: Layout) -> Result<Option<CallForm>> {
    if form_of(layout).is_none() {
        return Ok(None);
    }
    let comm = open(rank, &small(rank, layout))?;
    let form = lacked_by(&comm, layout);
    comm.close()?;
    Ok(form)
}

/// The layout, if the kernel set of a communicator does not take it.
fn lacked_by(comm: &Communicator, layout: Layout) -> Option<CallForm> {
    form_of(layout).filter(|form| !comm.takes(*form))
}

/// The form of calls in a layout that not every kernel set takes.
fn form_of(layout: Layout) -> Option<CallForm> {
    matches!(layout, Layout::RankMajor { .. }).then_some(CallForm::RankMajor)
}

/// The same test in every layout.
fn in_every_layout(name: &str, about: &str, ranks: u32, body: Body) -> Vec<Test> {
    LAYOUTS
        .into_iter()
        .map(|(word, layout)| test(&format!("{name}/{word}"), about, layout, ranks, body))
        .collect()
}

/// A small case for the world of a rank.
fn small(rank: &Rank<'_>, layout: Layout) -> Case {
    let ranks = rank.world.ranks() as usize;
    // Without scale-up one transport reaches all ranks, so it is as one domain.
    let domains = rank.config.domains.filter(|_| rank.config.scale_up.is_some());
    Case {
        ranks,
        domains: domains.unwrap_or(1) as usize,
        experts: 4 * ranks,
        topk: 3,
        hidden: 64,
        max_tokens: 12,
        layout,
        tokens: Tokens::Ragged,
        routing: Routing::SomeNegative,
        ..Case::default()
    }
}

fn open(rank: &Rank<'_>, case: &Case) -> Result<Communicator> {
    open_with(rank, exchange::options(case))
}

fn open_with(rank: &Rank<'_>, options: CommunicatorOptions) -> Result<Communicator> {
    Ok(Communicator::open(rank.world, rank.config, options)?)
}

/// Checks that an operation failed with one of these kinds, and that the error contains these words.
fn expect_error<T>(
    result: tokenyard_core::Result<T>,
    kinds: &[ErrorKind],
    parts: &[&str],
) -> Result<Error> {
    let Err(error) = result else {
        bail!("found success; expected an error that says {parts:?}");
    };
    if !kinds.contains(&error.kind()) {
        bail!("found an error of kind {:?}: {error}; expected {kinds:?}", error.kind());
    }
    let text = error.to_string();
    for part in parts {
        if !text.contains(part) {
            bail!("found the message `{text}`; expected it to say `{part}`");
        }
    }
    Ok(error)
}
