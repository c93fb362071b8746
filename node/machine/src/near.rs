//! The NICs that are nearest to a GPU, or to a NUMA node.

use serde::Serialize;

use crate::{Distance, Fact, Gpu, LinkLayer, Machine, Nic, NicFamily, PciAddress, Port};

/// The place of a process, for the distance to NICs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seat {
    /// The GPU that it drives.
    pub gpu: Option<PciAddress>,
    /// The NUMA node that it runs on. It counts where there is no GPU, or where no path between GPU
    /// and NIC is known.
    pub numa_node: Option<u32>,
}

/// The reason why a NIC cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unusable {
    /// No port is active.
    PortDown,
    /// Ports are active, and none has an address: RoCE sends nothing without an entry of the GID table.
    NoAddress,
    /// Its character device is not there: the container does not have it.
    NoDevice,
}

/// Models of BlueField cards. As a rule they serve storage and tenants on nodes that also have
/// other NICs.
const BLUEFIELD: [&str; 3] = ["MT41682", "MT41686", "MT41692"];

impl Machine {
    /// The reason why a NIC cannot be used; nothing for a usable NIC, as far as files show.
    pub fn unusable(&self, nic: &Nic) -> Option<Unusable> {
        if !nic.ports.iter().any(Port::is_active) {
            return Some(Unusable::PortDown);
        }
        if !nic.ports.iter().any(Port::can_carry) {
            return Some(Unusable::NoAddress);
        }
        (!self.has_device(nic)).then_some(Unusable::NoDevice)
    }

    /// Its character device is there, or the node does not show it.
    pub fn has_device(&self, nic: &Nic) -> bool {
        let node = nic.uverbs.known().map(|uverbs| format!("infiniband/{uverbs}"));
        node.is_none_or(|node| self.devices.nodes.contains_key(&node))
    }

    /// How far a NIC is from a seat.
    pub fn nic_distance(&self, seat: Seat, nic: &Nic) -> Distance {
        if let (Some(gpu), Fact::Known(nic)) = (seat.gpu, nic.pci) {
            let distance = self.distance(gpu, nic);
            if distance != Distance::Unknown {
                return distance;
            }
        }
        match (seat.numa_node, nic.numa_node) {
            (Some(seat), Fact::Known(nic)) if seat == nic => Distance::SameNumaNode,
            (Some(_), Fact::Known(_)) => Distance::Across,
            _ => Distance::Unknown,
        }
    }

    /// The NICs that are meant for ranks, whether they can be used now or not. These are the NICs
    /// of the boards that sit next to GPUs, else of the board with the highest possible rate. Other
    /// boards serve storage and tenants. So do NICs of these boards without a GPU next to them
    /// where others have one each, and NICs with another link layer than most. Virtual functions
    /// and BlueField cards beside other NICs do so too, unless most GPUs have BlueField cards next
    /// to them. The state of a link does not matter: a port that is down still belongs to its rank.
    pub fn rail_nics(&self) -> Vec<&Nic> {
        let hardware: Vec<&Nic> = self.nics.iter().filter(|nic| nic.is_hardware()).collect();
        let mut own = hardware.clone();
        // A container with virtual functions has no device nodes of the physical functions behind
        // them. Otherwise a rail whose device node is missing stays a rail, whatever storage has.
        if own.iter().any(|nic| self.is_virtual_function(nic) && self.has_device(nic)) {
            prefer(&mut own, |nic| self.has_device(nic));
        }
        prefer(&mut own, |nic| !self.is_virtual_function(nic));
        if !self.are_bluefields_rails(&own) {
            prefer(&mut own, |nic| !is_bluefield(nic));
        }
        let mut boards = self.boards_beside_gpus(&own);
        if boards.is_empty() {
            boards = self.boards_that_carry_most(&own);
        }
        let mut rails = hardware;
        rails.retain(|nic| boards.iter().any(|of| self.is_one_board(nic, of)));
        let is_beside = |nic: &Nic, gpu: &Gpu| self.is_next_to(gpu, nic);
        let all_have = !self.gpus.is_empty()
            && self.gpus.iter().all(|gpu| rails.iter().any(|nic| is_beside(nic, gpu)));
        if all_have {
            rails.retain(|nic| self.gpus.iter().any(|gpu| is_beside(nic, gpu)));
        }
        drop_other_layers(&mut rails, all_have);
        rails
    }

    /// Whether more than half of the GPUs have a BlueField next to them, and fewer have another
    /// NIC. Such BlueFields are SuperNICs, which have the same model number as the cards for
    /// storage and tenants.
    fn are_bluefields_rails(&self, nics: &[&Nic]) -> bool {
        let beside = |is_of: &dyn Fn(&Nic) -> bool| {
            let has = |gpu: &&Gpu| nics.iter().any(|nic| is_of(nic) && self.is_next_to(gpu, nic));
            self.gpus.iter().filter(has).count()
        };
        let bluefields = beside(&is_bluefield);
        2 * bluefields > self.gpus.len() && bluefields > beside(&|nic| !is_bluefield(nic))
    }

