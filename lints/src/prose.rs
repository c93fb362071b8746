//! Pages and comments are plain English: no sentence begins with a relative, no person stands for a technical
//! thing, and pages are short.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use crate::paragraphs::{Paragraph, of_comments, of_docstrings, of_page};
use crate::texts::files;

/// Words that begin a relative clause as well as a question.
const RELATIVES: [&str; 7] = ["What", "Whatever", "Which", "Whichever", "Who", "Whoever", "Whose"];

/// Words that begin a fragment: `That of the rail`. A comment names its subject first.
const FRAGMENTS: [&str; 2] = ["That of ", "Those of "];

/// Words of people, for which technical English has others: sent, received, reported, no rank, another process.
const WORDS: [&str; 10] = [
    "told",
    "untold",
    "brought",
    "nobody",
    "somebody",
    "company",
    "anybody",
    "someone",
    "everybody",
    "said",
];
/// Words that pages do not have either. A comment may say that a value is kept in a register.
const WORDS_OF_PAGES: [&str; 1] = ["kept"];

/// Pages that are longer than others, with the reason.
const LONG_PAGES: [(&str, usize, &str); 1] =
    [("docs/findings.md", 1200, "one entry for each check, with an index by symptom")];
const MOST_LINES: usize = 300;
/// The page of figures: its laboratory notes are in docs/history.
const FIGURES: (&str, usize) = ("docs/performance.md", 150);

/// A page that a developers' tool writes.
const LEFT_OUT: [&str; 1] = ["docs/conformance.md"];

fn is_left_out(path: &str) -> bool {
    LEFT_OUT.iter().any(|left_out| path.starts_with(left_out))
}

/// The pages, with their paragraphs.
fn pages() -> Vec<(String, Vec<Paragraph>)> {
    let pages = files(&["md"]).into_iter().filter(|(path, _)| !is_left_out(path));
    let pages: Vec<_> = pages.map(|(path, text)| (path, of_page(&text))).collect();
    assert!(pages.len() > 40, "found {} pages; the search misses some", pages.len());
    pages
}

/// The sources, with the paragraphs of their comments.
fn sources() -> Vec<(String, Vec<Paragraph>)> {
    let kinds = [
        (&["rs"][..], &["///", "//!", "//"][..]),
        (&["c", "cpp", "cu", "cuh", "h"], &["///", "//", "/**", "/*", "* "]),
        (&["py", "pyi", "sh", "toml"], &["#"]),
    ];
    let mut found: Vec<(String, Vec<Paragraph>)> = Vec::new();
    for (kinds, marks) in kinds {
        let sources = files(kinds).into_iter().filter(|(path, _)| !is_left_out(path));
        found.extend(sources.map(|(path, text)| (path, of_comments(&text, marks))));
    }
    let python = files(&["py", "pyi"]).into_iter();
    found.extend(python.map(|(path, text)| (path, of_docstrings(&text))));
    assert!(found.len() > 800, "found {} sources; the search misses some", found.len());
    found
}

/// The sentences of a text that begin with a relative and are no question.
fn relatives(text: &str) -> Vec<&str> {
    let ends = |c: char| matches!(c, '.' | '!' | '?' | ':');
    let sentences = text.split_inclusive(ends);
    let is_relative = |sentence: &&str| {
        let words = sentence.trim_start_matches(|c: char| !c.is_alphanumeric());
        let first = words.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        RELATIVES.contains(&first) && !sentence.trim_end().ends_with('?')
    };
    sentences
        .filter(is_relative)
        .map(|sentence| sentence.trim().trim_start_matches("** "))
        .collect()
}

fn has_word<'a>(text: &str, words: &[&'a str]) -> Option<&'a str> {
    let found = text.to_lowercase();
    let mut found = found.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    found.find_map(|word| words.iter().find(|banned| **banned == word).copied())
}

/// The sentences of all pages and comments that `wrong` finds, each with its place.
fn sentences_with(wrong: impl Fn(&str) -> Vec<&str>) -> Vec<String> {
    let mut found = Vec::new();
    for (path, paragraphs) in pages().into_iter().chain(sources()) {
        for Paragraph { line, text } in &paragraphs {
            let wrong = wrong(text).into_iter();
            found.extend(wrong.map(|sentence| format!("{path}:{line}: {sentence}")));
        }
    }
    found
}

