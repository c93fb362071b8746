//! `tokenyard doctor` on nodes of `node/machine/trees`, one recorded and the others made from documentation,
//! and across the ranks of a world.
//!
//! `TOKENYARD_GOLDENS=write cargo test -p tokenyard-cli --test doctor` writes the golden files
//! anew.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::{expect_code, json, repository, stderr, stdout, tokenyard};
use serde_json::Value;

/// Exit code of each node: its faults are part of its tree.
const TREES: [(&str, i32); 8] = [
    ("container-no-rights", 2),
    ("cpu-virtual", 0),
    ("gb200-nvl72", 0),
    ("hgx-cx7", 0),
    ("mi300x-pollara", 0),
    ("p5en-efa", 0),
    ("roce-bond", 0),
    ("roce-port-down", 1),
];

fn goldens() -> PathBuf {
    repository("cli/tests/goldens/doctor")
}

fn names(folder: &Path, extension: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.extension().is_some_and(|e| e == extension));
    files.map(|path| path.file_stem().unwrap().to_string_lossy().into_owned()).collect()
}

fn compare(name: &str, found: &str) {
    let path = goldens().join(name);
    if std::env::var("TOKENYARD_GOLDENS").is_ok_and(|value| value == "write") {
        std::fs::create_dir_all(goldens()).unwrap();
        std::fs::write(&path, found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "{}: expected\n{expected}\nfound\n{found}", path.display());
}

/// The text as one line, because a table breaks lines that are longer than its columns.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `verdict finding subject` for each finding, in order.
fn verdicts(document: &Value) -> String {
    let findings = document["findings"].as_array().unwrap();
    let line = |finding: &Value| {
        let text = |key: &str| finding[key].as_str().unwrap().to_owned();
        let verdict = match finding["needed"].as_bool().unwrap() {
            true => text("verdict"),
            false => "not-needed".to_owned(),
        };
        serde_json::json!([verdict, text("id"), text("subject")])
    };
    let lines: Vec<String> = findings.iter().map(|f| format!("  {}", line(f))).collect();
    format!("[\n{}\n]\n", lines.join(",\n"))
}

#[test]
fn recorded_nodes_are_judged_as_their_golden_files_say() {
    let folder = repository("node/machine/trees");
    let known: BTreeSet<String> = TREES.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names(&folder, "tree"), known, "every tree has its golden files");
    for (name, code) in TREES {
        let tree = folder.join(name).with_extension("tree");
        let call = |arguments: &[&str]| {
            tokenyard().arg("doctor").arg("--root").arg(&tree).args(arguments).output().unwrap()
        };
        let people = call(&[]);
        expect_code(&people, code);
        compare(&format!("{name}.txt"), &stdout(&people));
        let program = call(&["--json"]);
        expect_code(&program, code);
        compare(&format!("{name}.json"), &verdicts(&json(&program)));
    }
    assert_eq!(names(&goldens(), "txt"), known);
    assert_eq!(names(&goldens(), "json"), known);
}

#[test]
fn the_document_tells_how_far_each_nic_is_from_each_gpu() {
    let tree = repository("node/machine/trees/hgx-cx7.tree");
    let output = tokenyard().args(["doctor", "--json", "--root"]).arg(&tree).output().unwrap();
    let document = json(&output);
    let pairs = document["distances"].as_array().unwrap();
    assert_eq!(pairs.len(), 64);
    let near = |pair: &&Value| pair["distance"] == "same-switch";
    let near: Vec<&Value> = pairs.iter().filter(near).collect();
    assert_eq!(near.len(), 8);
    for pair in near {
        assert_eq!(pair["nic"], format!("mlx5_{}", pair["gpu"]));
    }
}

/// The lines of the output from the one that starts with `start`.
fn lines_from<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    text.lines().skip_while(|line| !line.starts_with(start)).collect()
}

#[test]
fn tables_fit_a_terminal_of_eighty_columns_and_problems_come_first() {
    for (name, _) in TREES {
        let tree = repository("node/machine/trees").join(name).with_extension("tree");
        let call = |arguments: &[&str]| {
            let mut command = tokenyard();
            stdout(
                &command.arg("doctor").arg("--root").arg(&tree).args(arguments).output().unwrap(),
            )
        };
        let (all, topology) = (call(&[]), call(&["--topology"]));
        let table = lines_from(&all, "verdict ");
        assert!(table.len() > 5, "{all}");
        for line in table.iter().copied().chain(topology.lines()) {
            assert!(line.chars().count() <= 80, "{name}: {line}");
        }
        assert!(table.iter().all(|line| !line.starts_with("  fix ")), "{all}");
    }
}

