//! The facts that are read from each tree: one is recorded, the others are made from documentation.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::Path;

use proptest::prelude::*;
use tokenyard_machine::{Distance, Fact, GpuVendor, LinkLayer, Machine, NicFamily, Tree};

fn machine(name: &str) -> Machine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("trees").join(name);
    Machine::read(&Tree::open(&path).unwrap())
}

fn distances(machine: &Machine) -> Vec<Vec<Distance>> {
    machine
        .gpus
        .iter()
        .map(|gpu| {
            let nics = machine.nics.iter();
            nics.map(|nic| machine.distance(gpu.pci, nic.pci.get().unwrap())).collect()
        })
        .collect()
}

#[test]
fn switches_have_the_gpus_and_nics_below_them_whatever_else_the_node_has() {
    for (name, switches, gpus, nics) in [
        ("hgx-cx7.tree", 8, 1, 1),
        ("p5en-efa.tree", 4, 2, 4),
        ("mi300x-pollara.tree", 8, 1, 1),
        ("healthy/hgx-storage-alike.tree", 8, 1, 1),
        ("healthy/hgx-bluefield.tree", 8, 1, 1),
        // A function for each port of a card.
        ("healthy/hgx-one-port.tree", 8, 1, 2),
        ("gb200-nvl72.tree", 0, 0, 0),
        ("cpu-virtual.tree", 0, 0, 0),
    ] {
        let machine = machine(name);
        let all = tokenyard_machine::switches(&machine);
        assert_eq!(all.len(), switches, "{name}");
        for one in &all {
            assert_eq!((one.gpus.len(), one.nics.len()), (gpus, nics), "{name}: {}", one.address);
        }
    }
}

#[test]
fn an_hgx_node_has_a_nic_below_the_switch_of_each_gpu() {
    let machine = machine("hgx-cx7.tree");
    assert_eq!((machine.nics.len(), machine.gpus.len(), machine.numa.len()), (8, 8, 2));
    for nic in &machine.nics {
        assert_eq!(nic.family, NicFamily::Mlx5);
        let port = nic.port(1).unwrap();
        assert!(port.is_active());
        assert_eq!(port.link_layer, Fact::Known(LinkLayer::InfiniBand));
        assert_eq!(port.rate.known().unwrap().megabits, 400_000);
        assert_eq!(port.counters.len(), 14);
        assert_eq!(nic.active_mtu[&1], 4096);
        assert_eq!(nic.interfaces.len(), 1);
        let function = machine.pci_at(nic.pci.get().unwrap()).unwrap();
        assert_eq!(function.link.speed, Fact::Known(32_000));
        assert_eq!(function.control.known().unwrap().max_read_request, 4096);
        assert_eq!(function.iommu_domain, Fact::Known("identity".into()));
    }
    for (gpu, row) in distances(&machine).into_iter().enumerate() {
        let near: Vec<usize> = (0..8).filter(|nic| row[*nic] == Distance::SameSwitch).collect();
        assert_eq!(near, [gpu]);
        assert_eq!(row.iter().filter(|far| **far == Distance::SameNumaNode).count(), 3);
        assert_eq!(row.iter().filter(|far| **far == Distance::Across).count(), 4);
    }
    for gpu in &machine.gpus {
        assert!(gpu.is_visible);
        assert_eq!(gpu.vendor, GpuVendor::Nvidia);
        assert_eq!(gpu.nvlinks.known().unwrap().len(), 18);
        assert_eq!(gpu.mig, Fact::Known(false));
        assert_eq!(gpu.largest_bar, Fact::Known(256 << 30));
    }
    let driver = machine.nvidia.unwrap();
    assert_eq!(driver.registry.known().unwrap()["PeerMappingOverride"], 1);
}

