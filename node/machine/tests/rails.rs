//! Missing rails are named where a NIC must be missing or cannot be used, and not on nodes that are
//! built or cabled with few NICs.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::fmt::Write;

use tokenyard_machine::{Machine, Tree};

/// A node of PCIe switches, each with its number of GPUs and NICs below it; `given` GPUs have
/// device nodes.
fn recorded(switches: &[(u8, u8)], given: u32) -> String {
    let mut text = String::new();
    let (mut gpu, mut nic) = (0, 0);
    for (place, (gpus, nics)) in switches.iter().enumerate() {
        let bus = 16 * (place + 1);
        let (root, up) = (format!("0000:{bus:02x}:01.0"), format!("0000:{:02x}:00.0", bus + 1));
        let bridge = |text: &mut String, at: &str, above: &str| {
            writeln!(
                text,
                "sys/bus/pci/devices/{at} -> ../../../devices/pci0000:{bus:02x}/{above}{at}\n\
                 sys/bus/pci/devices/{at}/class = 0x060400"
            )
            .unwrap();
        };
        bridge(&mut text, &root, "");
        bridge(&mut text, &up, &format!("{root}/"));
        for slot in 0..gpus + nics {
            let port = format!("0000:{:02x}:{slot:02x}.0", bus + 2);
            let at = format!("0000:{:02x}:00.0", bus + 3 + usize::from(slot));
            bridge(&mut text, &port, &format!("{root}/{up}/"));
            let (vendor, device, class) = match slot < *gpus {
                true => ("0x10de", "0x2335", "0x030200"),
                false => ("0x15b3", "0x1021", "0x020700"),
            };
            writeln!(
                text,
                "sys/bus/pci/devices/{at} -> ../../../devices/pci0000:{bus:02x}/{root}/{up}/{port}/{at}\n\
                 sys/bus/pci/devices/{at}/vendor = {vendor}\n\
                 sys/bus/pci/devices/{at}/device = {device}\n\
                 sys/bus/pci/devices/{at}/class = {class}\n\
                 sys/bus/pci/devices/{at}/numa_node = 0"
            )
            .unwrap();
            if slot < *gpus {
                writeln!(text, "proc/driver/nvidia/gpus/{at}/information = Device Minor: {gpu}")
                    .unwrap();
                if gpu < given {
                    writeln!(text, "dev/nvidia{gpu} =").unwrap();
                }
                gpu += 1;
            } else {
                writeln!(
                    text,
                    "sys/class/infiniband/mlx5_{nic}/device -> ../../../{at}\n\
                     sys/class/infiniband/mlx5_{nic}/ports/1/state = 4: ACTIVE"
                )
                .unwrap();
                nic += 1;
            }
        }
    }
    text
}

fn node(switches: &[(u8, u8)], given: u32) -> Machine {
    Machine::read_places(&Tree::recorded(&recorded(switches, given)).unwrap())
}

/// The node with changes.
fn changed(switches: &[(u8, u8)], changes: &str) -> Machine {
    Machine::read_places(&Tree::changed(&recorded(switches, 16), changes).unwrap())
}

/// The node with these NICs without a link.
fn down(switches: &[(u8, u8)], nics: &[u32]) -> Machine {
    let line = |nic: &u32| {
        let port = format!("sys/class/infiniband/mlx5_{nic}/ports/1");
        format!("{port}/state = 1: DOWN\n{port}/phys_state = 2: Polling\n")
    };
    changed(switches, &nics.iter().map(line).collect::<String>())
}

fn missing(machine: &Machine) -> Vec<u32> {
    machine.missing_rails().iter().map(|missing| missing.gpu.index).collect()
}

