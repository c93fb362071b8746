//! Communicators of one session: one bring-up, and nothing else in common.

use anyhow::{Result, anyhow};
use tokenyard_core::communicator::Communicator;
use tokenyard_core::ops::SessionOptions;

use super::chains::{beside, interleaved, two_cases};
use super::{LAYOUTS, close, l2, lacked_by, small};
use crate::moe::exchange;
use crate::moe::oracle::{Case, Layout};
use crate::ops::end::is_lack;
use crate::suite::{Outcome, Rank, Test};

pub(super) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = LAYOUTS
        .into_iter()
        .map(|(word, layout)| {
            let about = "two communicators of one session, operations mixed";
            shared(&format!("interleaved/{word}"), about, layout, |rank, layout| {
                let cases = two_cases(rank, layout);
                in_one_session(rank, cases, layout, interleaved)
            })
        })
        .collect();
    let about = "two communicators of one session, one thread each";
    tests.push(shared("two_threads/flat", about, Layout::Flat, |rank, layout| {
        let base = small(rank, layout);
        in_one_session(rank, [base.clone(), base.clone()], layout, |comms| {
            beside(comms.map(|(comm, _)| comm).into(), &base)
        })
    }));
    tests
}

type Body = fn(&Rank<'_>, Layout) -> Result<Outcome>;

fn shared(name: &str, about: &str, layout: Layout, body: Body) -> Test {
    l2(&format!("shared_session/{name}"), about, 2, move |rank| body(rank, layout))
}

/// Opens communicators for `cases` in one session, does this work, and closes them.
fn in_one_session(
    rank: &Rank<'_>,
    cases: [Case; 2],
    layout: Layout,
    work: impl FnOnce([(Communicator, Case); 2]) -> Result<Vec<Communicator>>,
) -> Result<Outcome> {
    let communicators = cases.iter().map(exchange::options).collect();
    let session = SessionOptions { communicators, ..SessionOptions::default() };
    let comms = match session.open(rank.world, rank.config) {
        Ok(users) => users.communicators,
        Err(error) if is_lack(&error) => return Ok(Outcome::NotSupported(error.detail())),
        Err(error) => return Err(error.into()),
    };
    let comms: [Communicator; 2] = comms
        .try_into()
        .map_err(|found: Vec<_>| anyhow!("found {} communicators; expected 2", found.len()))?;
    if let Some(form) = lacked_by(&comms[0], layout) {
        close(comms.into())?;
        return Ok(Outcome::NotSupported(form.to_string()));
    }
    let [one, two] = comms;
    let [first, second] = cases;
    close(work([(one, first), (two, second)])?)
}
