//! PCI Express switches with the GPUs and NICs below them, and GPUs that are missing there.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};

use crate::{Gpu, KfdLinkKind, Machine, Nic, PciAddress};

/// A bridge that a node's GPUs and NICs share.
#[derive(Clone, Debug)]
pub struct Switch<'a> {
    /// Its upstream port, or the root port where devices are below a root port without a switch.
    pub address: PciAddress,
    /// Bridges above it: none for a root port.
    pub depth: usize,
    /// GPUs below it.
    pub gpus: Vec<&'a Gpu>,
    /// Physical NICs of the rails' boards below it, whether their links are up or not.
    pub nics: Vec<&'a Nic>,
}

/// GPUs that are missing: a switch or a NUMA node has fewer than the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingGpus {
    /// The place where they are missing.
    pub place: GpuPlace,
    /// GPUs that are there.
    pub has: usize,
    /// GPUs that each of the others has.
    pub usual: usize,
    /// The number of others that have as many.
    pub others: usize,
    /// Ports of the switch without a link; a missing GPU may belong at one of them.
    pub ports: Vec<PciAddress>,
    /// Names of the NICs that are there, where the place is a switch.
    pub nics: Vec<String>,
}

/// The place where GPUs are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuPlace {
    /// Below a switch.
    Switch(PciAddress),
    /// Below a root port without a switch.
    RootPort(PciAddress),
    /// On a NUMA node.
    NumaNode(u32),
}

/// The bridges that most GPUs share with a NIC or with another GPU, in order of address, and
/// those of the same depth that have only a NIC of the rails' boards. None where GPUs and NICs
/// share no bridge.
pub fn switches(machine: &Machine) -> Vec<Switch<'_>> {
    let gpus = main_gpus(machine);
    let nics = board_nics(machine);
    let depth_of = |gpu: &&Gpu| bridges(machine, gpu.pci).len();
    let deepest = gpus.iter().map(depth_of).max().unwrap_or(0);
    let at_depth = |depth| switches_at(machine, depth, &gpus, &nics);
    (0..deepest)
        .rev()
        .map(at_depth)
        .find(|all| {
            let with_gpus = all.iter().filter(|one| !one.gpus.is_empty());
            let shared = all.iter().filter(|one| !one.gpus.is_empty() && one.cards() > 1);
            2 * shared.count() > with_gpus.count()
        })
        .unwrap_or_default()
}

/// GPUs that are missing. A node has 2, 4, 8 or 16 GPUs of a model, equally many below each of its
/// switches. So GPUs are missing if some switches have fewer than most, and the full number would be one
/// of these four. Where switches show nothing, the same rule applies to NUMA nodes, for GPUs of one board
/// (NVLink, xGMI).
pub fn missing_gpus(machine: &Machine) -> Vec<MissingGpus> {
    let count = main_gpus(machine).len();
    if count == 0 || count.is_power_of_two() {
        return Vec::new();
    }
    let would_be_full = |missing: &Vec<MissingGpus>| {
        let lacks: usize = missing.iter().map(|one| one.usual - one.has).sum();
        lacks > 0 && (count + lacks).is_power_of_two()
    };
    let below = Some(missing_below_switches(machine)).filter(would_be_full);
    let of_nodes = || Some(missing_on_numa_nodes(machine)).filter(would_be_full);
    below.or_else(of_nodes).unwrap_or_default()
}

fn missing_below_switches(machine: &Machine) -> Vec<MissingGpus> {
    let all = switches(machine);
    let with_gpus: Vec<&Switch<'_>> = all.iter().filter(|one| !one.gpus.is_empty()).collect();
    let like = |gpus| with_gpus.iter().filter(move |one| one.gpus.len() == gpus);
    let Some(first) =
        with_gpus.iter().find(|one| 2 * like(one.gpus.len()).count() > with_gpus.len())
    else {
        return Vec::new();
    };
    let usual = first.gpus.len();
    let model = |one: &Switch<'_>| machine.pci_at(one.address).map(|at| (at.vendor, at.device));
    let nics = like(usual).map(|one| one.nics.len()).min().unwrap_or(0);
    // A switch without a GPU counts as one of them only where it has their model and their
    // NICs.
    let is_like = |one: &&Switch<'_>| {
        !one.gpus.is_empty() || nics > 0 && one.nics.len() >= nics && model(one) == model(first)
    };
    let odd = all.iter().filter(|one| one.gpus.len() < usual).filter(is_like);
    let missing = odd.map(|one| MissingGpus {
        place: match one.depth {
            0 => GpuPlace::RootPort(one.address),
            _ => GpuPlace::Switch(one.address),
        },
        has: one.gpus.len(),
        usual,
        others: like(usual).count(),
        ports: machine.ports_without_link(one.address),
        nics: one.nics.iter().map(|nic| nic.name.clone()).collect(),
    });
    missing.collect()
}

