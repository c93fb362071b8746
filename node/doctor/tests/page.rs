//! `docs/findings.md` is made of the catalogue: every finding has its anchor, and every anchor its
//! finding. `TOKENYARD_GOLDENS=write cargo test -p tokenyard-doctor --test page` makes it anew.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

use tokenyard_doctor::{Rule, catalogue};

fn page() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/findings.md")
}

/// Where to look first when a job goes wrong. Each rule stands in at least one row.
const SYMPTOMS: &[(&str, &[&str])] = &[
    (
        "no rank starts, or a component is refused",
        &[
            "component",
            "alternative",
            "plugin-file",
            "kernel",
            "seccomp",
            "nvidia-driver",
            "nvrtc",
            "nvlink-fabric",
            "amdgpu-driver",
            "hip-runtime",
            "hiprtc",
            "amd-architecture",
        ],
    ),
    (
        "ranks wait for each other, or refuse each other",
        &[
            "rendezvous",
            "job-secret",
            "unix-sockets",
            "open-files",
            "gpu-ranks",
            "gpu-missing",
            "world-program",
            "world-ranks",
            "world-transport",
        ],
    ),
    (
        "a GPU is missing, or does nothing",
        &[
            "gpu-missing",
            "gpu-unused",
            "gpu-ranks",
            "nvidia-nodes",
            "nvidia-smi",
            "nvidia-driver",
            "kfd",
            "amdgpu-driver",
            "mig",
        ],
    ),
    (
        "a NIC is missing",
        &[
            "nic-present",
            "nic-named",
            "uverbs-nodes",
            "rdma-cm-node",
            "efa-driver",
            "efa-provider",
            "ionic-driver",
            "bnxt-driver",
            "nic-driver",
            "rail-count",
        ],
    ),
    (
        "a transport does not open",
        &[
            "shared-memory",
            "dev-shm",
            "libfabric-version",
            "rdma-core",
            "mlx5-provider",
            "efa-installer",
            "nccl",
            "gin-type",
            "nvshmem",
            "rccl",
            "gpu-doorbell",
            "devx",
            "ibgda-signals",
            "nvlink-clique",
            "imex-channel",
        ],
    ),
    (
        "memory cannot be registered",
        &[
            "locked-memory",
            "ipc-lock",
            "memory",
            "huge-pages",
            "gpu-bar",
            "peer-memory",
            "amd-peer-memory",
            "iommu",
        ],
    ),
    ("a rank is killed by the kernel", &["memory", "dev-shm"]),
    (
        "ranks do not connect, or lose packets (`retry exceeded`)",
        &["port-state", "gid", "rail-layer", "mtu", "port-errors", "acs", "world-fabric"],
    ),
    (
        "half of the bandwidth",
        &[
            "bond-members",
            "bond-lacp",
            "bond-hash",
            "bond-rate",
            "pcie-speed",
            "pcie-width",
            "pcie-room",
            "acs",
            "rail-count",
            "mtu",
        ],
    ),
    (
        "all ranks wait for one",
        &[
            "port-state",
            "port-rate",
            "rail-distance",
            "nvlink-links",
            "xgmi-links",
            "nic-firmware",
            "port-errors",
        ],
    ),
    (
        "small operations are slow",
        &["processors", "clock-source", "gdrcopy", "driver-options", "write-combining"],
    ),
    (
        "one node behaves differently",
        &[
            "world-node",
            "world-software",
            "world-settings",
            "world-nics",
            "nic-firmware",
            "nic-driver",
        ],
    ),
    ("logs and reports are in the wrong order", &["world-clock"]),
];

/// The width of a page's lines.
const WIDTH: usize = 140;

/// The paragraph in lines of the page's width; lines after the first begin with `indent`. Code stays in one piece.
fn wrapped(paragraph: &str, indent: &str) -> String {
    let mut is_code = false;
    let mut pieces = vec![String::new()];
    for c in paragraph.chars() {
        is_code ^= c == '`';
        match c {
            ' ' if !is_code => pieces.push(String::new()),
            _ => pieces.last_mut().unwrap().push(c),
        }
    }
    let mut text = String::new();
    let mut length = 0;
    for piece in pieces {
        let more = piece.chars().count();
        if length > 0 && length + 1 + more > WIDTH {
            write!(text, "\n{indent}").unwrap();
            length = indent.len();
        } else if length > 0 {
            text.push(' ');
            length += 1;
        }
        text += &piece;
        length += more;
    }
    text
}

