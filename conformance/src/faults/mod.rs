//! L3: ranks that are killed, stopped, gone or misled, at every phase.
//!
//! Each fault is played by processes of their own: all ranks follow one script (`script`), and one
//! of them, the victim, does its worst at its phase. Every other rank must get an error within the
//! deadline and a second more, which names the victim and what was waited for, and then end; and
//! nothing may be left behind. The launcher measures and judges (`judge`).

mod hosts;
mod judge;
mod lies;
mod links;
mod script;

use std::ops::Range;
use std::time::Duration;

pub use hosts::on_hosts;
pub use judge::{Seen, judge};
use lies::LIES;
pub use lies::Lie;
pub use links::{CutLink, on_links};
pub use script::Word;

use crate::pace::Pace;

/// The deadline that faults are played with on one machine.
const DEADLINE: Duration = Duration::from_millis(1000);
/// What an error may take beyond that deadline.
const GRACE: Duration = Duration::from_millis(1000);

/// Where in the script the victim does its worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before it joins the world.
    Bootstrap,
    /// Between joining and opening the communicator.
    Connect,
    /// Before a dispatch, after a whole exchange.
    Between,
    /// Before it sends a dispatch; alike for the next ones.
    DispatchSend,
    /// After it sent a dispatch, before it receives it.
    DispatchReceive,
    /// Before it sends a combine.
    CombineSend,
    /// After it sent a combine, before it receives it.
    CombineReceive,
}

impl Phase {
    const ALL: [Self; 7] = [
        Self::Bootstrap,
        Self::Connect,
        Self::Between,
        Self::DispatchSend,
        Self::DispatchReceive,
        Self::CombineSend,
        Self::CombineReceive,
    ];

    /// The word in names and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bootstrap => "bootstrap",
            Self::Connect => "connect",
            Self::Between => "between_operations",
            Self::DispatchSend => "dispatch_send",
            Self::DispatchReceive => "dispatch_receive",
            Self::CombineSend => "combine_send",
            Self::CombineReceive => "combine_receive",
        }
    }
}

/// What the victim does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is killed (SIGKILL).
    Killed,
    /// It is stopped (SIGSTOP).
    Stopped,
    /// It closes its communicator, and says goodbye.
    Leaves,
    /// It brings something else than the others.
    Lies(Lie),
    /// All processes of its host are stopped.
    Frozen,
    /// Its host is cut off from the others.
    Cut,
    /// The network that carries rows loses all from and to its host; the one where ranks meet lives.
    DataCut,
    /// The link of its RDMA device is down; the network where ranks meet lives.
    LinkDown,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Unique and stable, for example `l3/killed/dispatch_receive`.
    pub name: String,
    /// One line for people: what must hold.
    pub about: String,
    /// How many ranks play.
    pub ranks: u32,
    /// Which of them is the victim.
    pub victim: u32,
    /// When.
    pub phase: Phase,
    /// What.
    pub kind: Kind,
    /// How many hosts the ranks are on, the same number on each; nothing: all on this machine.
    pub hosts: Option<u32>,
    /// Domains that the config splits the ranks into.
    pub domains: u32,
    /// On what machine it is played.
    pub pace: Pace,
}

impl Fault {
    /// The same on a slower machine.
    #[must_use]
    pub fn at(self, pace: Pace) -> Self {
        Self { pace, ..self }
    }

    /// The same in a world of at most `ranks` ranks: two are enough for a victim and one that must end, in one
    /// domain. A fault that this does not fit is left as it is.
    #[must_use]
    pub fn within(self, ranks: u32) -> Self {
        let fits = self.domains == 1 && self.hosts.is_none() && ranks > self.victim.max(1);
        Self { ranks: if fits { self.ranks.min(ranks) } else { self.ranks }, ..self }
    }

    /// The deadline that it is played with.
    pub fn deadline(&self) -> Duration {
        self.pace.stretch(if self.hosts.is_some() { hosts::DEADLINE } else { DEADLINE })
    }

    /// What an error may take beyond the deadline.
    pub fn grace(&self) -> Duration {
        self.pace.stretch(if self.hosts.is_some() { hosts::GRACE } else { GRACE })
    }

