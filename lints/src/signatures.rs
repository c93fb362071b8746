//! No function takes a tuple apart in its list of parameters: a tuple only hides the number of arguments
//! and their meaning. Values that belong together get a named type.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

/// All sources below `folder`, tests included, without build output.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_str().unwrap();
        if name == "target" || name.starts_with('.') {
        } else if entry.file_type().unwrap().is_dir() {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// The text without its `//` comments, line by line.
fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

/// The end of a list that begins at the front of `text` with `open`: the position after the matching
/// `close`.
fn list_end(text: &str, open: char, close: char) -> Option<usize> {
    let (mut depth, mut last) = (0, ' ');
    for (at, letter) in text.char_indices() {
        if letter == open {
            depth += 1;
        } else if letter == close && last != '-' {
            // An arrow closes nothing.
            depth -= 1;
            if depth == 0 {
                return Some(at + 1);
            }
        }
        last = letter;
    }
    None
}

/// The pieces between the commas of a list that are in no brackets.
fn split(list: &str) -> Vec<&str> {
    let (mut depth, mut begin, mut last, mut all) = (0, 0, ' ', Vec::new());
    for (at, letter) in list.char_indices() {
        match letter {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if last != '-' => depth -= 1,
            ',' if depth == 0 => {
                all.push(&list[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
        last = letter;
    }
    all.push(&list[begin..]);
    all
}

/// The parameters of a function; `text` begins after its name.
fn parameters(text: &str) -> Option<Vec<&str>> {
    let text = match text.strip_prefix('<') {
        Some(_) => &text[list_end(text, '<', '>')?..],
        None => text,
    };
    let end = list_end(text, '(', ')')?;
    Some(split(text.get(1..end - 1)?))
}

/// Lines of a source on which a function begins that takes a tuple apart in its parameters.
fn hidden_arguments(text: &str) -> Vec<usize> {
    let text = without_comments(text);
    let mut lines = Vec::new();
    for (at, word) in text.match_indices("fn ") {
        let is_word = !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let rest = &text[at + word.len()..];
        let name = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$'));
        let Some(list) = name.filter(|_| is_word).map(|end| &rest[end..]) else { continue };
        if !list.starts_with(['(', '<']) {
            continue;
        }
        let is_tuple = |parameter: &str| {
            let pattern = parameter.trim_start_matches(|c: char| c.is_whitespace() || c == '&');
            // In a property test, a strategy follows the pattern, not a type.
            let has_type = |end| pattern[end..].trim_start().starts_with(':');
            pattern.starts_with('(') && list_end(pattern, '(', ')').is_some_and(has_type)
        };
        if parameters(list).is_some_and(|all| all.into_iter().any(is_tuple)) {
            lines.push(text[..at].matches('\n').count() + 1);
        }
    }
    lines
}

#[test]
fn no_function_hides_arguments_in_a_tuple() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    sources(&root, &mut found);
    assert!(found.len() > 600, "found {} sources; the search misses some", found.len());
    let mut wrong = Vec::new();
    for path in found {
        let name = path.strip_prefix(&root).unwrap();
        let lines = hidden_arguments(&std::fs::read_to_string(&path).unwrap());
        wrong.extend(lines.iter().map(|line| format!("{}:{line}", name.display())));
    }
    assert!(
        wrong.is_empty(),
        "found functions that take a tuple apart in their parameters. Expected an argument \
         for each value, at most five, or a named type for values that belong together:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn a_tuple_is_seen_in_each_kind_of_signature() {
    // The text is assembled here, because the test searches this file too.
    let function =
        |rest: &str| format!("// A comment (a, b): (u8, u8)\nimpl A {{\n    fn {rest} {{}}\n}}");
    for hidden in [
        "one((a, b): (u8, u8))",
        "after(&mut self, x: u8, (a, mut b): (u8, Vec<u8>)) -> u8",
        "on_lines(\n        x: u8,\n        (a, b): (&str, u8),\n    )",
        "by_reference(&(a, b): &(u8, u8))",
        "of_a_kind<T: Fn(u8) -> u8, const N: usize>((a, b): (T, [u8; N]))",
        "nested(((a, b), c): ((u8, u8), u8))",
    ] {
        assert_eq!(hidden_arguments(&function(hidden)), [3], "{hidden}");
    }
}

#[test]
fn other_parameters_closures_and_comments_are_not_taken_for_tuples() {
    for plain in [
        "fn none() {}",
        "fn typed(span: (u8, u8), f: impl Fn((u8, u8)) -> (u8, u8), g: fn(u8, u8)) {}",
        "fn apart(Span { from, to }: Span, Place(a, b): Place) {}",
        "fn inside(x: u8) { let (a, b): (u8, u8) = x; each(|(a, b): (u8, u8)| a) }",
        "fn units(_: ()) {}",
        "fn property((a, b) in (0_u8..3, 0_u8..3)) {}",
        "// fn plain((a, b): (u8, u8)) {}",
        "fn generic<T: Fn() -> u8>(pairs: &[(u8, u8)], map: Map<u8, (u8, u8)>) {}",
    ] {
        assert_eq!(hidden_arguments(plain), [0; 0], "{plain}");
    }
}
