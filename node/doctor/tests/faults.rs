//! Recorded faults: each is named, and nothing else turns red. And no alarm on healthy nodes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

use tokenyard_doctor::world::{Summary, compare};
use tokenyard_doctor::{Alternative, Component, Components, Finding, Job, Verdict, examine};
use tokenyard_machine::{Machine, Tree};

fn trees() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees")
}

/// The lines `# KEY = VALUE` at the head of a tree.
fn head<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    let line = |line: &'a str| line.strip_prefix("# ")?.strip_prefix(key)?.strip_prefix(" = ");
    text.lines().filter_map(line).collect()
}

/// A rank for each GPU that is given, with windows of some size, and the components that the head names.
fn job(machine: &Machine, uses: &[&str]) -> Job {
    let mut job = Job {
        ranks: machine.gpus.iter().filter(|gpu| gpu.is_visible).count().max(1) as u64,
        threads: 1,
        window_bytes: 64 << 20,
        ..Job::default()
    };
    for component in uses.iter().flat_map(|line| line.split(", ")) {
        let (kind, name) = component.rsplit_once(' ').unwrap();
        job.asks.add_component(kind, name, None);
    }
    job
}

fn findings(path: &Path, uses: &[&str]) -> Vec<Finding> {
    let machine = Machine::read(&Tree::open(path).unwrap());
    examine(&machine, &job(&machine, uses), None, None)
}

/// Findings that are not well, as their heads write them.
fn faults(findings: &[Finding]) -> Vec<String> {
    let faults = findings.iter().filter(|finding| finding.verdict != Verdict::Ok);
    faults.map(|f| format!("{} {} {}", f.verdict.name(), f.id, f.subject)).collect()
}

#[test]
fn every_recorded_fault_is_named_and_nothing_else_turns_red() {
    let folder = trees().join("faults");
    let (mut count, mut wrong) = (0, Vec::new());
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let uses = head(&text, "uses");
        let base = text.lines().find_map(|line| line.strip_prefix("@base ")).unwrap();
        // Facts that the healthy node does not show are missing here, too.
        let before = faults(&findings(&folder.join(base), &uses));
        let machine = Machine::read(&Tree::open(&path).unwrap());
        let mut job = job(&machine, &uses);
        job.asks.gid_indices =
            head(&text, "gid_index").iter().map(|i| i.parse().unwrap()).collect();
        let all = examine(&machine, &job, None, None);
        let found = faults(&all);
        let new: Vec<&String> = found.iter().filter(|fault| !before.contains(fault)).collect();
        if new != head(&text, "expect") {
            wrong.push(format!("{name}: found {new:?}"));
        }
        for words in head(&text, "says") {
            if !all.iter().any(|finding| finding.found.contains(words)) {
                wrong.push(format!("{name}: nothing says «{words}»"));
            }
        }
        for words in head(&text, "fix") {
            let fixes =
                |finding: &&Finding| finding.fix.as_ref().is_some_and(|fix| fix.contains(words));
            if !all.iter().any(|finding| fixes(&finding)) {
                wrong.push(format!("{name}: nothing is fixed by «{words}»"));
            }
        }
        let all_are_explained = all.iter().all(|finding| {
            finding.verdict == Verdict::Ok
                || (finding.impact.is_some() && finding.fix.is_some() && finding.source.is_some())
        });
        assert!(all_are_explained, "{name}");
        count += 1;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(count >= 30, "{count}");
}

