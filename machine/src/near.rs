//! Which NICs are nearest to a GPU, or to a NUMA node.

use serde::Serialize;

use crate::{Distance, Fact, Gpu, LinkLayer, Machine, Nic, NicFamily, PciAddress};

/// Where a process works, for the distance to NICs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seat {
    /// The GPU that it drives.
    pub gpu: Option<PciAddress>,
    /// The NUMA node that it runs on; asked where there is no GPU, or where no path between GPU and
    /// NIC is known.
    pub numa_node: Option<u32>,
}

/// Why a NIC cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unusable {
    /// No port is active.
    PortDown,
    /// Its character device is not there: a container was not given it.
    NoDevice,
}

/// Models of BlueField cards, which serve storage and tenants where other NICs are there too.
const BLUEFIELD: [&str; 3] = ["MT41682", "MT41686", "MT41692"];

impl Machine {
    /// Why a NIC cannot be used; nothing for one that can, as far as files tell.
    pub fn unusable(&self, nic: &Nic) -> Option<Unusable> {
        if !nic.ports.iter().any(|port| port.is_active()) {
            return Some(Unusable::PortDown);
        }
        let node = nic.uverbs.known().map(|uverbs| format!("infiniband/{uverbs}"));
        let is_there = node.is_none_or(|node| self.devices.nodes.contains_key(&node));
        (!is_there).then_some(Unusable::NoDevice)
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

    /// The NICs that are there for ranks, whether they can be used now or not: hardware of the model
    /// and board of the fastest port. Other boards serve storage and tenants; so do a card's ports
    /// that speak something else than its fastest, and BlueField cards and virtual functions beside
    /// others. A port that is down or trained slow is its rank's all the same.
    pub fn rail_nics(&self) -> Vec<&Nic> {
        let mut fastest: Vec<&Nic> = self.nics.iter().filter(|nic| nic.is_hardware()).collect();
        prefer(&mut fastest, |nic| self.unusable(nic) != Some(Unusable::NoDevice));
        prefer(&mut fastest, |nic| !self.is_virtual_function(nic));
        prefer(&mut fastest, |nic| !is_bluefield(nic));
        prefer(&mut fastest, |nic| self.unusable(nic).is_none());
        let rate = fastest.iter().map(|nic| nic.megabits()).max();
        fastest.retain(|nic| Some(nic.megabits()) == rate);
        let is_alike = |nic: &Nic| fastest.iter().any(|of| self.is_one_board(nic, of));
        let is_beside =
            |nic: &Nic| fastest.iter().any(|of| is_one_card(nic, of) && layer(nic) != layer(of));
        let mut rails: Vec<&Nic> = self.nics.iter().filter(|nic| nic.is_hardware()).collect();
        rails.retain(|nic| is_alike(nic) && !is_beside(nic));
        rails
    }

    /// The NICs that serve ranks: of those that are there for ranks the ones that can be used. Where
    /// none of them can, the fastest of the others.
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

    /// The NICs that serve a rank at `seat`: the nearest. Of these a slower one only where the
    /// fastest are fewer than the GPUs that are as near to them.
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

    /// Of `nics` those that are nearest to `seat`, all equally near; of these InfiniBand before
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
    fn is_one_board(&self, nic: &Nic, other: &Nic) -> bool {
        let device = |nic: &Nic| {
            nic.pci.get().and_then(|at| self.pci_at(at)).and_then(|function| function.device.get())
        };
        let board = |nic: &Nic| (nic.hca_type.known().cloned(), nic.board_id.known().cloned());
        (nic.family, device(nic), board(nic)) == (other.family, device(other), board(other))
    }

    fn is_virtual_function(&self, nic: &Nic) -> bool {
        nic.pci.get().and_then(|at| self.pci_at(at)).is_some_and(|f| f.is_virtual_function)
    }
}

impl Nic {
    /// It has a PCI function of its own. Soft-RoCE may show that of the interface below it.
    pub fn is_hardware(&self) -> bool {
        let is_software = matches!(self.family, NicFamily::Rxe | NicFamily::Siw);
        self.pci.known().is_some() && !is_software
    }

    /// Rate of the fastest active port in megabits a second; 0 where none says it.
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

/// What its active port speaks, else its first.
fn layer(nic: &Nic) -> Option<LinkLayer> {
    let active = nic.ports.iter().find(|port| port.is_active());
    active.or(nic.ports.first())?.link_layer.get()
}

/// Drops what `is_better` is not true of, if it is true of any.
fn prefer(nics: &mut Vec<&Nic>, is_better: impl Fn(&Nic) -> bool) {
    if nics.iter().any(|nic| is_better(nic)) {
        nics.retain(|nic| is_better(nic));
    }
}
