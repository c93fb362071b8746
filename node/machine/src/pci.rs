//! PCI functions, the bridges above them, and how far two of them are apart.

use serde::{Serialize, Serializer};

use crate::Fact;
use crate::tree::Tree;

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
    /// Its address.
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
    /// Name of the host bridge above it, as in sysfs: `pci0000:15`.
    pub host_bridge: Fact<String>,
    /// Bridges between the host bridge and this function, root port first.
    pub bridges: Vec<PciAddress>,
    /// IOMMU group.
    pub iommu_group: Fact<u32>,
    /// The mode of the IOMMU for its group: `identity` (passes through), `DMA`, `DMA-FQ`.
    pub iommu_domain: Fact<String>,
    /// Access control of a bridge's port; known and `None` where the function has none. Denied
    /// without the right to read the extended configuration space.
    pub acs: Fact<Option<Acs>>,
    /// The settings of the function's PCI Express capability.
    pub control: Fact<PcieControl>,
    /// Sizes of BAR 0 to BAR 5 in bytes; 0 where there is none.
    pub bars: Fact<[u64; 6]>,
    /// It is a virtual function of another (SR-IOV).
    pub is_virtual_function: bool,
}

/// A PCI Express link: its trained rate and width, and the maximum of both.
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
    /// The tree does not show it.
    Unknown,
}

/// The IOMMU as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Iommu {
    /// Names of the units: `dmar0` (Intel), `ivhd0` (AMD), `smmu3.0x...` (Arm). None: it is off.
    pub units: Vec<String>,
}

const FUNCTIONS: &str = "sys/bus/pci/devices";
/// Most functions that are read; a node with virtual functions may have thousands.
const MOST_FUNCTIONS: usize = 4096;

impl std::str::FromStr for PciAddress {
    type Err = ();

    /// Reads `0000:18:00.0`, and the form with eight digits of domain that `nvidia-smi` writes.
    fn from_str(text: &str) -> Result<Self, ()> {
        let parse = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(Self {
                domain: u32::from_str_radix(domain, 16).ok()?,
                bus: u8::from_str_radix(bus, 16).ok()?,
                device: u8::from_str_radix(device, 16).ok().filter(|d| *d < 32)?,
                function: function.parse().ok().filter(|f| *f < 8)?,
            })
        };
        parse().ok_or(())
    }
}

impl PciFunction {
    /// How far another function is.
    pub fn distance(&self, other: &Self) -> Distance {
        let common = self
            .bridges
            .iter()
            .zip(&other.bridges)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        if common > 0 {
            // Below the last common bridge there is at most the switch's own port to each.
            let below = self.bridges.len().max(other.bridges.len()) - common;
            return if below <= 1 { Distance::SameSwitch } else { Distance::SameRootPort };
        }
        if let (Fact::Known(ours), Fact::Known(theirs)) = (&self.host_bridge, &other.host_bridge)
            && ours == theirs
        {
            return Distance::SameHostBridge;
        }
        match (self.numa_node, other.numa_node) {
            (Fact::Known(ours), Fact::Known(theirs)) if ours == theirs => Distance::SameNumaNode,
            (Fact::Known(_), Fact::Known(_)) => Distance::Across,
            _ => Distance::Unknown,
        }
    }

    /// It is a bridge.
    pub fn is_bridge(&self) -> bool {
        self.class.known().is_some_and(|class| class >> 16 == 0x06)
    }
}

pub(crate) fn read(tree: &Tree) -> Vec<PciFunction> {
    let mut functions: Vec<_> = tree
        .list(FUNCTIONS)
        .iter()
        .take(MOST_FUNCTIONS)
        .filter_map(|name| function(tree, name.parse().ok()?, &format!("{FUNCTIONS}/{name}")))
        .collect();
    functions.sort_by_key(|function| function.address);
    functions
}

pub(crate) fn read_iommu(tree: &Tree) -> Iommu {
    Iommu { units: tree.list("sys/class/iommu") }
}

/// NUMA node that a device's file names; the kernel writes -1 for none.
pub(crate) fn numa_node(tree: &Tree, device: &str) -> Fact<u32> {
    match tree.value::<i64>(&format!("{device}/numa_node")) {
        Fact::Known(node) if node < 0 => Fact::Missing,
        fact => fact.and_then(|node| u32::try_from(node).ok()),
    }
}

fn function(tree: &Tree, address: PciAddress, path: &str) -> Option<PciFunction> {
    let file = |name: &str| format!("{path}/{name}");
    let class = tree.word(&file("class"), |text| Some(hex(text)? as u32));
    if !class.known().is_none_or(|class| matters(*class)) {
        return None;
    }
    let (host_bridge, bridges) = match tree.resolve(path) {
        Fact::Known(resolved) => above(&resolved),
        _ => (None, Vec::new()),
    };
    let config = file("config");
    let part = |offset| tree.part(&config, offset, 4);
    let registers = Registers(&part);
    let group = tree.target_name(&file("iommu_group")).and_then(|name| name.parse().ok());
    Some(PciFunction {
        address,
        vendor: tree.word(&file("vendor"), |text| Some(hex(text)? as u16)),
        device: tree.word(&file("device"), |text| Some(hex(text)? as u16)),
        class,
        driver: tree.target_name(&file("driver")),
        numa_node: numa_node(tree, path),
        link: PcieLink {
            speed: link_speed(tree.text(&file("current_link_speed"))),
            width: link_width(tree.value(&file("current_link_width"))),
            max_speed: link_speed(tree.text(&file("max_link_speed"))),
            max_width: link_width(tree.value(&file("max_link_width"))),
        },
        host_bridge: host_bridge.map_or(Fact::Missing, Fact::Known),
        bridges,
        iommu_group: group,
        iommu_domain: tree.word(&file("iommu_group/type"), |text| Some(text.to_owned())),
        acs: registers.acs(),
        control: registers.control(),
        bars: tree.word(&file("resource"), bars),
        is_virtual_function: tree.has(&file("physfn")),
    })
}

