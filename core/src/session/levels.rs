//! The levels of a session: their transports and teams.
//!
//! If one link reaches every rank, data goes straight to its rank (*direct*). Inside one domain that is scale-up. It is
//! scale-out if there is no scale-up transport, or if every domain is one rank. Otherwise both transports are open:
//! scale-up for the domain, scale-out for the rail (*hierarchical*).

use std::time::Duration;

use super::needs::SessionNeeds;
use super::progress::Progress;
use super::stuck::Stuck;
use super::transports::Transports;
use crate::abi;
use crate::bootstrap::Members;
use crate::config::{ComponentChoice, Config};
use crate::domains::Domains;
use crate::exchange::Exchange;
use crate::host::{OpenTransport, Registry, TransportRef};
use crate::kernels::Limits;
use crate::nics::Nics;
use crate::transport::{Capabilities, NO_CAPABILITIES, Team, TransportNeeds, TransportOpen};
use crate::{Error, ErrorKind, Result};

/// The description of one level, for display and for JSON.
#[derive(Clone, Debug, serde::Serialize)]
pub struct LevelReport {
    /// The transport.
    pub transport: String,
    /// How data moves: `load_store` or `put`.
    pub path: &'static str,
    /// World ranks that this rank reaches over it, itself included.
    pub team: Vec<u32>,
    /// True if it uses the NICs of the places; else its own table chooses them, or it uses none.
    pub placed_nics: bool,
    /// The reasons for this transport, where there was a choice.
    pub reasons: Vec<String>,
}

/// A level before its transport is open.
pub(crate) struct Level<'a> {
    component: TransportRef,
    choice: &'a ComponentChoice,
    capabilities: Capabilities,
    team: Team,
    reasons: Vec<String>,
}

impl Level<'_> {
    fn path(&self) -> &'static str {
        if self.capabilities.flags & abi::TY_CAP_LOAD_STORE != 0 { "load_store" } else { "put" }
    }

    fn goes_by_nics(&self) -> bool {
        self.capabilities.flags & abi::TY_CAP_PLACED_NICS != 0
    }

    fn report(&self) -> LevelReport {
        LevelReport {
            transport: self.choice.name.clone(),
            path: self.path(),
            team: self.team.world_ranks.clone(),
            placed_nics: self.goes_by_nics(),
            reasons: self.reasons.clone(),
        }
    }

    fn open(&self, with: &OpenWith<'_>, level: u64) -> Result<OpenTransport> {
        let (ranks, most) = (self.team.world_ranks.len(), self.capabilities.max_peers);
        if ranks > most as usize {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "open transport",
                format!("found {ranks} ranks; `{}` reaches at most {most}", self.choice.name),
            ));
        }
        let link = &with.needs.links[level as usize];
        let needs = TransportNeeds {
            windows: with.needs.windows_of(level).count() as u32,
            queues: link.queues,
            signals: link.signals,
            queue_depth: link.queue_depth,
            largest_put: link.largest_put,
            deadline: with.deadline,
        };
        let exchange =
            TeamExchange { members: with.members, name: &self.choice.name, team: &self.team };
        let opened = self.component.open(
            &self.choice.table,
            &TransportOpen {
                team: &self.team,
                needs: &needs,
                device: u32::try_from(with.needs.device).ok(),
                exchange: &exchange,
            },
        )?;
        let withheld = opened.capabilities().flags & !self.capabilities.flags;
        Ok(opened.without(withheld))
    }
}

/// Both levels before they are open; at least one exists.
pub(crate) struct Levels<'a> {
    /// Domains that data is routed over; 1 where it goes direct.
    pub(crate) domains: u32,
    pub(crate) scale_up: Option<Level<'a>>,
    pub(crate) scale_out: Option<Level<'a>>,
}

