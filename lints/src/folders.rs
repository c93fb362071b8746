//! A folder says what is inside, what may be touched, and which tests watch it: a reader need not open its files.

use std::collections::BTreeMap;

use crate::product::root;
use crate::texts::files;

/// With fewer sources, a folder is read as fast as a page about it.
const FEW: usize = 6;

/// Pages about a folder.
const PAGES: [&str; 2] = ["README.md", "docs.md"];

/// Roots of modules, whose documentation is about their folder.
const ROOTS: [&str; 4] = ["mod.rs", "lib.rs", "main.rs", "__init__.py"];

/// Whether a folder has a page, or the root of its module begins with documentation.
fn says(folder: &str, texts: &BTreeMap<String, String>) -> bool {
    let inside = ROOTS.iter().map(|name| format!("{folder}/{name}"));
    let mut roots = inside.chain([format!("{folder}.rs")]);
    let begins = |path: String| {
        texts.get(&path).is_some_and(|text| text.starts_with("//!") || text.starts_with("\"\"\""))
    };
    PAGES.iter().any(|page| texts.contains_key(&format!("{folder}/{page}"))) || roots.any(begins)
}

/// The folder that a path is in.
fn above(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

#[test]
fn a_folder_of_many_sources_says_what_is_inside() {
    let texts: BTreeMap<_, _> =
        files(&["rs", "py", "cuh", "h", "c", "cpp", "md"]).into_iter().collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for path in texts.keys().filter(|path| !path.ends_with(".md")) {
        *counts.entry(above(path)).or_default() += 1;
    }
    let many = counts.into_iter().filter(|(folder, count)| *count >= FEW && !folder.is_empty());
    let silent: Vec<_> = many
        .map(|(folder, _)| folder)
        .filter(|folder| ![*folder, above(folder)].iter().any(|folder| says(folder, &texts)))
        .collect();
    assert!(root().join("backends/gpu/device/README.md").exists(), "the root is elsewhere");
    assert!(
        silent.is_empty(),
        "folders of which nothing says what is inside: {silent:?}. Write five lines into a README.md, or as the \
         documentation of the module: what is inside, what may be touched, which tests watch it"
    );
}

#[test]
fn a_page_or_a_documented_root_speaks_for_a_folder() {
    let texts = |path: &str, text: &str| BTreeMap::from([(path.to_owned(), text.to_owned())]);
    assert!(says("a/b", &texts("a/b/README.md", "")));
    assert!(says("a/b", &texts("a/b.rs", "//! About b.")));
    assert!(says("a/b", &texts("a/b/__init__.py", "\"\"\"About b.\"\"\"")));
    assert!(!says("a/b", &texts("a/b/mod.rs", "mod c;")));
    assert!(!says("a/b", &texts("a/b/c.rs", "//! About c.")));
}