#[test]
fn a_p5en_has_four_nics_and_two_gpus_below_each_bridge() {
    let machine = machine("p5en-efa.tree");
    assert_eq!((machine.nics.len(), machine.gpus.len()), (16, 8));
    assert!(machine.nics.iter().all(|nic| nic.family == NicFamily::Efa));
    assert!(machine.nics.iter().all(|nic| nic.hca_type == Fact::Missing));
    let names: Vec<_> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!((names[0], names[4], names[15]), ("rdmap85s0", "rdmap110s0", "rdmap163s0"));
    for (gpu, row) in distances(&machine).into_iter().enumerate() {
        let near: Vec<usize> = (0..16).filter(|nic| row[*nic] == Distance::SameSwitch).collect();
        let first = gpu / 2 * 4;
        assert_eq!(near, (first..first + 4).collect::<Vec<_>>());
    }
    assert_eq!(machine.libraries.efa_installer, Fact::Known("1.43.2".into()));
    let fabric = machine.libraries.found.iter().find(|l| l.name == "libfabric.so").unwrap();
    assert_eq!(fabric.version.as_deref(), Some("1.29.1"));
    assert_eq!(machine.fabrics.known().unwrap()[0].version.as_deref(), Some("201.0"));
    assert_eq!(machine.kernel.is_virtual, Fact::Known(true));
}

#[test]
fn an_mi300x_node_has_a_nic_two_switches_away_from_each_gpu_in_the_order_of_the_kernel() {
    let machine = machine("mi300x-pollara.tree");
    assert_eq!((machine.nics.len(), machine.gpus.len()), (8, 8));
    let near: Vec<_> = distances(&machine)
        .iter()
        .map(|row| {
            let nic = row.iter().position(|far| *far == Distance::SameRootPort).unwrap();
            assert_eq!(row.iter().min(), Some(&Distance::SameRootPort));
            machine.nics[nic].name.as_str()
        })
        .collect();
    let documented = [121, 9, 105, 25, 249, 137, 233, 153].map(|bus| format!("rocep{bus}s0"));
    assert_eq!(near, documented);
    for gpu in &machine.gpus {
        assert_eq!(gpu.vendor, GpuVendor::Amd);
        let xgmi = gpu.kfd_links.iter().filter(|link| link.to.is_some()).count();
        assert_eq!((xgmi, gpu.kfd_links.len()), (7, 8));
        assert!(gpu.is_visible);
    }
    assert!(machine.nvidia.is_none());
}

#[test]
fn a_gb200_tray_has_its_gpus_in_a_clique_and_no_nic_near_them_but_by_numa_node() {
    let machine = machine("gb200-nvl72.tree");
    assert_eq!((machine.nics.len(), machine.gpus.len()), (8, 4));
    for (gpu, row) in distances(&machine).into_iter().enumerate() {
        let near: Vec<usize> = (0..8).filter(|nic| row[*nic] == Distance::SameNumaNode).collect();
        assert_eq!(near, if gpu < 2 { [0, 1, 2, 3] } else { [4, 5, 6, 7] });
    }
    for gpu in &machine.gpus {
        let fabric = gpu.fabric.known().unwrap();
        assert_eq!(fabric.clique, Fact::Known(32766));
        assert_eq!(gpu.nvlinks.known().unwrap().len(), 18);
    }
    let memory_only = |n: &&tokenyard_machine::NumaNode| n.processors.known().unwrap().is_empty();
    assert_eq!(machine.numa.iter().filter(memory_only).count(), 4);
    assert!(machine.devices.nodes.contains_key("nvidia-caps-imex-channels/channel0"));
}

#[test]
fn a_port_without_a_link_is_down_and_has_no_speed() {
    let machine = machine("roce-port-down.tree");
    let [up, down] = &machine.nics[..] else { panic!("two devices") };
    assert!(up.port(1).unwrap().is_active());
    assert!(!down.port(1).unwrap().is_active());
    assert_eq!(up.port(1).unwrap().gids.len(), 4);
    assert_eq!(machine.interfaces[1].megabits, Fact::Missing);
    assert_eq!(
        machine.distance(up.pci.get().unwrap(), down.pci.get().unwrap()),
        Distance::SameSwitch
    );
}

