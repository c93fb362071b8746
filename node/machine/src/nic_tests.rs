use proptest::prelude::*;

use super::*;

#[test]
fn rates_are_read_with_lanes_and_generation() {
    let rate = |megabits, lanes, generation: Option<&str>| {
        Some(LinkRate { megabits, lanes, generation: generation.map(str::to_owned) })
    };
    assert_eq!(link_rate("400 Gb/sec (4X NDR)"), rate(400_000, Some(4), Some("NDR")));
    assert_eq!(link_rate("2.5 Gb/sec (1X SDR)"), rate(2_500, Some(1), Some("SDR")));
    assert_eq!(link_rate("100 Gb/sec (4X)"), rate(100_000, Some(4), None));
    assert_eq!(link_rate("200 Gb/sec"), rate(200_000, None, None));
    assert_eq!(link_rate("fast"), None);
}

#[test]
fn a_software_device_has_its_parent_and_no_pci_function() {
    let tree = Tree::recorded(
        "sys/class/infiniband/rxe0/parent = eth0\n\
         sys/class/infiniband/rxe0/ports/1/state = 4: ACTIVE\n\
         sys/class/infiniband/rxe0/ports/1/gids/0 = fe80:0000:0000:0000:0042:acff:fe11:0002\n\
         sys/class/infiniband/rxe0/ports/1/gids/1 = 0000:0000:0000:0000:0000:ffff:ac11:0002\n\
         sys/class/infiniband/rxe0/ports/1/gids/2 = 0000:0000:0000:0000:0000:0000:0000:0000\n\
         sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1 = RoCE v2\n\
         sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/1 = eth0\n\
         sys/class/infiniband/rxe0/ports/1/hw_counters/out_of_sequence = 7\n\
         sys/class/infiniband/rxe0/ports/1/hw_counters/lifespan = 10\n\
         sys/class/infiniband_verbs/abi_version = 6\n\
         sys/class/infiniband_verbs/uverbs3/ibdev = rxe0\n",
    )
    .unwrap();
    let nics = read(&tree);
    let nic = &nics[0];
    assert_eq!((nic.family, nic.pci), (NicFamily::Rxe, Fact::Missing));
    assert_eq!(nic.interfaces, ["eth0"]);
    assert_eq!(nic.uverbs, Fact::Known("uverbs3".into()));
    let port = nic.port(1).unwrap();
    assert!(port.is_active());
    assert_eq!(port.counters, BTreeMap::from([("out_of_sequence".to_owned(), 7)]));
    assert_eq!(port.gids.len(), 2);
    assert!(port.gids[0].is_link_local());
    assert_eq!(port.gids[0].kind, Fact::Missing);
    assert_eq!(port.gids[1].ipv4(), Some(Ipv4Addr::new(172, 17, 0, 2)));
    assert_eq!(port.gids[1].kind, Fact::Known(GidKind::RoceV2));
}

#[test]
fn a_bond_is_read_with_what_its_switch_answered() {
    let tree = Tree::recorded(
        "sys/class/net/bond0/operstate = up\n\
         sys/class/net/bond0/speed = 400000\n\
         sys/class/net/bond0/bonding/mode = 802.3ad 4\n\
         sys/class/net/bond0/bonding/slaves = eth0 eth1\n\
         sys/class/net/bond0/bonding/ad_num_ports = 2\n\
         sys/class/net/bond0/bonding/ad_partner_mac = 00:00:00:00:00:00\n\
         sys/class/net/eth0/operstate = down\n\
         sys/class/net/eth0/speed = -1\n\
         sys/class/net/eth0/flags = 0x1803\n\
         sys/class/net/eth0/master -> ../bond0\n\
         sys/class/net/bonding_masters = bond0\n\
         proc/net/if_inet6 = fe800000000000000000000000000001 02 40 20 80 bond0\n",
    )
    .unwrap();
    let interfaces = crate::net::read(&tree);
    assert_eq!(interfaces.len(), 2);
    let bond = interfaces[0].bond.as_ref().unwrap();
    assert_eq!(bond.mode, Fact::Known("802.3ad".into()));
    assert_eq!(bond.members, ["eth0", "eth1"]);
    assert_eq!(bond.aggregated_ports, Fact::Known(2));
    assert_eq!(interfaces[0].ipv6.len(), 1);
    assert_eq!(interfaces[1].megabits, Fact::Missing);
    assert_eq!(interfaces[1].flags, Fact::Known(0x1803));
    assert_eq!(interfaces[1].master, Fact::Known("bond0".into()));
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,40}|[0-9.]{0,9} Gb/sec[ (0-9XNDR)]{0,12}|[0-9]: [A-Z]{0,6}") {
        let _ = (link_rate(&text), port_state(&text), link_layer(&text), family(&text, &text));
    }
}