fn missing_on_numa_nodes(machine: &Machine) -> Vec<MissingGpus> {
    let gpus = main_gpus(machine);
    if !gpus.iter().any(|gpu| gpu.is_of_a_board()) {
        return Vec::new();
    }
    let mut counts = BTreeMap::<u32, usize>::new();
    for gpu in &gpus {
        let Some(node) = gpu.numa_node.get() else { return Vec::new() };
        *counts.entry(node).or_default() += 1;
    }
    let usual = counts.values().copied().max().unwrap_or(0);
    let others = counts.values().filter(|count| **count == usual).count();
    let odd = counts.iter().filter(|(_, count)| **count < usual);
    let missing = odd.map(|(node, has)| MissingGpus {
        place: GpuPlace::NumaNode(*node),
        has: *has,
        usual,
        others,
        ports: Vec::new(),
        nics: Vec::new(),
    });
    missing.collect()
}

/// GPUs of the most frequent model: a display card belongs to no rank.
fn main_gpus(machine: &Machine) -> Vec<&Gpu> {
    let alike = |of: &Gpu| machine.gpus.iter().filter(|gpu| gpu.device_id == of.device_id).count();
    let main = machine.gpus.iter().max_by_key(|gpu| alike(gpu));
    let is_main = |gpu: &&Gpu| main.is_some_and(|main| gpu.device_id == main.device_id);
    machine.gpus.iter().filter(is_main).collect()
}

/// Physical NICs of the boards that serve ranks. Such a NIC beside a missing GPU is no rail.
fn board_nics(machine: &Machine) -> Vec<&Nic> {
    let rails = machine.rail_nics();
    let is_of = |nic: &&Nic| {
        nic.is_hardware()
            && !machine.is_virtual_function(nic)
            && rails.iter().any(|rail| machine.is_one_board(nic, rail))
    };
    machine.nics.iter().filter(is_of).collect()
}

fn bridges(machine: &Machine, address: PciAddress) -> &[PciAddress] {
    machine.pci_at(address).map_or(&[], |function| &function.bridges)
}

fn switches_at<'a>(
    machine: &'a Machine,
    depth: usize,
    gpus: &[&'a Gpu],
    nics: &[&'a Nic],
) -> Vec<Switch<'a>> {
    let mut all = BTreeMap::<PciAddress, Switch<'a>>::new();
    let mut switch = |of: PciAddress, add: &mut dyn FnMut(&mut Switch<'a>)| {
        let Some(address) = bridges(machine, of).get(depth).copied() else { return };
        let empty = Switch { address, depth, gpus: Vec::new(), nics: Vec::new() };
        add(all.entry(address).or_insert(empty));
    };
    for gpu in gpus {
        switch(gpu.pci, &mut |one| one.gpus.push(gpu));
    }
    for nic in nics {
        nic.pci.get().iter().for_each(|at| switch(*at, &mut |one| one.nics.push(nic)));
    }
    all.into_values().collect()
}

impl Switch<'_> {
    /// Cards below it: functions of one card count once.
    fn cards(&self) -> usize {
        let slot = |at: PciAddress| (at.domain, at.bus, at.device);
        let nics = self.nics.iter().filter_map(|nic| nic.pci.get().map(slot));
        nics.chain(self.gpus.iter().map(|gpu| slot(gpu.pci))).collect::<BTreeSet<_>>().len()
    }
}

impl Gpu {
    /// It is linked to other GPUs of its board. A board has an even number of GPUs.
    fn is_of_a_board(&self) -> bool {
        let fabric = self.fabric.known().and_then(|fabric| fabric.state.known());
        let links = self.nvlinks.known().map_or(&[][..], Vec::as_slice);
        fabric.is_some_and(|state| state != "N/A")
            || links.iter().any(|link| link.megabytes.is_some_and(|rate| rate > 0))
            || self.kfd_links.iter().any(|link| link.kind == KfdLinkKind::Xgmi)
    }
}

impl Display for GpuPlace {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(address) => write!(f, "switch {address}"),
            Self::RootPort(address) => write!(f, "root port {address}"),
            Self::NumaNode(node) => write!(f, "NUMA node {node}"),
        }
    }
}

impl Display for MissingGpus {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { place, has, usual, others, ports, nics } = self;
        let (word, on) = match place {
            GpuPlace::Switch(_) => ("switch", "below"),
            GpuPlace::RootPort(_) => ("root port", "below"),
            GpuPlace::NumaNode(_) => ("NUMA node", "on"),
        };
        let plural = if *others == 1 {
            ""
        } else if word == "switch" {
            "es"
        } else {
            "s"
        };
        let each = if *others == 1 { "has" } else { "have" };
        let of_each = if *others == 1 { "" } else { " each" };
        write!(f, "{on} {place} {} of {usual} GPUs ", has)?;
        write!(f, "{} there; {others} other {word}{plural} {each} {usual}{of_each}", is(*has))?;
        if !nics.is_empty() {
            write!(
                f,
                "; its {} there: {}",
                if nics.len() == 1 { "NIC is" } else { "NICs are" },
                nics.join(", ")
            )?;
        }
        if !ports.is_empty() {
            let ports: Vec<String> = ports.iter().map(PciAddress::to_string).collect();
            write!(f, "; without a link: port {}", ports.join(", "))?;
        }
        Ok(())
    }
}

fn is(count: usize) -> &'static str {
    if count == 1 { "is" } else { "are" }
}
