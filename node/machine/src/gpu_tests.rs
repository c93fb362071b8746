use proptest::prelude::*;

use super::*;
use crate::Machine;

#[test]
fn the_driver_tells_its_version_kind_and_registry() {
    let tree = Tree::recorded(
        "proc/driver/nvidia/version = NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\\nGCC version:  gcc version 12.3.0\n\
         proc/driver/nvidia/params = EnableStreamMemOPs: 1\\nImexChannelCount: 2048\\nRegistryDwords: \"PeerMappingOverride=1;RMForce=0x10;\"\\nRegistryDwordsPerDevice: \"\"\n",
    )
    .unwrap();
    let driver = read_driver(&tree, &commands::Outputs::default()).unwrap();
    assert_eq!(driver.version, Fact::Known("580.65.06".into()));
    assert_eq!(driver.is_open, Fact::Known(true));
    assert_eq!(driver.params.known().unwrap()["ImexChannelCount"], "2048");
    let registry = driver.registry.get().unwrap();
    assert_eq!(registry["PeerMappingOverride"], 1);
    assert_eq!(registry["RMForce"], 16);
    assert_eq!(read_driver(&Tree::recorded("").unwrap(), &commands::Outputs::default()), None);
}

#[test]
fn gpus_that_a_container_was_not_given_are_not_visible() {
    let machine = Machine::read(
        &Tree::recorded(
            "@each bus = 3b | 86\n\
             sys/bus/pci/devices/0000:{bus}:00.0/vendor = 0x10de\n\
             sys/bus/pci/devices/0000:{bus}:00.0/class = 0x030200\n\
             @end\n\
             proc/driver/nvidia/gpus/0000:86:00.0/information = Model: \\t\\t NVIDIA L40S\\nGPU UUID: \\t GPU-1\\nDevice Minor: \\t 1\n\
             proc/driver/nvidia/capabilities/gpu1/mig/gi1/access = DeviceFileMinor: 12\n\
             dev/nvidia1 =\n",
        )
        .unwrap(),
    );
    let visible: Vec<_> = machine.gpus.iter().map(|gpu| (gpu.index, gpu.is_visible)).collect();
    assert_eq!(visible, [(0, false), (1, true)]);
    assert_eq!(machine.gpus[1].model, Fact::Known("NVIDIA L40S".into()));
    assert_eq!(machine.gpus[1].mig, Fact::Known(true));
    assert_eq!(machine.gpus[0].mig, Fact::Missing);
}

#[test]
fn amd_gpus_are_those_with_a_node_and_know_their_links() {
    let machine = Machine::read(
        &Tree::recorded(
            "@each bus = 05 | 26 | c0\n\
             sys/bus/pci/devices/0000:{bus}:00.0/vendor = 0x1002\n\
             sys/bus/pci/devices/0000:{bus}:00.0/class = 0x120000\n\
             @end\n\
             sys/class/kfd/kfd/topology/nodes/0/properties = cpu_cores_count 96\\nsimd_count 0\n\
             @each n location minor other = 1 1280 128 2 | 2 9728 136 1\n\
             sys/class/kfd/kfd/topology/nodes/{n}/properties = simd_count 1216\\nlocation_id {location}\\ndomain 0\\ndrm_render_minor {minor}\\nunique_id 255\n\
             sys/class/kfd/kfd/topology/nodes/{n}/io_links/0/properties = type 2\\nnode_to 0\\nmax_bandwidth 64000\n\
             sys/class/kfd/kfd/topology/nodes/{n}/io_links/1/properties = type 11\\nnode_to {other}\\nmax_bandwidth 64000\n\
             @end\n\
             dev/kfd =\n\
             dev/dri/renderD128 =\n",
        )
        .unwrap(),
    );
    let gpus: Vec<_> = machine.gpus.iter().map(|g| (g.pci.to_string(), g.is_visible)).collect();
    assert_eq!(gpus, [("0000:05:00.0".to_owned(), true), ("0000:26:00.0".to_owned(), false)]);
    assert_eq!(machine.gpus[0].uuid, Fact::Known("00000000000000ff".into()));
    let links: Vec<_> = machine.gpus[0].kfd_links.iter().map(|l| (l.kind, l.to)).collect();
    let other = machine.gpus[1].pci;
    assert_eq!(links, [(KfdLinkKind::Pcie, None), (KfdLinkKind::Xgmi, Some(other))]);
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,60}|([A-Za-z]{1,5}=(0x)?[0-9a-f]{0,10};){0,3}|NVRM version: [0-9. ]{0,20}") {
        let _ = (registry(&text), driver_version(&text), kfd_address(&properties(&text)));
        let _ = fields(&text).count();
    }
}

#[test]
fn architectures_of_amd_have_the_names_that_compilers_use() {
    let names = [90_402, 90_500, 90_010, 110_000].map(gfx);
    let expected = ["gfx942", "gfx950", "gfx90a", "gfx1100"].map(|name| Some(name.to_owned()));
    assert_eq!(names, expected);
    assert_eq!(gfx(0), None, "a node of a processor");
}
