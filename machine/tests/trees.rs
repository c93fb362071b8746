//! The recorded trees: what is read of each.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::Path;

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
