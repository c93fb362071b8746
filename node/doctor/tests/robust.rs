//! Nodes that show little, or nonsense, are judged without a panic.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::Path;

use proptest::prelude::*;
use tokenyard_doctor::world::{Summary, compare};
use tokenyard_doctor::{Job, examine};
use tokenyard_machine::{Machine, Tree};

fn lines(name: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine/trees").join(name);
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

/// Lines that hold one file each, outside of repetitions.
fn is_plain(line: &str) -> bool {
    line.contains(" = ") && !line.starts_with(['@', '#']) && !line.contains(" << ")
}

fn judged(text: &str) {
    let Ok(tree) = Tree::recorded(text) else { return };
    let machine = Machine::read(&tree);
    let all = examine(&machine, &Job { ranks: 2, threads: 1, ..Job::default() }, None, None);
    for finding in &all {
        assert!(!finding.subject.is_empty() && !finding.found.is_empty(), "{finding:?}");
    }
    let mut job = Job { ranks: u64::MAX / 8, threads: 1, window_bytes: u64::MAX, ..Job::default() };
    for component in ["cuda", "rocm"] {
        job.asks.add_component("kernel set", component, None);
    }
    for component in ["nvlink", "verbs", "efa", "ibgda", "gin"] {
        job.asks.add_component("transport", component, None);
    }
    examine(&machine, &job, None, None);
    let summary = Summary::of(&machine, &job, "host", "1");
    compare(&[summary.clone(), Summary::default(), summary]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn nodes_that_tell_less_or_nonsense_are_judged(
        tree in prop::sample::select(vec!["hgx-cx7.tree", "roce-bond.tree", "gb200-nvl72.tree"]),
        fates in prop::collection::vec(0_u8..8, 400),
        nonsense in "[-0-9a-f:. x\\\\n]{0,12}",
    ) {
        let fates = fates.iter().cycle();
        let text: Vec<String> = lines(tree)
            .into_iter()
            .zip(fates)
            .filter_map(|(line, fate)| match fate {
                0 if is_plain(&line) => None,
                1 if is_plain(&line) => {
                    Some(format!("{} = {nonsense}", line.split(" = ").next().unwrap()))
                }
                _ => Some(line),
            })
            .collect();
        judged(&text.join("\n"));
    }
}

#[test]
fn a_node_that_tells_nothing_is_judged() {
    judged("");
}
