//! The kernel, its command line, and its modules.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::Fact;
use crate::tree::Tree;

/// The running kernel and the machine that it runs on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Kernel {
    /// `6.8.0-45-generic`.
    pub release: Fact<String>,
    /// Words of the command line: `iommu=pt`.
    pub command_line: Fact<Vec<String>>,
    /// The processors run under a hypervisor.
    pub is_virtual: Fact<bool>,
    /// Model of the processors.
    pub processor: Fact<String>,
    /// Maker and name of the machine: `NVIDIA DGXH100`.
    pub product: Fact<String>,
    /// `CONFIG_PCI_P2PDMA`, from the configuration file in `boot`.
    pub has_p2pdma: Fact<bool>,
    /// `CONFIG_DMABUF_MOVE_NOTIFY`, from the same.
    pub has_dmabuf_move_notify: Fact<bool>,
}

/// A kernel module that is loaded (or built in and visible).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Module {
    /// Version, where the module has one.
    pub version: Fact<String>,
    /// Parameters that can be read.
    pub parameters: BTreeMap<String, Fact<String>>,
}

/// Modules that are looked for.
const NAMES: [&str; 30] = [
    "amdgpu",
    "bnxt_en",
    "bnxt_re",
    "bonding",
    "efa",
    "efa_nv_peermem",
    "ena",
    "erdma",
    "gdrdrv",
    "ib_core",
    "ib_peer_mem",
    "ib_umad",
    "ib_uverbs",
    "ice",
    "ionic",
    "ionic_rdma",
    "irdma",
    "mlx5_core",
    "mlx5_ib",
    "nv_peer_mem",
    "nvidia",
    "nvidia_fs",
    "nvidia_modeset",
    "nvidia_peermem",
    "nvidia_uvm",
    "rdma_cm",
    "rdma_rxe",
    "rdma_ucm",
    "siw",
    "xpmem",
];
/// Most parameters of a module that are read.
const MOST_PARAMETERS: usize = 256;

pub(crate) fn read(tree: &Tree) -> BTreeMap<String, Module> {
    NAMES
        .into_iter()
        .filter(|name| tree.has(&format!("sys/module/{name}")))
        .map(|name| (name.to_owned(), module(tree, &format!("sys/module/{name}"))))
        .collect()
}

fn module(tree: &Tree, path: &str) -> Module {
    Module {
        version: tree.word(&format!("{path}/version"), |text| Some(text.to_owned())),
        parameters: tree
            .list(&format!("{path}/parameters"))
            .into_iter()
            .take(MOST_PARAMETERS)
            .map(|name| {
                let value = tree.text(&format!("{path}/parameters/{name}"));
                (name, value)
            })
            .collect(),
    }
}

pub(crate) fn read_kernel(tree: &Tree) -> Kernel {
    let release = tree.word("proc/sys/kernel/osrelease", |text| Some(text.to_owned()));
    let config = match &release {
        Fact::Known(release) => tree.text(&format!("boot/config-{release}")),
        _ => Fact::Missing,
    };
    // If a configuration does not name an option, the kernel may not know the option.
    let option = |name: &str| {
        let (on, off) = (format!("{name}=y"), format!("# {name} is not set"));
        match &config {
            Fact::Known(text) if text.lines().any(|line| line == on) => Fact::Known(true),
            Fact::Known(text) if text.lines().any(|line| line == off) => Fact::Known(false),
            Fact::Known(_) => Fact::Missing,
            other => other.unknown(),
        }
    };
    let processor = tree.text("proc/cpuinfo");
    let line = |name: &str| {
        processor.clone().known().and_then(|text| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(key, _)| key.trim() == name)
                .map(|(_, value)| value.trim().to_owned())
        })
    };
    Kernel {
        release,
        command_line: tree
            .text("proc/cmdline")
            .and_then(|text| Some(text.split_whitespace().map(str::to_owned).collect())),
        // Only x86 states it here.
        is_virtual: line("flags").map_or(Fact::Missing, |flags| {
            Fact::Known(flags.split_whitespace().any(|flag| flag == "hypervisor"))
        }),
        processor: line("model name").map_or(Fact::Missing, Fact::Known),
        product: product(tree),
        has_p2pdma: option("CONFIG_PCI_P2PDMA"),
        has_dmabuf_move_notify: option("CONFIG_DMABUF_MOVE_NOTIFY"),
    }
}

fn product(tree: &Tree) -> Fact<String> {
    let vendor = tree.text("sys/class/dmi/id/sys_vendor");
    let name = tree.text("sys/class/dmi/id/product_name");
    match (vendor, name) {
        (Fact::Known(vendor), Fact::Known(name)) => Fact::Known(format!("{vendor} {name}")),
        (fact, Fact::Missing) | (_, fact) => fact,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_and_the_kernel_are_read() {
        let tree = Tree::recorded(
            "proc/sys/kernel/osrelease = 6.8.0-45-generic\n\
             boot/config-6.8.0-45-generic = CONFIG_PCI_P2PDMA=y\\n# CONFIG_DMABUF_MOVE_NOTIFY is not set\n\
             proc/cmdline = BOOT_IMAGE=/vmlinuz iommu=pt\n\
             proc/cpuinfo = model name\\t: Some CPU\\nflags\\t\\t: fpu hypervisor\n\
             sys/class/dmi/id/sys_vendor = NVIDIA\n\
             sys/class/dmi/id/product_name = DGXH100\n\
             sys/module/nvidia_peermem/version = 580.65.06\n\
             sys/module/nvidia_peermem/parameters/peerdirect_support = 0\n\
             sys/module/snd/version = 1\n",
        )
        .unwrap();
        let kernel = read_kernel(&tree);
        assert_eq!(kernel.has_p2pdma, Fact::Known(true));
        assert_eq!(kernel.has_dmabuf_move_notify, Fact::Known(false));
        assert_eq!(kernel.is_virtual, Fact::Known(true));
        assert_eq!(kernel.product, Fact::Known("NVIDIA DGXH100".into()));
        assert_eq!(kernel.command_line.known().unwrap()[1], "iommu=pt");
        let modules = read(&tree);
        assert_eq!(modules.keys().collect::<Vec<_>>(), ["nvidia_peermem"]);
        let module = &modules["nvidia_peermem"];
        assert_eq!(module.version, Fact::Known("580.65.06".into()));
        assert_eq!(module.parameters["peerdirect_support"], Fact::Known("0".into()));
    }
}
