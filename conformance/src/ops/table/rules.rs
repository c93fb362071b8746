//! The rules of a table, stated once more without code of the product.

use anyhow::{Result, ensure};

use crate::ops::drawn;

/// The number of the bytes of an entry: of a rank, in a layer, of a write.
fn of(rank: u32, layer: u32, entry: u64, write: u64) -> u64 {
    (u64::from(rank) << 4 | u64::from(layer)) << 20 | entry << 12 | write & 0xfff
}

/// The entries that a rank writes to a layer: another number each, at most `most`, and none on some rank of four.
pub(super) fn count(rank: u32, layer: u32, most: u64) -> u64 {
    [most, 1, 0, most / 2 + 1][(rank + layer) as usize % 4].min(most)
}

/// The sizes of a table: bytes of the values and of the scales of an entry, and the most entries of a rank in a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) values: usize,
    pub(super) scales: usize,
    pub(super) most: u64,
}

/// Entries, or what a fetch gives: all values, then all scales.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) values: Vec<u8>,
    pub(super) scales: Vec<u8>,
}

impl Parts {
    /// So many entries, filled.
    pub(super) fn room(count: usize, sizes: Sizes) -> Self {
        let room = |bytes| vec![drawn::FILLER; count * bytes];
        Self { values: room(sizes.values), scales: room(sizes.scales) }
    }

    /// Whether nothing was written.
    pub(super) fn is_untouched(&self) -> bool {
        self.values.iter().chain(&self.scales).all(|byte| *byte == drawn::FILLER)
    }
}

/// The first `count` entries of a rank in a layer, as a write has them.
pub(super) fn entries(rank: u32, layer: u32, count: u64, write: u64, sizes: Sizes) -> Parts {
    let mut parts = Parts { values: Vec::new(), scales: Vec::new() };
    for entry in 0..count {
        let bytes = drawn::bytes(of(rank, layer, entry, write), sizes.values + sizes.scales);
        parts.values.extend(&bytes[..sizes.values]);
        parts.scales.extend(&bytes[sizes.values..]);
    }
    parts
}

/// So many indices that exist in a layer: of all ranks, also several of one entry, and entries in a row.
pub(super) fn indices(ranks: u32, layer: u32, most: u64, number: u64, count: usize) -> Vec<i64> {
    let of_rank = |rank: u32| {
        (0..self::count(rank, layer, most)).map(move |entry| u64::from(rank) * most + entry)
    };
    let all: Vec<u64> = (0..ranks).flat_map(of_rank).collect();
    let drawn = drawn::bytes(number & 0xffff_ffff, count + 1);
    let mut at = usize::from(drawn[count]);
    let next = |step: &u8| {
        // A step of one for half of them.
        at += if step.is_multiple_of(2) { 1 } else { usize::from(*step) };
        all[at % all.len()] as i64
    };
    drawn[..count].iter().map(next).collect()
}

/// Compares what a fetch gave with the entries that its indices name.
///
/// # Errors
/// The first byte that differs.
pub(super) fn check(
    layer: u32,
    write: u64,
    indices: &[i64],
    sizes: Sizes,
    found: &Parts,
) -> Result<()> {
    let most = sizes.most;
    let expected = indices.len() * sizes.values;
    ensure!(found.values.len() == expected, "found {} bytes", found.values.len());
    for (at, index) in indices.iter().enumerate() {
        let (rank, entry) = (*index as u64 / most, *index as u64 % most);
        let values = &found.values[at * sizes.values..][..sizes.values];
        let scales = &found.scales[at * sizes.scales..][..sizes.scales];
        drawn::check(of(rank as u32, layer, entry, write), &[values, scales].concat(), || {
            format!("place {at}: entry {entry} of rank {rank} in layer {layer}, write {write}")
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { values: 24, scales: 4, most: 8 };

    #[test]
    fn entries_that_indices_name_are_right_and_others_are_found() {
        let of_ranks = [0, 1].map(|rank| entries(rank, 1, count(rank, 1, 8), 3, SIZES));
        assert_eq!([0, 1, 2, 3].map(|rank| count(rank, 1, 8)), [1, 0, 5, 8]);
        assert_eq!(of_ranks[1], Parts::room(0, SIZES));
        check(1, 3, &[0], SIZES, &of_ranks[0]).unwrap();
        for (layer, write, index) in [(0, 3, 0), (1, 4, 0), (1, 3, 1), (1, 3, 8)] {
            let error = check(layer, write, &[index], SIZES, &of_ranks[0]).unwrap_err();
            assert!(error.to_string().starts_with("place 0: entry "), "{error}");
        }
        let mut broken = of_ranks[0].clone();
        broken.scales[3] ^= 1;
        let error = check(1, 3, &[0], SIZES, &broken).unwrap_err().to_string();
        assert!(error.contains("byte 27:"), "{error}");
    }

    #[test]
    fn indices_exist_and_name_entries_of_all_ranks_that_have_some() {
        let indices = indices(4, 0, 8, 7, 200);
        let ranks: std::collections::BTreeSet<_> = indices.iter().map(|i| i / 8).collect();
        assert_eq!(ranks.into_iter().collect::<Vec<_>>(), [0, 1, 3]);
        assert!(indices.iter().all(|i| ((i % 8) as u64) < count((i / 8) as u32, 0, 8)));
        assert!(indices.windows(2).any(|two| two[0] + 1 == two[1]), "some lie in a row");
    }
}