#[test]
fn no_sentence_begins_with_a_relative() {
    let found = sentences_with(relatives);
    assert!(found.is_empty(), "begin these with their subject:\n{}", found.join("\n"));
}

#[test]
fn a_comment_begins_with_its_subject() {
    let mut found = Vec::new();
    for (path, paragraphs) in sources() {
        let begins = |text: &str| FRAGMENTS.iter().any(|fragment| text.starts_with(fragment));
        let wrong = paragraphs.iter().filter(|paragraph| begins(&paragraph.text));
        found.extend(wrong.map(|Paragraph { line, text }| format!("{path}:{line}: {text}")));
    }
    assert!(found.is_empty(), "say first what these are about:\n{}", found.join("\n"));
}

/// Most words of a sentence: a longer one is not understood at first reading.
const MOST_WORDS: usize = 40;

/// The sentences of a text that are too long. Tables in comments, lists and formulas are none.
fn long_sentences(text: &str) -> Vec<&str> {
    let sentences = text.split_inclusive(['.', '!', '?', ':', ';']);
    let is_prose = |sentence: &&str| !["|", "·", " = "].iter().any(|mark| sentence.contains(mark));
    let is_long = |sentence: &&str| sentence.split_whitespace().count() > MOST_WORDS;
    sentences.filter(is_prose).filter(is_long).map(str::trim).collect()
}

#[test]
fn sentences_are_short() {
    let found = sentences_with(long_sentences);
    assert!(found.is_empty(), "split these ({MOST_WORDS} words):\n{}", found.join("\n"));
}

#[test]
fn long_sentences_are_seen_in_prose_alone() {
    let long = "word ".repeat(MOST_WORDS + 1) + "end.";
    assert_eq!(long_sentences(&format!("Short. {long}")), [long.as_str()]);
    assert!(long_sentences(&long.replacen("word", "|", 1)).is_empty());
    assert!(long_sentences(&long.replacen(" word", ". word", 20)).is_empty());
}

#[test]
fn technical_things_are_not_spoken_of_as_people() {
    let mut found = Vec::new();
    let all_words = [&WORDS[..], &WORDS_OF_PAGES].concat();
    let pages = pages().into_iter().map(|page| (page, &all_words[..]));
    let sources = sources().into_iter().map(|source| (source, &WORDS[..]));
    for ((path, paragraphs), words) in pages.chain(sources) {
        for Paragraph { line, text } in &paragraphs {
            let wrong = has_word(text, words).into_iter();
            found.extend(wrong.map(|word| format!("{path}:{line}: `{word}`: {text}")));
        }
    }
    assert!(found.is_empty(), "use the field's words:\n{}", found.join("\n"));
}

/// This file, which names the words.
const THIS: &str = "lints/src/prose.rs";
/// The key of a finished command's last line in `--json`, which readers of older reports know.
const KEPT_KEY: &str = "#[serde(rename = \"said\")]";

/// The words of a name: `is_told` and `kTold` have two each.
fn parts_of(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut before = '_';
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && before.is_lowercase()) {
            parts.push(String::new());
        }
        let part = parts.last_mut().unwrap();
        part.extend(c.to_lowercase().filter(|c| *c != '_'));
        before = c;
    }
    parts
}

/// The words of people in the names and texts of a source: `was_told` has one.
fn words_in_names(text: &str) -> Vec<(usize, &str)> {
    let banned = |word: &&str| parts_of(word).iter().any(|part| WORDS.contains(&part.as_str()));
    let lines = (1..).zip(text.lines()).filter(|(_, line)| line.trim() != KEPT_KEY);
    let words = lines.flat_map(|(number, line)| {
        let words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.map(move |word| (number, word))
    });
    words.filter(|(_, word)| banned(word)).collect()
}