#[test]
fn healthy_nodes_give_no_alarm_whatever_is_used() {
    let nvidia =
        ["kernel set cuda, transport nvlink, transport verbs", "kernel set cuda, transport ibgda"];
    for (name, uses) in [
        ("hgx-cx7", &nvidia[..]),
        ("gb200-nvl72", &nvidia[..]),
        ("p5en-efa", &["kernel set cuda, transport nvlink, transport efa"]),
        (
            "mi300x-pollara",
            &["kernel set rocm, transport verbs", "kernel set rocm, transport xgmi"],
        ),
        ("roce-bond", &["kernel set cpu, transport verbs"]),
        ("healthy/hgx-storage", &nvidia[..]),
        ("healthy/hgx-virtual", &nvidia[..1]),
        ("healthy/mi300x-thor2", &["kernel set rocm, transport verbs"]),
        ("healthy/p5en-doorbells", &["kernel set cuda, transport nvlink, transport efa"]),
        ("healthy/hgx-vpi", &nvidia[..]),
        ("healthy/hgx-storage-alike", &nvidia[..]),
        ("healthy/hgx-storage-ethernet", &nvidia[..]),
        ("healthy/hgx-bluefield", &nvidia[..]),
        ("healthy/hgx-one-port", &nvidia[..]),
    ] {
        let path = trees().join(name).with_extension("tree");
        for uses in uses.iter().map(|uses| vec![*uses]).chain([Vec::new()]) {
            let found = findings(&path, &uses);
            let red: Vec<&Finding> =
                found.iter().filter(|finding| finding.verdict > Verdict::Unknown).collect();
            assert!(red.is_empty(), "{name} {uses:?}: {red:#?}");
        }
    }
}

#[test]
fn nics_for_something_else_change_nothing_for_ranks() {
    let uses = ["kernel set cuda, transport verbs"];
    let plain = faults(&findings(&trees().join("hgx-cx7.tree"), &uses));
    for name in ["hgx-storage.tree", "hgx-storage-alike.tree", "hgx-vpi.tree", "hgx-bluefield.tree"]
    {
        let path = trees().join("healthy").join(name);
        let machine = Machine::read(&Tree::open(&path).unwrap());
        let rails: Vec<&str> = machine.rail_nics().iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(rails, (0..8).map(|i| format!("mlx5_{i}")).collect::<Vec<_>>(), "{name}");
        let found = findings(&path, &uses);
        let odd: Vec<String> =
            faults(&found).into_iter().filter(|fault| !plain.contains(fault)).collect();
        assert!(odd.is_empty(), "{name}: {odd:?}");
        assert!(
            found.iter().filter(|f| f.id == "uverbs-nodes").count() == 8,
            "only those of ranks are judged"
        );
    }
}

fn with_alternatives(tree: &str, names: &[&str]) -> Vec<Finding> {
    let machine = Machine::read(&Tree::open(&trees().join(tree)).unwrap());
    let mut job = job(&machine, &["kernel set cpu"]);
    for name in names {
        let mut alternative = Alternative { name: (*name).to_owned(), ..Alternative::default() };
        alternative.asks.add_component("transport", name, None);
        job.alternatives.push(alternative);
    }
    examine(&machine, &job, None, None)
}

fn alternatives(findings: &[Finding]) -> Vec<(bool, &'static str, String, String)> {
    let of = findings.iter().filter(|finding| finding.id == "alternative");
    of.map(|f| (f.needed, f.verdict.name(), f.found.clone(), f.expected.clone())).collect()
}

/// The kernel set `cpu` on a node with GPUs.
const IDLE: &str = "slow gpu-unused GPUs";

#[test]
fn of_several_transports_the_first_that_works_counts() {
    let found = with_alternatives("hgx-cx7.tree", &["efa", "verbs"]);
    assert_eq!(faults(&found), [IDLE]);
    let all = alternatives(&found);
    assert_eq!((all[0].0, all[0].1), (false, "ok"));
    assert!(all[0].2.starts_with("cannot be used here: NICs for efa: none"), "{all:?}");
    assert!(all[0].2.ends_with("; the config falls to verbs"), "{all:?}");
    assert_eq!(all[0].3, "nothing, as another transport is taken");
    assert_eq!((all[1].0, all[1].2.as_str()), (true, "would be taken"));
    // Needs of the other one alone are not needed.
    assert!(found.iter().filter(|f| f.id == "uverbs-nodes").all(|f| f.needed));
    assert!(found.iter().all(|finding| finding.id != "efa-provider" || !finding.needed));
}

