//! The files of the kernel's modules to load, and their order.

use std::collections::HashMap;

use anyhow::{Context, Result};

/// The modules that the machine needs: its devices, the host's files, soft-RoCE, and a network for it. rxe asks
/// for `crc32_generic` at run time only, so `modules.dep` does not name it.
pub(super) const WANTED: [&str; 12] = [
    "virtio_pci",
    "virtio_console",
    "qemu_fw_cfg",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "veth",
    "bridge",
];

/// The files to load in turn, as paths in the folder of the modules. `dep` is the text of
/// `modules.dep`, `builtin` that of `modules.builtin`.
pub(super) fn load_order(wanted: &[&str], dep: &str, builtin: &str) -> Result<Vec<String>> {
    let modules: HashMap<String, (&str, &str)> = dep
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| (module_name(file), (file, needs)))
        .collect();
    let mut order: Vec<String> = Vec::new();
    for &name in wanted {
        let Some((file, needs)) = modules.get(name) else {
            let inside = builtin.lines().any(|file| module_name(file) == name);
            inside.then_some(()).with_context(|| {
                format!("find the kernel module {name}: this kernel has no such module")
            })?;
            continue;
        };
        // A line holds all needs of its module, those of needs too; what is needed most comes last.
        for file in needs.split_whitespace().rev().chain([*file]) {
            if !order.iter().any(|known| known == file) {
                order.push(file.to_string());
            }
        }
    }
    Ok(order)
}

/// `kernel/fs/9p/9p.ko` is the module `9p`. The kernel takes `-` for `_`.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/net/9p/9pnet.ko:
kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko
kernel/fs/netfs/netfs.ko:
kernel/net/9p/9pnet-virtio.ko: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio.ko \
kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
";

    #[test]
    fn a_module_is_loaded_once_and_after_all_that_it_needs() {
        let order = load_order(&["9pnet_virtio", "9p"], DEP, "").unwrap();
        let names: Vec<String> = order.iter().map(|file| module_name(file)).collect();
        let expected = ["virtio_ring", "virtio", "9pnet", "9pnet_virtio", "netfs", "9p"];
        assert_eq!(names, expected);
        assert_eq!(order[3], "kernel/net/9p/9pnet-virtio.ko");
    }

    #[test]
    fn a_module_inside_the_kernel_need_not_be_loaded() {
        let order = load_order(&["veth", "9pnet"], DEP, "kernel/drivers/net/veth.ko\n").unwrap();
        assert_eq!(order, ["kernel/net/9p/9pnet.ko"]);
    }

    #[test]
    fn a_module_that_the_kernel_does_not_have_is_named() {
        let error = load_order(&["9p", "rdma_rxe"], DEP, "kernel/a.ko\n").unwrap_err().to_string();
        assert_eq!(error, "find the kernel module rdma_rxe: this kernel has no such module");
    }
}
