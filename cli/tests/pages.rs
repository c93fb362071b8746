//! Pages of the documentation that show what the command prints: the README and `docs/json.md`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{expect_code, json, repository, stdout, tokenyard};
use serde_json::Value;

/// A command, the section of `docs/json.md` that describes its document, and the exit codes that it may have.
struct Documented {
    section: &'static str,
    arguments: &'static str,
    codes: &'static [i32],
}

const RECORDED: &str = "explain reports/tests/recorded/\
                        a_link_that_carries_nothing_is_named_with_both_ends --json";

const DOCUMENTED: &[Documented] = &[
    Documented {
        section: "run",
        arguments: "run configs/cpu.toml --ranks 2 --tokens 8 --hidden 64 --steps 2 --json",
        codes: &[0],
    },
    Documented {
        section: "bench",
        arguments: "bench configs/cpu.toml --scenario exchange --tokens 8 --hidden 64 --json",
        codes: &[0],
    },
    Documented {
        section: "conformance",
        arguments: "conformance configs/cpu.toml --level L0 --filter signal --json",
        codes: &[0],
    },
    Documented {
        section: "config check",
        arguments: "config check configs/cpu.toml --json",
        codes: &[0],
    },
    Documented { section: "plugins", arguments: "plugins configs/cpu.toml --json", codes: &[0] },
    Documented {
        section: "doctor",
        arguments: "doctor --topology --root node/machine/trees/hgx-cx7.tree --json",
        codes: &[0, 1, 2],
    },
    // The report of this machine has facts that only a running process can find out.
    Documented { section: "doctor", arguments: "doctor --json", codes: &[0, 1, 2] },
    Documented { section: "explain", arguments: RECORDED, codes: &[1] },
    Documented {
        section: "shape",
        arguments: "shape --ranks 8 --experts 256 --topk 8 --hidden 7168 --max-tokens 128 --json",
        codes: &[0],
    },
    Documented {
        section: "shape",
        arguments: "shape --ranks 8 --domains 2 --experts 256 --topk 8 --hidden 7168 \
                    --max-tokens 128 --json",
        codes: &[0],
    },
    Documented {
        section: "shape",
        arguments: "shape --ranks 4 --domains 2 --experts 32 --topk 4 --hidden 128 \
                    --max-tokens 128 --input samples/skewed-router.safetensors --json",
        codes: &[0],
    },
    Documented { section: "warm", arguments: "warm configs/cpu.toml --json", codes: &[0] },
    Documented { section: "version", arguments: "version --json", codes: &[0] },
];

/// The rows of a section's table.
fn rows(section: &str) -> Vec<String> {
    let page = std::fs::read_to_string(repository("docs/json.md")).unwrap();
    let head = format!("\n## tokenyard {section}\n");
    let body = page.split(&head).nth(1).unwrap_or_else(|| panic!("docs/json.md has no {head:?}"));
    let body = body.split("\n## ").next().unwrap();
    body.lines().filter(|line| line.starts_with("| `")).map(str::to_owned).collect()
}

/// The paths that rows name. `.b` continues the path before it: `` `a.x`, `.b` `` is `a.x` and `a.b`.
fn named(rows: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for row in rows {
        let names = row.trim_start_matches('|').split(" | ").next().unwrap();
        let mut parent = String::new();
        for name in names.split('`').skip(1).step_by(2) {
            let path = match name.strip_prefix('.') {
                Some(rest) => format!("{parent}.{rest}"),
                None => name.to_owned(),
            };
            parent = path.rsplit_once('.').map_or(String::new(), |(parent, _)| parent.to_owned());
            paths.insert(path);
        }
    }
    paths
}

