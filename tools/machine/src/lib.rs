//! What a node has for moving data, read from files.
//!
//! [`Machine::read`] takes a root folder, `/` for the node itself, and reads below it only what
//! Linux tells in `sys`, `proc`, `dev` and a few folders of libraries. The doctor judges what it
//! finds; the topology chooses NICs by it. Nothing here judges.
//!
//! Nothing fails: what is missing, refused or nonsense is a [`Fact`] that says so. No reading opens
//! a device, writes, or waits.
//!
//! [`tree`] reads below a root, and holds the recorded trees. [`fact`] says what is unknown and
//! why. Then one module per subject holds its types and how they are read: [`pci`], [`nic`],
//! [`net`], [`gpu`], [`numa`], [`limits`], [`modules`], [`container`], [`libraries`], and
//! [`commands`] for what no file tells. [`near`] says which NICs are nearest to a GPU,
//! [`rails`] which GPUs lack one, [`switches`] which GPUs are missing, [`topology`] how any two of the
//! GPUs and NICs are linked.

pub mod commands;
pub mod container;
mod driven;
pub mod fact;
pub mod gid;
pub mod gpu;
pub mod libraries;
pub mod limits;
pub mod modules;
pub mod near;
pub mod net;
pub mod nic;
pub mod numa;
pub mod pci;
pub mod rails;
pub mod switches;
pub mod topology;
pub mod tree;

use std::collections::BTreeMap;

use serde::Serialize;

pub use commands::{FabricDomain, Outputs, Silence};
pub use container::{Access, Capabilities, Cgroup, Container, Devices, Seccomp};
pub use fact::Fact;
pub use gpu::{Gpu, GpuFabric, GpuVendor, KfdLink, KfdLinkKind, NvLink, NvidiaDriver};
pub use libraries::{Libraries, Library};
pub use limits::{Bound, HugePages, Limit, Limits};
pub use modules::{Kernel, Module};
pub use near::{Seat, Unusable};
pub use net::{Bond, Interface};
pub use nic::{
    Counters, Gid, GidKind, Growth, LinkLayer, LinkRate, Nic, NicFamily, Port, PortState,
};
pub use numa::NumaNode;
pub use pci::{Acs, Distance, Iommu, PciAddress, PciFunction, PcieControl, PcieLink};
pub use rails::{IdleNic, Lack, MissingRail, RailShare};
pub use switches::{GpuPlace, MissingGpus, Switch};
pub use topology::{Device, DeviceKind, Link, Topology};
pub use tree::Tree;

/// What a node has. Lists are in order of name, number or PCI address.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Machine {
    /// The kernel and what it runs on.
    pub kernel: Kernel,
    /// NUMA nodes.
    pub numa: Vec<NumaNode>,
    /// Bridges, NICs and accelerators of the PCI tree.
    pub pci: Vec<PciFunction>,
    /// The IOMMU.
    pub iommu: Iommu,
    /// RDMA devices.
    pub nics: Vec<Nic>,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// GPUs, those of NVIDIA first.
    pub gpus: Vec<Gpu>,
    /// NVIDIA's driver; `None` where it is not loaded.
    pub nvidia: Option<NvidiaDriver>,
    /// Modules that this project knows and that are loaded, by name.
    pub modules: BTreeMap<String, Module>,
    /// Limits and memory.
    pub limits: Limits,
    /// Rights of this process.
    pub container: Container,
    /// Device nodes.
    pub devices: Devices,
    /// Libraries.
    pub libraries: Libraries,
    /// What libfabric offers; missing where `fi_info` told nothing.
    pub fabrics: Fact<Vec<FabricDomain>>,
    /// Commands that told nothing, as people write them (`nvidia-smi -q`), and why.
    pub silent: BTreeMap<String, Silence>,
}

impl Machine {
    /// Reads the node below `tree`'s root. Of what only commands tell there is what the tree
    /// recorded, and nothing of the running system: no command is run.
    pub fn read(tree: &Tree) -> Self {
        let mut machine = Self::read_with(tree, &Outputs::recorded(tree));
        if let Some((later, milliseconds)) = Counters::recorded_later(tree) {
            machine.note_growth(&Counters::read(tree), &later, milliseconds);
        }
        machine
    }

    /// Notes how much the error counters of its ports grew between two readings.
    pub fn note_growth(&mut self, first: &Counters, later: &Counters, milliseconds: u64) {
        for nic in &mut self.nics {
            for port in &mut nic.ports {
                let counters = first.growth(later, &nic.name, port.number);
                port.growth = Some(Growth { milliseconds, counters });
            }
        }
    }

    /// Reads only what the choice of NICs needs: NUMA nodes, PCI, NICs, GPUs, device nodes and the
    /// process' rights. Everything else is empty.
    pub fn read_places(tree: &Tree) -> Self {
        let pci = pci::read(tree);
        Self {
            numa: numa::read(tree),
            gpus: gpu::read(tree, &pci, &gpu::told(&Outputs::default())),
            pci,
            nics: nic::read(tree),
            container: container::read(tree),
            devices: container::read_devices(tree),
            ..Self::default()
        }
    }

    /// Reads the node below `tree`'s root, with the outputs of [`commands::capture`].
    pub fn read_with(tree: &Tree, outputs: &Outputs) -> Self {
        let pci = pci::read(tree);
        let container = container::read(tree);
        let search_path = container.environment.get("LD_LIBRARY_PATH").map_or("", String::as_str);
        Self {
            kernel: modules::read_kernel(tree),
            numa: numa::read(tree),
            gpus: gpu::read(tree, &pci, &gpu::told(outputs)),
            pci,
            iommu: pci::read_iommu(tree),
            nics: nics(tree, outputs),
            interfaces: net::read(tree),
            nvidia: gpu::read_driver(tree, outputs),
            modules: modules::read(tree),
            limits: limits::read(tree),
            devices: container::read_devices(tree),
            libraries: libraries::read(tree, search_path),
            container,
            fabrics: commands::told(&outputs.fi_info, commands::fabrics),
            silent: outputs.silent(),
        }
    }
}

fn nics(tree: &Tree, outputs: &Outputs) -> Vec<Nic> {
    let mut nics = nic::read(tree);
    if let Ok(text) = &outputs.ibv_devinfo {
        for ((device, port), mtu) in commands::active_mtus(text) {
            if let Some(nic) = nics.iter_mut().find(|nic| nic.name == device) {
                nic.active_mtu.insert(port, mtu);
            }
        }
    }
    nics
}
