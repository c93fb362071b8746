//! GPUs: as many as the ranks need, and none missing below its switch.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::fmt::Write;
use std::path::{Path, PathBuf};

use tokenyard_doctor::{Finding, Job, Verdict, examine};
use tokenyard_machine::{Machine, Tree, missing_gpus};

fn trees() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees")
}

fn machine(name: &str) -> Machine {
    Machine::read(&Tree::open(&trees().join(name)).unwrap())
}

/// The node without some of its GPUs: on no bus, and so in no driver.
fn without(name: &str, gpus: &[usize]) -> Machine {
    let whole = machine(name);
    let mut change = String::new();
    for gpu in gpus {
        writeln!(change, "sys/bus/pci/devices/{} !gone", whole.gpus[*gpu].pci).unwrap();
    }
    let text = std::fs::read_to_string(trees().join(name)).unwrap();
    Machine::read(&Tree::changed(&text, &change).unwrap())
}

fn job(ranks: u64, components: &[(&str, &str)]) -> Job {
    let mut job = Job { ranks, threads: 1, window_bytes: 1 << 20, ..Job::default() };
    components.iter().for_each(|(kind, name)| job.asks.add_component(kind, name, None));
    job
}

fn of(machine: &Machine, job: &Job, id: &str) -> Vec<Finding> {
    let all = examine(machine, job, None, None);
    all.into_iter().filter(|finding| finding.id == id).collect()
}

fn ranks(machine: &Machine, job: &Job) -> (Verdict, String, String) {
    let found = of(machine, job, "gpu-ranks");
    assert_eq!(found.len(), 1, "{found:?}");
    (found[0].verdict, found[0].found.clone(), found[0].expected.clone())
}

#[test]
fn more_ranks_than_gpus_are_broken_and_the_ranks_without_one_named() {
    let node = machine("hgx-cx7.tree");
    let (verdict, found, wanted) = ranks(&node, &job(16, &[]));
    assert_eq!(
        (verdict, found.as_str()),
        (Verdict::Broken, "8 GPUs; none for local ranks 8 to 15")
    );
    assert_eq!(wanted, "one for each of 16 ranks");
    let mut launched = job(9, &[("kernel set", "cuda")]);
    launched.ranks_from = "LOCAL_WORLD_SIZE".to_owned();
    let (verdict, found, wanted) = ranks(&node, &launched);
    assert_eq!((verdict, found.as_str()), (Verdict::Broken, "8 GPUs; none for local rank 8"));
    assert_eq!(wanted, "one for each of 9 ranks (LOCAL_WORLD_SIZE)");
    assert_eq!(ranks(&node, &job(8, &[])).0, Verdict::Ok);
    assert_eq!(ranks(&node, &job(4, &[])).1, "4 for 4 ranks");
}

#[test]
fn ranks_that_drive_no_gpu_need_none_and_ranks_may_share_one_that_the_config_names() {
    let node = machine("hgx-cx7.tree");
    assert_eq!(ranks(&node, &job(16, &[("kernel set", "cpu")])).0, Verdict::Ok);
    let mut shared = job(16, &[("kernel set", "cuda")]);
    shared.asks.names_device = true;
    assert_eq!(ranks(&node, &shared).0, Verdict::Slow);
    let none = machine("roce-bond.tree");
    assert_eq!(ranks(&none, &job(1, &[("kernel set", "cuda")])).0, Verdict::Broken);
    assert!(of(&none, &job(1, &[]), "gpu-ranks").is_empty());
}

#[test]
fn gpus_that_a_config_or_the_number_of_ranks_leaves_idle_are_named() {
    let unused = |name: &str, job: &Job| {
        let found = of(&machine(name), job, "gpu-unused").into_iter();
        found.map(|finding| (finding.verdict, finding.found)).collect::<Vec<_>>()
    };
    let cpu = |ranks| job(ranks, &[("kernel set", "cpu"), ("transport", "verbs")]);
    let all = |vendor: &str| (Verdict::Slow, format!("the config uses none of 8 {vendor} GPUs"));
    assert_eq!(unused("hgx-cx7.tree", &cpu(8)), [all("NVIDIA")]);
    assert_eq!(unused("mi300x-pollara.tree", &cpu(8)), [all("AMD")]);
    // A node without GPUs, a job without a config, and one that uses all of them.
    assert_eq!(unused("roce-bond.tree", &cpu(8)), []);
    assert_eq!(unused("hgx-cx7.tree", &job(8, &[])), []);
    let mut few = job(4, &[("kernel set", "cuda")]);
    few.ranks_from = "LOCAL_WORLD_SIZE".to_owned();
    assert_eq!(unused("hgx-cx7.tree", &few), [(Verdict::Unknown, "4 ranks for 8 GPUs".to_owned())]);
    few.ranks_from = "--ranks".to_owned();
    assert_eq!(unused("hgx-cx7.tree", &few), []);
    assert_eq!(unused("hgx-cx7.tree", &job(8, &[("kernel set", "cuda")])), []);
}

