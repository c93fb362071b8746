//! A folder says what is inside, what may be touched, and which tests watch it: a reader need not open its files.

use std::collections::BTreeMap;

use crate::product::root;
use crate::texts::files;

/// With fewer sources, a folder is read as fast as a page about it.
const FEW: usize = 6;

/// Pages about a folder.
const PAGES: [&str; 2] = ["README.md", "docs.md"];

/// Kinds of sources, and of pages.
const KINDS: [&str; 7] = ["rs", "py", "cuh", "h", "c", "cpp", "md"];

/// Roots of modules, whose documentation is about their folder.
const ROOTS: [&str; 4] = ["mod.rs", "lib.rs", "main.rs", "__init__.py"];

/// The text of a folder's page, and the documentation of its root.
fn words(folder: &str, texts: &BTreeMap<String, String>) -> String {
    let text = |path: String| texts.get(&path).map(String::as_str);
    let pages = PAGES.iter().filter_map(|name| text(format!("{folder}/{name}")));
    let inside = ROOTS.iter().map(|name| format!("{folder}/{name}"));
    let roots = inside.chain([format!("{folder}.rs")]).filter_map(text);
    let heads = roots.filter_map(|text| match text.strip_prefix("\"\"\"") {
        Some(text) => text.split("\"\"\"").next().map(str::to_owned),
        None => Some(text.lines().take_while(|line| line.starts_with("//!")).collect()),
    });
    pages.map(str::to_owned).chain(heads).collect()
}

/// The folder that a path is in.
fn above(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Folders of many sources, and those of the root of a crate.
fn of_many_sources(texts: &BTreeMap<String, String>) -> Vec<&str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for path in texts.keys().filter(|path| !path.ends_with(".md")) {
        let is_root = path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
        *counts.entry(above(path)).or_default() += if is_root { FEW } else { 1 };
    }
    counts.retain(|folder, count| *count >= FEW && !folder.is_empty());
    counts.into_keys().collect()
}

#[test]
fn a_folder_of_many_sources_names_the_tests_that_watch_it() {
    let texts: BTreeMap<_, _> = files(&KINDS).into_iter().collect();
    let many = of_many_sources(&texts);
    let of_product = many.iter().filter(|folder| !folder.split('/').any(|part| part == "tests"));
    let unwatched: Vec<_> = of_product
        .filter(|folder| {
            ![*folder, above(folder)].iter().any(|folder| words(folder, &texts).contains("test"))
        })
        .collect();
    assert!(
        unwatched.is_empty(),
        "folders of which nothing says which tests watch them: {unwatched:?}. Name the tests in their README.md, or in \
         the documentation of the module: \"Watched by the tests in these files, and ...\""
    );
}

#[test]
fn a_folder_of_many_sources_says_what_is_inside() {
    let texts: BTreeMap<_, _> = files(&KINDS).into_iter().collect();
    let many = of_many_sources(&texts);
    let is_silent = |folder: &str| words(folder, &texts).is_empty();
    let silent: Vec<_> =
        many.iter().filter(|folder| is_silent(folder) && is_silent(above(folder))).collect();
    assert!(root().join("backends/gpu/device/README.md").exists(), "the root is elsewhere");
    assert!(
        silent.is_empty(),
        "folders of which nothing says what is inside: {silent:?}. Write five lines into a README.md, or as the \
         documentation of the module: what is inside, what may be touched, which tests watch it"
    );
}

#[test]
fn a_page_or_a_documented_root_speaks_for_a_folder() {
    let of = |path: &str, text: &str| {
        words("a/b", &BTreeMap::from([(path.to_owned(), text.to_owned())]))
    };
    assert_eq!(of("a/b/README.md", "About b.\nTests: c.rs"), "About b.\nTests: c.rs");
    assert_eq!(of("a/b.rs", "//! About b.\n\nmod tests;"), "//! About b.");
    assert_eq!(of("a/b/__init__.py", "\"\"\"About b.\"\"\"\nimport test"), "About b.");
    assert_eq!(of("a/b/mod.rs", "mod c;"), "");
    assert_eq!(of("a/b/c.rs", "//! About c."), "");
}
