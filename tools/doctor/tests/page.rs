//! `docs/findings.md` is made of the catalogue: every finding has its anchor, and every anchor its
//! finding. `TOKENYARD_GOLDENS=write cargo test -p tokenyard-doctor --test page` makes it anew.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

use tokenyard_doctor::{Rule, catalogue};

fn page() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/findings.md")
}

fn entry(text: &mut String, rule: &Rule) {
    let Rule { id, title, wanted, why, cost, fix, source } = rule;
    write!(
        text,
        "\n### `{id}`\n<a id=\"{id}\"></a>\n\n**{title}.** {why}\n\n\
         - **Wanted:** {wanted}.\n- **If left:** {cost}.\n- **Fix:** {fix}.\n- **Source:** {source}.\n"
    )
    .unwrap();
}

fn rendered() -> String {
    let mut text = "# Findings of `tokenyard doctor`\n\n\
        One entry for each check. The tool prints the entry's anchor, and in the numbers of the node what was found and \
        wanted. What the verdicts mean, and how to go from a node to a running job: \
        [operator-guide.md](operator-guide.md).\n\n\
        This page is made of the rules themselves (`tools/doctor/src`); a test keeps them equal.\n"
        .to_owned();
    for (subject, rules) in catalogue() {
        write!(text, "\n## {subject}\n").unwrap();
        rules.iter().for_each(|rule| entry(&mut text, rule));
    }
    text
}

#[test]
fn the_page_of_findings_is_that_of_the_catalogue() {
    let expected = rendered();
    if std::env::var("TOKENYARD_GOLDENS").is_ok_and(|value| value == "write") {
        std::fs::write(page(), &expected).unwrap();
    }
    let found = std::fs::read_to_string(page()).unwrap();
    assert!(found == expected, "docs/findings.md is old: see the head of {}", file!());
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
        for text in [rule.title, rule.wanted, rule.why, rule.cost, rule.fix, rule.source] {
            assert!(!text.is_empty() && !text.contains("  "), "{}: {text:?}", rule.id);
        }
    }
    assert!(ids.len() > 40, "{}", ids.len());
}