    /// The host of the victim.
    pub fn host(&self) -> u32 {
        self.victim / self.ranks_per_host()
    }

    /// The ranks that it befalls: the victim, and all of its host where the host is the victim.
    pub fn victims(&self) -> Range<u32> {
        match self.kind {
            Kind::Frozen | Kind::Cut | Kind::DataCut => {
                let first = self.host() * self.ranks_per_host();
                first..first + self.ranks_per_host()
            }
            _ => self.victim..self.victim + 1,
        }
    }

    fn ranks_per_host(&self) -> u32 {
        self.ranks / self.hosts.unwrap_or(1)
    }

    /// The fault of this name, here, among domains, on hosts or on links.
    pub fn find(name: &str) -> Option<Self> {
        let domains = name.rsplit_once("/d").and_then(|(_, domains)| domains.parse().ok());
        list(domains.unwrap_or(1))
            .into_iter()
            .chain(on_hosts())
            .chain(on_links())
            .find(|fault| fault.name == name)
    }
}

const KINDS: [(&str, Kind, &str); 3] = [
    ("killed", Kind::Killed, "a rank is killed"),
    ("stopped", Kind::Stopped, "a rank is stopped"),
    ("leaves", Kind::Leaves, "a rank leaves early"),
];

/// All faults on one machine, in a world of so many domains.
pub fn list(domains: u32) -> Vec<Fault> {
    if domains > 1 {
        return among_domains(domains);
    }
    let mut list = Vec::new();
    for (word, kind, about) in KINDS {
        for phase in Phase::ALL {
            // Rank 0 is the one that the others meet at.
            for (victim, suffix) in [(1, ""), (0, "/rank_0")] {
                list.push(Fault {
                    name: format!("l3/{word}/{}{suffix}", phase.name()),
                    about: format!("{about}: the others end in time and say which and where"),
                    ranks: 3,
                    victim,
                    phase,
                    kind,
                    hosts: None,
                    domains: 1,
                    pace: Pace::USUAL,
                });
            }
        }
    }
    for (name, lie) in LIES {
        list.push(Fault {
            name: format!("l3/misled/{name}"),
            about: "a rank brings something else: all ranks end and say what differs".to_owned(),
            ranks: 3,
            victim: 1,
            phase: lie.phase(),
            kind: Kind::Lies(lie),
            hosts: None,
            domains: 1,
            pace: Pace::USUAL,
        });
    }
    list
}

/// What is other where rows are handed on: every phase of an exchange, and ranks out of step. The
/// victim is also the forwarder of a rank in another domain.
fn among_domains(domains: u32) -> Vec<Fault> {
    let exchange = Phase::ALL.into_iter().skip_while(|phase| *phase != Phase::Between);
    let lost = exchange.flat_map(|phase| {
        KINDS.map(|(word, kind, about)| Fault {
            name: format!("l3/{word}/{}/d{domains}", phase.name()),
            about: format!("{about}: the others end in time and say which and where"),
            ranks: 2 * domains,
            victim: 1,
            phase,
            kind,
            hosts: None,
            domains,
            pace: Pace::USUAL,
        })
    });
    let lies = LIES.into_iter().filter(|(_, lie)| lie.phase() == Phase::DispatchSend);
    let misled = lies.map(|(name, lie)| Fault {
        name: format!("l3/misled/{name}/d{domains}"),
        about: "a rank is out of step: all ranks end and say what differs".to_owned(),
        ranks: 2 * domains,
        victim: 1,
        phase: lie.phase(),
        kind: Kind::Lies(lie),
        hosts: None,
        domains,
        pace: Pace::USUAL,
    });
    lost.chain(misled).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_in_one_domain_takes_two_ranks_where_there_are_no_more() {
        for fault in list(1) {
            let two = fault.clone().within(2);
            assert_eq!((two.ranks, two.name.as_str()), (2, fault.name.as_str()));
            assert!(two.victim < two.ranks, "{}", two.name);
            assert_eq!(fault.clone().within(8), fault, "no more than it has");
            assert_eq!(fault.clone().within(1), fault, "one rank has nobody to lose");
        }
        for fault in list(2).into_iter().chain(on_hosts()) {
            assert_eq!(fault.clone().within(2), fault);
        }
    }
}
