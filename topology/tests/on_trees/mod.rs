//! The NICs of each rank on nodes of `node/machine/trees`; those with NICs are made from documentation.

use std::path::Path;

use tokenyard_core::Result;
use tokenyard_core::nics::share_nics;
use tokenyard_core::topology::Place;
use tokenyard_machine::{Fact, Machine, PortState, Seat, Tree};

use super::nics::passed_over;
use super::place;
use crate::config::{NicChoice, Rails, TopologyConfig};

fn text(name: &str) -> String {
    let trees = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/machine/trees");
    std::fs::read_to_string(trees.join(name)).unwrap()
}

fn machine(name: &str) -> Machine {
    Machine::read_places(&Tree::recorded(&text(name)).unwrap())
}

fn found(machine: &Machine, nics: Option<NicChoice>, local_rank: u32) -> Result<Place> {
    let config = TopologyConfig { nics, ..TopologyConfig::default() };
    place(machine, &config, "node".into(), local_rank, None)
}

fn place_of(machine: &Machine, config: &TopologyConfig, local_rank: u32) -> Place {
    place(machine, config, "node".into(), local_rank, None).unwrap()
}

/// The same node with these NICs without a link.
fn with_down(mut machine: Machine, names: &[&str]) -> Machine {
    for nic in machine.nics.iter_mut().filter(|nic| names.contains(&nic.name.as_str())) {
        nic.ports.iter_mut().for_each(|port| port.state = Fact::Known(PortState::Down));
    }
    machine
}

/// One line a rank: device, NUMA node, NICs.
fn table(machine: &Machine, ranks: u32, nics: Option<NicChoice>) -> Vec<String> {
    let mut places: Vec<_> =
        (0..ranks).map(|rank| Some(found(machine, nics.clone(), rank).unwrap())).collect();
    share_nics(&mut places);
    let number = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
    let line = |place: Place| {
        format!("{} {} {}", number(place.device), number(place.numa_node), place.nics.join(","))
    };
    places.into_iter().flatten().map(line).collect()
}

#[test]
fn on_an_hgx_node_each_rank_has_the_nic_below_its_own_switch() {
    let node = machine("hgx-cx7.tree");
    let expected: Vec<_> = (0..8).map(|i| format!("{i} {} mlx5_{i}", i / 4)).collect();
    assert_eq!(table(&node, 8, None), expected);
    assert_eq!(table(&node, 2, None), ["0 0 mlx5_0", "1 0 mlx5_1"]);
}

#[test]
fn on_a_p5en_two_ranks_of_a_bridge_have_two_nics_each() {
    let expected = [
        "0 0 rdmap85s0,rdmap86s0",
        "1 0 rdmap87s0,rdmap88s0",
        "2 0 rdmap110s0,rdmap111s0",
        "3 0 rdmap112s0,rdmap113s0",
        "4 1 rdmap135s0,rdmap136s0",
        "5 1 rdmap137s0,rdmap138s0",
        "6 1 rdmap160s0,rdmap161s0",
        "7 1 rdmap162s0,rdmap163s0",
    ];
    assert_eq!(table(&machine("p5en-efa.tree"), 8, None), expected);
}

fn tree(name: &str) -> Machine {
    let trees = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/machine/trees");
    Machine::read_places(&Tree::open(&trees.join(name).with_extension("tree")).unwrap())
}

