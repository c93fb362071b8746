//! The session of core, and the engine of kernels on GPUs, lie below the operations and say no word of theirs. An
//! operation that is no MoE has neither experts nor rows of tokens.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::collections::BTreeSet;

use crate::product;

/// The folders below the operations.
const FOLDERS: [&str; 2] = ["core/src/session", "backends/gpu/src/engine"];

/// Words of MoE, in the singular.
const WORDS: [&str; 13] = [
    "combine", "decode", "dispatch", "expert", "gate", "hidden", "moe", "packed", "replay",
    "routing", "row", "token", "topk",
];

/// Words that stand below operations all the same: the file, the words, and the reason.
const ALLOWED: &[(&str, &[&str], &str)] = &[
    (
        "backends/gpu/src/engine/args.rs",
        &["expert", "row", "token", "topk"],
        "the names of device/common/args.cuh, where one structure for all saves registers",
    ),
    ("backends/gpu/src/engine/mod.rs", &["row"], "a field of that structure"),
    ("backends/gpu/src/engine/places.rs", &["moe"], "the module of core that has the arena"),
    ("backends/gpu/src/engine/queue.rs", &["row"], "a phase of the ABI"),
    ("core/src/session/reporter/folder.rs", &["hidden"], "files whose names begin with a dot"),
    ("core/src/session/variables.rs", &["token"], "the start of a misspelt variable"),
];

/// The words of a text, in small letters: a name has several, between capitals or low lines.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for c in text.chars() {
        let begins = !c.is_ascii_alphabetic() || (c.is_uppercase() && before.is_lowercase());
        if begins {
            words.push(String::new());
        }
        if c.is_ascii_alphabetic() {
            words.last_mut().unwrap().push(c.to_ascii_lowercase());
        }
        before = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// The word of MoE that a word is, in the singular.
fn of_moe(word: &str) -> Option<&'static str> {
    let is = |known: &&&str| {
        let ends = |stem: &str, ends: &[&str]| {
            word.strip_prefix(stem).is_some_and(|end| ends.contains(&end))
        };
        ends(known, &["", "s", "es", "d", "ed", "ing"])
            || known.strip_suffix('e').is_some_and(|stem| ends(stem, &["ing"]))
    };
    WORDS.iter().find(is).copied()
}

/// The words of MoE in the product's part of a source, comments included.
fn found(text: &str) -> BTreeSet<&'static str> {
    let tests = ["#[cfg(test)]\nmod tests {", "#[cfg(test)]\npub(crate) mod tests {"];
    let end = tests.iter().filter_map(|start| text.find(start)).min().unwrap_or(text.len());
    let product = &text[..end];
    words(product).iter().filter_map(|word| of_moe(word)).collect()
}

#[test]
fn below_operations_no_word_is_of_one() {
    let sources = product::files(&FOLDERS, &["rs"]);
    assert!(sources.len() > 40, "found {} sources; the search misses some", sources.len());
    let mut all: BTreeSet<(&str, &str)> = BTreeSet::new();
    for (path, text) in &sources {
        all.extend(found(text).into_iter().map(|word| (path.as_str(), word)));
    }
    let allowed: BTreeSet<_> = ALLOWED
        .iter()
        .flat_map(|(path, words, _)| words.iter().map(|word| (*path, *word)))
        .collect();
    let more: Vec<_> = all.difference(&allowed).collect();
    assert!(
        more.is_empty(),
        "words of operations below them: {more:?}. Let the operation give what the session or the engine needs, or \
         use a word that fits every operation"
    );
    let fewer: Vec<_> = allowed.difference(&all).collect();
    assert!(fewer.is_empty(), "exceptions that nothing needs any more: {fewer:?}");
}

#[test]
fn words_are_seen_in_names_of_every_kind_and_not_inside_others() {
    for text in
        ["DispatchCall", "TY_PHASE_ROWS", "max_tokens", "// It dispatched.", "experts", "combining"]
    {
        assert_eq!(found(text).len(), 1, "{text}");
    }
    for text in
        ["tokenyard_core", "tracing::dispatcher", "arrow", "grown", "#[cfg(test)]\nmod tests { row"]
    {
        assert_eq!(found(text).len(), 0, "{text}");
    }
}
