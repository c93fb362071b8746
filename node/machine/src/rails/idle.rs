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
    /// The reason why it cannot be used: `port 1 is down, Polling`.
    pub found: String,
    /// The fix, as commands.
    pub fix: String,
}

impl Display for IdleNic {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.found)
    }
}

/// Whether these are more than half of the GPUs, and do not all share the same NICs.
fn are_most(some: &[RailShare<'_>], all: &[RailShare<'_>]) -> bool {
    2 * some.len() > all.len() && have_different(some)
}

/// A node whose GPUs may lack a usable NIC, and the NICs that are nearest to each of its GPUs.
pub(super) struct IdleRails<'s, 'a> {
    pub(super) machine: &'a Machine,
    pub(super) shares: &'s [RailShare<'a>],
}

impl<'a> IdleRails<'_, 'a> {
    /// GPUs without a usable NIC, on nodes where most GPUs have one. A node on which half of the
    /// GPUs or fewer have one may be cabled like that on purpose. Where no GPU has one, and NICs
    /// for storage or the like are usable, ranks would use these.
    pub(super) fn find(&self) -> Vec<MissingRail<'a>> {
        let Self { machine, shares } = *self;
        let others = machine.serving_nics();
        let served = self.served();
        let with_own: Vec<_> =
            shares.iter().filter(|one| !self.own_rails(one).is_empty()).cloned().collect();
        let is_none = served.is_empty() && !others.is_empty() && are_most(&with_own, shares);
        if !is_none && !are_most(&served, shares) {
            return Vec::new();
        }
        // A display card belongs to no rank.
        let is_alike = |one: &RailShare<'_>| {
            is_none || served.iter().any(|other| other.gpu.device_id == one.gpu.device_id)
        };
        let is_served = |one: &RailShare<'_>| served.iter().any(|of| of.gpu.pci == one.gpu.pci);
        let there: Vec<&str> = others.iter().map(|nic| nic.name.as_str()).collect();
        let idle = |one: &RailShare<'a>| {
            let own = self.own_rails(one);
            let idle = own.into_iter().filter(|nic| self.machine.unusable(nic).is_some());
            let nics: Option<Vec<IdleNic>> = idle.map(|nic| self.why_idle(nic)).collect();
            let nics = nics.filter(|nics| !nics.is_empty() && is_alike(one) && !is_served(one))?;
            let left = self.usable_rails(one).iter().map(|nic| nic.name.clone()).collect();
            let lack = Lack::Idle { with: served.len(), gpus: shares.len(), nics, left };
            let (cards, module, there) = (Vec::new(), None, there.clone());
            Some(MissingRail { gpu: one.gpu, lack, cards, module, there })
        };
        shares.iter().filter_map(idle).collect()
    }

    /// GPUs with enough usable NICs next to them: one for each, or the share that a GPU has when
    /// all NICs are usable. Where half of the GPUs or fewer have that, the node is cabled with few
    /// NICs, and any usable NIC next to a GPU is enough.
    fn served(&self) -> Vec<RailShare<'a>> {
        let shares = self.shares;
        let reached = shares.iter().filter(|one| !self.usable_rails(one).is_empty());
        let reached: Vec<_> = reached.cloned().collect();
        let has_its_own = |one: &&RailShare<'a>| {
            let own = share(shares, &self.own_rails(one));
            share(shares, &self.usable_rails(one)) >= own.min(ONE_NIC)
        };
        let with_one: Vec<_> = reached.iter().filter(has_its_own).cloned().collect();
        if are_most(&with_one, shares) { with_one } else { reached }
    }

    /// NICs next to a GPU with the link layer of most NICs. NICs of other containers replace none
    /// of them.
    fn own_rails(&self, one: &RailShare<'a>) -> Vec<&'a Nic> {
        let usual = usual_layer(&self.machine.rail_nics());
        let mut nics = if is_next(one.distance) { one.nics.clone() } else { Vec::new() };
        prefer(&mut nics, |nic| self.machine.has_device(nic));
        prefer(&mut nics, |nic| layer(nic).is_none_or(|layer| Some(layer) == usual));
        nics
    }

    fn usable_rails(&self, one: &RailShare<'a>) -> Vec<&'a Nic> {
        let own = self.own_rails(one).into_iter();
        own.filter(|nic| self.machine.unusable(nic).is_none()).collect()
    }

    /// The reason why a NIC cannot be used; nothing where it can, or where the node does not show
    /// it.
    fn why_idle(&self, nic: &Nic) -> Option<IdleNic> {
        let port = nic.ports.first()?;
        let (found, fix) = match self.machine.unusable(nic)? {
            Unusable::PortDown => {
                let is_known = |port: &Port| matches!(port.state, Fact::Known(_));
                if !nic.ports.iter().all(is_known) {
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
            // The container may omit the device on purpose.
            Unusable::NoDevice => return None,
        };
        Some(IdleNic { name: nic.name.clone(), found, fix })
    }
}
