//! The device API on the CPU's model of a GPU (`backends/gpu/tests/model`), over the software ConnectX of
//! `standins/hca`, which stops at a driver's first mistake. Queues lie in weak memory: stores of kernels become
//! visible there late and in any order, until a fence.
//!
//! Both are stand-ins: the tests show the bytes of requests, the order of stores, and that every wait ends. They
//! show nothing of a GPU, of PCIe, or of a ConnectX.

// Helpers of a test may panic as a test may.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod calls;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use calls::{Call, hex};
use tempfile::TempDir;
use tokenyard_abi::TY_DEVICE_API_VERSION;
use tokenyard_hca::Random;
use tokenyard_ibgda::device_api::{Params, SOURCE};
use tokenyard_sys_mlx5::cqe::syndrome;
use tokenyard_sys_mlx5::doorbell::{Ring, record_word};

/// Fences whose absence the model shows, by the letters of the comments in the source.
const SHOWN: [char; 4] = ['A', 'B', 'C', 'D'];

/// Words that are a fence and an access, and the words for the access alone.
const RELEASES: [[&str; 2]; 2] =
    [["ty::store_release(", "ty::store_relaxed("], ["ty::add_release_device(", "ty::add_relaxed("]];

/// The source with switches: the line behind a comment `// X.` is a fence, which a run may leave out.
fn with_switches(source: &str) -> String {
    let mut found = Vec::new();
    let mut lines = Vec::new();
    let mut letter = None;
    for line in source.lines() {
        let code = line.trim();
        let fence = letter.take().filter(|letter| SHOWN.contains(letter));
        let released = RELEASES
            .into_iter()
            .find_map(|[word, relaxed]| Some((word, relaxed, code.strip_prefix(word)?)));
        match (fence, released) {
            (None, _) => lines.push(line.to_owned()),
            (Some(fence), Some((word, relaxed, rest))) => {
                let release = format!("if (model::keeps('{fence}')) {word}{rest}");
                lines.push(format!("{release} else {relaxed}{rest}"));
                found.push(fence);
            }
            (Some(fence), None) => {
                lines.push(format!("if (model::keeps('{fence}')) {code}"));
                found.push(fence);
            }
        }
        letter =
            code.strip_prefix("// ").and_then(|text| text.strip_suffix('.')).and_then(only_char);
    }
    found.sort_unstable();
    assert_eq!(found, SHOWN, "a fence for each letter");
    lines.join("\n")
}

fn only_char(text: &str) -> Option<char> {
    let mut chars = text.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// A program of `tests/model`, with the folder that it lies in.
struct Model {
    program: PathBuf,
    _folder: TempDir,
}

impl Model {
    /// `defines` are arguments of the compiler.
    fn compile(source: &str, defines: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let gpu = root.join("../gpu");
        for from in ["", "common", "codec", "moe", "decode"] {
            copy_sources(&gpu.join("device").join(from), folder.path());
        }
        let arch = ["arch.cuh", "shared.h"].map(|name| read(&gpu.join("tests/model").join(name)));
        std::fs::write(folder.path().join("arch.cuh"), arch.concat()).expect("written");
        std::fs::write(folder.path().join("up_device_api.cuh"), with_switches(SOURCE))
            .expect("written");
        let program = folder.path().join("program");
        let library = hca();
        let libraries = library.parent().expect("a folder").display();
        let compiled = Command::new("g++")
            .args(["-std=c++20", "-O1", "-pthread", "-Wno-subobject-linkage"])
            .arg(format!("-DTY_HOST_DEVICE_API_VERSION={TY_DEVICE_API_VERSION}"))
            .arg(format!("-DTY_UP_PARAM_BYTES={}", size_of::<Params>()))
            .args(["-DTY_ROWS_TMA=0", "-DTY_PUTS=1", "-DTY_GROUPED=0", "-DTY_QUEUES=2"])
            .arg("-DMODEL_FABRIC=\"hca.h\"")
            .args(defines)
            .arg(format!("-I{}", folder.path().display()))
            .arg(format!("-I{}", gpu.join("tests/model").display()))
            .arg(format!("-I{}", root.join("tests/model").display()))
            .arg(format!("-I{}", root.join("../../standins/hca/model").display()))
            .arg(model_source(root, source))
            .arg(library)
            .arg(format!("-Wl,-rpath,{libraries}"))
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap_or_else(|e| panic!("g++ cannot be run ({e}): apt-get install g++"));
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        Self { program, _folder: folder }
    }

    /// Many threads that post; compiled once for each size of a wave.
    fn posts(wave: u32) -> &'static Self {
        static POSTS: [OnceLock<Model>; 2] = [OnceLock::new(), OnceLock::new()];
        // Threads meet while one of them rings. Posts rely on no fence of another lane.
        let defines =
            [&format!("-DMODEL_WAVE={wave}"), "-DMODEL_FENCES_LAST=1", "-DMODEL_FENCES_ALONE=1"];
        POSTS[usize::from(wave == 64)].get_or_init(|| Self::compile("posts.cpp", &defines))
    }

    fn run(&self, options: &[&str]) -> Output {
        Command::new(&self.program).args(options).output().expect("it runs")
    }

    /// Runs the program, which must end well; returns its output.
    fn is_well(&self, options: &[&str]) -> String {
        let output = self.run(options);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options:?}: {printed}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs the program, which must notice an error; returns its output.
    fn notices(&self, options: &[&str]) -> String {
        let output = self.run(options);
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success(), "{options:?}: {printed}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// The software ConnectX behind C functions, built by the first call.
fn hca() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| tokenyard_testkit::built_plugin("tokenyard-hca-model"))
}

