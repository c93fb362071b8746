//! The faults of one of several hosts.

use std::time::Duration;

use super::{Fault, Kind, Phase};
use crate::pace::Pace;

/// The deadline is longer than on one machine: hosts answer slower than threads, and only silence shows a
/// cut.
pub(super) const DEADLINE: Duration = Duration::from_millis(2000);
/// The time beyond the deadline that an error may take: a second, and the time that a busy machine needs to
/// run the ranks of several hosts.
pub(super) const GRACE: Duration = Duration::from_millis(3000);

/// All faults on several hosts. They need the right to make network namespaces.
pub fn on_hosts() -> Vec<Fault> {
    let mut list = Vec::new();
    for what in KINDS {
        for phase in Phase::EXCHANGE {
            for (rank, suffix) in [(1, ""), (0, "/rank_0")] {
                list.push(what.at(phase, Victim { rank, ranks: 3, hosts: 3 }, suffix));
            }
        }
    }
    for what in &KINDS[1..] {
        list.push(what.at(Phase::DispatchReceive, SECOND_OF_TWO, "/two_by_two"));
    }
    for what in KINDS {
        // The same hosts as domains: inside a domain, ranks forward rows.
        for phase in
            [Phase::Connect, Phase::DispatchSend, Phase::DispatchReceive, Phase::CombineReceive]
        {
            let fault = what.at(phase, SECOND_OF_TWO, "/two_by_two/d2");
            list.push(Fault { domains: 2, ..fault });
        }
    }
    list
}

const KINDS: [HostFault; 4] = [
    HostFault { word: "killed", kind: Kind::Killed, what: "a rank is killed" },
    HostFault { word: "frozen", kind: Kind::Frozen, what: "a host is frozen" },
    HostFault { word: "cut", kind: Kind::Cut, what: "a host is cut off" },
    HostFault {
        word: "data_cut",
        kind: Kind::DataCut,
        what: "a host is cut off from the network of the rows alone",
    },
];

/// A fault of a host.
#[derive(Clone, Copy)]
struct HostFault {
    /// The word in the fault's name.
    word: &'static str,
    kind: Kind,
    /// The words in the fault's description.
    what: &'static str,
}

/// The rank of a fault, and the world around it.
#[derive(Clone, Copy)]
struct Victim {
    rank: u32,
    /// The number of ranks.
    ranks: u32,
    /// The number of hosts that they are on.
    hosts: u32,
}

/// The second host of two with two ranks each.
const SECOND_OF_TWO: Victim = Victim { rank: 2, ranks: 4, hosts: 2 };

impl HostFault {
    fn at(self, phase: Phase, victim: Victim, suffix: &str) -> Fault {
        let Self { word, kind, what } = self;
        let Victim { rank, ranks, hosts } = victim;
        Fault {
            name: format!("l3/hosts/{word}/{}{suffix}", phase.name()),
            about: format!("{what}: all that still run end in time and say which and where"),
            ranks,
            victim: rank,
            phase,
            kind,
            hosts: Some(hosts),
            domains: 1,
            pace: Pace::USUAL,
        }
    }
}
