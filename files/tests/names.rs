//! One meaning for each name: a type's name stands for one type in a crate, and abandoned words do not
//! return.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

mod product;

use std::collections::BTreeMap;

/// Older words, each with the present word (docs/architecture.md).
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
];

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
const ONE_TYPE: &[&str] = &["Lane", "Place", "Report", "Told"];

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
    for (path, text) in product::sources() {
        for (number, line) in (1..).zip(text.lines()) {
            for word in line.split(|c| !is_word(c)) {
                if let Some((_, now)) = GIVEN_UP.iter().find(|(old, _)| *old == word) {
                    found.push(format!("{path}:{number}: `{word}`; it is `{now}` now"));
                }
            }
        }
    }
    assert!(found.is_empty(), "older words:\n{}", found.join("\n"));
}

#[test]
fn definitions_of_every_kind_are_seen() {
    let text = "struct A;\npub struct B<T>(T);\npub(super) enum C {\n    D,\n}\nunsafe trait E {}\n\
                pub(crate) union F { a: u8 }\n// struct G;\nfn structure() {}\n";
    assert_eq!(types(text), ["A", "B", "C", "E", "F"]);
}
