//! L3: ranks that are killed, stopped, closed or misled, at every phase.
//!
//! Each fault runs in processes of its own. All ranks follow one script (`script`), and one of them, the
//! victim, fails at its phase. Every other rank must get an error within the deadline plus a second. The
//! error must name the victim and the awaited event. Then the rank must end, and nothing may be left
//! behind. The launcher measures and judges (`judge`).
//!
//! Watched by the tests in these files, and `conformance/tests/{faults,domain_faults,hosts,links}.rs`.

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

use crate::ops::faults as of_operation;
use crate::ops::gather::GatherEnd;
use crate::ops::pipe::PipeEnd;
use crate::ops::reduce::ReduceEnd;
use crate::ops::table::TableEnd;
use crate::pace::Pace;

/// The deadline of faults on one machine.
const DEADLINE: Duration = Duration::from_millis(1000);
/// The time beyond that deadline that an error may take.
const GRACE: Duration = Duration::from_millis(1000);

/// The place in the script where the victim fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Before it joins the world.
    Bootstrap,
    /// Between joining and opening the communicator.
    Connect,
    /// Before a dispatch, after a whole exchange.
    Between,
    /// Before it sends a dispatch.
    DispatchSend,
    /// After it sent a dispatch, before it receives it.
    DispatchReceive,
    /// Before it sends a combine.
    CombineSend,
    /// After it sent a combine, before it receives it.
    CombineReceive,
    /// Before it sends a message through a pipe: others wait for the message.
    Message,
    /// Before it receives a message through a pipe: others wait for the credit.
    Credit,
    /// Before it sends its shards of a gather.
    GatherSend,
    /// After it sent its shards of a gather, before it receives those of the others.
    GatherReceive,
    /// Before it sends its parts of a sum.
    ReduceSend,
    /// After it sent its parts of a sum, before it receives those of the others.
    ReduceReceive,
    /// Before it writes entries of a table: others wait until it has.
    Write,
    /// After it sent a fetch, before it receives it: others wait for its next write.
    Fetch,
}

impl Phase {
    /// The phases of an exchange, from the start of the ranks.
    const EXCHANGE: [Self; 7] = [
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
            Self::Message => "message",
            Self::Credit => "credit",
            Self::GatherSend => "gather_send",
            Self::GatherReceive => "gather_receive",
            Self::ReduceSend => "reduce_send",
            Self::ReduceReceive => "reduce_receive",
            Self::Write => "write",
            Self::Fetch => "fetch",
        }
    }
}

/// The fault of the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is killed (SIGKILL).
    Killed,
    /// It is stopped (SIGSTOP).
    Stopped,
    /// It closes its communicator and sends its goodbye.
    Leaves,
    /// It passes something else than the others.
    Lies(Lie),
    /// All processes of its host are stopped.
    Frozen,
    /// Its host is cut off from the others.
    Cut,
    /// The network that carries rows loses everything from and to its host; the network where ranks meet
    /// works.
    DataCut,
    /// The link of its RDMA device is down; the network where ranks meet works.
    LinkDown,
    /// All ranks are killed at once, while the others work or wait: only the launcher remains, and nothing is left.
    AllKilled,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Unique and stable, for example `l3/killed/dispatch_receive`.
    pub name: String,
    /// One line for reports: the rule that must hold.
    pub about: String,
    /// The number of ranks.
    pub ranks: u32,
    /// The rank that is the victim.
    pub victim: u32,
    /// The phase.
    pub phase: Phase,
    /// The fault.
    pub kind: Kind,
    /// The number of hosts, with the same number of ranks on each; `None`: all ranks are on this machine.
    pub hosts: Option<u32>,
    /// Domains that the config splits the ranks into.
    pub domains: u32,
    /// The pace of the machine that it runs on.
    pub pace: Pace,
}

impl Fault {
    /// The same fault on a slower machine.
    #[must_use]
    pub fn at(self, pace: Pace) -> Self {
        Self { pace, ..self }
    }

