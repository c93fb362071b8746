//! One meaning for each name: a type's name stands for one type in a crate, and abandoned words do not
//! return.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeMap;

use crate::product;

/// Older words, each with the present word.
const GIVEN_UP: &[(&str, &str)] = &[
    ("yard", "communicator"),
    ("yards", "communicators"),
    ("Yard", "Communicator"),
    ("unheard", "no_host_sync"),
    ("device_face", "device_api"),
    ("DeviceProxy", "GpuRing"),
    ("device_proxy", "gpu_ring"),
    ("PartTable", "ComponentTable"),
    ("max_lanes", "max_queues"),
    ("handover", "fd_exchange"),
    ("longest_put", "Path"),
    ("desk", "flight recorder"),
    ("desks", "flight recorders"),
    ("take_up", "select_stream"),
    ("let_pass", "order_refused"),
    ("staged_dispatch", "decode"),
];

/// Names that types had once.
const GIVEN_UP_TYPES: &[(&str, &str)] = &[
    ("Face", "DeviceApi"),
    ("Found", "LaunchState"),
    ("Moves", "DispatchTiling"),
    ("Pulls", "CombineTiling"),
    ("Whole", "Flat"),
    ("Inside", "IntraDomain"),
    ("Between", "InterDomain"),
    ("Way", "Path"),
    ("Desk", "FlightRecorder"),
    ("Ahead", "PendingDeps"),
];

/// Beginnings of constants of the plugin ABI. The recorded header of a former version has them.
const GIVEN_UP_CONSTANTS: &[(&str, &str)] = &[("TY_NEEDS_", "TY_KERNELS_CAP_")];

/// Functions of kernel sets, on either side.
const GIVEN_UP_FUNCTIONS: &[(&str, &str)] = &[
    ("hear", "poll_entries"),
    ("hear_entries", "poll_entries"),
    ("give_back", "combine_put"),
    ("put_back", "combine_put"),
    ("go_on", "resume"),
];

/// Beginnings of functions that kernel sets do not have.
const GIVEN_UP_BEGINNINGS: &[(&str, &str)] = &[("hear_", "poll_"), ("enter_", "post_")];

/// Folders of sources that are not Rust's, and their kinds. Headers in C are generated or for vendors.
const OTHER_FOLDERS: [&str; 10] = [
    "abi",
    "backends",
    "bench",
    "cli",
    "configs",
    "docs",
    "plugins",
    "python",
    "standins/device_put",
    "standins/paced",
];
const OTHER_KINDS: [&str; 8] = ["c", "cu", "cuh", "h", "md", "py", "pyi", "toml"];

/// The crate of a source: the path before `src`.
fn crate_of(path: &str) -> &str {
    path.split("/src/").next().unwrap()
}

/// The names of the types that a source defines.
fn types(text: &str) -> Vec<&str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    product::lines(text)
        .filter_map(|line| {
            let line = line.trim_start();
            let line = line.strip_prefix("pub").map_or(line, |rest| {
                let rest = rest.strip_prefix('(').map_or(rest, |r| r.split_once(')').unwrap().1);
                rest.trim_start()
            });
            let line = line.strip_prefix("unsafe ").unwrap_or(line);
            let kinds = ["struct ", "enum ", "trait ", "union "];
            let name = kinds.iter().find_map(|kind| line.strip_prefix(kind))?;
            name.split(|c| !is_name(c)).next().filter(|name| !name.is_empty())
        })
        .collect()
}

#[test]
fn a_name_stands_for_one_type_in_a_crate() {
    let sources = product::sources();
    let mut places: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for (path, text) in &sources {
        for name in types(text) {
            places.entry((crate_of(path), name)).or_default().push(path);
        }
    }
    assert!(places.len() > 1000, "found {} types; the search misses some", places.len());
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "types of one name in a crate; expected one each: {places:#?}");
}

/// Names that once had many meanings: at most one type of the whole product may have each.
const ONE_TYPE: &[&str] = &["Engine", "Lane", "Place", "Report"];

