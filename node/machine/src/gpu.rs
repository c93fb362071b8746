//! GPUs, their links to each other, and the drivers that serve them.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::commands::{self, SmiGpu};
use crate::tree::Tree;
use crate::{Fact, PciAddress, PciFunction};

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Place among the GPUs of its vendor, as its programs count: in the order of PCI addresses
    /// (NVIDIA, with `CUDA_DEVICE_ORDER=PCI_BUS_ID`), or of the kernel's nodes (AMD).
    pub index: u32,
    /// Its vendor.
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
    /// The process can use it: the driver lists it, and its device node is there. A container may
    /// have only some of a node's GPUs, while `sys` shows all.
    pub is_visible: bool,
    /// Number of its device node: `/dev/nvidiaN`, `/dev/dri/renderDN`.
    pub minor: Fact<u32>,
    /// Largest BAR in bytes: the range of its memory that peers can reach.
    pub largest_bar: Fact<u64>,
    /// It is split into instances (MIG).
    pub mig: Fact<bool>,
    /// NVLinks by number, as `nvidia-smi nvlink -s` lists them.
    pub nvlinks: Fact<Vec<NvLink>>,
    /// The fabric beyond the node, as `nvidia-smi -q` reports it.
    pub fabric: Fact<GpuFabric>,
    /// Architecture, such as `gfx942` (AMD).
    pub gfx: Fact<String>,
    /// Links to other GPUs and to processors (AMD).
    pub kfd_links: Vec<KfdLink>,
}

/// The vendor of a GPU.
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
    /// `Success`, or the reason of a failure.
    pub status: Fact<String>,
    /// GPUs of one cluster and one clique reach each other's memory.
    pub clique: Fact<u32>,
    /// The cluster; all zero where the fabric is one node.
    pub cluster: Fact<String>,
}

/// A link of a node of the kernel's GPU topology (`sys/class/kfd`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KfdLink {
    /// The kind of link.
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

/// NVIDIA's kernel driver, as `proc/driver/nvidia` reports it.
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
    /// The number of GPUs that `nvidia-smi -q` listed; missing where it printed nothing.
    pub smi_gpus: Fact<u64>,
}

const NVIDIA: &str = "proc/driver/nvidia";
const NODES: &str = "sys/class/kfd/kfd/topology/nodes";
const VENDOR_NVIDIA: u16 = 0x10de;
const VENDOR_AMD: u16 = 0x1002;

/// The GPUs among `functions`, those of NVIDIA first.
pub(crate) fn read(tree: &Tree, functions: &[PciFunction], facts: &CommandFacts) -> Vec<Gpu> {
    let of = |vendor: u16, is: fn(u32) -> bool| {
        functions.iter().filter(move |function| {
            function.vendor == Fact::Known(vendor) && function.class.known().is_some_and(|c| is(*c))
        })
    };
    // A VGA controller of a processor or of a management chip is of another vendor, or AMD's with
    // class 0x0300 and no node of the kernel's GPU topology.
    let nvidia = of(VENDOR_NVIDIA, |class| matches!(class >> 8, 0x0300 | 0x0302));
    let amd = of(VENDOR_AMD, |class| matches!(class >> 8, 0x0300 | 0x0302 | 0x0380 | 0x1200));
    let nodes = kfd_nodes(tree);
    let mut gpus: Vec<Gpu> =
        nvidia.zip(0..).map(|(function, index)| nvidia_gpu(tree, function, index, facts)).collect();
    // HIP counts in the order of the kernel's nodes, which is not that of the addresses.
    let mut amd: Vec<_> = amd
        .filter_map(|function| {
            Some((function, nodes.iter().find(|node| node.pci == Some(function.address))?))
        })
        .collect();
    amd.sort_by_key(|(_, node)| node.number);
    gpus.extend(
        amd.into_iter()
            .zip(0..)
            .map(|((function, node), index)| amd_gpu(tree, function, index, node, &nodes)),
    );
    gpus
}