impl<'a> Levels<'a> {
    /// Decides which transports are used, for a world of `domains` equal domains. Collective.
    pub(crate) fn choose(
        members: &Members<'_>,
        config: &'a Config,
        registry: &Registry,
        domains: u32,
    ) -> Result<Self> {
        // Both levels are looked up, so that a wrong name is found even where it would not be used.
        for choice in config.scale_up.iter().chain(&config.scale_out) {
            registry.choose_transport(choice)?;
        }
        let me = members.rank();
        let ranks = members.ranks();
        let all_ranks = team_of(members, 0..ranks);
        let out = |team| first_that_probes(members, registry, &config.scale_out, team);
        let Some(up) = &config.scale_up else {
            return Ok(Self { domains: 1, scale_up: None, scale_out: Some(out(all_ranks)?) });
        };
        let up = std::slice::from_ref(up);
        if domains == 1 {
            let level = first_that_probes(members, registry, up, all_ranks)?;
            return Ok(Self { domains: 1, scale_up: Some(level), scale_out: None });
        }
        if config.scale_out.is_empty() {
            return Err(no_way_out(domains, &up[0].name));
        }
        if ranks == domains {
            return Ok(Self { domains: 1, scale_up: None, scale_out: Some(out(all_ranks)?) });
        }
        let places = Domains::of(me, ranks, domains);
        let domain = team_of(members, places.domain_ranks());
        let rail = team_of(members, places.rail_ranks());
        Ok(Self {
            domains,
            scale_up: Some(first_that_probes(members, registry, up, domain)?),
            scale_out: Some(out(rail)?),
        })
    }

    fn each(&self) -> impl Iterator<Item = (&'static str, &Level<'a>)> {
        let up = self.scale_up.iter().map(|level| ("scale-up", level));
        up.chain(self.scale_out.iter().map(|level| ("scale-out", level)))
    }

    /// World ranks of a level's team, by their index there.
    pub(crate) fn ranks(&self, level: u64) -> &[u32] {
        let level = if level == abi::TY_LEVEL_SCALE_UP { &self.scale_up } else { &self.scale_out };
        level.as_ref().map_or(&[], |level| &level.team.world_ranks)
    }

    /// Makes data be put that could be loaded and stored. With loads, a rank that was declared lost may read
    /// memory that its owner has changed since, and forward it (INV-8).
    pub(crate) fn put_only(&mut self) {
        for level in [&mut self.scale_up, &mut self.scale_out].into_iter().flatten() {
            level.capabilities.flags &= !abi::TY_CAP_LOAD_STORE;
        }
    }

    /// Passes the NICs that the topology chose for this rank to the transports, and whether other NICs may
    /// be used.
    pub(crate) fn use_nics(&mut self, nics: &Nics) {
        for level in [&mut self.scale_up, &mut self.scale_out].into_iter().flatten() {
            level.team.nics = nics.clone();
        }
    }

    /// The name of a transport that does not declare a capability.
    pub(crate) fn without(&self, capability: u64) -> Option<&str> {
        let lacks = |level: &Level<'_>| level.capabilities.flags & capability == 0;
        self.each().find(|(_, level)| lacks(level)).map(|(_, level)| level.choice.name.as_str())
    }

    /// True if a transport uses the NICs that the topology chose.
    pub(crate) fn go_by_nics(&self) -> bool {
        self.each().any(|(_, level)| level.goes_by_nics())
    }