#[test]
fn names_and_messages_have_no_words_of_people() {
    let sources = files(&["rs", "py", "pyi", "tree", "c", "cpp", "cu", "cuh", "h"]);
    assert!(sources.len() > 1000, "found {} sources; the search misses some", sources.len());
    let mut found = Vec::new();
    for (path, text) in sources.iter().filter(|(path, _)| path != THIS) {
        let words = words_in_names(text).into_iter();
        found.extend(words.map(|(line, word)| format!("{path}:{line}: `{word}`")));
    }
    assert!(found.is_empty(), "use the field's words:\n{}", found.join("\n"));
}

#[test]
fn pages_are_short() {
    let mut found = Vec::new();
    let listed = |path: &str| LONG_PAGES.iter().find(|(long, ..)| *long == path);
    for (path, text) in files(&["md"]) {
        let most = if path == FIGURES.0 {
            FIGURES.1
        } else {
            listed(&path).map_or(MOST_LINES, |(_, most, _)| *most)
        };
        let lines = text.lines().count();
        if lines > most {
            found.push(format!("{path}: found {lines} lines, expected at most {most}"));
        }
    }
    assert!(found.is_empty(), "split these, or move notes to docs/history:\n{}", found.join("\n"));
}

#[test]
fn a_page_says_in_its_first_lines_for_whom_it_is() {
    // The README is for all; decisions and the index of pages name their readers in the index.
    let is_for_all = |path: &str| {
        ["README.md", "docs/README.md"].contains(&path)
            || path.starts_with("docs/decisions/")
            || is_left_out(path)
    };
    let has_reader = |text: &str| {
        let start = text.lines().skip(1).find(|line| !line.is_empty()).unwrap_or_default();
        start.starts_with("For ")
    };
    let pages = files(&["md"]).into_iter().filter(|(path, _)| !is_for_all(path));
    let found: Vec<String> =
        pages.filter(|(_, text)| !has_reader(text)).map(|(path, _)| path).collect();
    assert!(found.is_empty(), "begin with `For operators`, or another reader: {found:#?}");
}

#[test]
fn relatives_are_distinguished_from_questions() {
    assert_eq!(relatives("What waits, spins. Who waits? A thread."), ["What waits, spins."]);
    assert_eq!(relatives("**INV-1.** Who sees it, sees all"), ["Who sees it, sees all"]);
    assert_eq!(relatives("It says what it does. Which ranks are lost?"), Vec::<&str>::new());
}

#[test]
fn words_of_people_are_seen_in_prose_and_not_in_code() {
    let page = of_page("# Told\n\nRank 0 is\ntold. See `told()`.\n```\ntold\n```\n| a | kept |\n");
    let text: Vec<_> = page.iter().map(|p| (p.line, p.text.as_str())).collect();
    assert_eq!(text, [(3, "Rank 0 is told. See x."), (8, "a"), (8, "kept"), (8, "")]);
    assert_eq!(has_word(&page[0].text, &WORDS), Some("told"));
    assert_eq!(has_word("untold_x", &WORDS), None);
}

#[test]
fn words_of_people_are_seen_in_names() {
    let source = "fn is_told_so() {}\nlet Told = \"said nothing\";\nlet tolder = kTold;\n";
    let found = [(1, "is_told_so"), (2, "Told"), (2, "said"), (3, "kTold")];
    assert_eq!(words_in_names(source), found);
    assert!(words_in_names("    #[serde(rename = \"said\")]\n").is_empty());
}

#[test]
fn comments_of_each_kind_are_seen() {
    let rust =
        of_comments("//! A\n//! b.\nlet a = 1; // c\n/// - d\n///   e\n", &["///", "//!", "//"]);
    let text: Vec<_> = rust.iter().map(|p| (p.line, p.text.as_str())).collect();
    assert_eq!(text, [(1, "A b."), (3, "c"), (4, "d e")]);
    let python = of_docstrings("\"\"\"A.\n\nB\n\"\"\"\nx = 1\ndef f():\n    \"\"\"C.\"\"\"\n");
    let text: Vec<_> = python.iter().map(|p| (p.line, p.text.as_str())).collect();
    assert_eq!(text, [(1, "A."), (3, "B"), (7, "C.")]);
}