#[test]
fn quiet_prints_what_is_slow_or_broken_alone_and_ends_with_the_same_code() {
    for (name, code, subjects) in [
        ("hgx-cx7", 0, &[][..]),
        ("p5en-efa", 0, &[]),
        (
            "container-no-rights",
            2,
            &["broken locked-memory: ", "broken uverbs-nodes: mlx5_0, mlx5_1"],
        ),
        ("faults/gpu-missing", 1, &["slow gpu-missing: switch 0000:da:00.0"]),
    ] {
        let tree = repository("node/machine/trees").join(name).with_extension("tree");
        let output = tokenyard().args(["doctor", "-q", "--root"]).arg(&tree).output().unwrap();
        expect_code(&output, code);
        let text = stdout(&output);
        let heads: Vec<&str> =
            text.lines().filter(|line| !line.is_empty() && !line.starts_with(' ')).collect();
        assert_eq!(heads.len(), subjects.len(), "{text}");
        assert!(heads.iter().zip(subjects).all(|(head, of)| head.starts_with(of)), "{text}");
    }
}

#[test]
fn ranks_that_the_launcher_starts_beyond_the_gpus_are_broken() {
    let tree = repository("node/machine/trees/hgx-cx7.tree");
    let call = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = tokenyard();
        command.args(["doctor", "-q", "--root"]).arg(&tree).args(arguments);
        command.envs(variables.iter().copied()).output().unwrap()
    };
    for (name, value) in [
        ("LOCAL_WORLD_SIZE", "16"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "16"),
        ("SLURM_STEP_TASKS_PER_NODE", "16(x4)"),
    ] {
        let output = call(&[], &[(name, value)]);
        expect_code(&output, 2);
        let text = stdout(&output);
        assert!(text.contains("8 GPUs; none for local ranks 8 to 15"), "{text}");
        assert!(text.contains(&format!("one for each of 16 ranks ({name})")), "{text}");
    }
    expect_code(&call(&["--ranks", "16"], &[]), 2);
    // The operator's option applies; the variables of a single process do not.
    expect_code(&call(&["--ranks", "8"], &[("LOCAL_WORLD_SIZE", "16")]), 0);
    expect_code(&call(&[], &[("LOCAL_WORLD_SIZE", "1")]), 0);
    // A number that does not divide the experts is no error of this command.
    expect_code(&call(&[], &[("LOCAL_WORLD_SIZE", "7")]), 0);
    let cpu = repository("configs/cpu.toml");
    let idle = call(&[cpu.to_str().unwrap()], &[("LOCAL_WORLD_SIZE", "16")]);
    // More ranks than GPUs are no fault of such a config; that it uses no GPU is.
    expect_code(&idle, 1);
    let text = flat(&stdout(&idle));
    assert!(!text.contains("broken gpu-ranks") && text.contains("slow gpu-unused"), "{text}");
}

#[test]
fn of_several_transports_the_one_that_works_is_named_and_another_is_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_out]\nuse = [\"efa\", \"verbs\"]\n";
    std::fs::write(&config, text).unwrap();
    let tree = repository("node/machine/trees/hgx-cx7.tree");
    let output = tokenyard().arg("doctor").arg(&config).arg("--root").arg(&tree).output().unwrap();
    // Of GPUs such a config uses none.
    expect_code(&output, 1);
    let text = flat(&stdout(&output));
    assert!(text.contains("cannot be used here: NICs for efa: none"), "{text}");
    assert!(text.contains("the config falls to verbs"), "{text}");
}

#[test]
fn the_entry_that_gid_index_names_is_judged() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_out]\nuse = \"verbs\"\n\
                verbs.gid_index = 1\n";
    std::fs::write(&config, text).unwrap();
    let tree = repository("node/machine/trees/mi300x-pollara.tree");
    let output = tokenyard().arg("doctor").arg(&config).arg("--root").arg(&tree).output().unwrap();
    expect_code(&output, 1);
    let text = flat(&stdout(&output));
    assert!(text.contains("1: 10.0.1.2 (RoCE v2), by `gid_index = 1`"), "{text}");
    std::fs::write(&config, std::fs::read_to_string(&config).unwrap().replace("= 1", "= 7"))
        .unwrap();
    let output = tokenyard().arg("doctor").arg(&config).arg("--root").arg(&tree).output().unwrap();
    expect_code(&output, 2);
    assert!(stdout(&output).contains("no entry 7; there are 0:"), "{}", stdout(&output));
}

