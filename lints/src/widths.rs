//! Lines are short enough for two windows beside each other: pages, comments and the product's code.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use crate::product;
use crate::texts::files;

/// Most columns of a comment, and of a line of code that rustfmt leaves as it is.
const CODE: usize = 120;
/// Most columns of a page's text. Tables and blocks of code are free: Markdown cannot wrap them.
const PAGE: usize = 140;

/// One declaration a line, of functions of other libraries; no formatter wraps these tables.
fn is_table_of_functions(path: &str) -> bool {
    path.starts_with("sys/") && path.ends_with("/library.rs")
}

/// The lines of a text that are wider than `most` columns, by number.
fn wide<'a>(lines: impl Iterator<Item = (usize, &'a str)>, most: usize) -> Vec<(usize, &'a str)> {
    lines.filter(|(_, line)| line.chars().count() > most).collect()
}

/// The lines of a page that are text, by number: neither code nor tables.
fn of_text(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(page.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence && !line.starts_with('|')
    })
}

/// The lines of a source that are comments as a whole, by number.
fn of_comments<'a>(source: &'a str, marks: &[&str]) -> impl Iterator<Item = (usize, &'a str)> {
    let is_comment = |line: &str| marks.iter().any(|mark| line.trim_start().starts_with(mark));
    (1..).zip(source.lines()).filter(move |(_, line)| is_comment(line))
}

fn assert_none(found: &[String], most: usize) {
    assert!(found.is_empty(), "wrap these at {most} columns:\n{}", found.join("\n"));
}

#[test]
fn the_text_of_a_page_is_not_wide() {
    let pages = files(&["md"]);
    assert!(pages.len() > 40, "found {} pages; the search misses some", pages.len());
    let mut found = Vec::new();
    for (path, text) in &pages {
        let lines = wide(of_text(text), PAGE).into_iter();
        found.extend(lines.map(|(number, line)| format!("{path}:{number}: {line}")));
    }
    assert_none(&found, PAGE);
}

#[test]
fn comments_are_not_wide() {
    let kinds = [
        (&["rs", "c", "cpp", "cu", "cuh", "h"][..], &["//", "/*", "* "][..]),
        (&["py", "pyi", "sh", "toml"], &["#"]),
    ];
    let mut found = Vec::new();
    for (kinds, marks) in kinds {
        for (path, text) in files(kinds) {
            let lines = wide(of_comments(&text, marks), CODE).into_iter();
            found.extend(lines.map(|(number, line)| format!("{path}:{number}: {line}")));
        }
    }
    assert_none(&found, CODE);
}

#[test]
fn the_code_of_the_product_is_not_wide() {
    let mut found = Vec::new();
    for (path, text) in product::sources() {
        let lines = wide((0..).zip(product::lines(&text)), CODE).into_iter();
        let lines = lines.filter(|_| !is_table_of_functions(&path));
        found.extend(lines.map(|(_, line)| format!("{path}: {line}")));
    }
    for (path, text) in product::files(&["backends"], &["cu", "cuh"]) {
        let lines = wide((1..).zip(text.lines()), CODE).into_iter();
        found.extend(lines.map(|(number, line)| format!("{path}:{number}: {line}")));
    }
    assert_none(&found, CODE);
}

#[test]
fn wide_lines_are_seen_in_text_and_not_in_tables_and_code() {
    let page = "abcd\n| abcd |\n```\nabcd\n```\n- abcd\nab\n";
    assert_eq!(wide(of_text(page), 3), [(1, "abcd"), (6, "- abcd")]);
    let source = "/// ab\nlet a = 1; // ab\n    // cd\n";
    assert_eq!(wide(of_comments(source, &["//"]), 5), [(1, "/// ab"), (3, "    // cd")]);
}
