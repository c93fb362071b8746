//! Rails that are missing, or that cannot be used: broken only where the topology would refuse the node.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

use tokenyard_doctor::{Finding, Job, Verdict, examine};
use tokenyard_machine::{Machine, Nic, Tree};

fn trees() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees")
}

/// A job of these components, with a rank for each GPU.
fn job(machine: &Machine, uses: &[&str]) -> Job {
    let ranks = machine.gpus.iter().filter(|gpu| gpu.is_visible).count();
    let mut job = Job { ranks: ranks as u64, threads: 1, window_bytes: 64 << 20, ..Job::default() };
    for component in uses.iter().flat_map(|line| line.split(", ")) {
        let (kind, name) = component.rsplit_once(' ').unwrap();
        job.asks.add_component(kind, name, None);
    }
    job
}

#[test]
fn a_missing_nic_breaks_a_job_only_where_the_topology_would_refuse_it() {
    let machine = Machine::read(&Tree::open(&trees().join("faults/card-missing.tree")).unwrap());
    let verdict = |job: &Job| {
        let found = examine(&machine, job, None, None);
        let of = found.iter().find(|f| f.id == "rail-distance" && f.subject == "GPU 3").unwrap();
        (of.verdict, of.needed)
    };
    let mut verbs = job(&machine, &["kernel set cpu, transport verbs"]);
    // The topology goes by GPUs, whatever kernels run.
    assert_eq!(verdict(&verbs), (Verdict::Broken, true));
    verbs.asks.any_rails = true;
    assert_eq!(verdict(&verbs).0, Verdict::Ok, "no row of the cpu kernels lies on a GPU");
    let mut counted = job(&machine, &["kernel set cpu, transport verbs"]);
    counted.asks.counted_rails = true;
    assert_eq!(verdict(&counted).0, Verdict::Ok, "the transport takes others");
    let mut cuda = job(&machine, &["kernel set cuda, transport verbs"]);
    cuda.asks.nics = vec!["mlx5_0".to_owned()];
    assert_eq!(verdict(&cuda), (Verdict::Slow, true));
    let mut few = job(&machine, &["kernel set cuda, transport verbs"]);
    few.drives = Some(3);
    assert_eq!(verdict(&few).0, Verdict::Unknown, "GPU 3 is the fourth");
    few.drives = Some(4);
    assert_eq!(verdict(&few).0, Verdict::Broken);
    let tray = trees().join("faults/gb200-nic-missing.tree");
    let tray = Machine::read(&Tree::open(&tray).unwrap());
    for (ranks, expected) in [(2, Verdict::Unknown), (3, Verdict::Broken)] {
        few.drives = Some(ranks);
        let found = examine(&tray, &few, None, None);
        let count = found.iter().find(|f| f.id == "rail-count").unwrap();
        assert_eq!(count.verdict, expected, "GPU 2 and 3 share a NIC");
    }
    let inside = job(&machine, &["kernel set cuda, transport nvlink"]);
    assert_eq!(verdict(&inside), (Verdict::Ok, false));
}

#[test]
fn a_port_that_is_down_breaks_a_job_only_where_the_topology_would_refuse_it() {
    let node = |name: &str| {
        let path = trees().join("faults").join(name).with_extension("tree");
        Machine::read(&Tree::open(&path).unwrap())
    };
    for (tree, id, nic) in
        [("port-down", "port-state", "mlx5_3"), ("gid-none", "gid", "rocep105s0")]
    {
        let machine = node(tree);
        let judged = |change: &dyn Fn(&mut Job)| {
            let mut job = job(&machine, &["kernel set cpu, transport verbs"]);
            change(&mut job);
            let found = examine(&machine, &job, None, None);
            let of = found.into_iter().find(|f| f.id == id && f.subject == nic).unwrap();
            (of.verdict, of.found)
        };
        let (verdict, words) = judged(&|_| ());
        let missing = machine.missing_rails();
        assert_eq!((verdict, words), (Verdict::Broken, missing[0].to_string()), "{tree}");
        assert_eq!(judged(&|job| job.asks.any_rails = true).0, Verdict::Slow, "{tree}");
        assert_eq!(judged(&|job| job.asks.counted_rails = true).0, Verdict::Slow, "{tree}");
        assert_eq!(judged(&|job| job.drives = Some(2)).0, Verdict::Slow, "{tree}");
        assert_eq!(
            judged(&|job| job.asks.nics = vec![nic.to_owned()]).0,
            Verdict::Broken,
            "{tree}"
        );
        let inside = job(&machine, &["kernel set cuda, transport nvlink"]);
        let found = examine(&machine, &inside, None, None);
        assert!(found.iter().all(|f| f.id != id || f.verdict == Verdict::Ok), "{tree}");
    }
    // GPUs that the environment leaves out have no rank.
    for (devices, verdict) in [
        ("0,1,2,4,5,6,7", Verdict::Slow),
        ("4,3", Verdict::Broken),
        ("GPU-5c1f0a70-0000-4000-8000-000000000061", Verdict::Broken),
    ] {
        let mut machine = node("port-down");
        let environment = &mut machine.container.environment;
        environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), devices.to_owned());
        let found = examine(&machine, &job(&machine, &["transport verbs"]), None, None);
        let state = found.iter().find(|f| f.id == "port-state" && f.subject == "mlx5_3").unwrap();
        assert_eq!(state.verdict, verdict, "{devices}");
    }
    // Other NICs are named: this one serves no rank.
    let machine = node("port-down");
    let mut named = job(&machine, &["kernel set cuda, transport verbs"]);
    named.asks.nics = vec!["mlx5_0".to_owned()];
    let found = examine(&machine, &named, None, None);
    assert!(found.iter().all(|finding| finding.verdict < Verdict::Slow), "{found:#?}");
}