#[test]
fn a_config_says_what_counts() {
    let tree = repository("node/machine/trees/container-no-rights.tree");
    let call = |config: &str| {
        let mut command = tokenyard();
        command.arg("doctor").arg("--root").arg(&tree).arg(repository(config));
        command.output().unwrap()
    };
    let cpu = call("configs/cpu.toml");
    // It works, and GPUs that it could use are idle.
    expect_code(&cpu, 1);
    let text = stdout(&cpu);
    assert!(
        text.contains("not needed  uverbs-nodes") && text.contains("slow gpu-unused"),
        "{text}"
    );
    let verbs = call("configs/verbs.toml");
    expect_code(&verbs, 2);
    let text = stdout(&verbs);
    assert!(text.contains("broken uverbs-nodes") && text.contains("#uverbs-nodes"), "{text}");
}

#[test]
fn a_root_that_is_not_there_or_no_tree_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.tree");
    std::fs::write(&bad, "sys/x = 1\nnonsense\n").unwrap();
    for (root, wanted) in [(&bad, "line 2"), (&folder.path().join("none"), "none")] {
        let output = tokenyard().arg("doctor").arg("--root").arg(root).output().unwrap();
        expect_code(&output, 2);
        assert!(stderr(&output).contains(wanted), "{}", stderr(&output));
        assert!(stderr(&output).starts_with("error: --root: "), "{}", stderr(&output));
    }
    // An empty folder is a node without any files: no panic, nothing broken.
    let empty = tempfile::tempdir().unwrap();
    let output = tokenyard().arg("doctor").arg("--root").arg(empty.path()).output().unwrap();
    expect_code(&output, 0);
}

#[test]
fn this_machine_is_read_for_real_and_says_how_long_it_took() {
    let output = tokenyard().args(["doctor", "--ranks", "1", "--json"]).output().unwrap();
    let document = json(&output);
    let findings = document["findings"].as_array().unwrap();
    let broken: Vec<&Value> = findings.iter().filter(|f| f["verdict"] == "broken").collect();
    assert!(broken.is_empty(), "{broken:?}");
    assert!(document["elapsed_ms"].as_f64().unwrap() > 0.0);
    assert!(document["machine"]["kernel"]["release"].is_string(), "{}", document["machine"]);
}

#[test]
fn a_missing_nic_of_a_gpu_that_no_rank_drives_breaks_nothing() {
    let tree = repository("node/machine/trees/faults/nic-missing.tree");
    for (ranks, code) in [(&[][..], 2), (&["--ranks", "4"], 2), (&["--ranks", "2"], 0)] {
        let output =
            tokenyard().args(["doctor", "--root"]).arg(&tree).args(ranks).output().unwrap();
        expect_code(&output, code);
    }
}

