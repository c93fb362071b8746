//! Text from peers and about ranks, fit to print.

use serde::{Deserialize, Deserializer, Serializer, de};

/// The form in which a text of at most `LIMIT` bytes is sent, for `#[serde(with = "Text::<LIMIT>")]`. The
/// sender cuts the text, the receiver refuses a longer one, and both clean it.
pub(super) struct Text<const LIMIT: usize>;

impl<const LIMIT: usize> Text<LIMIT> {
    pub(super) fn serialize<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&clean(text, LIMIT))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        let text = <&str>::deserialize(from)?;
        if text.len() > LIMIT {
            return Err(de::Error::custom("too long"));
        }
        Ok(clean(text, LIMIT))
    }
}

/// `text` fit to print and at most `limit` bytes long: control characters become `?`.
pub(super) fn clean(text: &str, limit: usize) -> String {
    let mut out = String::with_capacity(text.len().min(limit));
    for c in text.chars().map(|c| if c.is_control() { '?' } else { c }) {
        if out.len() + c.len_utf8() > limit {
            break;
        }
        out.push(c);
    }
    out
}

/// `rank 3` or `ranks 0-2, 5`; `ranks` are in order. Long lists are cut.
pub(super) fn name_ranks(ranks: &[u32]) -> String {
    const MAX_SPANS: usize = 12;
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => spans.push((rank, rank)),
        }
    }
    let mut shown: Vec<String> = spans
        .iter()
        .take(MAX_SPANS)
        .map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") })
        .collect();
    let left: u32 = spans.iter().skip(MAX_SPANS).map(|(a, b)| b - a + 1).sum();
    if left > 0 {
        shown.push(format!("and {left} more"));
    }
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, shown.join(", "))
}

/// Lower-case hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_between_characters_and_carries_no_control_characters() {
        assert_eq!(clean("a\u{1b}[31m\n", 100), "a?[31m?");
        assert_eq!(clean("ééé", 5), "éé");
    }

    #[test]
    fn ranks_are_named_in_spans_and_long_lists_are_cut() {
        assert_eq!(name_ranks(&[3]), "rank 3");
        assert_eq!(name_ranks(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
        let odd: Vec<u32> = (0..100).map(|i| 2 * i).collect();
        assert!(name_ranks(&odd).ends_with("22, and 88 more"));
    }
}