    /// A NIC of each board that GPUs have next to them: first the board that most GPUs have, then
    /// the board that most of the remaining GPUs have, and so on.
    fn boards_beside_gpus<'a>(&self, nics: &[&'a Nic]) -> Vec<&'a Nic> {
        let mut boards: Vec<&Nic> = Vec::new();
        let mut without: Vec<&Gpu> = self.gpus.iter().collect();
        loop {
            let has = |gpu: &Gpu, board: &Nic| {
                let mut alike = nics.iter().filter(|nic| self.is_one_board(nic, board));
                alike.any(|nic| self.is_next_to(gpu, nic))
            };
            let served = |board: &Nic| without.iter().filter(|gpu| has(gpu, board)).count();
            let strength = |board: &Nic| (served(board), self.strength(nics, board));
            let best = nics.iter().copied().max_by_key(|nic| strength(nic));
            let Some(best) = best.filter(|best| served(best) > 0) else { return boards };
            without.retain(|gpu| !has(gpu, best));
            boards.push(best);
        }
    }

    /// A NIC of the board with the highest possible rate, and of each other board with links as
    /// fast.
    fn boards_that_carry_most<'a>(&self, nics: &[&'a Nic]) -> Vec<&'a Nic> {
        let best = nics.iter().copied().max_by_key(|nic| self.strength(nics, nic));
        let Some(best) = best else { return Vec::new() };
        let rate = self.strength(nics, best).2;
        let is_as_fast = |nic: &&Nic| rate > 0 && self.strength(nics, nic).2 == rate;
        nics.iter().copied().filter(|nic| self.is_one_board(nic, best) || is_as_fast(nic)).collect()
    }

    /// The possible rate of a board: megabits of its slot, then the number of its NICs, and only
    /// then the rate of its links, which may be down.
    fn strength(&self, nics: &[&Nic], board: &Nic) -> (u64, usize, u64) {
        let alike: Vec<&&Nic> = nics.iter().filter(|nic| self.is_one_board(nic, board)).collect();
        let slot = |nic: &&&Nic| {
            let link = self.pci_at(nic.pci.get()?)?.link;
            Some(u64::from(link.max_speed.get()?) * u64::from(link.max_width.get()?))
        };
        let slots = alike.iter().filter_map(slot).max().unwrap_or(0);
        let rate = alike.iter().map(|nic| nic.megabits()).max().unwrap_or(0);
        (slots, alike.len(), rate)
    }

    /// On one switch with the GPU, or below one root port.
    fn is_next_to(&self, gpu: &Gpu, nic: &Nic) -> bool {
        let far = nic.pci.get().map(|nic| self.distance(gpu.pci, nic));
        matches!(far, Some(Distance::SameSwitch | Distance::SameRootPort))
    }

    /// The NICs that serve ranks: of those that are meant for ranks, the usable ones. Where none is
    /// usable, the fastest of the others.
    pub fn serving_nics(&self) -> Vec<&Nic> {
        let is_usable = |nic: &&Nic| nic.is_hardware() && self.unusable(nic).is_none();
        let mut nics = self.rail_nics();
        nics.retain(is_usable);
        if nics.is_empty() {
            nics = self.nics.iter().filter(is_usable).collect();
            let fastest = nics.iter().map(|nic| nic.megabits()).max();
            nics.retain(|nic| Some(nic.megabits()) == fastest);
        }
        nics
    }

    /// The NICs that serve a rank at `seat`: the nearest. A slower one among them is included only
    /// where there are fewer of the fastest than GPUs that are as near to them.
    pub fn nearest_serving(&self, seat: Seat) -> Vec<&Nic> {
        let mut near = self.nearest(&self.serving_nics(), seat);
        let rate = near.iter().map(|nic| nic.megabits()).max();
        let is_fast = |nic: &&Nic| Some(nic.megabits()) == rate;
        let Some(fast) = near.iter().copied().find(|nic| is_fast(nic)) else { return near };
        let distance = self.nic_distance(seat, fast);
        let is_sharer = |gpu: &&Gpu| {
            let seat = Seat { gpu: Some(gpu.pci), numa_node: gpu.numa_node.get() };
            self.nic_distance(seat, fast) == distance
        };
        let sharers = self.gpus.iter().filter(is_sharer).count();
        if near.iter().filter(|nic| is_fast(nic)).count() >= sharers {
            near.retain(is_fast);
        }
        near
    }

    /// The NICs of `nics` that are nearest to `seat`, all equally near; InfiniBand is preferred to
    /// others. In the order of `nics`.
    pub fn nearest<'a>(&self, nics: &[&'a Nic], seat: Seat) -> Vec<&'a Nic> {
        let least = nics.iter().map(|nic| self.nic_distance(seat, nic)).min();
        let near = nics.iter().filter(|nic| Some(self.nic_distance(seat, nic)) == least);
        let mut near: Vec<&Nic> = near.copied().collect();
        prefer(&mut near, |nic| {
            nic.ports.iter().any(|port| port.link_layer == Fact::Known(LinkLayer::InfiniBand))
        });
        near
    }

    /// Two NICs of one model and one board.
    pub(crate) fn is_one_board(&self, nic: &Nic, other: &Nic) -> bool {
        let device = |nic: &Nic| {
            nic.pci.get().and_then(|at| self.pci_at(at)).and_then(|function| function.device.get())
        };
        let board = |nic: &Nic| (nic.hca_type.known().cloned(), nic.board_id.known().cloned());
        (nic.family, device(nic), board(nic)) == (other.family, device(other), board(other))
    }

    pub(crate) fn is_virtual_function(&self, nic: &Nic) -> bool {
        nic.pci.get().and_then(|at| self.pci_at(at)).is_some_and(|f| f.is_virtual_function)
    }
}