#[test]
fn a_missing_nic_is_reported_to_the_rank_of_its_gpu_and_to_no_other() {
    let node = tree("faults/card-missing");
    let words = |rank| found(&node, None, rank).unwrap().missing_nic;
    let there = (0..8).filter(|i| *i != 3).map(|i| format!("mlx5_{i}")).collect::<Vec<_>>();
    let expected = format!(
        "GPU 3 (0000:61:00.0) has no NIC of its own, and 7 of 8 GPUs have one: below its switch \
         0000:5c:00.0 is no such card, and port 0000:5d:00.0 has no link; NICs that are there: {}; to fix it: \
         lspci lists no such card there: reseat or replace it, or give the container its device",
        there.join(", ")
    );
    assert_eq!(words(3), Some(expected));
    assert!((0..8).filter(|rank| *rank != 3).all(|rank| words(rank).is_none()));
    // The operator names the NICs to use.
    let among = Some(NicChoice::Among(vec!["mlx5_2".to_owned()]));
    assert_eq!(found(&node, among, 3).unwrap().missing_nic, None);
    let words = found(&tree("faults/nic-missing"), None, 3).unwrap().missing_nic.unwrap();
    assert!(words.contains("is the card 0000:5e:00.0, which has no RDMA device"), "{words}");
    let words = found(&tree("faults/gb200-nic-missing"), None, 3).unwrap().missing_nic.unwrap();
    assert!(words.contains("3 NICs do not divide evenly among 4 GPUs: GPU 3"), "{words}");
}

#[test]
fn a_nic_without_a_link_is_reported_to_the_rank_of_its_gpu_with_the_fix_and_each_way_out_opens() {
    let node = tree("faults/port-down");
    let words = |rank| found(&node, None, rank).unwrap().missing_nic;
    let can = (0..8).filter(|i| *i != 3).map(|i| format!("mlx5_{i}")).collect::<Vec<_>>();
    let expected = format!(
        "GPU 3 (0000:61:00.0) has no NIC next to it that can be used, and 7 of 8 GPUs have one: mlx5_3 (port 1 \
         is down, Polling); NICs that can be used: {}; to fix it: look at cable, transceiver and switch port; \
         `ibstat mlx5_3` shows changes",
        can.join(", ")
    );
    assert_eq!(words(3), Some(expected));
    assert!((0..8).filter(|rank| *rank != 3).all(|rank| words(rank).is_none()));
    let among = Some(NicChoice::Among(can.clone()));
    let place = found(&node, among.clone(), 3).unwrap();
    assert_eq!(place.missing_nic, None);
    // A node whose links are all up gives its ranks NICs of the same names.
    assert_eq!(table(&node, 8, among.clone()), table(&machine("hgx-cx7.tree"), 8, among));
    let all = Some(NicChoice::Among((0..8).map(|i| format!("mlx5_{i}")).collect()));
    let text = found(&node, all, 3).unwrap_err().to_string();
    assert!(text.contains("NIC `mlx5_3` cannot be used: no port is active"), "{text}");
    let any = TopologyConfig { rails: Rails::Any, ..TopologyConfig::default() };
    let place = place_of(&node, &any, 3);
    assert!(place.any_rails && place.missing_nic.is_some() && !place.nics.is_empty());
    let init = found(&tree("faults/no-subnet-manager"), None, 3).unwrap().missing_nic.unwrap();
    assert!(init.contains("mlx5_3 (port 1 is init, LinkUp)"), "{init}");
    assert!(init.contains("start the subnet manager"), "{init}");
    let bare = found(&tree("faults/gid-none"), None, 2).unwrap().missing_nic.unwrap();
    assert!(
        bare.contains("rocep105s0 (port 1 is active, and no entry in its GID table)"),
        "{bare}"
    );
    assert!(bare.contains("ip addr add"), "{bare}");
}

