//! A node as a whole, and its reading.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::commands::{self, FabricDomain, Outputs, Silence};
use crate::container::{self, Container, Devices};
use crate::fact::Fact;
use crate::gpu::{self, Gpu, NvidiaDriver};
use crate::libraries::{self, Libraries};
use crate::limits::{self, Limits};
use crate::modules::{self, Kernel, Module};
use crate::net::{self, Interface};
use crate::nic::{self, Counters, Growth, Nic};
use crate::numa::{self, NumaNode};
use crate::pci::{self, Distance, Iommu, PciAddress, PciFunction};
use crate::tree::Tree;

/// A node. Lists are in order of name, number or PCI address.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Machine {
    /// The kernel and the machine that it runs on.
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
    /// The domains that libfabric offers; missing where `fi_info` printed nothing.
    pub fabrics: Fact<Vec<FabricDomain>>,
    /// Commands without output, as people write them (`nvidia-smi -q`), and the reason of each.
    pub silent: BTreeMap<String, Silence>,
}

impl Machine {
    /// Reads the node below `tree`'s root. Outputs of commands come from the recorded tree only; no
    /// command is run, so nothing of the running system is read.
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
            gpus: gpu::read(tree, &pci, &gpu::command_facts(&Outputs::default())),
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
            gpus: gpu::read(tree, &pci, &gpu::command_facts(outputs)),
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
            fabrics: commands::parsed(&outputs.fi_info, commands::fabrics),
            silent: outputs.silent(),
        }
    }

    /// The PCI function at an address, if it was read.
    pub fn pci_at(&self, address: PciAddress) -> Option<&PciFunction> {
        let at = self.pci.binary_search_by_key(&address, |function| function.address).ok()?;
        self.pci.get(at)
    }

    /// How far two PCI functions are apart.
    pub fn distance(&self, a: PciAddress, b: PciAddress) -> Distance {
        match (self.pci_at(a), self.pci_at(b)) {
            (Some(a), Some(b)) => a.distance(b),
            _ => Distance::Unknown,
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
