//! The errors that a node without GIN gets. The library is a stand-in for NCCL; its functions do nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};
use std::process::Command;

use tokenyard_core::transport::Transport as _;
use tokenyard_core::{Error, ErrorKind};
use tokenyard_gin::{Gin, GinConfig};
use tokenyard_sys_nccl::Nccl;

/// A folder as pip installs NCCL: `lib/libnccl.so.2`, with headers beside it.
fn installed(folder: &Path, library: i32, headers: i32) -> PathBuf {
    let (lib, include) = (folder.join("lib"), folder.join("include"));
    std::fs::create_dir_all(&lib).unwrap();
    std::fs::create_dir_all(&include).unwrap();
    let header = format!("#define NCCL_VERSION_CODE {headers}\n");
    std::fs::write(include.join("nccl.h"), header).unwrap();
    std::fs::write(include.join("nccl_device.h"), "").unwrap();
    let (source, file) = (folder.join("stand_in.c"), lib.join("libnccl.so.2"));
    let function = |symbol: &&str| match *symbol {
        "ncclGetVersion" => {
            format!("unsigned {symbol}(int* version) {{ *version = {library}; return 0; }}\n")
        }
        symbol => format!("unsigned {symbol}(void) {{ return 5; }}\n"),
    };
    let text: String = Nccl::SYMBOLS.iter().map(function).collect();
    std::fs::write(&source, text).unwrap();
    let built = Command::new("gcc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&file, &source])
        .output()
        .unwrap_or_else(|e| panic!("gcc cannot be run ({e}): apt-get install gcc"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    file
}

fn refusal(library: PathBuf) -> Error {
    let config = GinConfig { nccl_library: Some(library), ..GinConfig::default() };
    let error = Gin::probe(&config).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    error
}

#[test]
fn the_error_of_a_node_without_nccl_names_the_searched_files_and_the_package() {
    let text = refusal("/nowhere/libnccl.so.2".into()).to_string();
    assert!(text.contains("/nowhere/libnccl.so.2 cannot be loaded"), "{text}");
    assert!(text.contains("pip install nvidia-nccl-cu13"), "{text}");
}

#[test]
fn a_library_older_than_waits_that_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = refusal(installed(folder.path(), 23_007, 23_007)).to_string();
    assert!(text.contains("is NCCL 2.30.7; expected 2.31.2 or newer"), "{text}");
}

#[test]
fn headers_of_another_version_than_the_library_are_refused_with_both() {
    let folder = tempfile::tempdir().unwrap();
    let text = refusal(installed(folder.path(), 23_203, 23_102)).to_string();
    assert!(text.contains("headers of NCCL 2.31.2"), "{text}");
    assert!(text.contains("a library of 2.32.3"), "{text}");
}

#[test]
fn a_library_without_headers_is_refused_with_the_places_that_were_looked_in() {
    let folder = tempfile::tempdir().unwrap();
    let file = installed(folder.path(), 23_203, 23_203);
    std::fs::remove_dir_all(folder.path().join("include")).unwrap();
    let error = refusal(file);
    let place = folder.path().join("include").display().to_string();
    assert!(error.to_string().contains(&place), "{error}");
    assert!(error.fix().is_some_and(|fix| fix.contains("nccl_include")), "{error}");
}

#[test]
fn with_nccl_in_order_only_a_gpu_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let nccl_library = Some(installed(folder.path(), 23_203, 23_203));
    match Gin::probe(&GinConfig { nccl_library, ..GinConfig::default() }) {
        // On a machine with a GPU.
        Ok(found) => assert_eq!(found.max_queues, 1),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(!error.to_string().contains("nccl"), "{error}");
        }
    }
}
