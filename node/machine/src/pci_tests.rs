use proptest::prelude::*;

use super::*;
use crate::Machine;

/// A root port, a switch with two ports below, an endpoint at each, a second switch behind the
/// second; and an endpoint of another host bridge.
const TREE: &str = "
@each a path = 0000:16:01.0 0000:16:01.0 | 0000:17:00.0 0000:16:01.0/0000:17:00.0 | 0000:18:00.0 0000:16:01.0/0000:17:00.0/0000:18:00.0 | 0000:18:01.0 0000:16:01.0/0000:17:00.0/0000:18:01.0
sys/devices/pci0000:16/{path}/class = 0x060400
sys/bus/pci/devices/{a} -> ../../../devices/pci0000:16/{path}
@end
@each a path host node = 0000:19:00.0 0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0 16 0 | 0000:1a:00.0 0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0 16 0 | 0000:1b:00.0 0000:16:02.0/0000:1b:00.0 16 0 | 0000:40:00.0 0000:40:00.0 40 0 | 0000:80:00.0 0000:80:00.0 80 1 | 0000:81:00.0 0000:81:00.0 81 -1
sys/devices/pci0000:{host}/{path}/class = 0x020700
sys/devices/pci0000:{host}/{path}/numa_node = {node}
sys/bus/pci/devices/{a} -> ../../../devices/pci0000:{host}/{path}
@end
sys/devices/pci0000:40/0000:40:00.0/config x= 1000 34:40 40:1000 48:3029 100:0d000100 106:1d00
sys/devices/pci0000:80/0000:80:00.0/config x= 40 0:b315
sys/devices/pci0000:40/0000:40:00.0/resource = 0x0000000000001000 0x0000000000001fff 0x40200\\n0x0 0x0 0x0\\n0x2000000000 0x3fffffffff 0x14220c
sys/devices/pci0000:40/0000:40:00.0/current_link_speed = 16.0 GT/s PCIe
sys/devices/pci0000:40/0000:40:00.0/max_link_speed = Unknown
sys/devices/pci0000:99/0000:99:00.0/class = 0x010802
sys/bus/pci/devices/0000:99:00.0 -> ../../../devices/pci0000:99/0000:99:00.0
";

fn machine() -> Machine {
    Machine::read(&Tree::recorded(TREE).unwrap())
}

#[test]
fn distance_is_read_off_the_bridges_above() {
    let machine = machine();
    let distance = |a: &str, b: &str| {
        machine.distance(
            format!("0000:{a}:00.0").parse().unwrap(),
            format!("0000:{b}:00.0").parse().unwrap(),
        )
    };
    assert_eq!(distance("19", "1a"), Distance::SameSwitch);
    assert_eq!(distance("19", "1b"), Distance::SameHostBridge);
    assert_eq!(distance("19", "40"), Distance::SameNumaNode);
    assert_eq!(distance("19", "80"), Distance::Across);
    assert_eq!(distance("19", "81"), Distance::Unknown);
    assert_eq!(distance("19", "ff"), Distance::Unknown);
}

#[test]
fn two_levels_of_switches_are_one_root_port_apart() {
    let address = |text: &str| text.parse::<PciAddress>().unwrap();
    let mut near = machine().pci_at(address("0000:19:00.0")).unwrap().clone();
    let far = machine().pci_at(address("0000:1a:00.0")).unwrap().clone();
    near.bridges.extend([address("0000:1c:00.0"), address("0000:1d:00.0")]);
    assert_eq!(near.distance(&far), Distance::SameRootPort);
}

#[test]
fn what_is_no_bridge_nic_or_accelerator_is_left_out() {
    assert_eq!(machine().pci_at("0000:99:00.0".parse().unwrap()), None);
}

#[test]
fn the_configuration_space_tells_or_is_denied() {
    let machine = machine();
    let whole = machine.pci_at("0000:40:00.0".parse().unwrap()).unwrap();
    let acs = Acs {
        source_validation: true,
        request_redirect: true,
        completion_redirect: true,
        upstream_forwarding: true,
    };
    assert_eq!(whole.acs, Fact::Known(Some(acs)));
    let control = PcieControl { max_payload: 256, max_read_request: 512, relaxed_ordering: true };
    assert_eq!(whole.control, Fact::Known(control));
    assert_eq!(whole.bars, Fact::Known([4096, 0, 0x20_0000_0000, 0, 0, 0]));
    assert_eq!(whole.link.speed, Fact::Known(16_000));
    assert_eq!(whole.link.max_speed, Fact::Missing);
    let part = machine.pci_at("0000:80:00.0".parse().unwrap()).unwrap();
    assert_eq!((part.acs, part.control), (Fact::Denied, Fact::Denied));
}

#[test]
fn addresses_are_read_with_either_width_of_domain() {
    let address: PciAddress = "00000008:01:00.0".parse().unwrap();
    assert_eq!(address.to_string(), "0008:01:00.0");
    for bad in ["", "01:00.0", "0000:01:20.0", "0000:01:00.8", "pci0000:16"] {
        assert!(bad.parse::<PciAddress>().is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn no_configuration_space_panics_or_runs_for_ever(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let part = |offset: u64| {
            Fact::Known(bytes.iter().skip(offset as usize).take(4).copied().collect())
        };
        let _ = (Registers(&part).acs(), Registers(&part).control());
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,40}|[0-9a-fx:. \n]{0,40}") {
        let _ = (bars(&text), link_speed(Fact::Known(text.clone())), hex(&text), above(&text));
        let _ = text.parse::<PciAddress>();
    }
}