#[test]
fn a_transport_behind_the_one_that_is_taken_is_no_fault() {
    let found = with_alternatives("hgx-cx7.tree", &["verbs", "efa"]);
    assert_eq!(faults(&found), [IDLE]);
    assert_eq!(alternatives(&found)[1].3, "nothing, while verbs works everywhere");
}

#[test]
fn several_transports_are_broken_where_each_of_them_is() {
    let found = with_alternatives("container-no-rights.tree", &["efa", "verbs"]);
    let all = alternatives(&found);
    assert!(all.iter().all(|one| (one.0, one.1) == (true, "broken")), "{all:?}");
    let broken = faults(&found);
    for fault in ["broken nic-present NICs for efa", "broken locked-memory locked memory"] {
        assert!(broken.iter().any(|found| found == fault), "{fault}: {broken:?}");
    }
}

#[test]
fn the_node_on_which_a_list_of_transports_falls_further_is_named() {
    let node = |tree: &str, host: &str| Summary {
        host: host.to_owned(),
        ..Summary::default().with_transport(&with_alternatives(tree, &["efa", "verbs"]))
    };
    let efa = "p5en-efa.tree";
    let found = compare(&[node(efa, "a"), node(efa, "b"), node("hgx-cx7.tree", "c")]);
    let odd: Vec<&Finding> = found.iter().filter(|f| f.verdict != Verdict::Ok).collect();
    assert_eq!(odd.len(), 1, "{found:?}");
    assert_eq!((odd[0].id, odd[0].verdict), ("world-transport", Verdict::Slow));
    assert_eq!(odd[0].subject, "transport of several of c (rank 2)");
    assert_eq!((odd[0].found.as_str(), odd[0].expected.as_str()), ("verbs", "efa, as on most"));
}

/// Differences among nodes that use these components, by the ids of the findings.
fn odd(trees_of: &[&str], uses: &[&str]) -> Vec<String> {
    let summary = |(host, name): (usize, &&str)| {
        let machine = Machine::read(&Tree::open(&trees().join(name)).unwrap());
        Summary::of(&machine, &job(&machine, uses), &host.to_string(), "1")
    };
    faults(&compare(&trees_of.iter().enumerate().map(summary).collect::<Vec<_>>()))
}

#[test]
fn a_node_with_fewer_links_speaks_what_the_others_speak() {
    let hgx = "hgx-cx7.tree";
    let found = odd(&[hgx, "faults/nic-missing.tree", hgx], &[]);
    let expected = [
        "slow world-nics NICs with a link of 1 (rank 1)",
        "slow world-nics port rates of 1 (rank 1)",
    ];
    assert_eq!(found, expected);
    let found = odd(&[hgx, "faults/link-layer-odd.tree", hgx], &[]);
    assert!(found.contains(&"broken world-fabric link layers of 1 (rank 1)".into()), "{found:?}");
}

#[test]
fn a_node_with_a_gpu_less_is_named_by_its_gpus_and_its_switches() {
    let hgx = "hgx-cx7.tree";
    let found = odd(&[hgx, hgx, "faults/gpu-missing.tree"], &["kernel set cuda"]);
    let expected =
        ["slow world-nics GPUs of 2 (rank 2)", "slow world-nics GPUs of each switch of 2 (rank 2)"];
    assert_eq!(found, expected);
    assert!(odd(&[hgx, hgx, "faults/gpu-missing.tree"], &["kernel set cpu"]).is_empty());
}

#[test]
fn a_node_with_an_nvswitch_less_is_named() {
    let text = std::fs::read_to_string(trees().join("hgx-cx7.tree")).unwrap();
    let node = |host: &str, switches: usize| {
        let function = |i: usize| {
            let path = format!("sys/bus/pci/devices/0000:0{i}:00.0");
            format!("{path}/vendor = 0x10de\n{path}/device = 0x22a3\n{path}/class = 0x068000\n")
        };
        let change: String = (0..switches).map(function).collect();
        let machine = Machine::read(&Tree::changed(&text, &change).unwrap());
        Summary::of(&machine, &job(&machine, &[]), host, "1")
    };
    let found = faults(&compare(&[node("a", 4), node("b", 3), node("c", 4)]));
    assert_eq!(found, ["slow world-nics NVSwitches of b (rank 1)"]);
}