#[test]
fn links_that_are_down_where_others_serve_or_half_are_cabled_are_no_error() {
    let all = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"];
    for (name, down) in [
        ("hgx-cx7", &["mlx5_0", "mlx5_2", "mlx5_4", "mlx5_6"][..]),
        ("hgx-cx7", &all),
        ("healthy/hgx-storage", &["mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"]),
        ("healthy/hgx-storage-alike", &["mlx5_8"]),
        ("healthy/hgx-storage-ethernet", &["mlx5_8", "mlx5_9"]),
        ("healthy/hgx-vpi", &["mlx5_8"]),
        ("healthy/hgx-bluefield", &["mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11"]),
        ("gb200-nvl72", &["mlx5_1"]),
        ("gb200-nvl72", &["mlx5_2", "mlx5_3"]),
        ("p5en-efa", &["rdmap85s0"]),
        ("roce-bond", &["mlx5_bond_0"]),
        ("roce-port-down", &["mlx5_0"]),
    ] {
        let node = with_down(tree(name), down);
        for rank in 0..8 {
            assert_eq!(found(&node, None, rank).unwrap().missing_nic, None, "{name} {rank}");
        }
    }
    // Without any rail NIC, ranks would use the storage NICs.
    for (rank, words) in [(0, "mlx5_0 (port 1 is down"), (7, "mlx5_7 (port 1 is down")] {
        let place = found(&with_down(tree("healthy/hgx-storage"), &all), None, rank).unwrap();
        let missing = place.missing_nic.unwrap();
        assert!(
            missing.contains("nor has any other GPU: ") && missing.contains(words),
            "{missing}"
        );
        assert!(missing.contains("NICs that can be used: mlx5_8"), "{missing}");
    }
    // Where all adapters reach each other, a missing one is reported, and is no error.
    let bridge = ["rdmap85s0", "rdmap86s0", "rdmap87s0", "rdmap88s0"];
    let place = found(&with_down(tree("p5en-efa"), &bridge), None, 0).unwrap();
    assert!(place.any_rails && place.missing_nic.is_some());
}

#[test]
fn a_gpu_that_is_lost_is_no_missing_nic() {
    let lost = "sys/bus/pci/devices/0019:01:00.0 !gone\ndev/nvidia3 !gone\n";
    let node = Tree::changed(&text("gb200-nvl72.tree"), lost).unwrap();
    let node = Machine::read_places(&node);
    assert_eq!(node.gpus.len(), 3);
    for rank in 0..3 {
        assert_eq!(found(&node, None, rank).unwrap().missing_nic, None, "{rank}");
    }
}

#[test]
fn no_rank_of_a_healthy_node_lacks_a_nic() {
    for name in [
        "cpu-virtual",
        "container-no-rights",
        "gb200-nvl72",
        "hgx-cx7",
        "mi300x-pollara",
        "p5en-efa",
        "roce-bond",
        "roce-port-down",
        "healthy/hgx-storage",
        "healthy/hgx-virtual",
        "healthy/mi300x-thor2",
        "healthy/p5en-doorbells",
        "healthy/hgx-storage-alike",
        "healthy/hgx-storage-ethernet",
        "healthy/hgx-vpi",
        "healthy/hgx-bluefield",
        "healthy/hgx-one-port",
        "faults/half-wired",
        "faults/half-given",
        "faults/storage-and-frontend",
    ] {
        let node = tree(name);
        for rank in 0..8 {
            assert_eq!(found(&node, None, rank).unwrap().missing_nic, None, "{name} {rank}");
        }
    }
}

#[test]
fn adapters_of_efa_reach_each_other_under_all_names_and_other_nics_do_not() {
    for (tree, is_any) in [("p5en-efa.tree", true), ("hgx-cx7.tree", false)] {
        let node = machine(tree);
        assert_eq!(found(&node, None, 0).unwrap().any_rails, is_any, "{tree}");
    }
    let mut without = machine("p5en-efa.tree");
    without.nics.clear();
    assert!(!found(&without, None, 0).unwrap().any_rails);
}

#[test]
fn on_an_mi300x_node_ranks_follow_the_kernels_order_of_gpus() {
    let expected = [
        "0 0 rocep121s0",
        "1 0 rocep9s0",
        "2 0 rocep105s0",
        "3 0 rocep25s0",
        "4 1 rocep249s0",
        "5 1 rocep137s0",
        "6 1 rocep233s0",
        "7 1 rocep153s0",
    ];
    assert_eq!(table(&machine("mi300x-pollara.tree"), 8, None), expected);
}

#[test]
fn on_an_mi300x_node_with_thor2_ranks_follow_the_kernels_order_of_gpus_too() {
    let expected: Vec<_> = [3, 0, 2, 1, 7, 4, 6, 5]
        .into_iter()
        .enumerate()
        .map(|(rank, nic)| format!("{rank} {} bnxt_re{nic}", rank / 4))
        .collect();
    assert_eq!(table(&tree("healthy/mi300x-thor2"), 8, None), expected);
}

