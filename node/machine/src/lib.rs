//! The hardware and software of a node for moving data, read from files.
//!
//! [`Machine::read`] takes a root folder, `/` for the node itself, and reads below it only Linux'
//! files in `sys`, `proc`, `dev` and a few folders of libraries. The doctor judges the result; the
//! topology chooses NICs by it. Nothing here judges.
//!
//! Nothing fails: a value that is missing, refused or nonsense is a [`Fact`] with that state. No
//! reading opens a device, writes, or waits.
//!
//! [`tree`] reads below a root, and holds the recorded trees. [`fact`] marks a value as unknown,
//! with the reason. Then one module per subject holds its types and reads them: [`pci`], [`nic`],
//! [`net`], [`gpu`], [`numa`], [`limits`], [`modules`], [`container`], [`libraries`], and
//! [`commands`] for facts that no file holds. [`near`] finds the NICs that are nearest to a GPU,
//! [`rails`] the GPUs that lack a NIC, [`mod@switches`] the GPUs that are missing, [`topology`] the
//! link between any two GPUs or NICs.
//!
//! Watched by the tests in these files, and `tests`, which read the nodes of `trees`.

mod bytes;
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

pub use bytes::bytes;
pub use commands::{FabricDomain, Outputs, Silence};
pub use container::{Access, Capabilities, Cgroup, Container, Devices, Seccomp};
pub use driven::gpu_of_rank;
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
pub use switches::{GpuPlace, MissingGpus, Switch, missing_gpus, switches};
pub use topology::{Device, DeviceKind, Link, Topology};
pub use tree::Tree;