/// Networks, displays, bridges, other accelerators, and InfiniBand of the old class.
fn matters(class: u32) -> bool {
    matches!(class >> 16, 0x02 | 0x03 | 0x06 | 0x12) || class >> 8 == 0x0c06
}

/// Host bridge and bridges above a function, from its path below `sys/devices`.
fn above(path: &str) -> (Option<String>, Vec<PciAddress>) {
    let mut host = None;
    let mut bridges = Vec::new();
    for step in path.split('/') {
        if step.starts_with("pci") && step.contains(':') {
            host = Some(step.to_owned());
            bridges.clear();
        } else if let Ok(address) = step.parse() {
            bridges.push(address);
        }
    }
    // The last one is the function itself.
    bridges.pop();
    (host, bridges)
}

/// `0x15b3`, with or without the prefix.
pub(crate) fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

/// `32.0 GT/s PCIe` in megatransfers a second. `Unknown` is no value.
fn link_speed(text: Fact<String>) -> Fact<u32> {
    match text {
        Fact::Known(text) if matches!(text.as_str(), "" | "Unknown") => Fact::Missing,
        fact => fact.and_then(|text| {
            let number: f64 = text.split_whitespace().next()?.parse().ok()?;
            (0.0..1e6).contains(&number).then(|| (number * 1000.0).round() as u32)
        }),
    }
}

/// The kernel writes 0 for no link and 255 for an unknown one.
fn link_width(width: Fact<u32>) -> Fact<u32> {
    match width {
        Fact::Known(0 | 255) => Fact::Missing,
        fact => fact,
    }
}

/// Sizes of the first six lines of `resource`: start, end and flags in hexadecimal.
fn bars(text: &str) -> Option<[u64; 6]> {
    let mut sizes = [0; 6];
    for (size, line) in sizes.iter_mut().zip(text.lines()) {
        let mut words = line.split_whitespace();
        let (start, end) = (hex(words.next()?)?, hex(words.next()?)?);
        *size = if end == 0 { 0 } else { end.checked_sub(start)?.saturating_add(1) };
    }
    Some(sizes)
}

/// The configuration space, read four bytes at a time. Each read of a register goes to the device, and in a
/// virtual machine through its host, so reading all of it would take milliseconds.
struct Registers<'a>(&'a dyn Fn(u64) -> Fact<Vec<u8>>);

impl Registers<'_> {
    /// The register at an offset that is a multiple of 4. The kernel shows the first 64 bytes to
    /// every process and the rest only with `CAP_SYS_ADMIN`: without it the file ends there.
    fn at(&self, offset: u64) -> Fact<u32> {
        match (self.0)(offset) {
            Fact::Known(bytes) => match <[u8; 4]>::try_from(bytes.as_slice()) {
                Ok(bytes) => Fact::Known(u32::from_le_bytes(bytes)),
                Err(_) if offset == 0x40 => Fact::Denied,
                Err(_) => Fact::Missing,
            },
            other => other.unknown(),
        }
    }

    /// Access control of the extended capability 0x000d; known and `None` where there is none.
    fn acs(&self) -> Fact<Option<Acs>> {
        const ACS: u32 = 0x000d;
        if let unknown @ (Fact::Missing | Fact::Denied) = self.at(0x40) {
            return unknown.unknown();
        }
        let mut at = 0x100;
        // There is room for 960 capabilities; a longer list is a cycle.
        for _ in 0..960 {
            let Fact::Known(head) = self.at(at) else { return Fact::Known(None) };
            match head & 0xffff {
                0 | 0xffff => return Fact::Known(None),
                ACS => {
                    return self.at(at + 4).and_then(|register| {
                        let bits = register >> 16;
                        Some(Some(Acs {
                            source_validation: bits & 1 != 0,
                            request_redirect: bits & 4 != 0,
                            completion_redirect: bits & 8 != 0,
                            upstream_forwarding: bits & 16 != 0,
                        }))
                    });
                }
                _ => at = u64::from(head >> 20) & !3,
            }
            if at < 0x100 {
                return Fact::Known(None);
            }
        }
        Fact::Garbled
    }

    /// Device control of the PCI Express capability; missing where there is none.
    fn control(&self) -> Fact<PcieControl> {
        const PCI_EXPRESS: u32 = 0x10;
        if let unknown @ (Fact::Missing | Fact::Denied) = self.at(0x40) {
            return unknown.unknown();
        }
        let mut at = self.at(0x34).get().unwrap_or(0) & 0xfc;
        for _ in 0..48 {
            if at < 0x40 {
                return Fact::Missing;
            }
            let Fact::Known(head) = self.at(u64::from(at)) else { return Fact::Garbled };
            if head & 0xff == PCI_EXPRESS {
                return self.at(u64::from(at) + 8).and_then(|register| {
                    Some(PcieControl {
                        max_payload: 128 << ((register >> 5) & 7),
                        max_read_request: 128 << ((register >> 12) & 7),
                        relaxed_ordering: register & 0x10 != 0,
                    })
                });
            }
            at = (head >> 8) & 0xfc;
        }
        Fact::Garbled
    }
}

#[cfg(test)]
#[path = "pci_tests.rs"]
mod tests;