#[test]
fn the_fix_for_idle_gpus_names_configs_of_this_kind_of_node() {
    let cpu = job(8, &[("kernel set", "cpu"), ("transport", "verbs")]);
    for (tree, configs) in [
        ("hgx-cx7.tree", "configs/nvlink.toml, or between nodes configs/nvlink-verbs.toml"),
        ("p5en-efa.tree", "configs/nvlink.toml, or between nodes configs/nvlink-efa.toml"),
        ("mi300x-pollara.tree", "configs/rocm.toml, or between nodes configs/rocm-verbs.toml"),
    ] {
        let found = of(&machine(tree), &cpu, "gpu-unused").remove(0).fix.unwrap();
        assert!(found.contains(configs), "{tree}: {found}");
    }
}

#[test]
fn gpus_that_the_environment_hides_serve_no_rank() {
    let text = std::fs::read_to_string(trees().join("hgx-cx7.tree")).unwrap();
    let visible = |list: &str| {
        let change = format!("proc/self/environ = PATH=/usr/bin\\0CUDA_VISIBLE_DEVICES={list}\\0");
        Machine::read(&Tree::changed(&text, &change).unwrap())
    };
    assert_eq!(ranks(&visible("0,1"), &job(4, &[])).1, "2 GPUs; none for local ranks 2 to 3");
    // A launcher that gives each rank one GPU.
    assert_eq!(ranks(&visible("5"), &job(8, &[])).0, Verdict::Ok);
}

#[test]
fn any_gpu_that_is_missing_is_named_with_its_place_and_the_others_count() {
    for (name, gpus, place) in [
        ("hgx-cx7.tree", 8, "switch"),
        ("p5en-efa.tree", 8, "switch"),
        ("mi300x-pollara.tree", 8, "switch"),
        ("healthy/mi300x-thor2.tree", 8, "switch"),
        ("gb200-nvl72.tree", 4, "NUMA node"),
    ] {
        let whole = machine(name);
        assert_eq!(whole.gpus.len(), gpus, "{name}");
        for gpu in 0..gpus {
            let found = of(&without(name, &[gpu]), &job(1, &[]), "gpu-missing");
            assert_eq!(found.len(), 1, "{name} without GPU {gpu}: {found:?}");
            assert_eq!(found[0].verdict, Verdict::Slow);
            assert!(found[0].subject.starts_with(place), "{name}: {}", found[0].subject);
            let at = whole.pci_at(whole.gpus[gpu].pci).unwrap();
            let above = match place {
                "switch" => at.bridges[1].to_string(),
                _ => at.numa_node.get().unwrap().to_string(),
            };
            assert!(found[0].subject.ends_with(&above), "{name}: {}", found[0].subject);
        }
    }
}

#[test]
fn of_two_missing_gpus_each_place_is_named_and_half_of_a_node_may_be_meant_so() {
    let places = |gpus: &[usize]| {
        let found = of(&without("hgx-cx7.tree", gpus), &job(1, &[]), "gpu-missing");
        found.into_iter().map(|finding| finding.subject).collect::<Vec<_>>()
    };
    assert_eq!(places(&[1, 6]), ["switch 0000:3e:00.0", "switch 0000:cc:00.0"]);
    assert!(places(&[4, 5, 6, 7]).is_empty());
}

#[test]
fn no_gpu_is_missing_on_a_node_that_is_well() {
    for folder in [trees(), trees().join("healthy")] {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "tree") {
                let machine = Machine::read(&Tree::open(&path).unwrap());
                assert_eq!(missing_gpus(&machine), [], "{}", path.display());
            }
        }
    }
}

#[test]
fn a_gpu_that_the_driver_has_lost_is_no_gpu_of_nvidia_smi() {
    let name = "hgx-cx7.tree";
    let text = std::fs::read_to_string(trees().join(name)).unwrap();
    let change =
        "tokenyard/nvidia-smi-q.txt = GPU 00000000:1B:00.0\\n    Product Name : NVIDIA H200";
    let node = Machine::read(&Tree::changed(&text, change).unwrap());
    let found = of(&node, &job(8, &[]), "nvidia-smi");
    assert_eq!(found[0].verdict, Verdict::Slow);
    assert_eq!(found[0].found, "lists 1 of 8 GPUs: the driver has lost the others");
}