/// A model of this crate, or of the kernels' own.
fn model_source(root: &Path, source: &str) -> PathBuf {
    let own = root.join("tests/model").join(source);
    if own.exists() { own } else { root.join("../gpu/tests/model").join(source) }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Sources of device code, without the words of a vendor.
fn copy_sources(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let is_source = path.extension().is_some_and(|e| e == "cuh" || e == "cu");
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if is_source {
            let text = if name.starts_with("arch") { String::new() } else { read(&path) };
            std::fs::write(to.join(name), text).expect("written");
        }
    }
}

#[test]
fn posts_of_many_threads_arrive_behind_each_other_on_two_three_and_eight_ranks() {
    for (ranks, rounds) in [("2", "60"), ("3", "30"), ("8", "6")] {
        Model::posts(32).is_well(&[&format!("ranks={ranks}"), &format!("rounds={rounds}")]);
    }
}

#[test]
fn posts_of_waves_of_64_arrive_behind_each_other() {
    Model::posts(64).is_well(&["rounds=30"]);
}

#[test]
fn no_lane_of_a_wavefront_waits_for_another_that_posts() {
    // The model finds the place of a lane in the program by addresses: code must lie in the order of the source.
    let lockstep = ["-DMODEL_WAVE=64", "-DMODEL_LOCKSTEP=1", "-O0", "-fno-omit-frame-pointer"];
    let model = Model::compile("posts.cpp", &lockstep);
    model.is_well(&["rounds=3"]);
    model.is_well(&["rounds=1", "burst=2", "lanes=8"]);
}

#[test]
fn signals_come_behind_payloads_that_land_in_any_order() {
    for seed in ["seed=1", "seed=2", "seed=3"] {
        Model::posts(32).is_well(&["adaptive", "rounds=30", seed]);
        Model::posts(32).is_well(&["adaptive", "rounds=30", "fence_signals", seed]);
    }
}

#[test]
fn indices_wrap_past_65_536_and_one_ring_serves_many_requests() {
    let printed = Model::posts(32).is_well(&["ranks=1", "rounds=4", "burst=5600", "lanes=2"]);
    let numbers: Vec<u64> =
        printed.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
    let [requests, rings] = numbers[..] else { panic!("{printed}") };
    assert!(requests > 66_000, "{printed}");
    assert!(rings < requests, "{printed}");
}

#[test]
fn a_thread_of_the_host_may_ring_instead() {
    Model::posts(32).is_well(&["host_rings", "rounds=30"]);
    Model::posts(32).is_well(&["host_rings", "rounds=2", "burst=20", "ranks=3"]);
}

#[test]
fn each_fence_that_is_left_out_is_noticed() {
    for fence in SHOWN {
        // The effect depends on chance: one of several runs shows it.
        let without = format!("without={fence}");
        let is_noticed = (1..=8).any(|seed| {
            let seed = format!("seed={seed}");
            !Model::posts(32).run(&[&without, &seed, "rounds=400", "cap_ms=20000"]).status.success()
        });
        assert!(is_noticed, "fence {fence} can be left out and nothing notices");
    }
}

#[test]
fn a_device_on_bad_days_that_lose_nothing_changes_nothing() {
    for fault in [
        "kind='completions_late', most=1000000",
        "kind='completions_merged', most=8",
        "kind='completions_at_end'",
        "kind='doorbell_late', most=50000",
        "kind='payload_late', most=1000000",
    ] {
        let faults = format!("faults=faults=[{{{fault}}}]");
        Model::posts(32).is_well(&[&faults, "rounds=20", "burst=4"]);
    }
}

