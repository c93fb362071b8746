//! A page names things that exist: files, folders, and the functions of the worked example. The page of figures
//! begins with one table, and each peer has a version, a commit and a test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::Path;

use crate::texts::files;

/// The names of sources between backticks: `a/b.rs`, and `a/{b,c}.rs` as two.
fn sources_named(page: &str) -> Vec<String> {
    let kinds = [".rs", ".cuh", ".cu", ".py", ".toml"];
    let is_name = |code: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./{},".contains(c);
        kinds.iter().any(|kind| code.ends_with(kind) && code.len() > kind.len())
            && code.chars().all(plain)
            && !code.starts_with('/')
    };
    let codes = page.split('`').skip(1).step_by(2).filter(is_name);
    codes
        .flat_map(|code| match (code.split_once('{'), code.split_once('}')) {
            (Some((before, _)), Some((inside, after))) => {
                let inside = inside.split_once('{').map_or("", |(_, names)| names);
                inside.split(',').map(|name| format!("{before}{name}{after}")).collect()
            }
            _ => vec![code.to_owned()],
        })
        .collect()
}

/// Files of other projects that pages name.
const NOT_OURS: [&str; 5] = [
    "setup.py",
    "test_intranode.py",
    "test_low_latency.py",
    "tests/elastic/test_ep.py",
    "test_hybrid_ep.py",
];

#[test]
fn sources_that_a_page_names_exist() {
    let sources: Vec<String> = files(&["rs", "cuh", "cu", "py", "toml"])
        .into_iter()
        .map(|(path, _)| format!("/{path}"))
        .collect();
    let exists = |name: &str| sources.iter().any(|path| path.ends_with(&format!("/{name}")));
    let mut found = Vec::new();
    for (path, text) in files(&["md"]) {
        let names = sources_named(&text).into_iter();
        let missing = names.filter(|name| !exists(name) && !NOT_OURS.contains(&name.as_str()));
        found.extend(missing.map(|name| format!("{path}: no file `{name}`")));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

fn page(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)).unwrap()
}

/// The text below a heading, up to the next heading.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let below = page.split_once(&format!("\n## {heading}\n"));
    let (_, below) = below.unwrap_or_else(|| panic!("no heading {heading:?}"));
    below.split("\n## ").next().unwrap()
}

/// Top folders of the repository that pages name with a path below them.
const FOLDERS: [&str; 19] = [
    "abi",
    "backends",
    "bench",
    "bootstrap",
    "cli",
    "configs",
    "conformance",
    "core",
    "errors",
    "files",
    "launch",
    "node",
    "plugins",
    "python",
    "reports",
    "standins",
    "sys",
    "testkit",
    "topology",
];

/// The paths between backticks that begin with a folder of the repository, patterns left out.
fn paths_named(page: &str) -> Vec<&str> {
    let is_path = |code: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
        let first = code.split('/').next().unwrap_or_default();
        code.contains('/') && FOLDERS.contains(&first) && code.chars().all(plain)
    };
    page.split('`').skip(1).step_by(2).filter(is_path).collect()
}

#[test]
fn folders_and_files_that_a_page_names_by_their_path_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    let mut count = 0;
    for (path, text) in files(&["md"]) {
        for name in paths_named(&text) {
            count += 1;
            if !root.join(name).exists() {
                found.push(format!("{path}: no file or folder `{name}`"));
            }
        }
    }
    assert!(count > 100, "found {count} paths; the search misses some");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The functions that stand in brackets behind a source: `` `slots.rs` (`open_slot`) ``.
fn functions_named(text: &str) -> Vec<(String, String)> {
    let pieces: Vec<&str> = text.split('`').collect();
    let mut found = Vec::new();
    for at in (1..pieces.len().saturating_sub(2)).step_by(2) {
        if pieces[at].ends_with(".rs") && pieces[at + 1] == " (" {
            found.push((pieces[at].to_owned(), pieces[at + 2].to_owned()));
        }
    }
    found
}

#[test]
fn the_functions_of_the_worked_example_are_in_the_files_that_it_names() {
    let architecture = page("docs/architecture.md");
    let named = functions_named(section(&architecture, "A token's way"));
    assert!(named.len() > 8, "found {named:?}; the search misses some");
    for (file, function) in named {
        let folder = if file.starts_with("core/") { "" } else { "backends/cpu/src/" };
        let source = page(&format!("{folder}{file}"));
        assert!(
            source.contains(&format!("fn {function}("))
                || source.contains(&format!("fn {function}<")),
            "docs/architecture.md: {file} has no function `{function}`"
        );
    }
}

#[test]
fn the_page_of_figures_begins_with_one_table_and_has_its_peers_by_commit_and_test() {
    let figures = page("docs/performance.md");
    let first = figures.split("\n## ").nth(1).unwrap();
    let tables = first.lines().filter(|line| line.starts_with("|---")).count();
    assert_eq!(tables, 1, "docs/performance.md: expected one table in its first section");
    assert!(first.contains("never measured"), "docs/performance.md: what was never measured?");
    let runs = page("docs/history/measured.md");
    let (_, peers) = runs.split_once("\n## Peers\n").unwrap();
    let peers: Vec<&str> = peers.split("\n- **").skip(1).collect();
    assert!(peers.len() >= 4, "docs/history/measured.md: found {} peers", peers.len());
    for peer in peers {
        let is_known = ["commit ", "test_"].iter().all(|word| peer.contains(word));
        assert!(is_known, "docs/history/measured.md: expected a commit and a test in {peer:?}");
    }
}

#[test]
fn names_of_each_kind_are_seen() {
    let names = sources_named("`a/{b,c}.rs`, `d.cuh`, `f()`, `.toml`");
    assert_eq!(names, ["a/b.rs", "a/c.rs", "d.cuh"]);
    assert_eq!(paths_named("`core/src`, `x/y`, `core/*.rs`, `core`"), ["core/src"]);
    let functions = functions_named("| `a.rs` (`go`), `b.rs` | `c/d.rs` (`stop`) |");
    let expected = [("a.rs", "go"), ("c/d.rs", "stop")];
    assert!(functions.iter().map(|(f, n)| (f.as_str(), n.as_str())).eq(expected));
    assert_eq!(section("# A\n\n## B\nb\n\n## C\nc\n", "B"), "b\n");
}
