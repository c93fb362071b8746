//! The wording that all config errors share.

/// The most characters of a found value that a message repeats.
const MAX_SHOWN: usize = 60;

/// `text` in a form for messages: on one line, without control characters, of bounded length.
pub(super) fn shown(text: &str) -> String {
    bounded(text, MAX_SHOWN)
}

/// As [`shown`], with another bound on the characters of `text`.
pub(super) fn bounded(text: &str, most: usize) -> String {
    let mut short = String::new();
    for character in text.chars().take(most) {
        if character.is_control() {
            short.extend(character.escape_default());
        } else {
            short.push(character);
        }
    }
    if text.chars().nth(most).is_some() {
        short.push_str("...");
    }
    short
}

/// The message for an unknown key `found`; `place` is its place, `known` are the keys there.
pub(super) fn unknown_key(found: &str, place: &str, known: &[&str]) -> String {
    let expected = match known {
        [] => "no key is known here".to_owned(),
        [only] => format!("expected {only}"),
        several => format!("expected one of {}", several.join(", ")),
    };
    let hint = match nearest(found, known) {
        Some(name) => format!("; did you mean {name}?"),
        None => String::new(),
    };
    format!("unknown key `{}` {place}; {expected}{hint}", shown(found))
}

/// The value that the text of a string stands for, where a value of another type is expected: an integer,
/// `true` or `false`.
pub(super) fn unquoted(text: &str) -> Option<&str> {
    let text = text.trim();
    let is_integer = text.parse::<i64>().is_ok() && !text.starts_with('+');
    (is_integer || matches!(text, "true" | "false")).then_some(text)
}

/// The milliseconds that a text such as `30s` stands for.
pub(super) fn milliseconds(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits)?;
    let factor = match unit.trim() {
        "" | "ms" => 1,
        "s" | "sec" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// Words for what serde expects, which it may name by a type of Rust.
pub(super) fn plain(expected: &str) -> &str {
    match expected {
        "u8" => "an integer from 0 to 255",
        "u16" => "an integer from 0 to 65535",
        "u32" => "an integer from 0 to 4294967295",
        "u64" | "usize" => "an integer that is not negative",
        "i8" | "i16" | "i32" | "i64" | "isize" => "an integer",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "a table",
        of_rust if of_rust.starts_with("struct ") => "a table",
        other => other,
    }
}

/// The known name of which `found` is a likely misspelling: at most two edits away, and at most a third
/// of the name.
pub(crate) fn nearest<'a>(found: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .filter(|name| name.len().abs_diff(found.len()) <= 2)
        .map(|name| (edits(found.as_bytes(), name.as_bytes()), *name))
        .filter(|(edits, name)| *edits <= 2.min(name.len().div_ceil(3)))
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, name)| name)
}

/// The fewest insertions, removals, replacements and swaps of neighbours that make `a` into `b`.
fn edits(a: &[u8], b: &[u8]) -> usize {
    // Two rows of the usual table; a swap needs one more row.
    let mut row: Vec<usize> = (0..=b.len()).collect();
    let mut above = row.clone();
    for (i, from) in a.iter().enumerate() {
        let mut next = vec![i + 1];
        for (j, to) in b.iter().enumerate() {
            let cell = |row: &[usize], at: usize| row.get(at).copied().unwrap_or(usize::MAX / 2);
            let replaced = cell(&row, j) + usize::from(from != to);
            let mut least = replaced.min(cell(&row, j + 1) + 1).min(cell(&next, j) + 1);
            let swapped = i > 0 && j > 0 && a.get(i - 1) == Some(to) && b.get(j - 1) == Some(from);
            if swapped {
                least = least.min(cell(&above, j - 1) + 1);
            }
            next.push(least);
        }
        above = std::mem::replace(&mut row, next);
    }
    row.last().copied().unwrap_or(a.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_a_unit_of_time_is_milliseconds() {
        for (text, expected) in [
            ("30s", Some(30_000)),
            ("500 ms", Some(500)),
            ("30000", Some(30_000)),
            ("2 min", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("s", None),
            ("", None),
            ("-1s", None),
            ("30 days", None),
            ("18446744073709551615h", None),
        ] {
            assert_eq!(milliseconds(text), expected, "{text}");
        }
    }

    #[test]
    fn edits_counts_insertions_removals_replacements_and_swaps() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("abc", "abc", 0),
            ("kitten", "sitting", 3),
            ("deadine_ms", "deadline_ms", 1),
            ("ab", "ba", 1),
            ("cup", "cpu", 1),
            ("abcd", "badc", 2),
        ] {
            assert_eq!(edits(a.as_bytes(), b.as_bytes()), expected, "{a} to {b}");
        }
    }

    #[test]
    fn only_near_misses_are_suggested() {
        let known = ["bootstrap", "deadline_ms", "late_ms", "use"];
        assert_eq!(nearest("deadine_ms", &known), Some("deadline_ms"));
        assert_eq!(nearest("late_s", &known), Some("late_ms"));
        assert_eq!(nearest("uses", &known), Some("use"));
        assert_eq!(nearest("sms", &known), None);
        assert_eq!(nearest("cup", &["cuda", "cpu"]), Some("cpu"));
        assert_eq!(nearest("threads", &known), None);
    }

    #[test]
    fn shown_text_is_one_bounded_line() {
        assert_eq!(shown("a\n\u{1b}[31m"), "a\\n\\u{1b}[31m");
        assert_eq!(shown(&"x".repeat(61)), format!("{}...", "x".repeat(60)));
        assert_eq!(shown(&"é".repeat(60)), "é".repeat(60));
    }
}
