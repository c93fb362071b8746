//! Compares the named values of all ranks, and names the ranks that differ.

use super::message::decode_pairs;
use super::text::{clean, name_ranks};
use tokenyard_errors::Result;

const MAX_ITEMS_SHOWN: usize = 4;
const MAX_GROUPS_SHOWN: usize = 8;
const MAX_TEXT_SHOWN: usize = 80;

/// The ranks that arrived, grouped by their values. Ranks that agree share one copy.
#[derive(Default)]
pub(super) struct Agreement {
    groups: Vec<Group>,
}

struct Group {
    encoded: Vec<u8>,
    items: Vec<(String, String)>,
    ranks: Vec<u32>,
}

/// A name and its value.
type Item<'a> = (&'a str, &'a str);

impl Agreement {
    /// Adds the values of `rank`.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when `encoded` is no list of names and values.
    pub(super) fn add(&mut self, rank: u32, encoded: Vec<u8>) -> Result<()> {
        if let Some(group) = self.groups.iter_mut().find(|group| group.encoded == encoded) {
            group.ranks.push(rank);
            return Ok(());
        }
        let items = decode_pairs(&encoded)?;
        self.groups.push(Group { encoded, items, ranks: vec![rank] });
        Ok(())
    }

    /// The differences, by item and by rank, or nothing when all ranks agree.
    pub(super) fn difference(&self) -> Option<String> {
        if self.groups.len() < 2 {
            return None;
        }
        let longest = self.groups.iter().map(|group| group.items.len()).max().unwrap_or(0);
        let mut differing = (0..longest).filter_map(|at| self.describe(at));
        let mut text = differing.by_ref().take(MAX_ITEMS_SHOWN).collect::<Vec<_>>().join("; ");
        match differing.count() {
            0 => {}
            1 => text.push_str("; and 1 more item"),
            more => text.push_str(&format!("; and {more} more items")),
        }
        Some(text)
    }

    /// The value of each rank at place `at`, or nothing when all ranks hold the same value there.
    fn describe(&self, at: usize) -> Option<String> {
        let mut held: Vec<(Option<Item<'_>>, Vec<u32>)> = Vec::new();
        for Group { items, ranks, .. } in &self.groups {
            let item = items.get(at).map(|(name, value)| (name.as_str(), value.as_str()));
            match held.iter_mut().find(|(other, _)| *other == item) {
                Some((_, holders)) => holders.extend(ranks),
                None => held.push((item, ranks.clone())),
            }
        }
        if held.len() < 2 {
            return None;
        }
        // Not in the order of arrival, so that all runs report the same text.
        held.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
        held.sort_unstable_by_key(|(_, ranks)| ranks.first().copied());
        let name = held.first().and_then(|(item, _)| *item).map(|(name, _)| name);
        let name = name.filter(|name| held.iter().all(|(i, _)| i.is_some_and(|(n, _)| n == *name)));
        let more = held.len().saturating_sub(MAX_GROUPS_SHOWN);
        let shown = held.iter().take(MAX_GROUPS_SHOWN);
        let mut parts: Vec<String> =
            shown.map(|(item, ranks)| who_has(ranks, *item, name.is_some())).collect();
        if more > 0 {
            parts.push(format!("and {more} more values"));
        }
        let title = name.map_or_else(|| format!("item {at}"), shorten);
        Some(format!("{title}: {}", parts.join(", ")))
    }
}

fn who_has(ranks: &[u32], item: Option<Item<'_>>, name_is_known: bool) -> String {
    let what = match item {
        None => "nothing".to_owned(),
        Some((_, value)) if name_is_known => format!("{:?}", shorten(value)),
        Some((name, value)) => format!("{} = {:?}", shorten(name), shorten(value)),
    };
    format!("{} {} {what}", name_ranks(ranks), if ranks.len() == 1 { "has" } else { "have" })
}

fn shorten(text: &str) -> String {
    clean(text, MAX_TEXT_SHOWN)
}

#[cfg(test)]
mod tests {
    use super::super::message::encode;
    use super::*;

    fn items(pairs: &[(&str, &str)]) -> Vec<u8> {
        let pairs: Vec<_> = pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        encode(&pairs)
    }

    fn difference(ranks: &[&[(&str, &str)]]) -> Option<String> {
        let mut agreement = Agreement::default();
        for (rank, pairs) in ranks.iter().enumerate() {
            agreement.add(rank as u32, items(pairs)).unwrap();
        }
        agreement.difference()
    }

    #[test]
    fn equal_lists_agree_and_are_kept_once() {
        let mut agreement = Agreement::default();
        for rank in 0..100 {
            agreement.add(rank, items(&[("hidden", "7168")])).unwrap();
        }
        assert_eq!(agreement.groups.len(), 1);
        assert_eq!(agreement.difference(), None);
        assert_eq!(difference(&[&[], &[]]), None);
    }

    #[test]
    fn a_different_value_is_named_with_the_ranks_of_each() {
        let (a, b) = ([("topk", "8"), ("hidden", "7168")], [("topk", "8"), ("hidden", "4096")]);
        assert_eq!(
            difference(&[&a, &b, &a, &a]).unwrap(),
            "hidden: ranks 0, 2-3 have \"7168\", rank 1 has \"4096\""
        );
    }

    #[test]
    fn the_report_does_not_depend_on_who_came_first() {
        let mut agreement = Agreement::default();
        for (rank, value) in [(2, "b"), (1, "a"), (0, "a")] {
            agreement.add(rank, items(&[("x", value)])).unwrap();
        }
        let text = agreement.difference().unwrap();
        assert_eq!(text, "x: ranks 0-1 have \"a\", rank 2 has \"b\"");
    }

    #[test]
    fn a_missing_and_a_renamed_item_are_distinguished() {
        assert_eq!(
            difference(&[&[("a", "1")], &[]]).unwrap(),
            "item 0: rank 0 has a = \"1\", rank 1 has nothing"
        );
        assert_eq!(
            difference(&[&[("a", "1")], &[("b", "1")]]).unwrap(),
            "item 0: rank 0 has a = \"1\", rank 1 has b = \"1\""
        );
    }

    #[test]
    fn the_report_is_bounded() {
        let long = "x".repeat(1000);
        let many: Vec<Vec<(String, String)>> = (0..50)
            .map(|rank| (0..9).map(|i| (format!("item{i}"), format!("{rank}{long}"))).collect())
            .collect();
        let mut agreement = Agreement::default();
        for (rank, items) in many.iter().enumerate() {
            agreement.add(rank as u32, encode(items)).unwrap();
        }
        let text = agreement.difference().unwrap();
        assert!(
            text.contains("and 42 more values") && text.ends_with("and 5 more items"),
            "{text}"
        );
        assert!(text.len() < 4096, "{}", text.len());
    }

    #[test]
    fn malformed_items_are_refused() {
        for bytes in [&[][..], &[1], &[1, 1, b'a'], &[1, 0, 0, 0], &[1, 1, 255, 0], &[255; 8]] {
            assert!(Agreement::default().add(0, bytes.to_vec()).is_err(), "{bytes:?}");
        }
    }
}