#[test]
fn of_virtual_functions_ranks_have_those_that_their_container_was_given() {
    let expected: Vec<_> = (0..8).map(|i| format!("{i} {} mlx5_{}", i / 4, i + 8)).collect();
    assert_eq!(table(&tree("healthy/hgx-virtual"), 8, None), expected);
}

#[test]
fn a_virtual_function_without_a_link_is_reported_though_those_of_other_containers_have_one() {
    let node = with_down(tree("healthy/hgx-virtual"), &["mlx5_11"]);
    let missing = found(&node, None, 3).unwrap().missing_nic.unwrap();
    assert!(missing.contains("7 of 8 GPUs have one: mlx5_11 (port 1 is down"), "{missing}");
    assert_eq!(found(&node, None, 2).unwrap().missing_nic, None);
}

#[test]
fn a_nic_without_a_link_is_reported_where_another_as_near_serves_two_ranks_and_not_where_cards_have_a_port_to_spare()
 {
    let skipped = |machine: &Machine, gpu: usize| {
        let gpu = &machine.gpus[gpu];
        let seat = Seat { gpu: Some(gpu.pci), numa_node: gpu.numa_node.get() };
        let found = passed_over(machine, seat);
        found.into_iter().map(|(nic, _)| nic.to_owned()).collect::<Vec<_>>()
    };
    let tray = tree("faults/gb200-port-down");
    assert_eq!([skipped(&tray, 0), skipped(&tray, 2)], [vec!["mlx5_1".to_owned()], vec![]]);
    assert_eq!(skipped(&tree("faults/port-down"), 3), ["mlx5_3"]);
    for healthy in ["healthy/hgx-one-port", "healthy/hgx-virtual", "healthy/hgx-storage"] {
        assert_eq!(skipped(&tree(healthy), 3), Vec::<String>::new(), "{healthy}");
    }
}

#[test]
fn bluefields_next_to_gpus_serve_ranks_and_those_beside_connectx_do_not() {
    let super_nics = tree("healthy/hgx-bluefield");
    let node = tree("hgx-cx7");
    assert_eq!(table(&super_nics, 8, None), table(&node, 8, None));
    let missing = found(&with_down(super_nics, &["mlx5_3"]), None, 3).unwrap().missing_nic;
    assert!(missing.unwrap().contains("mlx5_3 (port 1 is down"));
    // A card for tenants may sit below the switch of some GPUs.
    let mut mixed = node.clone();
    for nic in mixed.nics.iter_mut().take(4) {
        nic.hca_type = Fact::Known("MT41692".to_owned());
    }
    assert!(mixed.rail_nics().iter().all(|nic| nic.hca_type == Fact::Known("MT4129".to_owned())));
}

#[test]
fn where_only_storage_has_device_nodes_its_nics_are_used() {
    let table = table(&tree("faults/uverbs-storage-only"), 2, None);
    assert!(
        table.iter().all(|line| line.contains("mlx5_8") || line.contains("mlx5_9")),
        "{table:?}"
    );
}

#[test]
fn on_a_gb200_tray_ranks_have_a_connectx_of_their_numa_node_and_no_bluefield() {
    let expected = ["0 0 mlx5_0", "1 0 mlx5_1", "2 1 mlx5_4", "3 1 mlx5_5"];
    assert_eq!(table(&machine("gb200-nvl72.tree"), 4, None), expected);
}

#[test]
fn without_gpus_ranks_share_what_has_a_link() {
    assert_eq!(table(&machine("roce-port-down.tree"), 2, None), ["- - mlx5_0", "- - mlx5_0"]);
    assert_eq!(table(&machine("roce-bond.tree"), 1, None), ["- - mlx5_bond_0"]);
}

#[test]
fn nics_that_a_container_was_not_given_are_not_chosen() {
    assert_eq!(table(&machine("container-no-rights.tree"), 2, None), ["0 0 ", "1 0 "]);
}

