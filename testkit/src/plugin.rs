//! Plugins, built as an operator would.

use std::path::PathBuf;
use std::process::Command;

/// Builds the plugin in package `package` of this workspace, and returns its file. A `cdylib` is not
/// built for the tests of its own package.
///
/// # Panics
/// The plugin cannot be built: the test ends.
#[allow(clippy::expect_used, clippy::panic, reason = "a test ends where its own setup is wrong")]
pub fn built_plugin(package: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").expect("cargo runs the tests");
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--package", package]);
    build.current_dir(env!("CARGO_MANIFEST_DIR"));
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let status = build.status().expect("cargo starts");
    assert!(status.success(), "{package} was not built: {status}");
    // The program of a test lies in `deps` below the folder of its profile.
    let test = std::env::current_exe().expect("the path of a test's own program");
    let folder = test.ancestors().nth(2).expect("a test lies in a folder of cargo");
    folder.join(format!("lib{}.so", package.replace('-', "_")))
}