#[test]
fn nodes_that_are_built_with_few_or_many_nics_lack_none() {
    for (switches, of) in [
        (&[(1, 1); 8][..], "one for each GPU"),
        (&[(1, 2); 8], "two ports for each GPU"),
        (&[(2, 1); 4], "4 NICs for 8 GPUs"),
        (&[(2, 4); 4], "16 NICs for 8 GPUs"),
        (&[(8, 1)], "1 NIC for 8 GPUs"),
        (&[(2, 1), (2, 0), (2, 0), (2, 0)], "1 NIC for 8 GPUs, below one of the switches"),
        (&[(2, 1), (2, 0), (2, 1), (2, 0)], "2 NICs for 8 GPUs, below half of the switches"),
        (&[(1, 1), (1, 0)], "1 NIC for 2 GPUs"),
        (&[(1, 0); 8], "no NIC"),
        (&[(0, 1); 8], "no GPU"),
        (&[(1, 1)], "one of each"),
        // Separate switches: no GPU has a NIC next to it.
        (&[(4, 0), (0, 4)], "4 NICs for 4 GPUs, below switches of their own"),
        (&[(4, 0), (0, 1)], "1 NIC for 4 GPUs, below a switch of its own"),
        (&[(4, 0), (0, 8)], "8 NICs for 4 GPUs, below a switch of their own"),
        (&[(2, 1), (1, 0)], "1 NIC for 3 GPUs, two of them below its switch"),
        (&[(3, 2), (1, 0)], "one card with two ports, below the switch of 3 of 4 GPUs"),
        (&[(5, 2), (5, 2)], "4 NICs for 10 GPUs, alike on both sides"),
        (&[(3, 0), (0, 2)], "2 ports of a card for 3 GPUs"),
        (&[(8, 0), (0, 9)], "one NIC more than GPUs"),
        (&[(2, 3), (2, 2)], "one NIC more on one side"),
        (&[(2, 2), (1, 2)], "4 NICs, and a GPU that is lost"),
        (&[(7, 0), (0, 4)], "4 NICs for 8 GPUs, of which one is lost"),
    ] {
        let machine = node(switches, 16);
        assert_eq!(missing(&machine), Vec::<u32>::new(), "{of}");
    }
}

#[test]
fn gpus_without_a_nic_are_named_where_most_have_one() {
    let mut eight = [(1, 1); 8];
    eight[3] = (1, 0);
    assert_eq!(missing(&node(&eight, 8)), [3]);
    assert_eq!(missing(&node(&[(2, 1), (2, 1), (2, 0), (2, 1)], 8)), [4, 5]);
    assert_eq!(missing(&node(&[(2, 4), (2, 4), (2, 4), (2, 0)], 8)), [6, 7]);
    let words = node(&eight, 8).missing_rails()[0].to_string();
    assert_eq!(
        words,
        "GPU 3 (0000:43:00.0) has no NIC of its own, and 7 of 8 GPUs have one: below its switch 0000:41:00.0 \
         is no such card; NICs that are there: mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6"
    );
}

