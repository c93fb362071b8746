//! What a node has for moving data, read from files.
//!
//! [`Machine::read`] takes a root folder, `/` for the node itself, and reads below it only what
//! Linux tells in `sys`, `proc`, `dev` and a few folders of libraries. The doctor judges what it
//! finds; the topology chooses NICs by it. Nothing here judges.
//!
//! Nothing fails: what is missing, refused or nonsense is a [`Fact`] that says so. No call opens a
//! device, writes, or waits.
//!
//! One module per subject holds its types and how they are read: [`fact`], [`pci`], [`nic`],
//! [`net`], [`gpu`], [`numa`], [`limits`], [`modules`], [`container`], [`libraries`],
//! [`commands`].

pub mod commands;
pub mod container;
pub mod fact;
pub mod gpu;
pub mod libraries;
pub mod limits;
pub mod modules;
pub mod net;
pub mod nic;
pub mod numa;
pub mod pci;

use std::collections::BTreeMap;

use serde::Serialize;

pub use commands::FabricDomain;
pub use container::{Access, Capabilities, Cgroup, Container, Devices, Seccomp};
pub use fact::Fact;
pub use gpu::{Gpu, GpuFabric, GpuVendor, KfdLink, KfdLinkKind, NvLink, NvidiaDriver};
pub use libraries::{Libraries, Library};
pub use limits::{Bound, HugePages, Limit, Limits};
pub use modules::{Kernel, Module};
pub use net::{Bond, Interface};
pub use nic::{Gid, GidKind, LinkLayer, LinkRate, Nic, NicFamily, Port, PortState};
pub use numa::NumaNode;
pub use pci::{Acs, Distance, Iommu, PciAddress, PciFunction, PcieControl, PcieLink};

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
    /// What libfabric offers; missing where `fi_info` was not run.
    pub fabrics: Fact<Vec<FabricDomain>>,
}
