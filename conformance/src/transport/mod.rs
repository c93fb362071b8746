//! L0: the contract of a transport, command by command, without a kernel set.
//!
//! Each case opens the config's transport itself, on a rig with its own windows. It uses the transport
//! exactly as core promises: one thread per queue, one writing (peer, queue) per signal, ranges inside the
//! windows. A case whose capability the transport did not declare is [`Outcome::NotSupported`].
//!
//! A case that fails on one rank ends that rank's part in the world, so that the others do not wait for their
//! deadline. After a failure the world is not used again.
//!
//! `docs/plugin-contract.md` names the case of each clause. Watched by the tests in these files, and in
//! `conformance/tests` by `mutants`, `lost_peers` and `commit`: broken transports, each of which a case must catch.

mod bring_up;
mod clock;
mod completion;
mod delivery;
mod direct;
mod ending;
mod errors;
mod headway;
mod hot_calls;
mod instances;
mod leaks;
mod limits;
mod lost_early;
mod lost_in_post;
mod lost_peer;
mod mad_peer;
mod masking;
mod memory;
mod needs;
mod ordering;
mod patience;
mod pausing;
mod places;
mod progress;
mod queue;
mod rig;
mod shortage;
mod signals;
mod slots;
mod standing;
mod strangers;
mod structures;
mod teams;
mod under_way;
mod waits;

use anyhow::Result;
use tokenyard_core::abi;
use tokenyard_core::capabilities::FLAGS;
use tokenyard_core::config::Config;
use tokenyard_core::transport::Capabilities;

use crate::suite::{Level, Loss, Outcome, Rank, Test};
use needs::Needs;
use rig::Rig;

/// The test of one behaviour.
#[derive(Clone, Copy)]
struct TransportCase {
    name: &'static str,
    about: &'static str,
    /// The invariants that a failing transport breaks: numbers of docs/invariants.md.
    invariants: &'static str,
    /// World sizes that it runs on.
    ranks: &'static [u32],
    /// Capabilities that it needs: bits `TY_CAP_*`.
    flags: u64,
    /// Capabilities that a transport must lack for the case to apply.
    without: u64,
    needs: Needs,
    body: Body,
}

impl TransportCase {
    /// The default fields, for struct update.
    const BARE: Self = Self {
        name: "",
        about: "",
        invariants: "",
        ranks: &[],
        flags: 0,
        without: 0,
        needs: Needs::SMALL,
        body: Body::Connected(|_| Ok(())),
    };
}

