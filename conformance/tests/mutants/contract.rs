//! `conformance/contract.toml` and `contract_header.toml` map each clause of transports to a case of L0 and to a
//! mutant that this case is known to catch, or to the reason why there is no such case. A clause is a sentence of the
//! contract, an item of the header that is about transports, or a sentence about such an item. A clause without either
//! fails here, and so does one that has changed since its entry was written: an entry has a mark of the whole clause.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use tokenyard_conformance::claims::{CLAIMS, Proof};
use tokenyard_conformance::transport;
use tokenyard_core::transport::{Capabilities, NO_CAPABILITIES};

use crate::header::{self, EXAMPLES, Item};

const PAGE: &str = include_str!("../../../docs/plugin-contract.md");
const TESTING: &str = include_str!("../../../docs/plugin-testing.md");
/// The mutants of the C examples, which `lost_peers` runs.
const OF_EXAMPLES: [&str; 2] = [
    include_str!("../../../plugins/example-c/mutants_shm.toml"),
    include_str!("../../../plugins/example-c/mutants_sockets.toml"),
];
/// The sources of this program with mutants and the cases that catch them.
const SOURCES: [&str; 3] = [
    include_str!("claim_mutants.rs"),
    include_str!("completion_mutants.rs"),
    include_str!("payload_mutants.rs"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contract {
    /// The reasons why a clause has no case, by their words.
    reasons: BTreeMap<String, String>,
    /// By the start of the clause.
    page: BTreeMap<String, Clause>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfHeader {
    /// By the name of the item.
    header: BTreeMap<String, Clause>,
    /// By the start of the clause, behind the name of the item.
    comments: BTreeMap<String, Clause>,
}

/// An entry, which ends with the mark of its clause.
#[derive(Deserialize)]
#[serde(untagged)]
enum Clause {
    /// Proofs, each a case and a mutant: `case/mutant`. The last item is the mark.
    Proofs(Vec<String>),
    /// The word of a reason, and the mark.
    Reason(String),
}

impl Clause {
    fn mark(&self) -> &str {
        let last = match self {
            Self::Proofs(proofs) => proofs.last().map_or("", String::as_str),
            Self::Reason(words) => words.rsplit(' ').next().unwrap_or(""),
        };
        if last.starts_with('#') { last } else { "" }
    }

    fn proofs(&self) -> impl Iterator<Item = &String> {
        let proofs = if let Self::Proofs(proofs) = self { &proofs[..] } else { &[] };
        proofs.iter().filter(|proof| !proof.starts_with('#'))
    }

    fn reason(&self) -> Option<&str> {
        if let Self::Reason(words) = self { words.split(' ').next() } else { None }
    }
}

/// The mark of a clause: the FNV-1a hash of its text in 32 bits.
fn mark(clause: &str) -> String {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    format!("#{:08x}", clause.bytes().fold(0x811c_9dc5, step))
}

/// Checks that the clauses of the entries are those that the entries were written for.
fn unchanged<'a>(entries: impl IntoIterator<Item = (&'a str, &'a Clause, String)>) {
    let stale = |(start, entry, clause): (&str, &Clause, String)| {
        let mark = mark(&clause);
        (entry.mark() != mark).then(|| format!("{start:?} {mark} {clause}"))
    };
    let stale: Vec<String> = entries.into_iter().filter_map(stale).collect();
    assert!(
        stale.is_empty(),
        "clauses have changed since their entries in conformance/contract*.toml were written. See whether the cases of \
         each still fail where it is broken, then give its entry this mark:\n{}",
        stale.join("\n")
    );
}

fn contract() -> Contract {
    toml::from_str(include_str!("../../contract.toml")).unwrap()
}

fn of_header() -> OfHeader {
    toml::from_str(include_str!("../../contract_header.toml")).unwrap()
}

/// Sentences, at the ends of which a new one begins.
fn sentences(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut words = text.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let last = all.last_mut().unwrap();
        *last += if last.is_empty() { "" } else { " " };
        *last += word;
        let begins =
            |next: &&str| next.starts_with(|c: char| c.is_ascii_uppercase() || "`*(".contains(c));
        if word.ends_with(['.', '!', '?']) && words.peek().is_some_and(begins) {
            all.push(String::new());
        }
    }
    all
}

/// The sentences of a page. Those of a table's row begin with the row's first cell.
fn clauses(page: &str) -> Vec<String> {
    let (mut all, mut block, mut in_code) = (Vec::new(), String::new(), false);
    let mut rows = 0;
    for line in page.lines().chain([""]) {
        let code = line.starts_with("```");
        let (row, item) = (line.starts_with('|'), line.strip_prefix("- "));
        let ends = code || row || item.is_some() || line.is_empty() || line.starts_with('#');
        if ends && !block.is_empty() {
            all.extend(sentences(&std::mem::take(&mut block)));
        }
        rows = if row { rows + 1 } else { 0 };
        in_code ^= code;
        if in_code || code || line.is_empty() || line.starts_with('#') {
            continue;
        }
        if row {
            // The first two rows of a table are its head.
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            if rows > 2 {
                let named = |text: String| format!("{}: {text}", cells[0]);
                all.extend(cells[1..].iter().flat_map(|cell| sentences(cell)).map(named));
            }
            continue;
        }
        block += item.unwrap_or(line);
        block += " ";
    }
    all
}

/// The sentences of the comments. The first one of a constant or a field says what that is, and is its item's.
fn remarks() -> Vec<String> {
    let rules = header::rules().replace("\n *", " ");
    let rules = rules.split(" - ").map(str::trim).filter(|rule| !rule.is_empty());
    let mut all: Vec<String> = rules
        .map(|rule| format!("rules: {}", rule.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect();
    for item in header::items() {
        let Item { name, comment, .. } = &item;
        let of_item = sentences(comment).into_iter().skip(usize::from(!item.is_structure()));
        all.extend(of_item.map(|sentence| format!("{name}: {sentence}")));
    }
    all
}

/// The pairs of a case and a mutant that tests run: `case/mutant`.
fn proofs_that_run() -> BTreeSet<String> {
    let of_claims = CLAIMS.iter().flat_map(|claim| claim.proofs).filter_map(|proof| match proof {
        Proof::Case { case, mutant, .. } => Some(format!("{case}/{mutant}")),
        Proof::Cannot(_) => None,
    });
    let mut all: BTreeSet<String> = of_claims.collect();
    let between = |text: &'static str, end: char| text.split(end).next().unwrap();
    for source in SOURCES {
        for rest in source.split("caught::<").skip(1) {
            let (fault, case) = (between(rest, '>'), rest.split("\"l0/").nth(1).unwrap());
            let head = format!("impl Fault for {fault} {{\n    const NAME: &'static str = \"");
            let Some(name) = SOURCES.iter().find_map(|source| source.split(&head).nth(1)) else {
                continue;
            };
            all.insert(format!("{}/{}", between(case, '/'), between(name, '"')));
        }
    }
    for listed in OF_EXAMPLES {
        let listed: toml::Table = listed.parse().unwrap();
        for mutant in listed["mutant"].as_array().unwrap() {
            let word = |key: &str| mutant[key].as_str().unwrap();
            let case = word("case");
            let case = if case.starts_with("l3/") { case } else { case.split('/').next().unwrap() };
            all.insert(format!("{case}/{}", word("name")));
        }
    }
    all
}

/// Checks that each clause begins with one of the entries, and each entry one clause.
fn match_each_other(clauses: &[String], entries: &BTreeMap<String, Clause>) {
    for clause in clauses {
        let starts = entries.keys().filter(|start| clause.starts_with(start.as_str()));
        let starts: Vec<_> = starts.collect();
        assert_eq!(
            starts.len(),
            1,
            "{clause:?} has the entries {starts:?} in conformance/contract*.toml"
        );
    }
    for start in entries.keys() {
        let count = clauses.iter().filter(|clause| clause.starts_with(start)).count();
        assert_eq!(
            count, 1,
            "the entry {start:?} of conformance/contract*.toml is about {count} clauses"
        );
    }
    let of = |start: &str| clauses.iter().find(|clause| clause.starts_with(start)).unwrap().clone();
    unchanged(entries.iter().map(|(start, entry)| (start.as_str(), entry, of(start))));
}

#[test]
fn every_sentence_of_the_contract_has_a_case_with_a_mutant_or_a_reason() {
    let clauses = clauses(PAGE);
    let reads = |text: &str| clauses.iter().any(|clause| clause == text);
    assert!(reads("`open`: once per team"), "cells in the middle of a row are read: {clauses:#?}");
    match_each_other(&clauses, &contract().page);
}

#[test]
fn a_mark_shows_a_change_at_the_end_of_a_clause() {
    let marks = ["It never waits.", "It never waits, or seldom."].map(mark);
    assert_eq!(marks[0].len(), "#01234567".len());
    assert_ne!(marks[0], marks[1]);
    assert_eq!(mark(""), "#811c9dc5", "FNV-1a");
}

#[test]
fn every_item_of_the_header_has_a_case_with_a_mutant_or_a_reason() {
    let entries = of_header().header;
    let listed: BTreeSet<String> = entries.keys().cloned().collect();
    let fields = header::items().into_iter().filter(|item| !item.is_structure());
    let fields: BTreeMap<String, Item> = fields.map(|item| (item.name.clone(), item)).collect();
    let items: BTreeSet<String> = fields.keys().cloned().collect();
    let missing: Vec<_> = items.difference(&listed).collect();
    assert_eq!(missing, [""; 0], "missing in conformance/contract_header.toml");
    assert_eq!(listed.difference(&items).collect::<Vec<_>>(), [""; 0], "not in the header");
    // The further sentences are entries of their own.
    let says = |name: &String| {
        let Item { comment, code, .. } = &fields[name];
        // The number of a constant is no clause.
        let code = if name.contains('.') { code } else { "" };
        format!("{} {code}", sentences(comment)[0])
    };
    unchanged(entries.iter().map(|(name, entry)| (name.as_str(), entry, says(name))));
}

#[test]
fn every_rule_in_the_headers_comments_has_a_case_with_a_mutant_or_a_reason() {
    let remarks = remarks();
    let reads = |text: &str| remarks.iter().any(|remark| remark.starts_with(text));
    assert!(reads("TyTransportTable.close: Called once"), "{remarks:#?}");
    assert!(reads("rules: enumerations cross"), "{remarks:#?}");
    match_each_other(&remarks, &of_header().comments);
}

#[test]
fn the_proofs_of_the_contract_are_run_by_tests_and_its_reasons_are_explained() {
    let (contract, header, run) = (contract(), of_header(), proofs_that_run());
    let mut reasons = BTreeSet::new();
    let all = contract.page.iter().chain(&header.header).chain(&header.comments);
    for (clause, proof) in all {
        assert!(proof.reason().is_some() || proof.proofs().count() > 0, "{clause}");
        for proof in proof.proofs() {
            assert!(run.contains(proof), "{clause}: no test runs {proof:?}; there are {run:#?}");
        }
        if let Some(word) = proof.reason() {
            assert!(contract.reasons.contains_key(word), "{clause}: no reason is called {word:?}");
            reasons.insert(word);
        }
    }
    let words = contract.reasons.keys();
    let unused: Vec<_> = words.filter(|word| !reasons.contains(word.as_str())).collect();
    assert!(unused.is_empty(), "{unused:?} explain nothing");
}

/// The page for authors gives the numbers of clauses, of reasons and of mutants.
#[test]
fn the_page_about_testing_counts_the_clauses_by_reasons_and_the_mutants() {
    let (contract, header) = (contract(), of_header());
    let all = contract.page.values().chain(header.header.values()).chain(header.comments.values());
    let (mut reasons, mut proofs) = (BTreeMap::new(), Vec::new());
    let mut clauses = 0;
    for entry in all {
        clauses += 1;
        match entry.reason() {
            Some(word) => *reasons.entry(word.to_owned()).or_insert(0) += 1,
            None => proofs.push(entry),
        }
    }
    let page = TESTING.split("## Clauses without a case\n").nth(1).unwrap();
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
        Some((cells.next()?.trim_matches('`').to_owned(), cells.next()?.parse::<usize>().ok()?))
    };
    let listed: BTreeMap<String, usize> = page.lines().filter_map(row).collect();
    assert_eq!(listed, reasons, "the table of docs/plugin-testing.md, and the entries");
    let (proved, others) = (proofs.len(), clauses - proofs.len());
    let says =
        |words: String| assert!(page.contains(&words), "docs/plugin-testing.md: no {words:?}");
    says(format!("Of {clauses} clauses {proved} have a case. The other {others} have a reason"));
    let mutants = proofs.iter().flat_map(|entry| entry.proofs());
    let mutants: BTreeSet<_> = mutants.map(|proof| proof.rsplit('/').next().unwrap()).collect();
    let is_edit = |name: &&&str| {
        let line = format!("name = \"{name}\"\n");
        OF_EXAMPLES.iter().any(|list| list.contains(&line))
    };
    let edits = mutants.iter().filter(is_edit).count();
    says(format!("{} broken transports. Of these {edits} are edits", mutants.len()));
    says(format!("The other {} wrap", mutants.len() - edits));
}

/// A case that no mutant fails may be one that nothing can fail.
#[test]
fn every_case_of_l0_is_known_to_catch_a_mutant() {
    let run = proofs_that_run();
    let proved: BTreeSet<_> = run.iter().filter_map(|proof| proof.split('/').next()).collect();
    let all = Capabilities { flags: !0, memory_kinds: !0, ..NO_CAPABILITIES };
    let without: BTreeSet<String> = transport::tests(&all)
        .into_iter()
        .filter_map(|test| Some(test.name.split('/').nth(1)?.to_owned()))
        .filter(|case| !proved.contains(case.as_str()))
        .collect();
    assert!(without.is_empty(), "no mutant is known to fail {without:?}");
}

/// A transport that says by itself what is wrong with it shows nothing about the suite: where its call fails, the suite
/// says that the call must succeed.
#[test]
fn mutants_are_caught_in_words_of_the_suite_and_not_in_their_own() {
    let failures = |code: &str| -> Vec<String> {
        let calls = code.split("fail(error").skip(1);
        calls.map(|call| call.split(");").next().unwrap().to_owned()).collect()
    };
    for (list, code) in OF_EXAMPLES.iter().zip([&EXAMPLES[..1], &EXAMPLES[1..]]) {
        let listed: toml::Table = list.parse().unwrap();
        for mutant in listed["mutant"].as_array().unwrap() {
            let edits = mutant["edits"].as_array().unwrap().iter();
            let put = edits.map(|edit| edit["put"].as_str().unwrap());
            let says = mutant["says"].as_str().unwrap();
            for call in put.chain(code.iter().copied()).flat_map(failures) {
                assert!(!call.contains(says), "{}: {says:?} are words of {call:?}", mutant["name"]);
            }
        }
    }
    for claim in CLAIMS {
        for proof in claim.proofs {
            if let Proof::Case { mutant, says, .. } = proof {
                let mut made = SOURCES.iter().flat_map(|source| source.split("format!(").skip(1));
                let own = made.any(|text| text.split(';').next().unwrap().contains(says));
                assert!(!own, "{mutant}: {says:?} are its own words");
            }
        }
    }
}
