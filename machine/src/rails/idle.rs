//! GPUs whose own NICs are there, and cannot be used.

use std::fmt::{self, Display, Formatter};

use super::{Lack, MissingRail, RailShare, have_different, is_next};
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

impl Machine {
    /// A GPU is served by any NIC next to it that can be used, and that speaks what most NICs do. Nodes on
    /// which half of the GPUs or fewer are served may be cabled so. Where none is, and NICs for storage or the
    /// like can be used, ranks would go over these.
    pub(super) fn idle_rails<'a>(&'a self, shares: &[RailShare<'a>]) -> Vec<MissingRail<'a>> {
        let rails = self.rail_nics();
        let usual = usual_layer(&rails);
        let own = |one: &RailShare<'a>| {
            let mut nics = if is_next(one.distance) { one.nics.clone() } else { Vec::new() };
            // What other containers were given stands in for none of these.
            prefer(&mut nics, |nic| self.has_device(nic));
            prefer(&mut nics, |nic| layer(nic).is_none_or(|layer| Some(layer) == usual));
            nics
        };
        let serves = |one: &RailShare<'a>| own(one).iter().any(|nic| self.unusable(nic).is_none());
        let served: Vec<_> = shares.iter().filter(|one| serves(one)).cloned().collect();
        let others = self.serving_nics();
        let with_own: Vec<_> = shares.iter().filter(|one| !own(one).is_empty()).cloned().collect();
        let are_most =
            |some: &[RailShare<'_>]| 2 * some.len() > shares.len() && have_different(some);
        let is_none = served.is_empty() && !others.is_empty() && are_most(&with_own);
        if !is_none && !are_most(&served) {
            return Vec::new();
        }
        // A card for a display is no rank's.
        let is_alike = |one: &RailShare<'_>| {
            is_none || served.iter().any(|other| other.gpu.device_id == one.gpu.device_id)
        };
        let there: Vec<&str> = others.iter().map(|nic| nic.name.as_str()).collect();
        let idle = |one: &RailShare<'a>| {
            let nics: Option<Vec<IdleNic>> =
                own(one).into_iter().map(|nic| self.why_idle(nic)).collect();
            let nics = nics.filter(|nics| !nics.is_empty() && is_alike(one))?;
            let lack = Lack::Idle { with: served.len(), gpus: shares.len(), nics };
            let (cards, module, there) = (Vec::new(), None, there.clone());
            Some(MissingRail { gpu: one.gpu, lack, cards, module, there })
        };
        shares.iter().filter_map(idle).collect()
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
