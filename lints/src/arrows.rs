//! Arrows between folders point one way: the base of the operations knows none of them. So an operation is a folder
//! that can be added, and that can be read alone. It has the same name in each crate, so a reader of one knows the
//! others.

use crate::product::root;
use crate::texts::files;

/// Operations that all ranks take part in.
const OPERATIONS: [&str; 2] = ["dispatch", "combine"];

/// Where an operation has a file or a folder of its name: contract, host code, device code, rules, cases.
const HOMES: [&str; 6] = [
    "core/src/moe",
    "backends/cpu/src/moe",
    "backends/gpu/src/moe",
    "backends/gpu/device/moe",
    "conformance/src/moe/oracle",
    "conformance/src/moe/cases",
];

/// Folders, and the modules that their files do not name.
const ARROWS: [(&str, &[&str]); 4] = [
    ("backends/cpu/src/engine/", &["moe"]),
    ("backends/gpu/src/engine/", &["moe", "decode"]),
    ("conformance/src/transport/", &["moe"]),
    ("core/src/session/", &["moe", "call", "communicator"]),
];

/// The lines of code in a source that name one of the modules; a comment may.
fn named<'a>(text: &'a str, modules: &[&str]) -> Vec<&'a str> {
    let names = |line: &str, module: &str| {
        let mut paths = line.split("crate::").skip(1);
        paths.any(|path| {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            path.split(|c| !is_part(c)).next() == Some(module)
        })
    };
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .filter(|line| modules.iter().any(|module| names(line, module)))
        .collect()
}

#[test]
fn the_base_of_the_operations_names_none_of_them() {
    let sources = files(&["rs"]);
    let mut found = Vec::new();
    for (folder, modules) in ARROWS {
        let inside = sources.iter().filter(|(path, _)| path.starts_with(folder));
        let count = inside.clone().count();
        assert!(count > 10, "found {count} files in {folder}; the search misses some");
        for (path, text) in inside {
            let lines = named(text, modules);
            found.extend(lines.into_iter().map(|line| format!("{path}: {}", line.trim())));
        }
    }
    assert!(
        found.is_empty(),
        "files that name an operation below which they lie; expected what both need to be here, or the arrow to point \
         down. Move the item:\n{}",
        found.join("\n")
    );
}

#[test]
fn an_operation_has_its_name_in_each_crate() {
    let missing = HOMES.iter().flat_map(|home| {
        OPERATIONS.iter().map(move |name| format!("{home}/{name}")).filter(|path| {
            let kinds = [".rs", ".cuh", "/mod.rs"];
            !kinds.iter().any(|kind| root().join(format!("{path}{kind}")).exists())
        })
    });
    let missing: Vec<String> = missing.collect();
    assert!(
        missing.is_empty(),
        "no file or folder of the operation's name: {}. Name it as in the other crates",
        missing.join(", ")
    );
}

#[test]
fn a_module_is_seen_by_its_whole_name() {
    let text = "use crate::moe::Shape;\n//! crate::moe\nuse crate::moe_args;\nuse tokenyard_core::moe::Arena;\nlet a = crate::call();";
    assert_eq!(named(text, &["moe"]), ["use crate::moe::Shape;"]);
    assert_eq!(named(text, &["call", "moe"]).len(), 2);
}
