//! Tests of loading, with a stand-in for NCCL: a library whose functions have the right names and do nothing.

// Helpers of a test may panic as a test may.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;

use tokenyard_sys_nccl::{LoadError, Nccl};

/// A library of this version with these functions. `ncclGetVersion` reports the version; each other function returns
/// its number.
fn stand_in(folder: &Path, version: i32, symbols: &[&str]) -> PathBuf {
    let (source, file) = (folder.join("stand_in.c"), folder.join(format!("libnccl.{version}.so")));
    let mut text = String::new();
    for (i, symbol) in symbols.iter().enumerate() {
        text += &if *symbol == "ncclGetVersion" {
            format!("unsigned {symbol}(int* version) {{ *version = {version}; return 0; }}\n")
        } else {
            format!("unsigned {symbol}(void) {{ return {i}; }}\n")
        };
    }
    std::fs::write(&source, text).unwrap();
    let built = Command::new("gcc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&file, &source])
        .output()
        .unwrap_or_else(|e| panic!("gcc cannot be run ({e}): apt-get install gcc"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    file
}

#[test]
fn each_field_calls_the_function_of_its_symbol() {
    let folder = tempfile::tempdir().unwrap();
    let nccl = Nccl::open_file(&stand_in(folder.path(), 23_203, Nccl::SYMBOLS)).unwrap();
    assert_eq!((nccl.version(), nccl.version_text().as_str()), (23_203, "2.32.3"));
    let number = |symbol| Nccl::SYMBOLS.iter().position(|s| *s == symbol).unwrap() as u32;
    let null = std::ptr::null_mut();
    // SAFETY: the functions of the stand-in read nothing.
    let found = unsafe { [(nccl.comm_abort)(null), (nccl.mem_free)(null)] };
    assert_eq!(found, [number("ncclCommAbort"), number("ncclMemFree")]);
}

#[test]
fn a_function_that_is_missing_is_named_whichever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    for (i, missing) in [(0, Nccl::SYMBOLS[0]), (1, Nccl::SYMBOLS[Nccl::SYMBOLS.len() - 1])] {
        let others: Vec<_> = Nccl::SYMBOLS.iter().copied().filter(|s| *s != missing).collect();
        let file = stand_in(folder.path(), 23_102 + i, &others);
        let error = Nccl::open_file(&file).unwrap_err();
        let (file, expected) = (file.display().to_string(), "NCCL 2.31.2 or newer: upgrade it");
        assert_eq!(error, LoadError::Lacks { file, function: missing, expected });
        let text = error.to_string();
        assert!(text.contains(missing) && text.contains("expected NCCL 2.31.2 or newer"), "{text}");
    }
}

#[test]
fn an_older_library_is_refused_with_its_version() {
    let folder = tempfile::tempdir().unwrap();
    let error = Nccl::open_file(&stand_in(folder.path(), 23_003, Nccl::SYMBOLS)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("is NCCL 2.30.3; expected 2.31.2 or newer"), "{text}");
}

#[test]
fn a_library_that_is_absent_is_named_with_what_the_loader_says() {
    let text = Nccl::open_file(Path::new("libtokenyard_a.so.2")).unwrap_err().to_string();
    assert!(text.starts_with("libtokenyard_a.so.2 cannot be loaded: "), "{text}");
    assert!(text.contains("LD_LIBRARY_PATH") && text.contains("No such file"), "{text}");
}

#[test]
fn no_function_is_looked_up_twice() {
    let mut all = Nccl::SYMBOLS.to_vec();
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    assert!(all.iter().all(|s| s.starts_with("nccl")) && all.len() == 16);
}
