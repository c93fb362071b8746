//! L0: the contract of a transport, command by command, without a kernel set.
//!
//! Each case opens the config's transport itself, on a rig with windows of its own, and uses
//! it exactly as core promises to: one thread per queue, one writing (peer, queue) per signal, ranges
//! inside the windows. What a transport did not declare is [`Outcome::NotSupported`].
//!
//! A case that fails on one rank ends that rank's part in the world, so that the others do not wait
//! for their deadline: after a failure the world is of no more use.

mod bring_up;
mod completion;
mod delivery;
mod direct;
mod errors;
mod memory;
mod places;
mod rig;
mod signals;

use anyhow::Result;
use tokenyard_core::abi;
use tokenyard_core::config::Config;
use tokenyard_core::transport::Capabilities;

use crate::suite::{Level, Outcome, Rank, Test};
use rig::{Needs, Rig};

/// One behaviour.
#[derive(Clone, Copy)]
struct TransportCase {
    name: &'static str,
    about: &'static str,
    /// World sizes that it runs on.
    ranks: &'static [u32],
    /// Capabilities that it needs: bits `TY_CAP_*`.
    flags: u64,
    needs: Needs,
    body: Body,
}

/// What each rank runs.
#[derive(Clone, Copy)]
enum Body {
    /// On connected ranks.
    Connected(fn(&mut Rig<'_>) -> Result<()>),
    /// On connected ranks, and leaves a transport that is not healthy.
    Breaking(fn(&mut Rig<'_>) -> Result<()>),
    /// Does the bring-up itself.
    Alone(fn(&Rank<'_>, &Needs) -> Result<()>),
}

const CASES: &[&[TransportCase]] = &[
    delivery::CASES,
    places::CASES,
    signals::CASES,
    completion::CASES,
    errors::CASES,
    direct::CASES,
    bring_up::CASES,
];

/// The tests of level L0. What `capabilities` lack makes a test that says so and does nothing.
pub fn tests(capabilities: &Capabilities) -> Vec<Test> {
    let with_ranks = |case: &'static TransportCase| {
        case.ranks.iter().map(move |ranks| test(case, *ranks, capabilities))
    };
    CASES.iter().copied().flatten().flat_map(with_ranks).collect()
}

/// What the transport declares that would carry the rows of `config` on this node.
///
/// # Errors
/// A plugin that cannot be loaded, an unknown transport, or one that cannot run here.
pub fn probe(config: &Config) -> Result<Capabilities> {
    let (component, choice) = rig::choose(config)?;
    Ok(component.probe(&choice.table)?)
}

fn test(case: &'static TransportCase, ranks: u32, capabilities: &Capabilities) -> Test {
    let lack = lack(case, ranks, capabilities);
    Test {
        name: format!("l0/{}/r{ranks}", case.name),
        level: Level::L0,
        ranks,
        about: case.about.to_owned(),
        body: Box::new(move |rank| match &lack {
            Some(lack) => Ok(Outcome::NotSupported(lack.clone())),
            None => run(case, rank).map(|()| Outcome::Pass),
        }),
    }
}

/// What a case needs and the transport did not declare.
fn lack(case: &TransportCase, ranks: u32, capabilities: &Capabilities) -> Option<String> {
    let names = [(abi::TY_CAP_GET, "TY_CAP_GET"), (abi::TY_CAP_LOAD_STORE, "TY_CAP_LOAD_STORE")];
    let missing = case.flags & !capabilities.flags;
    if let Some((_, name)) = names.iter().find(|(flag, _)| missing & flag != 0) {
        return Some((*name).to_owned());
    }
    if capabilities.memory_kinds & abi::TY_MEMORY_HOST == 0 {
        return Some("TY_MEMORY_HOST: the cases read and write host memory".to_owned());
    }
    case.needs.lack(ranks, capabilities)
}

fn run(case: &TransportCase, rank: &Rank<'_>) -> Result<()> {
    let connected = |body: fn(&mut Rig<'_>) -> Result<()>, healthy| {
        let mut rig = Rig::bring_up(rank, &case.needs)?;
        body(&mut rig)?;
        rig.end(healthy)
    };
    let result = match case.body {
        Body::Connected(body) => connected(body, true),
        Body::Breaking(body) => connected(body, false),
        Body::Alone(body) => body(rank, &case.needs),
    };
    if let Err(error) = &result {
        rank.world.report_failure(&format!("{error:#}"));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::transport::NO_CAPABILITIES;

    fn capable() -> Capabilities {
        Capabilities {
            flags: abi::TY_CAP_GET | abi::TY_CAP_LOAD_STORE,
            memory_kinds: abi::TY_MEMORY_HOST,
            max_peers: 8,
            max_queues: 2,
            max_signals: 1024,
            max_queue_depth: 64,
            max_windows: 4,
            largest_put: 1 << 20,
            ..NO_CAPABILITIES
        }
    }

    fn lacks(capabilities: &Capabilities) -> Vec<String> {
        let cases = CASES.iter().copied().flatten();
        cases.filter_map(|case| lack(case, case.ranks[0], capabilities)).collect()
    }

    #[test]
    fn names_are_unique_whatever_is_declared() {
        let mut names: Vec<_> = tests(&NO_CAPABILITIES).into_iter().map(|t| t.name).collect();
        assert_eq!(names.len(), tests(&capable()).len(), "no test is silently left out");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), tests(&capable()).len());
    }

    #[test]
    fn what_is_not_declared_is_named() {
        assert_eq!(lacks(&capable()), Vec::<String>::new());
        let no_get = Capabilities { flags: abi::TY_CAP_LOAD_STORE, ..capable() };
        assert_eq!(lacks(&no_get), ["TY_CAP_GET"]);
        let one_queue = Capabilities { max_queues: 1, ..capable() };
        assert_eq!(lacks(&one_queue), ["max_queues is 1; the case needs 2"]);
        let shallow = Capabilities { max_queue_depth: 2, ..capable() };
        assert_eq!(lacks(&shallow), Vec::<String>::new(), "any depth will do");
        let device = Capabilities { memory_kinds: abi::TY_MEMORY_CUDA, ..capable() };
        assert!(lacks(&device).iter().all(|lack| lack.contains("TY_MEMORY_HOST")));
    }
}