impl Nic {
    /// It has a PCI function of its own. Soft-RoCE may show that of the interface below it.
    pub fn is_hardware(&self) -> bool {
        let is_software = matches!(self.family, NicFamily::Rxe | NicFamily::Siw);
        self.pci.known().is_some() && !is_software
    }

    /// Rate of the fastest active port in megabits a second; 0 where no port has a known rate.
    pub fn megabits(&self) -> u64 {
        let active = self.ports.iter().filter(|port| port.is_active());
        active.filter_map(|port| Some(port.rate.known()?.megabits)).max().unwrap_or(0)
    }
}

fn is_bluefield(nic: &Nic) -> bool {
    nic.hca_type.known().is_some_and(|model| BLUEFIELD.contains(&model.as_str()))
}

/// Functions of one card.
fn is_one_card(nic: &Nic, other: &Nic) -> bool {
    let slot = |nic: &Nic| nic.pci.get().map(|at| (at.domain, at.bus, at.device));
    slot(nic).is_some() && slot(nic) == slot(other)
}

/// The link layer of its active port, else of its first port.
pub(crate) fn layer(nic: &Nic) -> Option<LinkLayer> {
    let active = nic.ports.iter().find(|port| port.is_active());
    active.or(nic.ports.first())?.link_layer.get()
}

/// Drops NICs with another link layer than most: those beside another function of the same card
/// and, where GPUs have no NIC next to them, separate cards too. A separate NIC next to a GPU is a
/// rail that is set up wrongly, so it stays.
fn drop_other_layers(rails: &mut Vec<&Nic>, all_have: bool) {
    let Some(usual) = usual_layer(rails) else { return };
    let (like, odd): (Vec<&Nic>, Vec<&Nic>) =
        rails.iter().partition(|nic| layer(nic).is_none_or(|layer| layer == usual));
    let is_minority = !all_have && odd.len() < like.len();
    let is_dropped = |nic: &Nic| {
        layer(nic).is_some_and(|layer| layer != usual)
            && (is_minority || like.iter().any(|of| is_one_card(nic, of)))
    };
    rails.retain(|nic| !is_dropped(nic));
}

/// The link layer of most NICs. Of two that are equally frequent, the faster one if links of both
/// are up, else InfiniBand.
pub(crate) fn usual_layer(nics: &[&Nic]) -> Option<LinkLayer> {
    let layers = [LinkLayer::Ethernet, LinkLayer::InfiniBand];
    let of = |which: LinkLayer| nics.iter().filter(move |nic| layer(nic) == Some(which));
    let count = |which: &LinkLayer| of(*which).count();
    let rate = |which: &LinkLayer| of(*which).map(|nic| nic.megabits()).max().unwrap_or(0);
    let all_are_up = layers.iter().all(|layer| rate(layer) > 0);
    let usual = layers.into_iter().max_by_key(|layer| {
        // `max_by_key` takes the last of equals.
        (count(layer), if all_are_up { rate(layer) } else { 0 })
    });
    usual.filter(|layer| count(layer) > 0)
}

/// Drops the NICs for which `is_better` is false, if it is true of any.
pub(crate) fn prefer(nics: &mut Vec<&Nic>, is_better: impl Fn(&Nic) -> bool) {
    if nics.iter().any(|nic| is_better(nic)) {
        nics.retain(|nic| is_better(nic));
    }
}
