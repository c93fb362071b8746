//! How any two of a node's GPUs and NICs are linked.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Distance, Fact, Gpu, GpuVendor, KfdLinkKind, Machine, PciAddress};

/// GPUs and NICs, and the link of each pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Topology {
    /// GPUs, then NICs.
    pub devices: Vec<Device>,
    /// Each pair once, in the order of `devices`.
    pub links: Vec<Link>,
}

/// A GPU or a NIC.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// `GPU0`, by the index of its vendor; or `NIC0`, by the order of the NICs' names.
    pub name: String,
    /// Its kind.
    pub kind: DeviceKind,
    /// The NIC's name, or the model of the GPU.
    pub model: Fact<String>,
    /// PCI function.
    pub pci: Fact<PciAddress>,
    /// NUMA node.
    pub numa_node: Fact<u32>,
    /// Processors of that NUMA node, in the kernel's list format.
    pub processors: Fact<String>,
}

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// A GPU.
    Gpu,
    /// An RDMA device with a PCI function of its own.
    Nic,
}

/// How two devices are linked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Name of the first.
    pub a: String,
    /// Name of the second.
    pub b: String,
    /// Their distance on PCI Express.
    pub distance: Distance,
    /// NVLinks from the first to the second, through switches or not; 0 unless both are NVIDIA's GPUs.
    pub nvlinks: Fact<u32>,
    /// They are linked by xGMI.
    pub xgmi: bool,
}

/// NVLinks of pairs of GPUs, as `nvidia-smi topo -m` numbers these.
type Matrix = BTreeMap<(usize, usize), u32>;

impl Topology {
    /// The topology of a node that was read. `matrix` is the output of `nvidia-smi topo -m`, if
    /// there is one.
    ///
    /// Without it the NVLinks of a pair are known in two cases. One of the two GPUs has no active link; or
    /// the fabric reports that both are registered with one NVLink switch domain, and then all links of a GPU
    /// lead to every other GPU.
    pub fn of(machine: &Machine, matrix: Option<&str>) -> Self {
        let gpus = machine.gpus.iter();
        let nics = machine.nics.iter().filter(|nic| nic.is_hardware());
        let mut devices: Vec<Device> =
            gpus.clone().map(|gpu| device_of_gpu(machine, gpu)).collect();
        devices.extend(nics.zip(0..).map(|(nic, index): (_, u32)| Device {
            name: format!("NIC{index}"),
            kind: DeviceKind::Nic,
            model: Fact::Known(nic.name.clone()),
            pci: nic.pci,
            numa_node: nic.numa_node,
            processors: processors(machine, nic.numa_node),
        }));
        let matrix = matrix.and_then(|text| NvLinks::of(machine, text));
        let mut links = Vec::new();
        for (at, a) in devices.iter().enumerate() {
            for b in &devices[at + 1..] {
                let distance = match (a.pci, b.pci) {
                    (Fact::Known(a), Fact::Known(b)) => machine.distance(a, b),
                    _ => Distance::Unknown,
                };
                let pair = gpu_at(machine, a).zip(gpu_at(machine, b));
                links.push(Link {
                    a: a.name.clone(),
                    b: b.name.clone(),
                    distance,
                    nvlinks: pair.map_or(Fact::Known(0), |(a, b)| nvlinks(a, b, matrix.as_ref())),
                    xgmi: pair.is_some_and(|(a, b)| are_linked_by_xgmi(a, b)),
                });
            }
        }
        Self { devices, links }
    }

    /// The link of two devices, in either order.
    pub fn link(&self, a: &str, b: &str) -> Option<&Link> {
        let is_of = |link: &&Link| link.a == a && link.b == b || link.a == b && link.b == a;
        self.links.iter().find(is_of)
    }
}

fn device_of_gpu(machine: &Machine, gpu: &Gpu) -> Device {
    let mixed = machine.gpus.iter().any(|other| other.vendor != gpu.vendor);
    let prefix = if mixed && gpu.vendor == GpuVendor::Amd { "AMD" } else { "GPU" };
    Device {
        name: format!("{prefix}{}", gpu.index),
        kind: DeviceKind::Gpu,
        model: gpu.model.clone(),
        pci: Fact::Known(gpu.pci),
        numa_node: gpu.numa_node,
        processors: processors(machine, gpu.numa_node),
    }
}

fn gpu_at<'a>(machine: &'a Machine, device: &Device) -> Option<&'a Gpu> {
    let is_it = |gpu: &&Gpu| device.pci == Fact::Known(gpu.pci);
    machine.gpus.iter().find(is_it).filter(|_| device.kind == DeviceKind::Gpu)
}

fn processors(machine: &Machine, node: Fact<u32>) -> Fact<String> {
    let Fact::Known(node) = node else { return node.unknown() };
    let of = machine.numa.iter().find(|numa| numa.node == node);
    of.map_or(Fact::Missing, |numa| {
        numa.processors.clone().and_then(|list| Some(crate::numa::cpu_list_text(&list)))
    })
}