#[test]
fn a_port_that_is_down_breaks_a_job_until_the_config_says_what_to_use_instead() {
    let folder = tempfile::tempdir().unwrap();
    let call = |rest: &str, arguments: &[&str]| {
        let config = folder.path().join("config.toml");
        std::fs::write(&config, format!("[kernels]\nuse = \"cuda\"\n{rest}")).unwrap();
        let tree = repository("node/machine/trees/faults/port-down.tree");
        let mut command = tokenyard();
        command.arg("doctor").arg(&config).arg("--root").arg(&tree).args(arguments);
        command.output().unwrap()
    };
    let verbs = "[transport.scale_out]\nuse = \"verbs\"\n";
    let broken = call(verbs, &[]);
    expect_code(&broken, 2);
    let text = stdout(&broken);
    for words in [
        "broken port-state: mlx5_3",
        "GPU 3 (0000:61:00.0) has no NIC next to it that can be used, and 7 of 8 GPUs have one: mlx5_3 (port 1 \
         is down, Polling)",
        "`ibstat mlx5_3`",
        "the topology refuses this node",
        "`nics` of [topology.auto]",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let auto = |line: &str| format!("{verbs}[topology]\nuse = \"auto\"\n[topology.auto]\n{line}\n");
    let others = "nics = [\"mlx5_0\", \"mlx5_1\", \"mlx5_2\", \"mlx5_4\", \"mlx5_5\", \"mlx5_6\", \"mlx5_7\"]";
    expect_code(&call(&auto(others), &[]), 0);
    expect_code(&call(&auto("rails = \"any\""), &[]), 1);
    expect_code(&call(&auto("nics = [\"mlx5_3\"]"), &[]), 2);
    expect_code(&call(verbs, &["--ranks", "2"]), 1);
    let libfabric = |line: &str| {
        format!(
            "[transport.scale_out]\nuse = \"libfabric\"\n[transport.scale_out.libfabric]\n{line}\n"
        )
    };
    expect_code(&call(&libfabric("provider = \"verbs\""), &[]), 2);
    expect_code(&call(&libfabric("provider = \"verbs\"\nrails = 2"), &[]), 1);
    expect_code(&call(&libfabric("provider = \"tcp\""), &[]), 0);
    expect_code(&call("[transport.scale_up]\nuse = \"shm\"\n", &[]), 0);
}

/// A rank of a world with a file rendezvous, on its own node.
fn rank_command(rank: usize, roots: &[&str], folder: &Path) -> Command {
    let mut command: Command = tokenyard();
    command
        .args(["doctor", "--world", "--json", "--root"])
        .arg(repository("node/machine/trees").join(roots[rank]))
        .env("TOKENYARD_BOOTSTRAP", format!("file://{}", folder.join("meet").display()))
        .env("TOKENYARD_RANK", rank.to_string())
        .env("TOKENYARD_RANKS", roots.len().to_string())
        .env("TOKENYARD_LOCAL_RANK", rank.to_string())
        .env("TOKENYARD_SECRET", "ab".repeat(32))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn world(roots: &[&str]) -> Vec<Output> {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<Child> = (0..roots.len())
        .map(|rank| rank_command(rank, roots, folder.path()).spawn().unwrap())
        .collect();
    ranks.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// The findings of a world's document that are not `ok`.
fn named(document: &Value) -> Vec<String> {
    let findings = document["findings"].as_array().unwrap().iter();
    let bad = findings.filter(|finding| finding["verdict"] != "ok");
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    bad.map(|f| format!("{}: {}", text(f, "subject"), text(f, "found"))).collect()
}

#[test]
fn of_four_nodes_the_odd_one_is_named_with_what_it_has() {
    let healthy = "hgx-cx7.tree";
    let outputs = world(&[healthy, healthy, "faults/port-half-rate.tree", healthy]);
    for output in &outputs {
        // All ranks come to the same verdict.
        expect_code(output, 1);
    }
    assert!(outputs[1..].iter().all(|output| stdout(output).is_empty()), "rank 0 alone prints");
    let document = json(&outputs[0]);
    let named = named(&document);
    assert!(named.iter().all(|line| line.contains("rank 2")), "{named:?}");
    assert!(
        named.iter().any(|l| l.contains("port rates") && l.contains("1 x 200 Gb/s")),
        "{named:?}"
    );
    assert!(named.iter().any(|l| l.ends_with(": port-rate mlx5_3")), "{named:?}");
    let ranks = document["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4);
    // One machine has one clock; the bound allows for a loaded machine.
    for rank in &ranks[1..] {
        let (ahead, error) = (&rank["clock"]["ahead"], &rank["clock"]["error"]);
        assert!(ahead.as_i64().unwrap().abs() <= error.as_i64().unwrap(), "{rank}");
    }
}

#[test]
fn nodes_that_are_alike_give_no_alarm() {
    for output in world(&["hgx-cx7.tree", "hgx-cx7.tree"]) {
        expect_code(&output, 0);
    }
}

#[test]
fn ranks_of_one_host_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| {
        let mut command = rank_command(rank, &["hgx-cx7.tree"; 2], folder.path());
        // The real node: both ranks are on it.
        let arguments: Vec<_> = command.get_args().take(3).map(ToOwned::to_owned).collect();
        let variables: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
            .collect();
        command = tokenyard();
        command.args(arguments).envs(variables);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start(0), start(1)];
    let outputs = ranks.map(|child| child.wait_with_output().unwrap());
    let document = json(&outputs[0]);
    assert_eq!(document["ranks"][1]["items"]["ranks of the node"], "2", "{document}");
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    let text = "[world]\ndeadline_ms = 2000\nlate_ms = 3000\n[kernels]\nuse = \"cpu\"\n\
                [transport.scale_up]\nuse = \"shm\"\n";
    std::fs::write(&config, text).unwrap();
    let mut alone = rank_command(0, &["hgx-cx7.tree", "hgx-cx7.tree"], folder.path());
    let output = alone.arg(&config).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("rank 1"), "{}", stderr(&output));
}

#[test]
fn without_a_launcher_a_world_is_an_error_that_says_so() {
    let output = tokenyard().args(["doctor", "--world"]).output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("torchrun"), "{}", stderr(&output));
}
