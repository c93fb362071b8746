//! What can happen to one of several hosts.

use std::time::Duration;

use super::{Fault, Kind, Phase};
use crate::pace::Pace;

/// Hosts answer slower than threads, and a cut is found by silence alone.
pub(super) const DEADLINE: Duration = Duration::from_millis(2000);
/// What an error may take beyond the deadline: a second, and what a busy machine takes to run the
/// ranks of several hosts.
pub(super) const GRACE: Duration = Duration::from_millis(3000);

/// All faults on several hosts. They need the right to make network namespaces.
pub fn on_hosts() -> Vec<Fault> {
    let mut list = Vec::new();
    for what in KINDS {
        for phase in Phase::ALL {
            for (victim, suffix) in [(1, ""), (0, "/rank_0")] {
                list.push(fault(what, phase, (3, 3, victim), suffix));
            }
        }
    }
    for what in &KINDS[1..] {
        // The second host of two with two ranks each.
        list.push(fault(*what, Phase::DispatchReceive, (4, 2, 2), "/two_by_two"));
    }
    for what in KINDS {
        // The same hosts as domains: rows are handed on inside of them.
        for phase in
            [Phase::Connect, Phase::DispatchSend, Phase::DispatchReceive, Phase::CombineReceive]
        {
            let fault = fault(what, phase, (4, 2, 2), "/two_by_two/d2");
            list.push(Fault { domains: 2, ..fault });
        }
    }
    list
}

const KINDS: [(&str, Kind, &str); 4] = [
    ("killed", Kind::Killed, "a rank is killed"),
    ("frozen", Kind::Frozen, "a host is frozen"),
    ("cut", Kind::Cut, "a host is cut off"),
    ("data_cut", Kind::DataCut, "a host is cut off from the network of the rows alone"),
];

fn fault(
    (word, kind, about): (&str, Kind, &str),
    phase: Phase,
    (ranks, hosts, victim): (u32, u32, u32),
    suffix: &str,
) -> Fault {
    Fault {
        name: format!("l3/hosts/{word}/{}{suffix}", phase.name()),
        about: format!("{about}: all that still run end in time and say which and where"),
        ranks,
        victim,
        phase,
        kind,
        hosts: Some(hosts),
        domains: 1,
        pace: Pace::USUAL,
    }
}