#[test]
fn a_bond_is_one_device_that_says_the_rate_of_one_port() {
    let machine = machine("roce-bond.tree");
    assert_eq!(machine.nics.len(), 1);
    let rate = machine.nics[0].port(1).unwrap().rate.clone().get().unwrap();
    let bond = machine.interfaces.iter().find(|interface| interface.bond.is_some()).unwrap();
    assert_eq!((rate.megabits, bond.megabits), (100_000, Fact::Known(200_000)));
    let members = machine.interfaces.iter().filter(|i| i.master == Fact::Known("bond0".into()));
    assert_eq!(members.count(), 2);
}

#[test]
fn a_container_without_rights_sees_its_nics_and_cannot_open_them() {
    use tokenyard_machine::{Bound, Capabilities, Seccomp};
    let machine = machine("container-no-rights.tree");
    assert_eq!(machine.nics.len(), 2);
    assert!(machine.devices.nodes.keys().all(|node| !node.starts_with("infiniband")));
    assert_eq!(machine.limits.locked_memory.known().unwrap().hard, Bound::At(65536));
    assert!(!machine.container.capabilities.get().unwrap().has(Capabilities::IPC_LOCK));
    assert_eq!(machine.container.seccomp, Fact::Known(Seccomp::Filter));
    assert_eq!(machine.container.runtime, Fact::Known(Some("kubernetes".into())));
    assert_eq!(machine.container.cgroup.memory, Fact::Known(Bound::At(256 << 30)));
    assert!(machine.pci.iter().all(|function| function.acs == Fact::Denied));
    assert_eq!(machine.limits.shared_memory, Fact::Known(64 << 20));
}

#[test]
fn every_tree_says_whether_it_was_recorded_or_made_from_documentation_and_becomes_json() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("trees");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "tree") {
            let text = std::fs::read_to_string(&path).unwrap();
            let is_made = text.contains("Made from documentation; recorded nowhere:");
            assert!(is_made != text.contains("# Recorded on such a machine on "), "{path:?}");
            let machine = Machine::read(&Tree::open(&path).unwrap());
            assert!(serde_json::to_string(&machine).unwrap().len() > 1000);
            count += 1;
        }
    }
    assert!(count >= 7, "{count}");
}

#[test]
fn this_machine_is_read_for_real() {
    let machine = Machine::read(&Tree::system());
    assert!(machine.kernel.release.known().is_some());
    assert!(machine.limits.memory_total.known().is_some_and(|bytes| *bytes > 1 << 20));
    assert!(machine.limits.locked_memory.known().is_some());
    assert!(machine.container.capabilities.known().is_some());
    assert!(machine.interfaces.iter().any(|interface| interface.name == "lo"));
}

/// A tree in which some values are nonsense, as on a node with a later kernel or a defect.
fn garbled(text: &str, edits: &[(usize, String)]) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (at, nonsense) in edits {
        let at = at % lines.len();
        if let Some((path, _)) = lines[at].clone().split_once(" = ")
            && !path.starts_with('@')
        {
            lines[at] = format!("{path} = {nonsense}");
        }
    }
    lines.join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_nonsense_in_files_panics_or_keeps_the_rest_from_being_read(
        edits in proptest::collection::vec((any::<usize>(), "\\PC{0,24}|[-0-9.,: x]{0,24}"), 1..40),
    ) {
        for name in ["hgx-cx7.tree", "mi300x-pollara.tree", "roce-bond.tree"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("trees").join(name);
            let text = garbled(&std::fs::read_to_string(path).unwrap(), &edits);
            let machine = Machine::read(&Tree::recorded(&text).unwrap());
            prop_assert!(!machine.nics.is_empty() && !machine.pci.is_empty());
        }
    }
}