#[test]
fn names_that_stood_for_many_things_stand_for_one_in_the_product() {
    let sources = product::sources();
    for name in ONE_TYPE {
        let defined = sources.iter().filter(|(_, text)| types(text).contains(name));
        let files: Vec<&str> = defined.map(|(path, _)| path.as_str()).collect();
        assert!(files.len() <= 1, "`{name}` is a type in each of {files:?}; expected one at most");
    }
}

#[test]
fn words_that_were_given_up_do_not_come_back() {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let others = product::files(&OTHER_FOLDERS, &OTHER_KINDS);
    assert!(others.len() > 100, "found {} other sources; the search misses some", others.len());
    for (path, text) in product::sources().into_iter().chain(others) {
        for (number, line) in (1..).zip(text.lines()) {
            for word in line.split(|c| !is_word(c)) {
                if let Some((_, now)) = GIVEN_UP.iter().find(|(old, _)| *old == word) {
                    found.push(format!("{path}:{number}: `{word}`; it is `{now}` now"));
                }
                for (_, now) in GIVEN_UP_CONSTANTS.iter().filter(|(old, _)| word.starts_with(old)) {
                    found.push(format!("{path}:{number}: `{word}`; such are `{now}...` now"));
                }
            }
        }
    }
    assert!(found.is_empty(), "older words:\n{}", found.join("\n"));
}

/// The names that follow a word in the code of a source: `fn`, or what a C function of a kernel begins with.
fn names_behind<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let lines = product::lines(text).flat_map(|line| line.split(word).skip(1));
    lines.filter_map(|rest| rest.split(|c| !is_name(c)).next()).collect()
}

#[test]
fn types_and_functions_do_not_get_names_again_that_were_given_up() {
    let kernels =
        |path: &str| path.starts_with("backends/cpu/") || path.starts_with("backends/gpu/");
    let device =
        product::files(&["backends", "standins/device_put", "standins/paced"], &["cu", "cuh"]);
    assert!(device.len() > 15, "found {} sources of kernels; the search misses some", device.len());
    let mut found = Vec::new();
    for (path, text) in product::sources().into_iter().chain(device) {
        for (old, now) in GIVEN_UP_TYPES.iter().filter(|(old, _)| types(&text).contains(old)) {
            found.push(format!("{path}: a type `{old}`; it was renamed to `{now}`"));
        }
        let functions: Vec<&str> = ["fn ", "bool ", "void "]
            .iter()
            .flat_map(|word| names_behind(&text, word))
            .filter(|_| kernels(&path))
            .collect();
        for (old, now) in GIVEN_UP_FUNCTIONS.iter().filter(|(old, _)| functions.contains(old)) {
            found.push(format!("{path}: a function `{old}`; it was renamed to `{now}`"));
        }
        for (old, now) in GIVEN_UP_BEGINNINGS {
            let names = functions.iter().filter(|name| name.starts_with(old));
            found.extend(
                names.map(|name| format!("{path}: a function `{name}`; such are `{now}...` now")),
            );
        }
    }
    assert!(found.is_empty(), "older names:\n{}", found.join("\n"));
}

#[test]
fn functions_are_seen_in_rust_and_in_kernels() {
    let rust = "    pub(super) fn hear(engine: &mut Engine) {}\n// fn heard() {}\n";
    assert_eq!(names_behind(rust, "fn "), ["hear"]);
    let kernel = "__device__ bool hear(const Common& c) {\n__device__ inline void enter_nothing(";
    assert_eq!(
        (names_behind(kernel, "bool "), names_behind(kernel, "void ")),
        (vec!["hear"], vec!["enter_nothing"])
    );
}

#[test]
fn definitions_of_every_kind_are_seen() {
    let text = "struct A;\npub struct B<T>(T);\npub(super) enum C {\n    D,\n}\nunsafe trait E {}\n\
                pub(crate) union F { a: u8 }\n// struct G;\nfn structure() {}\n";
    assert_eq!(types(text), ["A", "B", "C", "E", "F"]);
}