    /// The capabilities that the transports declared.
    pub(crate) fn limits(&self) -> Limits {
        let of = |level: &Option<Level<'_>>| {
            level.as_ref().map_or(NO_CAPABILITIES, |level| level.capabilities)
        };
        Limits {
            size: size_of::<Limits>(),
            scale_up: of(&self.scale_up),
            scale_out: of(&self.scale_out),
        }
    }

    /// Checks that ranks agree on windows and signals. Keys of a component's own table may differ per
    /// rank, but their effect on windows and signals may not: every rank computes the others' offsets
    /// from its own. Collective.
    pub(crate) fn agree(&self, members: &Members<'_>, needs: &SessionNeeds) -> Result<()> {
        let mut items = vec![("windows".to_owned(), needs.windows.len().to_string())];
        for (name, level) in self.each() {
            items.push((format!("{name} path of data"), level.path().to_owned()));
        }
        for (name, link) in ["scale-up", "scale-out"].iter().zip(&needs.links) {
            items.push((format!("{name} signals"), link.signals.to_string()));
        }
        for (id, window) in needs.windows.iter().enumerate() {
            items.push((format!("bytes of window {id}"), window.bytes.to_string()));
            items.push((format!("levels of window {id}"), format!("{:#x}", window.levels)));
        }
        members.agree("windows", &items).map(drop)
    }

    /// Opens the transports. Collective: they may exchange bytes among their ranks.
    pub(crate) fn open(&self, with: &OpenWith<'_>) -> Result<Transports> {
        let open = |level: &Option<Level<'_>>, number| {
            level.as_ref().map(|level| level.open(with, number)).transpose()
        };
        Ok(Transports {
            scale_up: open(&self.scale_up, abi::TY_LEVEL_SCALE_UP)?,
            scale_out: open(&self.scale_out, abi::TY_LEVEL_SCALE_OUT)?,
            counts: Vec::new(),
        })
    }

    pub(crate) fn reports(&self) -> (Option<LevelReport>, Option<LevelReport>) {
        (self.scale_up.as_ref().map(Level::report), self.scale_out.as_ref().map(Level::report))
    }

    /// The transports of both levels, in words.
    pub(crate) fn transports(&self) -> String {
        let names: Vec<_> = self.each().map(|(_, level)| level.choice.name.as_str()).collect();
        if names.is_empty() { "no transport".to_owned() } else { names.join(" and ") }
    }

    /// The connection from this rank to each peer of each level, for diagnoses: (world rank, text).
    pub(crate) fn link_names(&self, transports: &Transports) -> [Vec<(u32, String)>; 2] {
        let of = |level: &Option<Level<'_>>, transport: &Option<OpenTransport>| {
            let (Some(level), Some(transport)) = (level, transport) else { return Vec::new() };
            let ranks = (0..).zip(&level.team.world_ranks);
            ranks.map(|(peer, rank)| (*rank, transport.link_name(peer))).collect()
        };
        [of(&self.scale_up, &transports.scale_up), of(&self.scale_out, &transports.scale_out)]
    }

    /// Exchanges endpoints and connects every team. Collective.
    pub(crate) fn connect(
        &self,
        members: &Members<'_>,
        transports: &mut Transports,
        stuck: &Stuck,
    ) -> Result<()> {
        let levels = [
            ("scale-up endpoints", &self.scale_up, &mut transports.scale_up),
            ("scale-out endpoints", &self.scale_out, &mut transports.scale_out),
        ];
        // While this rank waits for the ranks' endpoints of the second level, some ranks may still
        // connect the first, and need this side of it to be driven.
        let mut driven = Vec::new();
        for (name, level, transport) in levels {
            if let (Some(level), Some(transport)) = (level, transport) {
                connect_team(members, name, &level.team, transport)?;
                // SAFETY: `driven` is dropped before this returns, and the transports outlive the call.
                // `bring_up` leaks them where a thread is stuck.
                driven.extend(unsafe { Progress::start([transport.link()].into_iter(), stuck)? });
            }
        }
        drop(driven);
        stuck.check("connect")
    }
}

/// Arguments for opening the transports of all levels.
pub(crate) struct OpenWith<'a> {
    pub(crate) members: &'a Members<'a>,
    pub(crate) needs: &'a SessionNeeds,
    pub(crate) deadline: Duration,
}

/// The exchange of one level's teams. All teams take part in it: their ranks open the same transport.
#[derive(Debug)]
struct TeamExchange<'a> {
    members: &'a Members<'a>,
    name: &'a str,
    team: &'a Team,
}

impl Exchange for TeamExchange<'_> {
    fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let topic = format!("exchange of transport {}", self.name);
        let mut all = self.members.all_gather(&topic, mine)?;
        let take = |rank: &u32| all.get_mut(*rank as usize).map(std::mem::take).unwrap_or_default();
        Ok(self.team.world_ranks.iter().map(take).collect())
    }
}

