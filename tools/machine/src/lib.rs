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
mod machine;
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

pub use commands::{FabricDomain, Outputs, Silence};
pub use container::{Access, Capabilities, Cgroup, Container, Devices, Seccomp};
pub use fact::Fact;
pub use gpu::{Gpu, GpuFabric, GpuVendor, KfdLink, KfdLinkKind, NvLink, NvidiaDriver};
pub use libraries::{Libraries, Library};
pub use limits::{Bound, HugePages, Limit, Limits};
pub use machine::Machine;
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