    /// The same fault in a world of at most `ranks` ranks. In one domain two ranks are enough: a victim and
    /// a rank that must end. A fault that does not fit is unchanged.
    #[must_use]
    pub fn within(self, ranks: u32) -> Self {
        let fits = self.domains == 1 && self.hosts.is_none() && ranks > self.victim.max(1);
        Self { ranks: if fits { self.ranks.min(ranks) } else { self.ranks }, ..self }
    }

    /// Its deadline.
    pub fn deadline(&self) -> Duration {
        self.pace.stretch(if self.hosts.is_some() { hosts::DEADLINE } else { DEADLINE })
    }

    /// The time beyond the deadline that an error may take.
    pub fn grace(&self) -> Duration {
        self.pace.stretch(if self.hosts.is_some() { hosts::GRACE } else { GRACE })
    }

    /// The host of the victim.
    pub fn host(&self) -> u32 {
        self.victim / self.ranks_per_host()
    }

    /// The ranks that fail: the victim, or all ranks of its host where the host fails.
    pub fn victims(&self) -> Range<u32> {
        match self.kind {
            Kind::Frozen | Kind::Cut | Kind::DataCut => {
                let first = self.host() * self.ranks_per_host();
                first..first + self.ranks_per_host()
            }
            Kind::AllKilled => 0..self.ranks,
            _ => self.victim..self.victim + 1,
        }
    }

    fn ranks_per_host(&self) -> u32 {
        self.ranks / self.hosts.unwrap_or(1)
    }

    /// The fault of this name, on one machine, among domains, on hosts or on links.
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

/// All faults on one machine, in a world of `domains` domains.
pub fn list(domains: u32) -> Vec<Fault> {
    if domains > 1 {
        return among_domains(domains);
    }
    let mut list = Vec::new();
    for (word, kind, about) in KINDS {
        for phase in Phase::EXCHANGE {
            // The others meet at rank 0.
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
    list.push(all_killed(1));
    list.extend(beside_moe(1));
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

/// The faults that differ where ranks forward rows: every phase of an exchange, and ranks out of step. The
/// victim is also the forwarder of a rank in another domain.
fn among_domains(domains: u32) -> Vec<Fault> {
    let exchange = Phase::EXCHANGE.into_iter().skip_while(|phase| *phase != Phase::Between);
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
    lost.chain([all_killed(domains)]).chain(misled).chain(beside_moe(domains)).collect()
}

/// The faults of operations beside MoE.
fn beside_moe(domains: u32) -> impl Iterator<Item = Fault> {
    let of_pipes = of_operation::list::<PipeEnd>(domains).into_iter();
    let of_gathers = of_operation::list::<GatherEnd>(domains);
    let of_sums = of_operation::list::<ReduceEnd>(domains);
    // A table needs one link that reaches every rank.
    let of_tables = if domains == 1 { of_operation::list::<TableEnd>(1) } else { Vec::new() };
    of_pipes.chain(of_gathers).chain(of_sums).chain(of_tables)
}

/// All ranks have all of their memory and connections in use when they end.
fn all_killed(domains: u32) -> Fault {
    let suffix = if domains > 1 { format!("/d{domains}") } else { String::new() };
    Fault {
        name: format!("l3/all_killed/{}{suffix}", Phase::CombineSend.name()),
        about: "all ranks are killed at once: nothing is left behind".to_owned(),
        ranks: if domains > 1 { 2 * domains } else { 3 },
        victim: 1,
        phase: Phase::CombineSend,
        kind: Kind::AllKilled,
        hosts: None,
        domains,
        pace: Pace::USUAL,
    }
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
            assert_eq!(fault.clone().within(1), fault, "one rank has no other to lose");
        }
        for fault in list(2).into_iter().chain(on_hosts()) {
            assert_eq!(fault.clone().within(2), fault);
        }
    }
}