#[test]
fn hosts_with_unequally_many_ranks_are_named() {
    let rank = |host: &str, ranks| {
        Summary { host: host.to_owned(), ..Summary::default() }.with_ranks(ranks)
    };
    let found = compare(&[rank("a", 2), rank("a", 2), rank("b", 1), rank("c", 2), rank("c", 2)]);
    assert_eq!(faults(&found), ["broken world-ranks ranks of the node of b (rank 2)"]);
    assert!(faults(&compare(&[rank("a", 2), rank("a", 2)])).is_empty());
}

#[test]
fn nodes_may_differ_in_what_their_job_does_not_use() {
    let nodes = ["hgx-cx7.tree", "roce-bond.tree", "hgx-cx7.tree"];
    let of_devices = |uses: &[&str]| {
        let found = odd(&nodes, uses);
        found.iter().filter(|fault| !fault.starts_with("unknown")).count()
    };
    assert_eq!(of_devices(&["kernel set cpu, transport shm"]), 0);
    assert!(of_devices(&["kernel set cpu, transport verbs"]) > 0);
    assert!(of_devices(&[]) > 0, "without a config all counts");
}

#[test]
fn probes_say_which_transport_is_taken_and_a_fault_behind_a_probe_is_one() {
    let machine = Machine::read(&Tree::open(&trees().join("hgx-cx7.tree")).unwrap());
    let mut job = job(&machine, &["kernel set cpu"]);
    for name in ["efa", "verbs"] {
        let mut alternative = Alternative { name: name.to_owned(), ..Alternative::default() };
        alternative.asks.add_component("transport", name, None);
        job.alternatives.push(alternative);
    }
    let component = |name: &str, why_not: Option<&str>| Component {
        kind: "transport".to_owned(),
        name: name.to_owned(),
        chosen: true,
        why_not: why_not.map(str::to_owned),
    };
    let components = |efa, verbs| Components {
        components: vec![component("efa", efa), component("verbs", verbs)],
        ..Components::default()
    };
    let found = examine(&machine, &job, Some(&components(Some("no adapter"), None)), None);
    assert_eq!(faults(&found), [IDLE]);
    assert_eq!(
        alternatives(&found)[0].2,
        "cannot be used here: no adapter; the config falls to verbs"
    );
    // The communicator takes what probes.
    let found = examine(&machine, &job, Some(&components(None, None)), None);
    assert_eq!(alternatives(&found)[0].2, "would be taken");
    assert!(faults(&found).contains(&"broken nic-present NICs for efa".to_owned()));
    let found = examine(&machine, &job, Some(&components(Some("none"), Some("none"))), None);
    assert!(faults(&found).contains(&"broken component transport verbs".to_owned()), "{found:#?}");
    assert!(faults(&found).contains(&"broken component transport efa".to_owned()));
}

#[test]
fn a_port_that_the_config_does_not_use_is_not_judged() {
    let base = std::fs::read_to_string(trees().join("roce-port-down.tree")).unwrap();
    let port = "sys/class/infiniband/mlx5_0/ports/2";
    let second = format!("{port}/state = 1: DOWN\n{port}/link_layer = Ethernet\n");
    let machine = Machine::read(&Tree::changed(&base, &second).unwrap());
    let mut job = job(&machine, &["kernel set cpu, transport verbs"]);
    job.asks.nics = vec!["mlx5_0".to_owned()];
    let down = "broken port-state mlx5_0 port 2".to_owned();
    assert!(faults(&examine(&machine, &job, None, None)).contains(&down));
    job.asks.ports = [1].into();
    assert!(!faults(&examine(&machine, &job, None, None)).contains(&down));
}