/// The present ranks of `ranks`, in order.
fn team_of(members: &Members<'_>, ranks: impl Iterator<Item = u32>) -> Team {
    let world_ranks: Vec<u32> = ranks.filter(|rank| members.has(*rank)).collect();
    let me = world_ranks.iter().position(|rank| *rank == members.rank());
    Team::new(me.map_or(0, |me| me as u32), world_ranks)
}

fn connect_team(
    members: &Members<'_>,
    name: &str,
    team: &Team,
    transport: &mut OpenTransport,
) -> Result<()> {
    let mut outgoing = vec![Vec::new(); members.ranks() as usize];
    for (peer, rank) in (0..).zip(&team.world_ranks) {
        outgoing[*rank as usize] = transport.endpoint(peer)?;
    }
    let incoming = members.exchange(name, outgoing)?;
    for (peer, rank) in (0..).zip(&team.world_ranks) {
        let connected = transport.connect(peer, &incoming[*rank as usize]);
        connected.map_err(|error| about_peer(error, *rank))?;
    }
    transport.commit()
}

/// An error of `connect` names the peer, unless this rank alone lacks something: its descriptors, memory, or config.
fn about_peer(error: Error, rank: u32) -> Error {
    let is_about_it = matches!(
        error.kind(),
        ErrorKind::PeerLost
            | ErrorKind::Deadline
            | ErrorKind::Protocol
            | ErrorKind::Mismatch
            | ErrorKind::Transport
    );
    if is_about_it && error.rank().is_none() { error.with_rank(rank) } else { error }
}

fn no_way_out(domains: u32, scale_up: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        "choose components",
        format!(
            "the ranks are in {domains} domains, scale-up transport `{scale_up}` reaches one, and \
             scale_out is \"none\""
        ),
    )
    .with_fix("name a transport in [transport.scale_out], or run all ranks on one machine")
}

/// The first choice that every rank can use, with the reasons against the choices before it.
fn first_that_probes<'a>(
    members: &Members<'_>,
    registry: &Registry,
    choices: &'a [ComponentChoice],
    team: Team,
) -> Result<Level<'a>> {
    let mut reasons = Vec::new();
    for choice in choices {
        let component = registry.choose_transport(choice)?;
        let mine = component.probe(&choice.table);
        let word = mine.as_ref().map_or_else(ToString::to_string, |_| String::new());
        let all = members.all_gather("probe", word.as_bytes())?;
        let against: Vec<_> = all
            .iter()
            .enumerate()
            .filter(|(_, word)| !word.is_empty())
            .map(|(rank, word)| format!("rank {rank}: {}", String::from_utf8_lossy(word)))
            .collect();
        if let (Ok(capabilities), true) = (mine, against.is_empty()) {
            reasons.push(format!("{}: chosen, it probes on all ranks", choice.name));
            return Ok(Level { component, choice, capabilities, team, reasons });
        }
        let first = against.first().cloned().unwrap_or_default();
        reasons.push(format!(
            "{}: {} of {} ranks cannot: {first}",
            choice.name,
            against.len(),
            all.len()
        ));
    }
    Err(Error::new(
        ErrorKind::Unavailable,
        "choose transport",
        format!("no transport works on all ranks: {}", reasons.join("; ")),
    )
    .with_fix(
        "correct what the probe names (tokenyard doctor says more), or choose another transport",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_rank_lacks_while_it_connects_is_no_fault_of_the_peer() {
        let rank_of = |kind| about_peer(Error::new(kind, "connect", "no more"), 3).rank();
        assert_eq!(rank_of(ErrorKind::System), None);
        assert_eq!(rank_of(ErrorKind::Deadline), Some(3));
        let of_another = Error::new(ErrorKind::PeerLost, "connect", "gone").with_rank(1);
        assert_eq!(about_peer(of_another, 3).rank(), Some(1));
    }
}
