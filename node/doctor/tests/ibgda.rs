//! The needs of ibgda of a node, where a config asks for it.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::Path;

use tokenyard_doctor::{Component, Components, Finding, Job, Verdict, examine};
use tokenyard_machine::{Machine, Tree};

fn machine(name: &str) -> Machine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees").join(name);
    Machine::read(&Tree::open(&path).unwrap())
}

fn changed(name: &str, change: &str) -> Machine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees").join(name);
    Machine::read(&Tree::changed(&std::fs::read_to_string(path).unwrap(), change).unwrap())
}

fn job() -> Job {
    let mut job = Job { ranks: 2, threads: 1, ..Job::default() };
    job.asks.add_component("kernel set", "cuda", None);
    job.asks.add_component("transport", "ibgda", None);
    job
}

fn one(all: &[Finding], id: &str) -> Finding {
    let found: Vec<_> = all.iter().filter(|finding| finding.id == id).collect();
    assert_eq!(found.len(), 1, "{id}: {found:?}");
    found[0].clone()
}

/// The finding is broken or slow, and its fix has these words.
fn fixed_by(finding: &Finding, verdict: Verdict, words: &str) {
    assert_eq!(finding.verdict, verdict, "{finding:?}");
    assert!(finding.fix.as_ref().is_some_and(|fix| fix.contains(words)), "{finding:?}");
}

#[test]
fn a_node_with_connectx_and_all_options_is_well() {
    let all = examine(&machine("hgx-cx7.tree"), &job(), None, None);
    for id in ["devx", "ibgda-signals", "driver-options", "gpu-doorbell", "peer-memory"] {
        assert_eq!(one(&all, id).verdict, Verdict::Ok, "{id}");
    }
}

#[test]
fn each_thing_that_is_missing_is_found_with_its_fix() {
    let of = |machine: &Machine, id| one(&examine(machine, &job(), None, None), id);
    let efa = machine("p5en-efa.tree");
    fixed_by(&of(&efa, "devx"), Verdict::Broken, "choose `verbs`");
    fixed_by(&of(&efa, "gpu-doorbell"), Verdict::Broken, "choose `verbs`");
    let old = changed("hgx-cx7.tree", "proc/sys/kernel/osrelease = 4.18.0-553.el8\n");
    let found = of(&old, "devx");
    fixed_by(&found, Verdict::Broken, "UCTX_EN=1");
    assert_eq!(found.found, "Linux 4.18.0-553.el8");
    let options = of(&machine("faults/no-driver-options.tree"), "driver-options");
    fixed_by(&options, Verdict::Slow, "PeerMappingOverride=1");
    let memory = of(&machine("faults/no-peer-memory.tree"), "peer-memory");
    fixed_by(&memory, Verdict::Broken, "nvidia_peermem");
}

#[test]
fn a_device_that_refuses_commands_of_the_probe_is_found() {
    let probed = |why: &str| Components {
        components: vec![Component {
            kind: "transport".to_owned(),
            name: "ibgda".to_owned(),
            chosen: true,
            why_not: Some(why.to_owned()),
        }],
        ..Components::default()
    };
    let verdict = |why: &str| {
        let all = examine(&machine("hgx-cx7.tree"), &job(), Some(&probed(why)), None);
        one(&all, "devx")
    };
    let refused =
        "open device: mlx5dv_open_device: the device takes no commands of a process (DEVX)";
    fixed_by(&verdict(refused), Verdict::Broken, "UCTX_EN=1");
    assert_eq!(verdict("found no port; expected one").verdict, Verdict::Ok);
}

#[test]
fn signals_by_writes_are_refused_before_a_rank_starts() {
    let mut job = job();
    job.asks.writes_totals = true;
    let all = examine(&machine("hgx-cx7.tree"), &job, None, None);
    fixed_by(&one(&all, "ibgda-signals"), Verdict::Broken, "\"atomic\"");
}

#[test]
fn nothing_is_found_where_no_config_asks_for_it() {
    let job = Job { ranks: 2, threads: 1, ..Job::default() };
    let all = examine(&machine("hgx-cx7.tree"), &job, None, None);
    assert!(all.iter().all(|finding| finding.id != "devx" && finding.id != "ibgda-signals"));
}