/// The body that each rank runs.
#[derive(Clone, Copy)]
enum Body {
    /// A body for connected ranks.
    Connected(fn(&mut Rig<'_>) -> Result<()>),
    /// A body for connected ranks; it leaves the transport unhealthy.
    Breaking(fn(&mut Rig<'_>) -> Result<()>),
    /// It does the bring-up itself.
    Alone(fn(&Rank<'_>, &Needs) -> Result<()>),
    /// As `Alone`, and each rank needs a process of its own.
    OwnProcess(fn(&Rank<'_>, &Needs) -> Result<Outcome>),
    /// On connected ranks, of which the last ones, as many as this, are lost; it gets their numbers.
    Losing(Loss, u32, fn(&mut Rig<'_>, &[u32]) -> Result<()>),
}

const CASES: &[&[TransportCase]] = &[
    delivery::CASES,
    places::CASES,
    teams::CASES,
    signals::CASES,
    completion::CASES,
    errors::CASES,
    direct::CASES,
    limits::CASES,
    progress::CASES,
    standing::CASES,
    hot_calls::CASES,
    pausing::CASES,
    ordering::CASES,
    bring_up::CASES,
    slots::CASES,
    structures::CASES,
    strangers::CASES,
    mad_peer::CASES,
    instances::CASES,
    shortage::CASES,
    ending::CASES,
    lost_early::CASES,
    lost_peer::CASES,
    under_way::CASES,
    masking::CASES,
    lost_in_post::CASES,
];

/// The invariants that a transport breaks if the test of this name fails on it.
pub(crate) fn invariants(test: &str) -> &'static str {
    let name = test.split('/').nth(1).unwrap_or_default();
    let case = CASES.iter().copied().flatten().find(|case| case.name == name);
    case.map_or("", |case| case.invariants)
}

/// The tests of level L0. A capability that `capabilities` lack makes a test that reports so and does
/// nothing.
pub fn tests(capabilities: &Capabilities) -> Vec<Test> {
    let with_ranks = |case: &'static TransportCase| {
        case.ranks.iter().map(move |ranks| test(case, *ranks, capabilities))
    };
    CASES.iter().copied().flatten().flat_map(with_ranks).collect()
}

/// The declarations of the transport that would carry the rows of `config` on this node.
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
        lacks: lack.clone(),
        body: Box::new(move |rank| match &lack {
            Some(lack) => Ok(Outcome::NotSupported(lack.clone())),
            None => run(case, rank),
        }),
        in_processes: matches!(case.body, Body::OwnProcess(_) | Body::Losing(..)),
    }
}

/// The capability that a case needs and the transport did not declare.
fn lack(case: &TransportCase, ranks: u32, capabilities: &Capabilities) -> Option<String> {
    let named = |flags: u64| {
        let (_, name) = FLAGS.iter().find(|(flag, _)| flags & flag != 0)?;
        Some(format!("TY_CAP_{}", name.to_uppercase()))
    };
    if let Some(missing) = named(case.flags & !capabilities.flags) {
        return Some(missing);
    }
    if let Some(declared) = named(case.without & capabilities.flags) {
        return Some(format!("{declared} is declared"));
    }
    let in_host_memory = capabilities.memory_kinds & abi::TY_MEMORY_HOST != 0;
    if case.flags & abi::TY_CAP_LOAD_STORE != 0 && !in_host_memory {
        return Some("TY_MEMORY_HOST: the case stores into peers' windows by itself".to_owned());
    }
    case.needs.lack(ranks, capabilities)
}

fn run(case: &TransportCase, rank: &Rank<'_>) -> Result<Outcome> {
    let connected = |body: fn(&mut Rig<'_>) -> Result<()>, healthy| {
        let mut rig = Rig::bring_up(rank, &case.needs)?;
        body(&mut rig)?;
        rig.end(healthy).map(|()| Outcome::Pass)
    };
    let result = match case.body {
        Body::Connected(body) => connected(body, true),
        Body::Breaking(body) => connected(body, false),
        Body::Alone(body) => body(rank, &case.needs).map(|()| Outcome::Pass),
        Body::OwnProcess(body) => body(rank, &case.needs),
        Body::Losing(loss, victims, survive) => {
            lost_peer::play(rank, &case.needs, loss, victims, survive)
        }
    };
    match result {
        Err(error) if error.is::<rig::Lacking>() => Ok(Outcome::NotSupported(format!("{error:#}"))),
        Err(error) => {
            rank.world.report_failure(&format!("{error:#}"));
            Err(error)
        }
        passed => passed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::transport::NO_CAPABILITIES;

    fn capable() -> Capabilities {
        Capabilities {
            flags: abi::TY_CAP_GET
                | abi::TY_CAP_LOAD_STORE
                | abi::TY_CAP_ORDERED
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_MASKING,
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
        // Some cases are for transports that the caller must drive, or for those that move by themselves; some for
        // those that own the memory, or for the others; and one for those that do not mask losses.
        let (driven, owns) = ("TY_CAP_MANUAL_PROGRESS", "TY_CAP_OWNS_MEMORY");
        let masks = "TY_CAP_MASKING is declared";
        assert_eq!(lacks(&capable()), [masks, driven, driven, driven, driven, owns, driven]);
        let manual = capable().flags | abi::TY_CAP_MANUAL_PROGRESS | abi::TY_CAP_OWNS_MEMORY;
        let declared = Capabilities { flags: manual, ..capable() };
        let both = [driven, driven, owns, owns].map(|name| format!("{name} is declared"));
        assert_eq!(lacks(&declared)[0], masks);
        assert_eq!(lacks(&declared)[1..], both);
        let no_get = Capabilities { flags: manual & !abi::TY_CAP_GET, ..capable() };
        assert!(lacks(&no_get).contains(&"TY_CAP_GET".to_owned()));
        let one_queue = Capabilities { max_queues: 1, ..capable() };
        assert_eq!(
            lacks(&one_queue),
            [
                "max_queues is 1; the case needs 2",
                masks,
                driven,
                driven,
                driven,
                driven,
                owns,
                driven
            ]
        );
        let shallow = Capabilities { max_queue_depth: 2, max_windows: 2, ..capable() };
        let few = "max_windows is 2; the case needs 3";
        let others = [masks, driven, driven, driven, driven, owns, driven];
        assert_eq!(lacks(&shallow)[0], few, "less depth will do");
        assert_eq!(lacks(&shallow)[1..], others);
        let device = Capabilities { memory_kinds: abi::TY_MEMORY_CUDA, ..capable() };
        let stores = |lack: &&String| lack.contains("TY_MEMORY_HOST");
        assert_eq!(lacks(&device).iter().filter(stores).count(), 2, "{:?}", lacks(&device));
    }
}
