//! The built plugin passes the host's judgement, and needs no libfabric to be loaded.

// The helper below may panic as a test may.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use tokenyard_core::abi;
use tokenyard_core::config::PartTable;
use tokenyard_core::host::Registry;

/// Builds the plugin as an operator would and returns its file. A `cdylib` is not built for the
/// tests of its own package.
fn built_plugin() -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "-p", env!("CARGO_PKG_NAME")]);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success());
    // This test lies in `deps` below the folder of its profile.
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).map(Path::to_path_buf).unwrap().join("libtokenyard_plugin_libfabric.so")
}

#[test]
fn the_plugin_provides_both_parts_and_links_no_fabric() {
    let file = built_plugin();
    let registry = Registry::load(std::slice::from_ref(&file)).unwrap();
    let parts: Vec<_> = registry.parts().into_iter().map(|p| (p.kind, p.name, p.file)).collect();
    for name in ["libfabric", "efa"] {
        assert!(parts.contains(&("transport", name, Some(file.clone()))), "{parts:?}");
    }
    let table = PartTable::from_text("provider = \"shm\"", "test.toml");
    let found = registry.transport("libfabric").unwrap().probe(&table).unwrap();
    assert_ne!(found.flags & abi::TY_CAP_MANUAL_PROGRESS, 0);

    let linked = Command::new("ldd").arg(&file).output().unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    assert!(linked.contains("libc.so") && !linked.contains("fabric.so.1"), "{linked}");
}