#[test]
fn an_error_completion_ends_every_wait_and_names_peer_and_syndrome() {
    // The last request of a warp that posts alone fails: no request behind it is flushed.
    let fault = |fault: &str, code: u8| {
        let faults = format!("faults=faults=[{{{fault}, request=80}}]");
        let printed = Model::posts(32).notices(&[&faults, "rounds=20", "alone"]);
        let expected = format!("syndrome {code:#x} ({})", syndrome::words(code));
        let names = |line: &str| line.starts_with("rank 0: peer 1, queue pair ");
        assert!(printed.lines().any(|line| names(line) && line.contains(&expected)), "{printed}");
        // Reported by the kernel that finds it in its flush, or by the host that finds it earlier.
        assert!(printed.contains("rank 0: an ended wait: phase "), "{printed}");
        assert!(printed.contains("rank 1: an ended wait: phase 1, peer 0"), "{printed}");
    };
    for code in [
        syndrome::LOCAL_LENGTH,
        syndrome::LOCAL_QP_OPERATION,
        syndrome::LOCAL_PROTECTION,
        syndrome::BAD_RESPONSE,
        syndrome::LOCAL_ACCESS,
        syndrome::REMOTE_INVALID_REQUEST,
        syndrome::REMOTE_ACCESS,
        syndrome::REMOTE_OPERATION,
        syndrome::RETRIES,
        syndrome::RNR_RETRIES,
        syndrome::REMOTE_ABORTED,
    ] {
        fault(&format!("kind='error', syndrome={code}"), code);
    }
    fault("kind='peer_silent'", syndrome::RETRIES);
}

#[test]
fn a_port_that_goes_down_ends_the_waits_of_both_sides_and_names_the_peer() {
    let printed = Model::posts(32).notices(&[
        "faults=faults=[{kind='port_down', request=60}]",
        "rounds=20",
        "alone",
    ]);
    for line in [
        "rank 0: peer 1, queue pair ",
        "rank 0: an ended wait: phase ",
        "rank 1: an ended wait: phase ",
    ] {
        assert!(printed.contains(line), "{printed}");
    }
}

/// A collapsed completion holds the last cause only.
#[test]
fn among_many_requests_an_error_may_show_as_that_of_one_behind_it() {
    let faults = "faults=faults=[{kind='error', request=20, syndrome=4}]";
    let printed = Model::posts(32).notices(&[faults, "rounds=20", "burst=4"]);
    let is_reported = [syndrome::LOCAL_PROTECTION, syndrome::FLUSHED]
        .iter()
        .any(|code| printed.contains(&format!("syndrome {code:#x} ({})", syndrome::words(*code))));
    assert!(is_reported && printed.contains("rank 0: peer 0, queue pair "), "{printed}");
    assert!(printed.contains("rank 0: an ended wait: phase "), "{printed}");
}

#[test]
fn a_device_that_stops_or_loses_a_ring_ends_waits_by_their_cap() {
    for fault in ["kind='device_stops', request=20", "kind='doorbell_lost', every=2"] {
        let faults = format!("faults=faults=[{{{fault}}}]");
        // The ring of another thread would make up for one that is lost.
        let printed = Model::posts(32).notices(&[&faults, "rounds=20", "alone", "cap_ms=3000"]);
        assert!(printed.contains("an ended wait: phase "), "{printed}");
    }
}

#[test]
fn rows_reach_their_places_and_come_back_over_a_software_connectx() {
    let model = Model::compile("exchange.cpp", &[]);
    model.is_well(&["few"]);
    model.is_well(&["eight"]);
}

/// `standins/hca/preload/tests` compares the same writer in Rust with libmlx5's.
#[test]
fn two_hundred_random_requests_are_the_64_bytes_that_rust_writes() {
    let model = Model::compile("golden.cpp", &[]);
    let mut child = Command::new(&model.program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut random = Random::new(23);
    let (mut input, mut expected, mut blocks) = (String::new(), String::new(), 0);
    while blocks < 200 {
        let call = Call::random(&mut random);
        input.push_str(&call.line());
        let written = call.blocks();
        for block in &written {
            expected.push_str(&hex(block));
            expected.push('\n');
        }
        blocks += written.len();
        let next = call.index.wrapping_add(written.len() as u16);
        let ring = Ring::NextIndex { next, qpn: call.qpn };
        expected.push_str(&format!("{} {}\n", hex(&record_word(next)), hex(&ring.to_bytes())));
    }
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found = String::from_utf8_lossy(&output.stdout);
    for (at, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "line {at}");
    }
    assert_eq!(found.lines().count(), expected.lines().count());
}
