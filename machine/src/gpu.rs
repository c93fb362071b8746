//! GPUs, their links to each other, and the drivers that serve them.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Fact, PciAddress};

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Place in the order of PCI addresses among the GPUs of its vendor, as drivers count with
    /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub index: u32,
    /// Who made it.
    pub vendor: GpuVendor,
    /// PCI function.
    pub pci: PciAddress,
    /// PCI device id.
    pub device_id: Fact<u16>,
    /// Model in words.
    pub model: Fact<String>,
    /// Its unique name, `GPU-...` (NVIDIA), or the hexadecimal unique id (AMD).
    pub uuid: Fact<String>,
    /// NUMA node of the PCI function.
    pub numa_node: Fact<u32>,
    /// Number of its device node: `/dev/nvidiaN`, `/dev/dri/renderDN`.
    pub minor: Fact<u32>,
    /// Largest BAR in bytes: what peers can reach of its memory.
    pub largest_bar: Fact<u64>,
    /// It is split into instances (MIG).
    pub mig: Fact<bool>,
    /// NVLinks by number, as `nvidia-smi nvlink -s` tells them.
    pub nvlinks: Fact<Vec<NvLink>>,
    /// The fabric beyond the node, as `nvidia-smi -q` tells it.
    pub fabric: Fact<GpuFabric>,
    /// Links to other GPUs and to processors (AMD).
    pub kfd_links: Vec<KfdLink>,
}

/// Who made a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuVendor {
    /// NVIDIA.
    Nvidia,
    /// AMD.
    Amd,
}

/// One NVLink of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NvLink {
    /// Number of the link.
    pub link: u32,
    /// Megabytes a second and direction; `None` if the link is inactive.
    pub megabytes: Option<u64>,
}

/// A GPU's place in an NVLink fabric that may span nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuFabric {
    /// `Completed`, `In Progress`, `Not Started`, `N/A`.
    pub state: Fact<String>,
    /// `Success`, or why not.
    pub status: Fact<String>,
    /// GPUs of one cluster and one clique reach each other's memory.
    pub clique: Fact<u32>,
    /// The cluster; all zero where the fabric is one node.
    pub cluster: Fact<String>,
}

/// A link of a node of the kernel's GPU topology (`sys/class/kfd`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KfdLink {
    /// What the link is.
    pub kind: KfdLinkKind,
    /// PCI function of the GPU at the other end; `None` for a processor.
    pub to: Option<PciAddress>,
    /// Most megabytes a second; 0 where the kernel knows none.
    pub megabytes: u64,
}

/// Kinds of links of the kernel's GPU topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KfdLinkKind {
    /// Type 2.
    Pcie,
    /// Type 11.
    Xgmi,
    /// Another type.
    Other,
}

/// NVIDIA's kernel driver, as `proc/driver/nvidia` tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NvidiaDriver {
    /// `580.65.06`.
    pub version: Fact<String>,
    /// The open kernel modules, which dmabuf needs.
    pub is_open: Fact<bool>,
    /// `params`, by name: `EnableStreamMemOPs` -> `0`, `ImexChannelCount`, `CreateImexChannel0` …
    pub params: Fact<BTreeMap<String, String>>,
    /// `RegistryDwords` of the parameters, taken apart: `PeerMappingOverride` -> 1.
    pub registry: Fact<BTreeMap<String, u32>>,
}