#[test]
fn gpus_with_less_than_others_are_named_where_nics_do_not_divide_evenly() {
    assert_eq!(missing(&node(&[(2, 4), (2, 3), (2, 4), (2, 4)], 8)), [2, 3]);
    assert_eq!(missing(&node(&[(2, 2), (2, 1)], 4)), [2, 3]);
    // All are equally near to all.
    assert_eq!(missing(&node(&[(8, 0), (0, 7)], 8)), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(missing(&node(&[(4, 0), (0, 3)], 4)), [0, 1, 2, 3]);
    assert_eq!(missing(&node(&[(8, 0), (0, 15)], 8)), [0, 1, 2, 3, 4, 5, 6, 7]);
    let node = node(&[(2, 2), (2, 1)], 4);
    assert_eq!(
        node.missing_rails()[0].to_string(),
        "3 NICs do not divide evenly among 4 GPUs: GPU 2 (0000:23:00.0) has 1 for 2 GPUs (mlx5_2), and others \
         one NIC for each; NICs that are there: mlx5_0, mlx5_1, mlx5_2"
    );
}

#[test]
fn only_gpus_that_the_process_was_given_count() {
    let mut eight = [(1, 1); 8];
    eight[7] = (1, 0);
    assert_eq!(missing(&node(&eight, 8)), [7]);
    // Two of eight GPUs in a container: that there are seven NICs is no fault of these two.
    assert_eq!(missing(&node(&eight, 2)), Vec::<u32>::new());
    eight[1] = (1, 0);
    assert_eq!(missing(&node(&eight, 3)), [1]);
}

#[test]
fn gpus_whose_own_nics_have_no_link_are_named_where_most_have_one() {
    assert_eq!(missing(&down(&[(1, 1); 8], &[3])), [3]);
    assert_eq!(missing(&down(&[(1, 1); 8], &[1, 3, 6])), [1, 3, 6]);
    assert_eq!(missing(&down(&[(1, 2); 8], &[6, 7])), [3], "both ports of a card");
    assert_eq!(missing(&down(&[(2, 1); 4], &[2])), [4, 5], "one NIC for two GPUs");
    assert_eq!(missing(&down(&[(1, 1); 3], &[2])), [2]);
    let words = down(&[(1, 1); 8], &[3]).missing_rails()[0].to_string();
    assert_eq!(
        words,
        "GPU 3 (0000:43:00.0) has no NIC next to it that can be used, and 7 of 8 GPUs have one: mlx5_3 (port 1 \
         is down, Polling); NICs that can be used: mlx5_0, mlx5_1, mlx5_2, mlx5_4, mlx5_5, mlx5_6, mlx5_7"
    );
    // Two GPUs would share one NIC.
    assert_eq!(missing(&down(&[(2, 2); 4], &[2])), [2, 3]);
    assert_eq!(missing(&down(&[(2, 2); 4], &[2, 3])), [2, 3], "and here none");
    assert_eq!(missing(&down(&[(3, 3); 3], &[8])), [6, 7, 8]);
    let words = down(&[(2, 2); 4], &[2]).missing_rails()[0].to_string();
    assert!(
        words.contains(
            "has no NIC of its own that can be used, and shares mlx5_3, and 6 of 8 GPUs have one: mlx5_2 (port 1 is \
             down, Polling); NICs that can be used: mlx5_0,"
        ),
        "{words}"
    );
    // A NIC that is missing, and one without a link.
    let mut eight = [(1, 1); 8];
    eight[5] = (1, 0);
    assert_eq!(missing(&down(&eight, &[3])), [5, 3]);
}

#[test]
fn nodes_where_another_nic_serves_or_that_are_cabled_with_few_lack_none() {
    for (switches, nics, of) in [
        (&[(1, 2); 8][..], &[6][..], "a card with two ports, of which one has a link"),
        (&[(1, 2); 8], &[0, 2, 4, 6, 8, 10, 12, 14], "one port of each card"),
        (&[(2, 4); 4], &[5], "another as near"),
        (&[(2, 2); 4], &[0, 2, 4, 6], "one NIC of two for two GPUs"),
        (&[(2, 2); 4], &[0, 2, 4], "cabled with few"),
        (&[(2, 2), (2, 2)], &[0], "half share one"),
        (&[(1, 1); 8], &[0, 2, 4, 6], "cabled by halves"),
        (&[(1, 1); 8], &[0, 1, 2, 3, 4, 5, 6, 7], "no link at all"),
        (&[(8, 1)], &[0], "one NIC for all"),
        (&[(2, 1), (2, 0)], &[0], "one NIC for half of them"),
        (&[(2, 1), (2, 1)], &[1], "half"),
        (&[(1, 1), (1, 1)], &[0], "one of two"),
        (&[(3, 1), (1, 1)], &[1], "around one card"),
        (&[(4, 0), (0, 4)], &[2], "NICs that are no GPU's own"),
        (&[(0, 1); 8], &[2], "no GPU"),
        (&[(1, 1)], &[0], "one of each"),
    ] {
        assert_eq!(missing(&down(switches, nics)), Vec::<u32>::new(), "{of}");
    }
}

#[test]
fn a_nic_without_an_address_is_as_idle_and_one_of_unknown_state_is_not() {
    let eight = [(1, 1); 8];
    let nic = "sys/class/infiniband/mlx5_3/ports/1";
    let found = |changes: &str| {
        let machine = changed(&eight, changes);
        let missing = machine.missing_rails();
        missing.iter().map(|one| format!("{one}. {}", one.fix())).collect::<Vec<_>>().join(" | ")
    };
    let armed = found(&format!("{nic}/state = 3: ARMED\n{nic}/phys_state = 5: LinkUp\n"));
    assert!(armed.contains("mlx5_3 (port 1 is armed, LinkUp)"), "{armed}");
    assert!(armed.contains("start the subnet manager"), "{armed}");
    let bare = found(&format!("{nic}/link_layer = Ethernet\n"));
    assert!(bare.contains("mlx5_3 (port 1 is active, and no entry in its GID table)"), "{bare}");
    assert!(bare.contains("ip addr add ADDRESS/LENGTH dev IFACE"), "{bare}");
    // A device that the container does not have is no fault.
    assert_eq!(found("sys/class/infiniband_verbs/uverbs3/ibdev = mlx5_3\n"), "");
    assert_eq!(found(&format!("{nic}/state !gone\n")), "");
    // A NIC with another link layer than the rest is no rail.
    let two = [(1, 2); 8];
    let layers: String = (0..16)
        .map(|i| {
            let layer = if i % 2 == 0 { "InfiniBand" } else { "Ethernet" };
            let port = format!("sys/class/infiniband/mlx5_{i}/ports/1");
            format!("{port}/link_layer = {layer}\n{port}/gids/0 = fe80::{}\n", i + 1)
        })
        .collect();
    let machine =
        changed(&two, &format!("{layers}sys/class/infiniband/mlx5_6/ports/1/state = 1: DOWN\n"));
    assert_eq!(missing(&machine), [3]);
}
