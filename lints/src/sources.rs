//! No other code of the product opens a file that a user names: every other open is listed here, with
//! the reason why no user names its path.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeMap;

use crate::product;

/// Calls that open a file for reading, or run code from one.
const OPENS: [&str; 10] = [
    "File::open(",
    "File::options(",
    "OpenOptions::new(",
    "fs::read(",
    "fs::read_to_string(",
    "fs::copy(",
    "fs::openat(",
    "fs::open(",
    "Library::open(Some",
    "open_library(",
];
const LIBRARIES: &str = "Library::new(";

/// Files with opens of their own: the number of opens, and the reason.
const ALLOWED: &[(&str, usize, &str)] = &[
    ("files/src/lib.rs", 1, "the function itself"),
    ("core/src/host/loader.rs", 1, "dlopen of a plugin that was opened and checked before"),
    ("core/src/conditions.rs", 1, "/proc and /sys/fs/cgroup"),
    ("bootstrap/src/machine.rs", 4, "/proc/cpuinfo and /proc/sys"),
    ("bootstrap/src/launcher/hydra.rs", 1, "/proc/PID/stat"),
    ("core/src/session/reporter/folder.rs", 1, "makes a new file (O_EXCL) in this user's folder"),
    ("bootstrap/src/rendezvous.rs", 1, "makes a new file (O_EXCL), then renames it"),
    ("cli/src/memory.rs", 1, "/proc/meminfo and /sys/fs/cgroup"),
    ("cli/src/writable.rs", 2, "outputs: of a kind that was checked before, and without waiting"),
    ("launch/src/interrupt.rs", 1, "/proc/self/status"),
    ("launch/src/running.rs", 1, "/proc/PID/stat"),
    ("launch/src/hosts/network.rs", 1, "/sys/class/net"),
    ("launch/src/hosts/spaces.rs", 1, "/proc/PID/ns"),
    ("bench/src/steady.rs", 1, "/proc/self"),
    ("bench/abi/src/main.rs", 1, "samples that criterion has just written"),
    ("conformance/src/transport/lost_peer.rs", 1, "/proc/PID/stat"),
    ("conformance/src/transport/leaks.rs", 1, "/proc/self"),
    ("conformance/src/transport/strangers.rs", 1, "/proc/net"),
    ("conformance/src/names.rs", 3, "/proc"),
    ("abi/header/src/header.rs", 2, "sources and the header of this repository"),
    ("testkit/allocations/src/lib.rs", 1, "/proc/self/task"),
    ("bench/src/gpu/machine.rs", 2, "versions of drivers, in /proc and /sys"),
    ("backends/gpu/src/compile/cache.rs", 2, "writes in a folder that only this user can write"),
    ("backends/gpu/src/compile/library.rs", 1, "/proc/self/maps"),
    ("topology/src/lib.rs", 1, "/proc/self/status"),
    ("backends/libfabric/src/transport/numa.rs", 1, "/sys/class"),
    ("backends/libfabric/src/transport/interfaces.rs", 1, "/sys/class/net"),
    ("sys/load/src/lib.rs", 3, "the libraries that the crates beside it bind"),
];

/// Opens in the product's part of a source, comments left out.
fn opens(text: &str) -> usize {
    let lines = product::lines(text);
    let count = |line: &str| {
        // `files::read` and the like are the allowed functions; `fs::open` is not in their names.
        let line = line.replace("files::open(", "").replace("files::read", "");
        let plain: usize = OPENS.iter().map(|open| line.matches(open).count()).sum();
        plain + line.matches(LIBRARIES).count()
    };
    lines.map(count).sum()
}

#[test]
fn every_open_outside_of_files_is_of_a_path_that_no_user_names() {
    let found = product::sources();
    let expected: BTreeMap<&str, usize> = ALLOWED.iter().map(|(file, n, _)| (*file, *n)).collect();
    let mut wrong = Vec::new();
    for (name, text) in found {
        let count = opens(&text);
        let expected = expected.get(name.as_str()).copied().unwrap_or(0);
        if count != expected {
            wrong.push(format!("{name}: found {count} opens, expected {expected}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "a path that a user can name is opened by tokenyard_files (core::files); any other is \
         listed in this test, with the reason:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn an_open_of_each_kind_is_seen_and_those_of_tests_and_of_files_are_not() {
    for open in OPENS {
        assert_eq!(opens(&format!("let file = std::{open}path);\n")), 1, "{open}");
    }
    assert_eq!(opens("    libloading::Library::new(path)\n"), 1);
    assert_eq!(opens("tokenyard_files::open(path); files::read(path, 3)"), 0);
    assert_eq!(
        opens("// fs::read(path)\nfn a() {}\n#[cfg(test)]\nmod tests { fs::read(path) }"),
        0
    );
}
