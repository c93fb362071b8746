//! `docs/findings.md` has an entry for each rule of the catalogue, in its order, and no other. After a change of its
//! words, `TOKENYARD_GOLDENS=write cargo test -p tokenyard-doctor --test page` wraps its lines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

use tokenyard_doctor::{Rule, Words, catalogue};

fn page() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/findings.md")
}

/// The width of a page's lines.
const WIDTH: usize = 140;

/// The paragraph in lines of the page's width; lines after the first begin with `indent`. Code stays in one piece.
fn wrapped(paragraph: &str, indent: &str) -> String {
    let mut is_code = false;
    let mut pieces = vec![String::new()];
    for c in paragraph.chars() {
        is_code ^= c == '`';
        match c {
            ' ' if !is_code => pieces.push(String::new()),
            _ => pieces.last_mut().unwrap().push(c),
        }
    }
    let mut text = String::new();
    let mut length = 0;
    for piece in pieces {
        let more = piece.chars().count();
        if length > 0 && length + 1 + more > WIDTH {
            write!(text, "\n{indent}").unwrap();
            length = indent.len();
        } else if length > 0 {
            text.push(' ');
            length += 1;
        }
        text += &piece;
        length += more;
    }
    text
}

fn entry(text: &mut String, rule: &Rule) {
    let (id, words) = (rule.id, rule.words());
    let Words { title, why, expected, impact, fix, source } = words;
    let about = wrapped(&format!("**{title}.** {why}"), "");
    write!(text, "\n### `{id}`\n<a id=\"{id}\"></a>\n\n{about}\n\n").unwrap();
    for (name, value) in
        [("Expected", expected), ("Impact", impact), ("Fix", fix), ("Source", source)]
    {
        let line = wrapped(&format!("- **{name}:** {value}."), "  ");
        writeln!(text, "{line}").unwrap();
    }
}

/// The page up to its entries, with the index by symptom, and the entries.
fn parts(page: &str) -> (&str, &str) {
    page.split_at(page.find("\n## Alternatives\n").unwrap())
}

#[test]
fn the_entries_of_the_page_are_the_rules_in_their_order() {
    let found = std::fs::read_to_string(page()).unwrap();
    let (head, entries) = parts(&found);
    let mut expected = String::new();
    for (subject, rules) in catalogue() {
        write!(expected, "\n## {subject}\n").unwrap();
        rules.iter().for_each(|rule| entry(&mut expected, rule));
    }
    if std::env::var("TOKENYARD_GOLDENS").is_ok_and(|value| value == "write") {
        std::fs::write(page(), format!("{head}{expected}")).unwrap();
        return;
    }
    for (found, expected) in entries.lines().zip(expected.lines()) {
        assert_eq!(found, expected, "see the head of {}", file!());
    }
    assert_eq!(entries.lines().count(), expected.lines().count());
}

#[test]
fn the_index_by_symptom_has_every_rule_and_no_other() {
    let page = std::fs::read_to_string(page()).unwrap();
    let (head, _) = parts(&page);
    let rules: BTreeSet<&str> =
        catalogue().iter().flat_map(|(_, rules)| rules.iter()).map(|rule| rule.id).collect();
    let mut listed = BTreeSet::new();
    for row in head.lines().filter(|line| line.starts_with("| ") && line.contains("](#")) {
        for link in row.split('[').skip(1) {
            let (id, target) = link.split_once("](#").unwrap();
            assert_eq!(Some(id), target.split(')').next(), "{row}");
            listed.insert(id);
        }
    }
    assert_eq!(listed, rules);
}

#[test]
fn links_of_other_pages_lead_to_findings_that_there_are() {
    let ids: BTreeSet<&str> =
        catalogue().iter().flat_map(|(_, r)| r.iter()).map(|r| r.id).collect();
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut count = 0;
    for entry in std::fs::read_dir(docs).unwrap() {
        let path = entry.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for link in text.split("findings.md#").skip(1) {
            let id = link.split([')', '`', ' ']).next().unwrap();
            if id == "by-symptom" {
                continue;
            }
            assert!(ids.contains(id), "{}: no finding {id}", path.display());
            count += 1;
        }
    }
    assert!(count > 20, "{count}");
}

#[test]
fn every_rule_has_an_anchor_of_its_own_and_words_in_every_place() {
    let mut ids = BTreeSet::new();
    for rule in catalogue().iter().flat_map(|(_, rules)| rules.iter()) {
        assert!(ids.insert(rule.id), "{} twice", rule.id);
        assert!(
            rule.id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'),
            "{}",
            rule.id
        );
        let Words { title, why, expected, impact, fix, source } = rule.words();
        for text in [title, why, expected, impact, fix, source] {
            assert!(!text.is_empty() && !text.contains("  "), "{}: {text:?}", rule.id);
        }
    }
    assert!(ids.len() > 40, "{}", ids.len());
}
