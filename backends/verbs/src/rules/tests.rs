use super::*;

pub(crate) fn facts(device: &str, speed: u8) -> PortFacts {
    PortFacts {
        device: device.into(),
        port: 1,
        active: true,
        has_gid: true,
        link_layer: ffi::LINK_LAYER_ETHERNET,
        width: 2,
        speed,
    }
}

fn entry(index: u32, address: &str, gid_type: u32) -> ffi::GidEntry {
    let raw = address.parse::<Ipv6Addr>().unwrap().octets();
    ffi::GidEntry {
        gid: ffi::Gid { raw },
        gid_index: index,
        port_num: 1,
        gid_type,
        ndev_ifindex: 1,
    }
}

fn names(ports: &[PortFacts]) -> Vec<&str> {
    automatic(ports).into_iter().map(|port| port.device.as_str()).collect()
}

#[test]
fn auto_takes_the_fastest_active_ports_once_per_device_in_natural_order() {
    let down = PortFacts { active: false, ..facts("mlx5_0", 128) };
    let second = PortFacts { port: 2, ..facts("mlx5_2", 128) };
    let warp = PortFacts { link_layer: 0, ..facts("siw0", 128) };
    let ports =
        [facts("mlx5_10", 128), down, second, facts("mlx5_2", 128), facts("mlx5_bond_0", 32), warp];
    assert_eq!(names(&ports), ["mlx5_2", "mlx5_10"]);
    assert_eq!(automatic(&ports)[0].port, 1);
    assert!(names(&[]).is_empty());
}

#[test]
fn width_counts_as_speed_does() {
    let two = PortFacts { width: 16, ..facts("a", 64) };
    assert_eq!(names(&[two, facts("b", 32)]), ["a", "b"]);
}

#[test]
fn a_port_is_the_wished_one_or_the_first_active() {
    let ports = [
        PortFacts { active: false, ..facts("d", 32) },
        PortFacts { port: 2, ..facts("d", 32) },
        PortFacts { port: 3, ..facts("d", 32) },
    ];
    assert_eq!(port(&ports, "d", None).unwrap().port, 2);
    assert_eq!(port(&ports, "d", Some(3)).unwrap().port, 3);
    let text = port(&ports, "d", Some(1)).unwrap_err().to_string();
    assert!(text.contains("port 1 is not active"), "{text}");
    let text = port(&ports, "d", Some(4)).unwrap_err().to_string();
    assert!(text.contains("found no port 4; expected 1 to 3"), "{text}");
    let text = port(&ports[..1], "d", None).unwrap_err().to_string();
    assert!(text.contains("no active port"), "{text}");
}

#[test]
fn roce_takes_version_2_and_an_ipv4_address_first() {
    let table = [
        entry(0, "fe80::1", ffi::GID_TYPE_ROCE_V1),
        entry(1, "fe80::1", ffi::GID_TYPE_ROCE_V2),
        entry(2, "::ffff:10.0.0.1", ffi::GID_TYPE_ROCE_V1),
        entry(3, "2001:db8::1", ffi::GID_TYPE_ROCE_V2),
        entry(4, "::ffff:169.254.1.1", ffi::GID_TYPE_ROCE_V2),
        entry(5, "::ffff:10.0.0.1", ffi::GID_TYPE_ROCE_V2),
        entry(6, "::ffff:10.0.0.2", ffi::GID_TYPE_ROCE_V2),
    ];
    let facts = facts("d", 32);
    let chosen = |table: &[ffi::GidEntry]| gid(table, &facts, None).unwrap().gid_index;
    assert_eq!(chosen(&table), 5);
    assert_eq!(chosen(&table[..5]), 4);
    assert_eq!(chosen(&table[..4]), 3);
    assert_eq!(chosen(&table[..2]), 1);
    assert_eq!(gid(&table, &facts, Some(2)).unwrap().gid_index, 2, "a wish is taken as it is");
}

#[test]
fn entries_of_other_ports_and_beyond_8_bits_are_no_choice() {
    let other = ffi::GidEntry { port_num: 2, ..entry(0, "::ffff:10.0.0.1", 2) };
    let far = entry(256, "::ffff:10.0.0.1", ffi::GID_TYPE_ROCE_V2);
    let near = entry(7, "fe80::1", ffi::GID_TYPE_ROCE_V2);
    assert_eq!(gid(&[other, far, near], &facts("d", 32), None).unwrap().gid_index, 7);
}

#[test]
fn infiniband_takes_entry_0() {
    let port = PortFacts { link_layer: ffi::LINK_LAYER_INFINIBAND, ..facts("d", 32) };
    let table = [entry(0, "fe80::2", ffi::GID_TYPE_IB), entry(1, "fec0::2", ffi::GID_TYPE_IB)];
    assert_eq!(gid(&table, &port, None).unwrap().gid_index, 0);
}

#[test]
fn a_table_without_a_choice_is_shown() {
    let table = [entry(0, "fe80::1", ffi::GID_TYPE_ROCE_V1)];
    let text = gid(&table, &facts("d", 32), None).unwrap_err().to_string();
    assert!(text.contains("found 0: fe80::1 (RoCE v1); expected an entry of RoCE v2"), "{text}");
    let text = gid(&[], &facts("d", 32), Some(9)).unwrap_err().to_string();
    assert!(text.contains("found nothing; expected entry 9"), "{text}");
}

#[test]
fn the_mtu_is_the_ports_or_a_smaller_wish() {
    assert_eq!(mtu(Mtu::Auto, 3).unwrap(), 3);
    for (bytes, code) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
        assert_eq!(mtu(Mtu::Bytes(bytes), 5).unwrap(), code);
    }
    let text = mtu(Mtu::Bytes(4096), 3).unwrap_err().to_string();
    assert!(text.contains("found mtu 4096; expected at most 1024"), "{text}");
    assert_eq!(mtu(Mtu::Auto, 77).unwrap(), 1, "an unknown code is the smallest");
}

#[test]
fn signals_arrive_as_the_device_can() {
    use SignalChoice::{Atomic, Auto, Immediate};
    assert_eq!(signals(Auto, 4096, true).unwrap(), SignalMode::Immediate);
    assert_eq!(signals(Auto, 0, true).unwrap(), SignalMode::Atomic);
    assert_eq!(signals(Atomic, 4096, true).unwrap(), SignalMode::Atomic);
    assert_eq!(signals(Immediate, 64, false).unwrap(), SignalMode::Immediate);
    for (choice, receives, atomics) in
        [(Auto, 0, false), (Immediate, 63, true), (Atomic, 4096, false)]
    {
        let error = signals(choice, receives, atomics).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.fix().is_some(), "{error}");
    }
}

#[test]
fn the_default_settings_find_a_dead_peer_within_the_default_deadline() {
    let config = crate::VerbsConfig::default();
    let longest = longest_silence(config.timeout, config.retry_count);
    assert!(longest < Duration::from_secs(30), "{longest:?}");
    assert!(longest > Duration::from_secs(10), "a flapping link is survived: {longest:?}");
    assert_eq!(longest_silence(1, 0), Duration::from_nanos(4096 * 2 * 4));
}