fn entry(text: &mut String, rule: &Rule) {
    let Rule { id, title, expected, why, impact, fix, source } = rule;
    let about = wrapped(&format!("**{title}.** {why}"), "");
    write!(text, "\n### `{id}`\n<a id=\"{id}\"></a>\n\n{about}\n\n").unwrap();
    for (name, value) in
        [("Expected", expected), ("Impact", impact), ("Fix", fix), ("Source", source)]
    {
        let line = wrapped(&format!("- **{name}:** {value}."), "  ");
        writeln!(text, "{line}").unwrap();
    }
}

fn rendered() -> String {
    let about = "For operators: one entry for each check. The tool prints the anchor of the entry, the \
                 state that it found on the node, and the state that it expected. The meaning of the \
                 verdicts, and the way from a node to a running job: \
                 [operator-guide.md](operator-guide.md).";
    let mut text = format!(
        "# Findings of `tokenyard doctor`\n\n{}\n\n\
         This page is made of the rules themselves (`node/doctor/src`); a test keeps them equal.\n\n\
         ## By symptom\n\n| symptom | look at |\n|---|---|\n",
        wrapped(about, "")
    );
    for (symptom, ids) in SYMPTOMS {
        let links: Vec<String> = ids.iter().map(|id| format!("[{id}](#{id})")).collect();
        writeln!(text, "| {symptom} | {} |", links.join(", ")).unwrap();
    }
    for (subject, rules) in catalogue() {
        write!(text, "\n## {subject}\n").unwrap();
        rules.iter().for_each(|rule| entry(&mut text, rule));
    }
    text
}

#[test]
fn the_page_of_findings_is_that_of_the_catalogue() {
    let expected = rendered();
    if std::env::var("TOKENYARD_GOLDENS").is_ok_and(|value| value == "write") {
        std::fs::write(page(), &expected).unwrap();
    }
    let found = std::fs::read_to_string(page()).unwrap();
    assert!(found == expected, "docs/findings.md is old: see the head of {}", file!());
}

#[test]
fn the_index_by_symptom_has_every_rule_and_no_other() {
    let rules: BTreeSet<&str> =
        catalogue().iter().flat_map(|(_, rules)| rules.iter()).map(|rule| rule.id).collect();
    let listed: BTreeSet<&str> = SYMPTOMS.iter().flat_map(|(_, ids)| ids.iter().copied()).collect();
    assert_eq!(listed, rules);
}

#[test]
fn links_of_other_pages_lead_to_findings_that_there_are() {
    let ids: BTreeSet<&str> =
        catalogue().iter().flat_map(|(_, r)| r.iter()).map(|r| r.id).collect();
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut count = 0;
    for entry in std::fs::read_dir(docs).unwrap() {
        let path = entry.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for link in text.split("findings.md#").skip(1) {
            let id = link.split([')', '`', ' ']).next().unwrap();
            if id == "by-symptom" {
                continue;
            }
            assert!(ids.contains(id), "{}: no finding {id}", path.display());
            count += 1;
        }
    }
    assert!(count > 20, "{count}");
}

#[test]
fn every_rule_has_an_anchor_of_its_own_and_words_in_every_place() {
    let mut ids = BTreeSet::new();
    for rule in catalogue().iter().flat_map(|(_, rules)| rules.iter()) {
        assert!(ids.insert(rule.id), "{} twice", rule.id);
        assert!(
            rule.id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'),
            "{}",
            rule.id
        );
        for text in [rule.title, rule.expected, rule.why, rule.impact, rule.fix, rule.source] {
            assert!(!text.is_empty() && !text.contains("  "), "{}: {text:?}", rule.id);
        }
    }
    assert!(ids.len() > 40, "{}", ids.len());
}
