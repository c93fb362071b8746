//! The sources of the product, for tests that read them.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

/// The folders of the product; `testkit`, `standins/hca`, `xtask` and `fuzz` are tools of its
/// developers.
const FOLDERS: [&str; 18] = [
    "abi",
    "backends",
    "bench",
    "bootstrap",
    "cli",
    "conformance",
    "core",
    "errors",
    "files",
    "plugins",
    "python",
    "sys",
    "testkit/allocations",
    "node/doctor",
    "launch",
    "node/machine",
    "reports",
    "topology",
];

/// The folder of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All sources without tests, benches and build output: the path below the repository, and the text.
pub(crate) fn sources() -> Vec<(String, String)> {
    let found = files(&FOLDERS, &["rs"]);
    assert!(found.len() > 300, "found {} sources; the search misses some", found.len());
    found
}

/// Files of these kinds in these folders, as [`sources`] has those in Rust.
pub(crate) fn files(folders: &[&str], kinds: &[&str]) -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    folders.iter().for_each(|folder| collect(&root.join(folder), kinds, &mut found));
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    found.into_iter().map(read).collect()
}

/// The lines of a source that are the product's: neither tests nor comments.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    product.lines().filter(|line| !line.trim_start().starts_with("//"))
}

fn collect(folder: &Path, kinds: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let is_test = ["tests", "benches", "target", "examples"].contains(&name)
            || name == "tests.rs"
            || name.ends_with("_tests.rs");
        if is_test {
        } else if path.is_dir() {
            collect(&path, kinds, found);
        } else if name.rsplit_once('.').is_some_and(|(_, kind)| kinds.contains(&kind)) {
            found.push(path);
        }
    }
}