fn nvlinks(a: &Gpu, b: &Gpu, matrix: Option<&NvLinks>) -> Fact<u32> {
    if a.vendor != GpuVendor::Nvidia || b.vendor != GpuVendor::Nvidia {
        return Fact::Known(0);
    }
    if let Some(count) = matrix.and_then(|matrix| matrix.between(a, b)) {
        return Fact::Known(count);
    }
    let active = |gpu: &Gpu| {
        let links = gpu.nvlinks.known()?.iter();
        let count = links.filter(|link| link.megabytes.is_some_and(|rate| rate > 0)).count();
        u32::try_from(count).ok()
    };
    match (active(a), active(b)) {
        (Some(0), _) | (_, Some(0)) => Fact::Known(0),
        (Some(a_count), Some(b_count)) if share_switches(a, b) => Fact::Known(a_count.min(b_count)),
        _ => Fact::Missing,
    }
}

/// Both are registered with one domain of NVLink switches.
fn share_switches(a: &Gpu, b: &Gpu) -> bool {
    let domain = |gpu: &Gpu| {
        let fabric = gpu.fabric.known()?;
        let is_in = fabric.state.known().is_some_and(|state| state == "Completed");
        is_in.then(|| (fabric.cluster.clone(), fabric.clique))
    };
    domain(a).is_some() && domain(a) == domain(b)
}

fn are_linked_by_xgmi(a: &Gpu, b: &Gpu) -> bool {
    let leads = |from: &Gpu, to: &Gpu| {
        let mut links = from.kfd_links.iter();
        links.any(|link| link.kind == KfdLinkKind::Xgmi && link.to == Some(to.pci))
    };
    leads(a, b) || leads(b, a)
}

/// NVLinks of pairs, by PCI function.
struct NvLinks {
    /// The GPUs in the order of `nvidia-smi`, which is that of the addresses.
    gpus: Vec<PciAddress>,
    matrix: Matrix,
}

impl NvLinks {
    /// Nothing where `nvidia-smi` lists other GPUs than this process can use.
    fn of(machine: &Machine, text: &str) -> Option<Self> {
        let is_listed = |gpu: &&Gpu| gpu.vendor == GpuVendor::Nvidia && gpu.is_visible;
        let gpus: Vec<PciAddress> =
            machine.gpus.iter().filter(is_listed).map(|gpu| gpu.pci).collect();
        let (count, matrix) = matrix(text)?;
        (count == gpus.len()).then_some(Self { gpus, matrix })
    }

    fn between(&self, a: &Gpu, b: &Gpu) -> Option<u32> {
        let at = |gpu: &Gpu| self.gpus.iter().position(|pci| *pci == gpu.pci);
        self.matrix.get(&(at(a)?, at(b)?)).copied()
    }
}

/// Reads `nvidia-smi topo -m`: a line of names, then a line for each GPU and NIC. Returns the
/// number of GPUs and the NVLinks of each pair; nothing where the text is no such matrix.
fn matrix(text: &str) -> Option<(usize, Matrix)> {
    // `nvidia-smi` underlines the line of names.
    let plain = text.replace("\u{1b}[4m", "").replace("\u{1b}[0m", "");
    let mut lines = plain.lines().skip_while(|line| !line.trim_start().starts_with("GPU0"));
    let index = |name: &str| name.strip_prefix("GPU")?.parse::<usize>().ok();
    let heads: Vec<usize> = lines.next()?.split_whitespace().map_while(index).collect();
    let mut matrix = Matrix::new();
    for line in lines {
        let mut words = line.split_whitespace();
        let Some(row) = words.next().and_then(index) else { continue };
        for (column, word) in heads.iter().zip(words) {
            let count = match word.strip_prefix("NV") {
                Some(count) => count.parse().ok()?,
                None => 0,
            };
            matrix.insert((row, *column), count);
        }
    }
    let is_whole = matrix.len() == heads.len() * heads.len();
    (is_whole && heads.iter().copied().eq(0..heads.len())).then_some((heads.len(), matrix))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FOUR: &str = "\t\u{1b}[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m\n\
                        GPU0\t X \tNV4\tPIX\t0-31\t0\t\tN/A\n\
                        GPU1\tNV4\t X \tSYS\t32-63\t1\t\tN/A\n\
                        NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n";

    #[test]
    fn the_driver_s_matrix_is_read_with_its_underlined_head() {
        let (count, links) = matrix(FOUR).unwrap();
        assert_eq!((count, links[&(0, 1)], links[&(1, 0)], links[&(0, 0)]), (2, 4, 4, 0));
    }

    #[test]
    fn what_is_no_matrix_tells_nothing() {
        for text in [
            "",
            "No devices were found",
            "GPU0\tGPU1\nGPU0\t X \tNV4\n",
            "GPU0\tGPU1\nGPU0\t X \tNVx\nGPU1\tNV4\t X \n",
            "GPU0\tGPU2\nGPU0\t X \tNV4\nGPU2\tNV4\t X \n",
        ] {
            assert_eq!(matrix(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn whatever_a_command_prints_is_read_or_tells_nothing(text in "(GPU[0-9]|NV[0-9]{0,12}|[ \t\nX]){0,40}") {
            if let Some((count, links)) = matrix(&text) {
                prop_assert_eq!(links.len(), count * count);
            }
        }
    }
}