#[test]
fn a_nic_to_spare_on_one_side_is_no_fault() {
    let mut machine = Machine::read(&Tree::open(&trees().join("gb200-nvl72.tree")).unwrap());
    let fifth = machine.nics.iter().find(|nic| nic.name == "mlx5_5").unwrap();
    let fifth = Nic { name: "mlx5_9".to_owned(), ..fifth.clone() };
    machine.nics.push(fifth);
    let found = examine(&machine, &job(&machine, &[]), None, None);
    let count = found.iter().find(|finding| finding.id == "rail-count").unwrap();
    assert_eq!(count.verdict, Verdict::Ok, "{count:#?}");
    assert_eq!(count.found, "one NIC for each, and more for GPU 2, 3");
}

#[test]
fn a_gpu_for_a_display_lacks_no_nic() {
    let card = "sys/bus/pci/devices/0000:02:00.0 -> ../../../devices/pci0000:00/0000:00:02.0/0000:02:00.0\n\
                sys/bus/pci/devices/0000:02:00.0/vendor = 0x10de\n\
                sys/bus/pci/devices/0000:02:00.0/device = 0x1fb0\n\
                sys/bus/pci/devices/0000:02:00.0/class = 0x030000\n\
                sys/bus/pci/devices/0000:02:00.0/numa_node = 0\n\
                proc/driver/nvidia/gpus/0000:02:00.0/information = Device Minor: 8\n\
                dev/nvidia8 =\n";
    let base = std::fs::read_to_string(trees().join("hgx-cx7.tree")).unwrap();
    let machine = Machine::read(&Tree::changed(&base, card).unwrap());
    assert_eq!(machine.gpus.len(), 9);
    assert!(machine.missing_rails().is_empty());
    let found = examine(&machine, &job(&machine, &[]), None, None);
    let near: Vec<&Finding> = found.iter().filter(|f| f.id == "rail-distance").collect();
    assert_eq!(near.len(), 9);
    assert!(near.iter().all(|finding| finding.verdict <= Verdict::Unknown), "{near:?}");
}

#[test]
fn gpus_and_cards_of_other_containers_are_no_missing_rails() {
    // Two GPUs with their NICs; the other RDMA devices are in namespaces of their own.
    let mut text = String::from("dev/infiniband/rdma_cm !gone\n");
    for i in 2..8 {
        text += &format!(
            "dev/nvidia{i} !gone\nsys/class/infiniband/mlx5_{i} !gone\n\
             sys/class/infiniband_verbs/uverbs{i} !gone\ndev/infiniband/uverbs{i} !gone\n"
        );
    }
    let base = std::fs::read_to_string(trees().join("hgx-cx7.tree")).unwrap();
    let machine = Machine::read(&Tree::changed(&base, &text).unwrap());
    let found = examine(&machine, &job(&machine, &[]), None, None);
    let near: Vec<&Finding> = found.iter().filter(|f| f.id == "rail-distance").collect();
    assert_eq!(near.len(), 2, "{near:?}");
    assert!(near.iter().all(|finding| finding.verdict == Verdict::Ok), "{near:?}");
    assert!(found.iter().all(|finding| finding.verdict == Verdict::Ok), "{found:#?}");
}

#[test]
fn a_port_without_a_cable_is_slow_where_the_cards_of_other_gpus_have_one_more() {
    let path = trees().join("healthy/hgx-one-port.tree");
    let mut machine = Machine::read(&Tree::open(&path).unwrap());
    let judged = |machine: &Machine| {
        let found = examine(machine, &job(machine, &["transport verbs"]), None, None);
        let of =
            found.into_iter().find(|f| f.id == "port-state" && f.subject == "mlx5_13").unwrap();
        (of.verdict, of.impact)
    };
    let (verdict, cost) = judged(&machine);
    assert_eq!(verdict, Verdict::Unknown);
    assert!(cost.unwrap().contains("nothing, if the node is cabled so"));
    let up = machine.nics[0].ports.clone();
    for nic in machine.nics.iter_mut().filter(|nic| nic.name != "mlx5_13") {
        nic.ports = up.clone();
    }
    assert_eq!(judged(&machine).0, Verdict::Slow);
}
