//! The engine on the model of a GPU that `backends/gpu/tests` has: its payloads, signals and launches.

// A test may panic.
#![allow(clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// The sources of kernels, with the model's words in the place of a dialect's: rows move by bulk copies, or by vectors.
fn sources(to: &Path, bulk: bool) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let device = root.join("../../backends/gpu");
    let copy = |from: PathBuf, name: &str| {
        std::fs::copy(from, to.join(name)).expect("a source is copied");
    };
    copy(device.join("device/common/transport.cuh"), "transport.cuh");
    copy(device.join("src/transport/nvlink.cuh"), "up_device_api.cuh");
    let rows = if bulk { "bulk.h" } else { "shared.h" };
    let arch = ["arch.cuh", rows].map(|name| {
        std::fs::read_to_string(device.join("tests/model").join(name)).expect("the model")
    });
    // A block of the engine has more shared memory than one of an exchange.
    let [few, many] = ["kSharedBytes = 1 << 17;", "kSharedBytes = 1 << 18;"];
    let arch = arch.concat();
    assert!(arch.contains(few), "the model has another size of shared memory");
    std::fs::write(to.join("arch.cuh"), arch.replace(few, many)).expect("written");
    for name in ["engine.cu", "jobs.cuh", "request.cuh"] {
        copy(root.join("src").join(name), name);
    }
}

/// The program, in its folder.
fn program(bulk: bool) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    sources(folder.path(), bulk);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = folder.path().join("engine");
    let compiled = Command::new("g++")
        .args(["-std=c++20", "-Og", "-pthread", "-DTY_HOST_DEVICE_API_VERSION=2"])
        .arg(format!("-DTY_ROWS_TMA={}", u32::from(bulk)))
        .args(["-DTY_UP_PARAM_BYTES=32", "-I"])
        .arg(folder.path())
        .arg("-I")
        .arg(root.join("../../backends/gpu/tests/model"))
        .arg(root.join("tests/engine.cpp"))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("g++ runs: apt-get install g++");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    (folder, program)
}

#[test]
fn puts_arrive_before_their_signals_launches_end_together_and_faults_are_noticed() {
    check(false);
}

#[test]
fn puts_by_bulk_copies_arrive_before_their_signals() {
    check(true);
}

fn check(bulk: bool) {
    let (_folder, program) = program(bulk);
    let run = |case: &str| {
        let output = Command::new(&program).arg(case).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for case in ["free", "paced", "short_launches", "rows", "quiet_queue", "long_put"] {
        assert_eq!(run(case), (Some(0), String::new()), "{case}");
    }
    let put = "a put is not there, or more is\n";
    let signal = "a signal is not there\n";
    for (case, found) in
        [("signal_first", put), ("lost", put), ("done_early", put), ("wrong_queue", signal)]
    {
        assert_eq!(run(case), (Some(1), found.to_owned()), "{case}");
    }
}