/// Facts about NVIDIA's GPUs from commands.
pub(crate) struct CommandFacts {
    /// The GPUs that `nvidia-smi -q` lists.
    pub(crate) smi: Fact<Vec<SmiGpu>>,
    /// The links that `nvidia-smi nvlink -s` lists, by the GPU's unique name.
    pub(crate) nvlinks: Fact<BTreeMap<String, Vec<NvLink>>>,
}

fn plain(function: &PciFunction, index: u32, vendor: GpuVendor) -> Gpu {
    Gpu {
        index,
        vendor,
        pci: function.address,
        device_id: function.device,
        model: Fact::Missing,
        uuid: Fact::Missing,
        numa_node: function.numa_node,
        is_visible: false,
        minor: Fact::Missing,
        largest_bar: function.bars.and_then(|bars| bars.into_iter().max()),
        mig: Fact::Missing,
        nvlinks: Fact::Missing,
        fabric: Fact::Missing,
        gfx: Fact::Missing,
        kfd_links: Vec::new(),
    }
}

fn nvidia_gpu(tree: &Tree, function: &PciFunction, index: u32, facts: &CommandFacts) -> Gpu {
    let mut gpu = plain(function, index, GpuVendor::Nvidia);
    let information = tree.text(&format!("{NVIDIA}/gpus/{}/information", gpu.pci));
    let field = |name: &str| match &information {
        Fact::Known(text) => fields(text)
            .find_map(|(key, value)| (key == name).then(|| Fact::Known(value.to_owned())))
            .unwrap_or_default(),
        other => other.clone(),
    };
    gpu.model = field("Model");
    gpu.uuid = field("GPU UUID");
    gpu.minor = field("Device Minor").and_then(|minor| minor.parse().ok());
    if let Fact::Known(minor) = gpu.minor {
        gpu.is_visible = tree.has(&format!("dev/nvidia{minor}"));
        let instances = tree.list(&format!("{NVIDIA}/capabilities/gpu{minor}/mig"));
        if instances.iter().any(|name| name.starts_with("gi")) {
            gpu.mig = Fact::Known(true);
        }
    }
    match &facts.smi {
        Fact::Known(all) => {
            if let Some(smi) = all.iter().find(|smi| smi.pci == gpu.pci) {
                gpu.mig = if gpu.mig == Fact::Known(true) { gpu.mig } else { smi.mig };
                gpu.fabric = smi.fabric.clone();
            }
        }
        other => gpu.fabric = other.unknown(),
    }
    gpu.nvlinks = match (&facts.nvlinks, &gpu.uuid) {
        (Fact::Known(all), Fact::Known(uuid)) => {
            all.get(uuid).map_or(Fact::Missing, |links| Fact::Known(links.clone()))
        }
        (other, _) => other.unknown(),
    };
    gpu
}

/// Lines `Key: value` of the driver's files.
fn fields(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.trim(), v.trim()))
}

/// NVIDIA's driver; `None` where it is not loaded.
pub(crate) fn read_driver(tree: &Tree, outputs: &commands::Outputs) -> Option<NvidiaDriver> {
    let version = tree.text(&format!("{NVIDIA}/version"));
    if version == Fact::Missing {
        return None;
    }
    let params = tree.text(&format!("{NVIDIA}/params")).and_then(|text| {
        let pairs = fields(&text).map(|(k, v)| (k.to_owned(), v.trim_matches('"').to_owned()));
        Some(pairs.collect::<BTreeMap<_, _>>())
    });
    Some(NvidiaDriver {
        is_open: version.clone().and_then(|text| Some(text.contains("Open Kernel Module"))),
        version: version.and_then(|text| driver_version(&text)),
        registry: params.clone().and_then(|params| {
            Some(registry(params.get("RegistryDwords").map_or("", String::as_str)))
        }),
        params,
        smi_gpus: command_facts(outputs).smi.and_then(|gpus| Some(gpus.len() as u64)),
    })
}