/// The paths of all values below `value` that are no filled object and no filled list.
fn paths(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => entries.iter().for_each(|(key, value)| {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            paths(value, &path, found);
        }),
        Value::Array(list) if !list.is_empty() => {
            let path = format!("{path}[]");
            list.iter().for_each(|value| paths(value, &path, found));
        }
        Value::Array(_) => {
            found.insert(format!("{path}[]"));
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

/// Whether the table names the path, a list or object that it is in, or (of a null) something below it.
fn is_covered(path: &str, table: &BTreeSet<String>) -> bool {
    table.iter().any(|known| {
        let below = |whole: &str, part: &str| {
            whole.strip_prefix(part).is_some_and(|rest| rest.starts_with(['.', '[']))
        };
        match known.strip_suffix(".*") {
            Some(stem) => path == stem || below(path, stem),
            None => {
                path == known || known.ends_with("[]") && below(path, known) || below(known, path)
            }
        }
    })
}

fn documented(section: &str) -> BTreeSet<String> {
    named(rows(section))
}

/// The version of a section's documents: the first number of the row of `schema_version`.
fn stated_version(section: &str) -> u64 {
    let row = rows(section).into_iter().find(|row| row.starts_with("| `schema_version`")).unwrap();
    let meaning = row.split(" | ").nth(1).unwrap();
    meaning.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn the_page_of_json_states_one_version_for_each_kind_of_document() {
    let page = std::fs::read_to_string(repository("docs/json.md")).unwrap();
    let kinds = [("bench", "`bench`"), ("conformance", "`conformance`")];
    for (section, kind) in kinds {
        let stated = format!("{} for those of {kind}", stated_version(section));
        assert!(page.contains(&stated), "docs/json.md: expected {stated:?} above the tables");
    }
    assert!(page.contains(&format!("it is {} for the command's", stated_version("run"))));
}

/// The fields that the commands print, by section.
fn printed() -> BTreeMap<&'static str, BTreeSet<String>> {
    let mut printed: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for Documented { section, arguments, codes } in DOCUMENTED {
        let mut command = tokenyard();
        command.current_dir(repository(".")).args(arguments.split_whitespace());
        let output = command.output().unwrap();
        let code = output.status.code().unwrap();
        assert!(codes.contains(&code), "{arguments}: {code}, {output:?}");
        let document = json(&output);
        assert_eq!(stated_version(section), document["schema_version"], "docs/json.md, {section}");
        paths(&document, "", printed.entry(*section).or_default());
    }
    printed
}

#[test]
fn the_page_of_json_has_the_fields_that_the_commands_print_and_no_others() {
    for (section, found) in printed() {
        let table = documented(section);
        let missing: Vec<_> = found.iter().filter(|path| !is_covered(path, &table)).collect();
        assert!(missing.is_empty(), "docs/json.md, {section}: no row for {missing:?}");
        // Fields that only some calls have are marked so.
        let always = named(
            rows(section)
                .into_iter()
                .filter(|row| !row.contains("alone") && !row.contains("absent")),
        );
        for path in always {
            let stem = path.trim_end_matches(".*");
            assert!(
                found.iter().any(|found| found.starts_with(stem)),
                "docs/json.md, {section}: no command prints {path}"
            );
        }
    }
}

#[test]
fn the_page_of_json_names_every_fact_of_a_node() {
    let machine = rows("doctor").into_iter().find(|row| row.starts_with("| `machine.*`")).unwrap();
    for path in printed()["doctor"].iter().filter_map(|path| path.strip_prefix("machine.")) {
        let name = path.split(['.', '[']).next().unwrap();
        assert!(machine.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn a_field_that_the_page_does_not_have_is_noticed() {
    let table = documented("shape");
    assert!(is_covered("buffers[].bytes", &table) && is_covered("rank_bytes", &table));
    assert!(!is_covered("buffers[].byte", &table) && !is_covered("rank_bytes_", &table));
    assert!(is_covered("machine.pci.devices[].slot", &documented("doctor")));
}

/// A line without its numbers and without the width of its columns.
fn shape(line: &str) -> String {
    let digits = |c: char| c.is_ascii_digit() || c == '.';
    let words = line.split_whitespace().map(|word| word.replace(digits, ""));
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_readme_shows_what_the_doctor_prints_for_a_recorded_node() {
    let readme = std::fs::read_to_string(repository("README.md")).unwrap();
    let shown = readme.split("roce-port-down.tree`) it prints:\n\n```\n").nth(1).unwrap();
    let shown = shown.split("\n```\n").next().unwrap();
    let words = ["doctor", "--quiet", "--root", "node/machine/trees/roce-port-down.tree"];
    let output = tokenyard().current_dir(repository(".")).args(words).output().unwrap();
    expect_code(&output, 1);
    assert_eq!(stdout(&output).trim_end(), shown);
}

#[test]
fn the_readme_shows_what_its_first_command_prints() {
    let readme = std::fs::read_to_string(repository("README.md")).unwrap();
    let shown = readme.split("ten times with fresh data:\n\n```\n").nth(1).unwrap();
    let shown = shown.split("\n```\n").next().unwrap();
    let mut command = tokenyard();
    let output =
        command.current_dir(repository(".")).args(["run", "configs/cpu.toml"]).output().unwrap();
    expect_code(&output, 0);
    let printed = stdout(&output);
    let printed = printed.lines().filter(|line| !line.starts_with("note: this build is not"));
    let printed: Vec<String> = printed.map(shape).collect();
    let shown: Vec<String> = shown.lines().map(shape).collect();
    assert_eq!(printed, shown);
}

/// The page comes from a whole run. A test that joins the suite, or leaves it, is noticed here before.
#[test]
fn the_page_of_results_counts_as_many_tests_as_the_suite_has() {
    let mut command = tokenyard();
    command.current_dir(repository(".")).args(["conformance", "configs/cpu.toml", "--list"]);
    let listed = stdout(&command.output().unwrap());
    let listed = listed.lines().filter(|line| line.starts_with('l')).count();
    let page = std::fs::read_to_string(repository("docs/conformance.md")).unwrap();
    let row = page.lines().find(|line| line.starts_with("| `shm`, built in |")).unwrap();
    // The four levels, and the tests that do not apply.
    let counted: usize = row.split('|').filter_map(|cell| cell.trim().parse::<usize>().ok()).sum();
    assert_eq!(counted, listed, "run cargo xtask test, then cargo xtask results, for `{row}`");
}
