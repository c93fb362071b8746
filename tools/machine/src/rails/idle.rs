//! GPUs whose own NICs are there, and cannot be used.

use std::fmt::{self, Display, Formatter};

use super::{Lack, MissingRail, ONE_NIC, RailShare, have_different, is_next, share};
use crate::near::{layer, prefer, usual_layer};
use crate::{Fact, Machine, Nic, Port, Unusable};

/// A NIC that cannot be used, in words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdleNic {
    /// Its name.
    pub name: String,
    /// What keeps it from being used, as found: `port 1 is down, Polling`.
    pub found: String,
    /// What to do about it, as commands.
    pub fix: String,
}

impl Display for IdleNic {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.found)
    }
}

/// More than half, and not all by the same NICs.
fn are_most(some: &[RailShare<'_>], all: &[RailShare<'_>]) -> bool {
    2 * some.len() > all.len() && have_different(some)
}

impl Machine {
    /// GPUs that are not served, on nodes where most are. Nodes on which half of the GPUs or fewer are served may be
    /// cabled so. Where none is, and NICs for storage or the like can be used, ranks would go over these.
    pub(super) fn idle_rails<'a>(&'a self, shares: &[RailShare<'a>]) -> Vec<MissingRail<'a>> {
        let others = self.serving_nics();
        let served = self.served(shares);
        let with_own: Vec<_> =
            shares.iter().filter(|one| !self.own_rails(one).is_empty()).cloned().collect();
        let is_none = served.is_empty() && !others.is_empty() && are_most(&with_own, shares);
        if !is_none && !are_most(&served, shares) {
            return Vec::new();
        }
        // A card for a display is no rank's.
        let is_alike = |one: &RailShare<'_>| {
            is_none || served.iter().any(|other| other.gpu.device_id == one.gpu.device_id)
        };
        let is_served = |one: &RailShare<'_>| served.iter().any(|of| of.gpu.pci == one.gpu.pci);
        let there: Vec<&str> = others.iter().map(|nic| nic.name.as_str()).collect();
        let idle = |one: &RailShare<'a>| {
            let own = self.own_rails(one);
            let idle = own.into_iter().filter(|nic| self.unusable(nic).is_some());
            let nics: Option<Vec<IdleNic>> = idle.map(|nic| self.why_idle(nic)).collect();
            let nics = nics.filter(|nics| !nics.is_empty() && is_alike(one) && !is_served(one))?;
            let left = self.usable_rails(one).iter().map(|nic| nic.name.clone()).collect();
            let lack = Lack::Idle { with: served.len(), gpus: shares.len(), nics, left };
            let (cards, module, there) = (Vec::new(), None, there.clone());
            Some(MissingRail { gpu: one.gpu, lack, cards, module, there })
        };
        shares.iter().filter_map(idle).collect()
    }

    /// GPUs that NICs next to them serve: with one for each, or with as much of one as a GPU has where all can
    /// be used. Where that is so for half of them or fewer, they are cabled with few, and any NIC next to one will do.
    fn served<'a>(&'a self, shares: &[RailShare<'a>]) -> Vec<RailShare<'a>> {
        let reached = shares.iter().filter(|one| !self.usable_rails(one).is_empty());
        let reached: Vec<_> = reached.cloned().collect();
        let has_its_own = |one: &&RailShare<'a>| {
            let own = share(shares, &self.own_rails(one));
            share(shares, &self.usable_rails(one)) >= own.min(ONE_NIC)
        };
        let with_one: Vec<_> = reached.iter().filter(has_its_own).cloned().collect();
        if are_most(&with_one, shares) { with_one } else { reached }
    }

    /// NICs next to a GPU that speak what most NICs do. What other containers were given stands in for none
    /// of these.
    fn own_rails<'a>(&'a self, one: &RailShare<'a>) -> Vec<&'a Nic> {
        let usual = usual_layer(&self.rail_nics());
        let mut nics = if is_next(one.distance) { one.nics.clone() } else { Vec::new() };
        prefer(&mut nics, |nic| self.has_device(nic));
        prefer(&mut nics, |nic| layer(nic).is_none_or(|layer| Some(layer) == usual));
        nics
    }

    fn usable_rails<'a>(&'a self, one: &RailShare<'a>) -> Vec<&'a Nic> {
        let own = self.own_rails(one).into_iter();
        own.filter(|nic| self.unusable(nic).is_none()).collect()
    }

    /// Every GPU has NICs next to it, and with them equally many ports that can carry: where a port cannot, all
    /// are cabled without it.
    pub fn has_even_links(&self) -> bool {
        let shares = self.rail_shares();
        let links = |one: &RailShare<'_>| {
            let ports = one.nics.iter().flat_map(|nic| &nic.ports);
            ports.filter(|port| port.can_carry()).count()
        };
        let first = shares.first().map_or(0, links);
        let is_even = |one: &RailShare<'_>| is_next(one.distance) && links(one) == first;
        shares.len() > 1 && first > 0 && shares.iter().all(is_even)
    }

    /// Why a NIC cannot be used; nothing where it can, or where the node does not tell.
    fn why_idle(&self, nic: &Nic) -> Option<IdleNic> {
        let port = nic.ports.first()?;
        let (found, fix) = match self.unusable(nic)? {
            Unusable::PortDown => {
                let is_told = |port: &Port| matches!(port.state, Fact::Known(_));
                if !nic.ports.iter().all(is_told) {
                    return None;
                }
                let state =
                    |port: &Port| format!("port {} is {}", port.number, port.state_in_words());
                let states: Vec<String> = nic.ports.iter().map(state).collect();
                (states.join(", "), nic.link_fix(port))
            }
            Unusable::NoAddress => {
                let active = nic.ports.iter().find(|port| port.is_active()).unwrap_or(port);
                let interface = nic.interfaces.first().map_or("IFACE", String::as_str);
                (
                    format!("port {} is active, and no entry in its GID table", active.number),
                    format!(
                        "give its network interface an address: ip link set {interface} up; ip addr add \
                         ADDRESS/LENGTH dev {interface}"
                    ),
                )
            }
            // Who made the container may have meant it so.
            Unusable::NoDevice => return None,
        };
        Some(IdleNic { name: nic.name.clone(), found, fix })
    }
}
