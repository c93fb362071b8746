//! The carrier of NCCL's GIN, where a config asks for it.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::Path;

use tokenyard_doctor::{Finding, Job, Verdict, examine};
use tokenyard_machine::{Machine, Tree};

const LIBRARY: &str = "usr/lib/x86_64-linux-gnu";

fn machine(name: &str, change: &str) -> Machine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    Machine::read(&Tree::changed(&text, change).unwrap())
}

fn nccl(version: &str) -> String {
    format!("{LIBRARY}/libnccl.so.2 -> libnccl.so.{version}\n{LIBRARY}/libnccl.so.{version} =\n")
}

fn findings(machine: &Machine, id: &str) -> Vec<Finding> {
    let mut job = Job { ranks: 2, threads: 1, ..Job::default() };
    job.asks.add_component("kernel set", "cuda", None);
    job.asks.add_component("transport", "gin", None);
    let all = examine(machine, &job, None, None);
    all.into_iter().filter(|finding| finding.id == id).collect()
}

fn one(machine: &Machine, id: &str) -> (Verdict, String) {
    let found = findings(machine, id);
    assert_eq!(found.len(), 1, "{found:?}");
    (found[0].verdict, found[0].found.clone())
}

#[test]
fn an_nccl_whose_waits_have_no_end_is_too_old() {
    for (version, verdict) in
        [("2.28.9", Verdict::Broken), ("2.31.2", Verdict::Ok), ("2.32.3", Verdict::Ok)]
    {
        let node = machine("cpu-virtual.tree", &nccl(version));
        let (found, text) = one(&node, "nccl");
        assert_eq!(found, verdict, "{text}");
        assert!(text.contains(version), "{text}");
    }
}

#[test]
fn the_nics_of_a_node_say_what_would_post() {
    let (verdict, text) = one(&machine("hgx-cx7.tree", ""), "gin-type");
    assert!(verdict == Verdict::Ok && text.contains("gdaki"), "{text}");
    let (verdict, text) = one(&machine("p5en-efa.tree", ""), "gin-type");
    assert!(verdict == Verdict::Ok && text.contains("aws-ofi-nccl"), "{text}");
}

#[test]
fn without_a_nic_gdrcopy_and_nccl_2_32_are_a_way_over_sockets() {
    let of = |version: &str, change: &str| {
        one(&machine("cpu-virtual.tree", &(nccl(version) + change)), "gin-type")
    };
    let (verdict, text) = of("2.32.3", "");
    assert!(verdict == Verdict::Broken && text.contains("no GDRCopy"), "{text}");
    const GDRDRV: &str = "sys/module/gdrdrv/version = 2.5\n";
    let (verdict, text) = of("2.32.3", GDRDRV);
    assert!(verdict == Verdict::Slow && text.contains("sockets"), "{text}");
    let (verdict, text) = of("2.31.2", GDRDRV);
    assert!(verdict == Verdict::Broken && text.contains("no NCCL 2.32"), "{text}");
}

#[test]
fn a_job_that_does_not_ask_for_gin_gets_no_finding_of_it() {
    let job = Job { ranks: 2, threads: 1, ..Job::default() };
    let all = examine(&machine("hgx-cx7.tree", ""), &job, None, None);
    assert!(all.iter().all(|finding| finding.id != "gin-type"));
}
