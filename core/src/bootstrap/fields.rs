//! The pieces that payloads are made of: integers, texts and lists.

use std::ops::Range;

use crate::{Error, ErrorKind, Result};

/// A list of byte strings, kept in one allocation: per item a 32-bit length and its bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct List {
    bytes: Vec<u8>,
    items: Vec<Range<u32>>,
}

impl List {
    /// Reads items to the end of `bytes`.
    pub(super) fn parse_all(bytes: Vec<u8>) -> Result<Self> {
        let mut fields = Fields(&bytes);
        let mut items = Vec::new();
        while !fields.0.is_empty() {
            let len = fields.item()?.len() as u32;
            let end = (bytes.len() - fields.0.len()) as u32;
            items.push(end - len..end);
        }
        Ok(Self { bytes, items })
    }

    /// Reads exactly `count` items.
    pub(super) fn parse(bytes: Vec<u8>, count: usize) -> Result<Self> {
        let list = Self::parse_all(bytes)?;
        if list.len() != count {
            return Err(malformed(format!("found {} items, expected {count}", list.len())));
        }
        Ok(list)
    }

    /// The list as it crossed the wire.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The number of items.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Item `i`, or nothing where there is none.
    pub(super) fn get(&self, i: usize) -> &[u8] {
        let range = self.items.get(i).map_or(0..0, |r| r.start as usize..r.end as usize);
        self.bytes.get(range).unwrap_or_default()
    }
}

/// Appends one item of a [`List`].
pub(super) fn put_item(out: &mut Vec<u8>, item: &[u8]) {
    out.extend((item.len() as u32).to_le_bytes());
    out.extend(item);
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

/// Appends a 16-bit length and `text`, cleaned and cut to `limit` bytes.
pub(super) fn put_text(out: &mut Vec<u8>, text: &str, limit: usize) {
    let text = clean(text, limit);
    out.extend((text.len() as u16).to_le_bytes());
    out.extend(text.as_bytes());
}

/// What is left of a payload.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((field, rest)) = self.0.split_at_checked(count) else {
            return Err(malformed(format!("found {} bytes, expected {count} more", self.0.len())));
        };
        self.0 = rest;
        Ok(field)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn text(&mut self, limit: usize) -> Result<String> {
        let len = u16::from_le_bytes(self.array()?) as usize;
        if len > limit {
            return Err(malformed(format!(
                "found a text of {len} bytes, expected {limit} at most"
            )));
        }
        Ok(clean(&String::from_utf8_lossy(self.take(len)?), limit))
    }

    /// One item of a [`List`].
    pub(super) fn item(&mut self) -> Result<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    pub(super) fn end(&self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(malformed(format!("found {} bytes behind the payload, expected none", self.0.len())))
    }
}

/// The error for a payload that is not what its kind says.
pub(super) fn malformed(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "read payload", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_gives_its_items_and_refuses_another_count() {
        let mut bytes = Vec::new();
        for item in [&b"a"[..], b"", b"ccc"] {
            put_item(&mut bytes, item);
        }
        let list = List::parse(bytes.clone(), 3).unwrap();
        assert_eq!((list.get(0), list.get(1), list.get(2)), (&b"a"[..], &b""[..], &b"ccc"[..]));
        for wrong in [0, 2, 4, usize::MAX] {
            let error = List::parse(bytes.clone(), wrong).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }

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
