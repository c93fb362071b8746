//! What can happen to one of several hosts.

use std::time::Duration;

use super::{Fault, Kind, Phase};
use crate::pace::Pace;

/// Hosts answer slower than threads, and a cut is found by silence alone.
pub(super) const DEADLINE: Duration = Duration::from_millis(2000);
/// What an error may take beyond the deadline.
pub(super) const GRACE: Duration = Duration::from_millis(2000);

/// All faults on several hosts. They need the right to make network namespaces.
pub fn on_hosts() -> Vec<Fault> {
    let mut list = Vec::new();
    let kinds = [
        ("killed", Kind::Killed, "a rank is killed"),
        ("frozen", Kind::Frozen, "a host is frozen"),
        ("cut", Kind::Cut, "a host is cut off"),
    ];
    for (word, kind, about) in kinds {
        for phase in Phase::ALL {
            for (victim, suffix) in [(1, ""), (0, "/rank_0")] {
                list.push(fault((word, kind, about), phase, (3, 3, victim), suffix));
            }
        }
    }
    for kind in &kinds[1..] {
        // The second host of two with two ranks each.
        list.push(fault(*kind, Phase::DispatchReceive, (4, 2, 2), "/two_by_two"));
    }
    list
}

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