#[test]
fn ranks_without_a_gpu_use_the_nics_of_the_numa_node_that_they_are_bound_to() {
    let mut node = machine("hgx-cx7.tree");
    node.gpus.clear();
    let bound = |rank: u32, first: u32| {
        let cpus = Some((first..first + 8).collect());
        place(&node, &TopologyConfig::default(), "node".into(), rank, cpus).unwrap()
    };
    // Interleaved binding, which some launchers use: ranks 0 and 2 on node 0, ranks 1 and 3 on node 1.
    let mut places: Vec<_> = (0..4).map(|rank| Some(bound(rank, (rank % 2) * 56))).collect();
    share_nics(&mut places);
    let nics: Vec<_> = places.into_iter().flatten().map(|place| place.nics.join(",")).collect();
    assert_eq!(nics, ["mlx5_0,mlx5_1", "mlx5_4,mlx5_5", "mlx5_2,mlx5_3", "mlx5_6,mlx5_7"]);
}

#[test]
fn ranks_that_see_more_nics_than_a_place_has_room_for_begin_at_different_ones() {
    let mut node = machine("p5en-efa.tree");
    node.gpus.clear();
    let table = table(&node, 2, None);
    assert!(
        table[0].starts_with("- - rdmap85s0,") && table[0].ends_with(",rdmap113s0"),
        "{table:?}"
    );
    assert!(table[1].starts_with("- - rdmap135s0,"), "{table:?}");
}

#[test]
fn visible_devices_say_which_gpu_a_rank_drives() {
    let mut node = machine("hgx-cx7.tree");
    let mut with = |list: &str| {
        let environment = &mut node.container.environment;
        environment.insert("CUDA_VISIBLE_DEVICES".into(), list.into());
        table(&node, 2, None)
    };
    assert_eq!(with("6,2"), ["0 1 mlx5_6", "1 0 mlx5_2"]);
    // One for each rank, set by its launcher; here both ranks are given the same one.
    assert_eq!(with("5"), ["0 1 mlx5_5", "0 1 mlx5_5"]);
    let uuid = "GPU-5c1f0a70-0000-4000-8000-0000000000df";
    assert_eq!(with(uuid)[0], "0 1 mlx5_7");
    // Cut short, as long as one GPU alone begins so.
    assert_eq!(with("GPU-5c1f0a70-0000-4000-8000-00000000009")[0], "0 1 mlx5_4");
    // Unknown: no device, and the nearest of all.
    assert_eq!(with("MIG-1")[0], "- - mlx5_0,mlx5_1,mlx5_2,mlx5_3");
}

#[test]
fn a_storage_nic_farther_away_or_slower_is_not_chosen() {
    // The two dual-port storage cards of a DGX, at half the rate, on the host bridge of the first GPU.
    let storage = "sys/bus/pci/devices/0000:29:00.0 -> ../../../devices/pci0000:15/0000:15:02.0/0000:29:00.0\n\
        sys/bus/pci/devices/0000:29:00.0/class = 0x020000\n\
        sys/bus/pci/devices/0000:29:00.0/numa_node = 0\n\
        sys/class/infiniband/mlx5_8 -> ../../devices/pci0000:15/0000:15:02.0/0000:29:00.0/infiniband/mlx5_8\n\
        sys/class/infiniband/mlx5_8/device -> ../../../0000:29:00.0\n\
        sys/class/infiniband/mlx5_8/ports/1/state = 4: ACTIVE\n\
        sys/class/infiniband/mlx5_8/ports/1/rate = 200 Gb/sec (4X HDR)\n";
    let node = Tree::recorded(&(text("hgx-cx7.tree") + storage)).unwrap();
    let mut node = Machine::read_places(&node);
    assert_eq!(node.nics.len(), 9);
    assert_eq!(table(&node, 1, None), ["0 0 mlx5_0"]);
    node.gpus.clear();
    assert!(!table(&node, 1, None)[0].contains("mlx5_8"));
}