#[test]
fn a_near_card_without_an_rdma_device_is_distinguished_from_a_card_that_is_missing() {
    let fix = |name: &str| {
        let found = findings(&trees().join("faults").join(name), &[]);
        let far = found.into_iter().find(|f| f.id == "rail-distance" && f.verdict != Verdict::Ok);
        far.unwrap().fix.unwrap()
    };
    assert!(
        fix("nic-missing.tree")
            .starts_with("modprobe mlx5_ib, then dmesg; lspci -k -s 0000:5e:00.0 shows")
    );
    assert!(fix("nic-missing.tree").contains("in a container, where the host has its RDMA device"));
    assert!(fix("card-missing.tree").contains("reseat or replace it"));
    assert!(fix("half-wired.tree").contains("nothing, if the node is wired so"));
}

#[test]
fn what_a_config_does_not_use_is_no_fault_of_its_node() {
    let path = trees().join("container-no-rights.tree");
    assert!(findings(&path, &[]).iter().any(|finding| finding.verdict == Verdict::Broken));
    let found = findings(&path, &["kernel set cpu, transport shm"]);
    let is_of_node = |fault: &String| fault != IDLE && !fault.starts_with("unknown");
    assert!(!faults(&found).iter().any(is_of_node), "{found:#?}");
    let uverbs = found.iter().find(|finding| finding.id == "uverbs-nodes").unwrap();
    assert!(!uverbs.needed && uverbs.fix.is_none());
}

#[test]
fn a_container_with_some_of_the_devices_is_well_until_more_are_asked_for() {
    let path = trees().join("faults/half-given.tree");
    assert_eq!(faults(&findings(&path, &[])), Vec::<String>::new());
    let machine = Machine::read(&Tree::open(&path).unwrap());
    let mut job = job(&machine, &["kernel set cuda, transport verbs"]);
    (job.ranks, job.asks.nics) = (5, vec!["mlx5_6".to_owned()]);
    assert_eq!(
        faults(&examine(&machine, &job, None, None)),
        ["broken uverbs-nodes mlx5_6", "broken nvidia-nodes NVIDIA GPUs", "broken gpu-ranks GPUs"]
    );
}

#[test]
fn a_small_window_of_a_gpu_is_no_fault_where_no_nic_reaches_it() {
    let text = "sys/bus/pci/devices/0000:3b:00.0/vendor = 0x10de\n\
                sys/bus/pci/devices/0000:3b:00.0/device = 0x1eb8\n\
                sys/bus/pci/devices/0000:3b:00.0/class = 0x030200\n\
                sys/bus/pci/devices/0000:3b:00.0/resource = 0x0000380fc0000000 0x0000380fcfffffff 0x000000000014220c\n\
                proc/driver/nvidia/version = NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n\
                proc/driver/nvidia/gpus/0000:3b:00.0/information = Device Minor: 0\n\
                dev/nvidia0 =\ndev/nvidiactl =\ndev/nvidia-uvm =\n";
    let machine = Machine::read(&Tree::recorded(text).unwrap());
    assert_eq!(machine.gpus[0].largest_bar.get(), Some(256 << 20));
    let found = examine(&machine, &job(&machine, &["kernel set cuda"]), None, None);
    assert!(found.iter().all(|finding| finding.verdict < Verdict::Slow), "{found:#?}");
    assert!(found.iter().all(|finding| finding.id != "gpu-bar"));
}

