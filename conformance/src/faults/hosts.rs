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
            for (rank, suffix) in [(1, ""), (0, "/rank_0")] {
                list.push(what.at(phase, Victim { rank, ranks: 3, hosts: 3 }, suffix));
            }
        }
    }
    for what in &KINDS[1..] {
        list.push(what.at(Phase::DispatchReceive, SECOND_OF_TWO, "/two_by_two"));
    }
    for what in KINDS {
        // The same hosts as domains: rows are handed on inside of them.
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

/// What happens to a host.
#[derive(Clone, Copy)]
struct HostFault {
    /// In the fault's name.
    word: &'static str,
    kind: Kind,
    /// In words.
    what: &'static str,
}

/// To whom it happens.
#[derive(Clone, Copy)]
struct Victim {
    rank: u32,
    /// As many ranks as this are there.
    ranks: u32,
    /// On as many hosts as this.
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
