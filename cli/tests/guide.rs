//! The transport in C in the guide for plugin authors passes the suite, exactly as printed there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{expect_code, stderr, stdout, tokenyard};

const GUIDE: &str = include_str!("../../docs/plugin-c.md");

/// Builds the guide's first listing in C.
fn build(folder: &Path, compiler: &str, options: &[&str]) -> PathBuf {
    let code = GUIDE.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let (source, library) = (folder.join("my.c"), folder.join(format!("libmy_{compiler}.so")));
    fs::write(&source, code).unwrap();
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../abi/include");
    let made = Command::new(compiler)
        .args(options)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", include])
        .args([&source, Path::new("-o"), &library])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", stderr(&made));
    library
}

fn config(library: &Path, keys: &str) -> PathBuf {
    let file = library.with_extension("toml");
    let text = format!(
        "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"neighbours\"\n{keys}\
         [plugins]\npaths = [\"{}\"]\n",
        library.display()
    );
    fs::write(&file, text).unwrap();
    file
}

#[test]
fn the_guides_transport_in_c_passes_the_suite_as_c_and_as_cpp() {
    let folder = tempfile::tempdir().unwrap();
    for (compiler, options, levels) in [
        ("cc", &["-std=c11"][..], "--level L0 --level L1"),
        ("g++", &["-std=c++17", "-x", "c++"], "--level L0"),
    ] {
        let config = config(&build(folder.path(), compiler, options), "");
        let levels = levels.split_whitespace();
        let output = tokenyard().arg("conformance").arg(config).args(levels).output().unwrap();
        expect_code(&output, 0);
        let text = stdout(&output) + &stderr(&output);
        assert!(text.contains("all as expected"), "{compiler}: {text}");
    }
}

#[test]
fn the_guides_transport_in_c_refuses_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let library = build(folder.path(), "cc", &["-std=c11"]);
    let config = config(&library, "[transport.scale_up.neighbours]\na = 1\n");
    let output = tokenyard().arg("run").arg(config).args(["--ranks", "2"]).output().unwrap();
    assert!(!output.status.success());
    let text = stderr(&output) + &stdout(&output);
    assert!(text.contains("found a table, expected none"), "{text}");
}
