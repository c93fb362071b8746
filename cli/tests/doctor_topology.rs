//! `tokenyard doctor --topology` on nodes that are made from documentation.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::path::Path;

use common::{json, repository, stdout, tokenyard};

/// The word of a line and a column of the matrix.
fn word<'a>(text: &'a str, row: &str, column: &str) -> &'a str {
    let mut heads = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if line.starts_with(' ') {
            heads = words;
        } else if words.first() == Some(&row)
            && words.len() == heads.len() + 1
            && let Some(at) = heads.iter().position(|head| *head == column)
        {
            return words[at + 1];
        }
    }
    panic!("no {row} {column}: {text}")
}

#[test]
fn the_topology_says_how_gpus_and_nics_are_linked() {
    let call = |tree: &Path, arguments: &[&str]| {
        let mut command = tokenyard();
        command.args(["doctor", "--topology", "--root"]).arg(tree).args(arguments);
        command.output().unwrap()
    };
    let hgx = repository("node/machine/trees/hgx-cx7.tree");
    let text = stdout(&call(&hgx, &[]));
    for (row, column, expected) in [
        ("GPU0", "GPU7", "NV18"),
        ("GPU3", "GPU3", "X"),
        ("GPU0", "NIC0", "PIX"),
        ("NIC1", "GPU0", "NODE"),
        ("NIC0", "NIC7", "SYS"),
    ] {
        assert_eq!(word(&text, row, column), expected, "{row} {column}");
    }
    let device = text.lines().find(|line| line.starts_with("NIC5")).unwrap();
    let words: Vec<&str> = device.split_whitespace().collect();
    assert_eq!(words, ["NIC5", "0000:c0:00.0", "1", "56-111,168-223", "mlx5_5"]);
    let document = json(&call(&hgx, &["--json"]));
    let (devices, links) = (&document["topology"]["devices"], &document["topology"]["links"]);
    assert_eq!((devices.as_array().unwrap().len(), links.as_array().unwrap().len()), (16, 120));
    let first = serde_json::json!({
        "a": "GPU0", "b": "GPU1", "distance": "same-numa-node", "nvlinks": 18, "xgmi": false
    });
    assert_eq!(links[0], first);
    let amd = stdout(&call(&repository("node/machine/trees/mi300x-pollara.tree"), &[]));
    assert_eq!((word(&amd, "GPU0", "GPU1"), word(&amd, "GPU0", "NIC3")), ("XGMI", "PXB"));
}

#[test]
fn nvlinks_are_those_of_the_driver_s_matrix_and_unknown_where_nothing_says_them() {
    let folder = tempfile::tempdir().unwrap();
    let call = |change: &str| {
        let base = repository("node/machine/trees/container-no-rights.tree");
        let tree = folder.path().join("node.tree");
        let text = format!("@base {}\n{change}\n", base.canonicalize().unwrap().display());
        std::fs::write(&tree, text).unwrap();
        let mut command = tokenyard();
        stdout(&command.args(["doctor", "--topology", "--root"]).arg(&tree).output().unwrap())
    };
    let silent = call("");
    assert_eq!(word(&silent, "GPU0", "GPU1"), "NODE?");
    assert!(silent.contains("nvidia-smi topo -m was not run"), "{silent}");
    let matrix = |between: &str| {
        let file = "tokenyard/nvidia-smi-topo.txt";
        call(&format!(
            "{file} << END\n\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \t{between}\tPIX\t0-3\n\
             GPU1\t{between}\t X \tSYS\t0-3\nNIC0\tPIX\tSYS\t X \nEND"
        ))
    };
    assert_eq!(word(&matrix("NV12"), "GPU1", "GPU0"), "NV12");
    assert_eq!(word(&matrix("NODE"), "GPU1", "GPU0"), "NODE");
}
