//! Communicators of one session: one bring-up, and nothing else in common.

use anyhow::Result;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::ops::SessionOptions;

use super::chains::{beside, interleaved, two_cases};
use super::{LAYOUTS, close, lacked_by, small};
use crate::moe::exchange;
use crate::moe::oracle::{Case, Layout};
use crate::ops::end::is_lack;
use crate::suite::{Level, Outcome, Rank, Test};

pub(super) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = LAYOUTS
        .into_iter()
        .map(|(word, layout)| {
            let about = "two communicators of one session, operations mixed";
            shared(&format!("interleaved/{word}"), about, layout, |rank, layout| {
                let cases = two_cases(rank, layout);
                let work = |comms: Vec<Communicator>| {
                    let mut each = comms.into_iter().zip(cases.clone());
                    match (each.next(), each.next()) {
                        (Some(one), Some(two)) => interleaved([one, two]),
                        _ => anyhow::bail!("found fewer communicators than were asked for"),
                    }
                };
                in_one_session(rank, &cases, layout, work)
            })
        })
        .collect();
    let about = "two communicators of one session, one thread each";
    tests.push(shared("two_threads/flat", about, Layout::Flat, |rank, layout| {
        let base = small(rank, layout);
        in_one_session(rank, &[base.clone(), base.clone()], layout, |comms| beside(comms, &base))
    }));
    tests
}

type Body = fn(&Rank<'_>, Layout) -> Result<Outcome>;

fn shared(name: &str, about: &str, layout: Layout, body: Body) -> Test {
    Test {
        name: format!("l2/shared_session/{name}"),
        level: Level::L2,
        ranks: 2,
        about: about.to_owned(),
        in_processes: false,
        lacks: None,
        body: Box::new(move |rank| body(rank, layout)),
    }
}

/// Opens communicators for `cases` in one session, does this work, and closes them.
fn in_one_session(
    rank: &Rank<'_>,
    cases: &[Case],
    layout: Layout,
    work: impl FnOnce(Vec<Communicator>) -> Result<Vec<Communicator>>,
) -> Result<Outcome> {
    let communicators = cases.iter().map(exchange::options).collect();
    let session = SessionOptions { communicators, ..SessionOptions::default() };
    let comms = match session.open(rank.world, rank.config) {
        Ok(users) => users.communicators,
        Err(error) if is_lack(&error) => return Ok(Outcome::NotSupported(error.detail())),
        Err(error) => return Err(error.into()),
    };
    let lacked = comms.first().and_then(|comm| lacked_by(comm, layout));
    match lacked {
        Some(form) => {
            close(comms)?;
            Ok(Outcome::NotSupported(form.to_string()))
        }
        None => close(work(comms)?),
    }
}
