//! The texts of the repository: its pages and its sources, tests included.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

/// Folders that are not the repository's own text of now: build output, laboratory notes, copies of earlier files and
/// version control.
const LEFT_OUT: [&str; 9] = [
    "target",
    "history",
    "site",
    "shared",
    "node_modules",
    "__pycache__",
    "goldens",
    "golden",
    "header_1_8",
];

/// All files of these kinds, tests included: the path below the repository, and the text.
pub(crate) fn files(kinds: &[&str]) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    collect(&root, kinds, &mut found);
    found.sort();
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    found.into_iter().map(read).collect()
}

fn collect(folder: &Path, kinds: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with('.') || LEFT_OUT.contains(&name) || path.is_symlink() {
        } else if path.is_dir() {
            collect(&path, kinds, found);
        } else if name.rsplit_once('.').is_some_and(|(_, kind)| kinds.contains(&kind)) {
            found.push(path);
        }
    }
}