#[test]
fn a_nic_that_the_config_names_must_be_there_and_have_its_link() {
    let machine = Machine::read(&Tree::open(&trees().join("roce-port-down.tree")).unwrap());
    let mut job = job(&machine, &["kernel set cpu, transport verbs"]);
    let verdict = |job: &Job| {
        let found = examine(&machine, job, None, None);
        found.into_iter().find(|f| f.id == "port-state" && f.verdict != Verdict::Ok).unwrap()
    };
    assert_eq!(verdict(&job).verdict, Verdict::Slow);
    job.asks.nics = vec!["mlx5_1".to_owned()];
    let named = verdict(&job);
    assert_eq!((named.verdict, named.subject.as_str()), (Verdict::Broken, "mlx5_1"));
    assert!(named.impact.unwrap().contains("names this NIC"));
    job.asks.nics = vec!["mlx5_7".to_owned()];
    let found = examine(&machine, &job, None, None);
    let absent = found.iter().find(|finding| finding.id == "nic-named").unwrap();
    assert_eq!((absent.verdict, absent.subject.as_str()), (Verdict::Broken, "mlx5_7"));
    assert_eq!(absent.found, "not there; there are: mlx5_0, mlx5_1");
}

/// `gpus` A100 of the PCIe form, of which the first `bridged` have a bridge.
fn pcie_gpus(gpus: usize, bridged: usize) -> Machine {
    let mut text = String::from(
        "proc/driver/nvidia/version = NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n\
         dev/nvidiactl =\ndev/nvidia-uvm =\n",
    );
    let mut links = String::from("tokenyard/nvidia-smi-nvlink.txt << END\n");
    for i in 0..gpus {
        let at = format!("0000:{}0:00.0", i + 1);
        text += &format!(
            "sys/bus/pci/devices/{at}/vendor = 0x10de\nsys/bus/pci/devices/{at}/device = 0x20b5\n\
             sys/bus/pci/devices/{at}/class = 0x030200\n\
             proc/driver/nvidia/gpus/{at}/information = GPU UUID: GPU-{i}\\nDevice Minor: {i}\n\
             dev/nvidia{i} =\n"
        );
        links += &format!("GPU {i}: A100 PCIe (UUID: GPU-{i})\n");
        let state = if i < bridged { "25 GB/s" } else { "<inactive>" };
        links.extend((0..12).map(|link| format!("  Link {link}: {state}\n")));
    }
    Machine::read(&Tree::recorded(&format!("{text}{links}END\n")).unwrap())
}

#[test]
fn pcie_gpus_without_a_bridge_are_broken_only_where_nvlink_is_asked_for() {
    let links = |gpus: usize, bridged: usize, uses: &[&str]| -> Vec<Verdict> {
        let machine = pcie_gpus(gpus, bridged);
        let found = examine(&machine, &job(&machine, uses), None, None);
        found.iter().filter(|f| f.id == "nvlink-links").map(|f| f.verdict).collect()
    };
    let nvlink = ["kernel set cuda, transport nvlink"];
    assert_eq!(links(1, 0, &[]), []);
    assert_eq!(links(2, 0, &[]), [Verdict::Unknown; 2]);
    assert_eq!(links(2, 0, &nvlink), [Verdict::Broken; 2]);
    let (well, unknown) = (Verdict::Ok, Verdict::Unknown);
    assert_eq!(links(4, 2, &[]), [well, well, unknown, unknown]);
}

#[test]
fn a_limit_on_locked_memory_that_holds_the_windows_is_not_called_broken() {
    let base = std::fs::read_to_string(trees().join("faults/memlock-small.tree")).unwrap();
    let small = base.split_once("@base ../hgx-cx7.tree").unwrap().1;
    let node = std::fs::read_to_string(trees().join("hgx-cx7.tree")).unwrap();
    for (limit, verdict) in [
        (65536_u64, Verdict::Broken),
        ((64 << 20) - 1, Verdict::Broken),
        (512 << 20, Verdict::Unknown),
        (1 << 30, Verdict::Ok),
    ] {
        let changes = small.replace("65536", &limit.to_string());
        let machine = Machine::read(&Tree::changed(&node, &changes).unwrap());
        let found = examine(&machine, &job(&machine, &[]), None, None);
        let locked = found.iter().find(|finding| finding.id == "locked-memory").unwrap();
        assert_eq!(locked.verdict, verdict, "{limit}: {}", locked.found);
    }
}
