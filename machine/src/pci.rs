//! PCI functions, the bridges above them, and how far two of them are apart.

use serde::{Serialize, Serializer};

use crate::Fact;

/// Address of a PCI function: domain, bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Domain (segment).
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device (slot), 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl std::fmt::Display for PciAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A PCI function that matters here: a bridge, a NIC, a GPU or another accelerator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PciFunction {
    /// Where it is.
    pub address: PciAddress,
    /// Vendor id; `0x15b3` Mellanox, `0x10de` NVIDIA, `0x1002` AMD, `0x1d0f` Amazon, `0x1dd8` Pensando.
    pub vendor: Fact<u16>,
    /// Device id.
    pub device: Fact<u16>,
    /// Class, subclass and programming interface: `0x020700` for InfiniBand, `0x060400` for a bridge.
    pub class: Fact<u32>,
    /// Name of the driver that is bound to it.
    pub driver: Fact<String>,
    /// NUMA node; missing where the firmware names none (the kernel writes -1).
    pub numa_node: Fact<u32>,
    /// Link to the bridge above it.
    pub link: PcieLink,
    /// Name of the host bridge above it, as sysfs has it: `pci0000:15`.
    pub host_bridge: Fact<String>,
    /// Bridges between the host bridge and this function, root port first.
    pub bridges: Vec<PciAddress>,
    /// IOMMU group.
    pub iommu_group: Fact<u32>,
    /// What the IOMMU does for its group: `identity` (passes through), `DMA`, `DMA-FQ`.
    pub iommu_domain: Fact<String>,
    /// Access control of a bridge's port; known and `None` where the function has none. Denied
    /// without the right to read the extended configuration space.
    pub acs: Fact<Option<Acs>>,
    /// What the function's PCI Express capability is set to.
    pub control: Fact<PcieControl>,
    /// Sizes of BAR 0 to BAR 5 in bytes; 0 where there is none.
    pub bars: Fact<[u64; 6]>,
    /// It is a virtual function of another (SR-IOV).
    pub is_virtual_function: bool,
}

/// A PCI Express link, as trained and as the card could.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PcieLink {
    /// Rate of a lane in megatransfers a second: 32,000 for generation 5.
    pub speed: Fact<u32>,
    /// Lanes.
    pub width: Fact<u32>,
    /// The highest rate of this end.
    pub max_speed: Fact<u32>,
    /// The most lanes of this end.
    pub max_width: Fact<u32>,
}

/// Bits of the Access Control Services control register that send peer-to-peer traffic upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Acs {
    /// Source validation.
    pub source_validation: bool,
    /// Peer requests are redirected to the root complex.
    pub request_redirect: bool,
    /// Peer completions are redirected to the root complex.
    pub completion_redirect: bool,
    /// Upstream forwarding.
    pub upstream_forwarding: bool,
}

/// Settings of the PCI Express device control register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PcieControl {
    /// Largest payload in bytes.
    pub max_payload: u32,
    /// Largest read request in bytes.
    pub max_read_request: u32,
    /// The function may set the relaxed-ordering attribute.
    pub relaxed_ordering: bool,
}

/// How far two PCI functions are apart; nearer is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Under one switch, or functions of one card (`PIX` of other tools).
    SameSwitch,
    /// Under one root port through several switches (`PXB`).
    SameRootPort,
    /// Under one host bridge (`PHB`).
    SameHostBridge,
    /// On one NUMA node (`NODE`).
    SameNumaNode,
    /// On different NUMA nodes (`SYS`).
    Across,
    /// The tree does not tell.
    Unknown,
}

/// The IOMMU as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Iommu {
    /// Names of the units: `dmar0` (Intel), `ivhd0` (AMD), `smmu3.0x...` (Arm). None: it is off.
    pub units: Vec<String>,
}