#[test]
fn a_port_that_trained_slow_stays_with_its_gpu_and_a_storage_card_of_its_model_does_not_come_in() {
    let slow =
        "@base hgx-cx7.tree\nsys/class/infiniband/mlx5_3/ports/1/rate = 200 Gb/sec (2X NDR)\n";
    let node = Tree::changed(&text("hgx-cx7.tree"), slow).unwrap();
    let expected: Vec<_> = (0..8).map(|i| format!("{i} {} mlx5_{i}", i / 4)).collect();
    assert_eq!(table(&Machine::read_places(&node), 8, None), expected);
    for fault in ["port-half-rate", "storage-and-frontend"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/machine/trees/faults");
        let tree = Tree::open(&path.join(fault).with_extension("tree")).unwrap();
        assert_eq!(table(&Machine::read_places(&tree), 8, None), expected, "{fault}");
    }
}

#[test]
fn soft_roce_is_left_to_the_transport_even_where_it_shows_the_card_below_it() {
    let soft = "sys/class/infiniband/soft/parent = ibp24s0\n\
        sys/class/infiniband/soft/device -> ../../../bus/pci/devices/0000:18:00.0\n\
        sys/class/infiniband/soft/ports/1/state = 4: ACTIVE\n\
        sys/class/infiniband/soft/ports/1/rate = 800 Gb/sec (4X XDR)\n";
    let node = Tree::recorded(&(text("hgx-cx7.tree") + soft)).unwrap();
    assert_eq!(table(&Machine::read_places(&node), 1, None), ["0 0 mlx5_0"]);
}

#[test]
fn a_list_in_the_config_is_what_ranks_choose_from_and_a_table_is_taken_as_it_is() {
    let node = machine("hgx-cx7.tree");
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let among = |list: &[&str]| Some(NicChoice::Among(names(list)));
    assert_eq!(table(&node, 2, among(&["mlx5_3"])), ["0 0 mlx5_3", "1 0 mlx5_3"]);
    assert_eq!(table(&node, 2, among(&["mlx5_1", "mlx5_0"])), ["0 0 mlx5_0", "1 0 mlx5_1"]);
    let by_rank = NicChoice::ByLocalRank([(0, names(&["mlx5_7"])), (1, names(&["mlx5_7"]))].into());
    assert_eq!(table(&node, 2, Some(by_rank.clone())), ["0 0 mlx5_7", "1 0 mlx5_7"]);
    let text = found(&node, Some(by_rank), 2).unwrap_err().to_string();
    assert!(text.contains("local rank 2; found local ranks 0, 1"), "{text}");
}

#[test]
fn a_named_nic_that_is_missing_or_down_is_an_error_that_names_it() {
    let node = machine("roce-port-down.tree");
    let error = |name: &str| {
        let among = NicChoice::Among(vec![name.to_owned()]);
        found(&node, Some(among), 0).unwrap_err().to_string()
    };
    let text = error("mlx5_3");
    assert!(text.contains("found no NIC `mlx5_3`; available: mlx5_0, mlx5_1"), "{text}");
    let text = error("mlx5_1");
    assert!(text.contains("NIC `mlx5_1` cannot be used: no port is active"), "{text}");
    assert!(text.contains("bring its link up"), "{text}");
}

#[test]
fn the_config_takes_a_list_or_a_table_and_refuses_the_rest_with_its_line() {
    use tokenyard_core::config::ComponentTable;
    let read = |text: &str| {
        ComponentTable::from_text(text, "a.toml")
            .parse::<TopologyConfig>("auto")
            .map_err(|e| e.to_string())
    };
    let list = read("nics = [\"mlx5_3\"]").unwrap().nics;
    assert_eq!(list, Some(NicChoice::Among(vec!["mlx5_3".into()])));
    let table = read("nics = { 0 = [\"a\"], 10 = [\"b\", \"c\"] }").unwrap().nics;
    let expected = [(0, vec!["a".into()]), (10, vec!["b".into(), "c".into()])];
    assert_eq!(table, Some(NicChoice::ByLocalRank(expected.into())));
    for (line, expected) in [
        ("nics = \"mlx5_0\"", "a list of names of NICs"),
        ("nics = []", "at least one name"),
        ("nics = { first = [\"a\"] }", "a local rank"),
        ("nics = { 0 = [] }", "1 to 8 names"),
    ] {
        let text = read(&format!("\n{line}")).unwrap_err();
        assert!(text.contains(expected) && text.contains("a.toml:2"), "{line}: {text}");
    }
}