/// The first word of the form `580.65.06` of the line `NVRM version: ...`.
pub fn driver_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| {
        word.contains('.') && word.split('.').all(|n| !n.is_empty() && n.parse::<u32>().is_ok())
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// `PeerMappingOverride=1;RmX=0x2`.
fn registry(text: &str) -> BTreeMap<String, u32> {
    text.split(';')
        .filter_map(|pair| {
            let (name, value) = pair.split_once('=')?;
            let value = value.trim();
            let value = match value.strip_prefix("0x") {
                Some(digits) => u32::from_str_radix(digits, 16).ok()?,
                None => value.parse().ok()?,
            };
            Some((name.trim().to_owned(), value))
        })
        .collect()
}

/// A node of the kernel's GPU topology.
struct KfdNode {
    number: u32,
    /// `None` for a processor.
    pci: Option<PciAddress>,
    properties: BTreeMap<String, u64>,
}

fn kfd_nodes(tree: &Tree) -> Vec<KfdNode> {
    tree.list(NODES)
        .iter()
        .filter_map(|name| {
            let properties = tree
                .text(&format!("{NODES}/{name}/properties"))
                .get()
                .map_or(BTreeMap::new(), |text| properties(&text));
            let pci = (properties.get("simd_count").copied().unwrap_or(0) > 0)
                .then(|| kfd_address(&properties))
                .flatten();
            Some(KfdNode { number: name.parse().ok()?, pci, properties })
        })
        .collect()
}

/// Lines `name value`.
fn properties(text: &str) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?)))
        .collect()
}

/// `location_id` holds bus, device and function as a PCI requester id does.
fn kfd_address(properties: &BTreeMap<String, u64>) -> Option<PciAddress> {
    let location = *properties.get("location_id")?;
    Some(PciAddress {
        domain: u32::try_from(properties.get("domain").copied().unwrap_or(0)).ok()?,
        bus: (location >> 8) as u8,
        device: (location >> 3) as u8 & 31,
        function: location as u8 & 7,
    })
}

fn amd_gpu(
    tree: &Tree,
    function: &PciFunction,
    index: u32,
    node: &KfdNode,
    nodes: &[KfdNode],
) -> Gpu {
    let mut gpu = plain(function, index, GpuVendor::Amd);
    let path = format!("sys/bus/pci/devices/{}", gpu.pci);
    let property =
        |name: &str| node.properties.get(name).map_or(Fact::Missing, |value| Fact::Known(*value));
    gpu.model = tree.word(&format!("{path}/product_name"), |text| Some(text.to_owned()));
    gpu.uuid = property("unique_id").and_then(|id| Some(format!("{id:016x}")));
    gpu.gfx = property("gfx_target_version").and_then(gfx);
    gpu.minor = property("drm_render_minor").and_then(|minor| u32::try_from(minor).ok());
    if let Fact::Known(minor) = gpu.minor {
        gpu.is_visible = tree.has("dev/kfd") && tree.has(&format!("dev/dri/renderD{minor}"));
    }
    let links = format!("{NODES}/{}/io_links", node.number);
    gpu.kfd_links = tree
        .list(&links)
        .iter()
        .filter_map(|name| {
            let link = properties(&tree.text(&format!("{links}/{name}/properties")).get()?);
            let to = link.get("node_to")?;
            Some(KfdLink {
                kind: match link.get("type")? {
                    2 => KfdLinkKind::Pcie,
                    11 => KfdLinkKind::Xgmi,
                    _ => KfdLinkKind::Other,
                },
                to: nodes.iter().find(|node| u64::from(node.number) == *to)?.pci,
                megabytes: link.get("max_bandwidth").copied().unwrap_or(0),
            })
        })
        .collect();
    gpu
}

/// The name of an architecture: 90402, version 9.4 and stepping 2, is gfx942.
fn gfx(version: u64) -> Option<String> {
    let (major, minor, stepping) = (version / 10_000, version / 100 % 100, version % 100);
    (major > 0).then(|| format!("gfx{major}{minor:x}{stepping:x}"))
}

/// Parses the outputs of the commands.
pub(crate) fn command_facts(outputs: &commands::Outputs) -> CommandFacts {
    CommandFacts {
        smi: commands::parsed(&outputs.nvidia_smi, commands::smi),
        nvlinks: commands::parsed(&outputs.nvlink, commands::nvlinks),
    }
}

#[cfg(test)]
#[path = "gpu_tests.rs"]
mod tests;
