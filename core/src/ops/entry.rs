//! Entries of a table, as kernel sets find and move them.

use crate::{Error, ErrorKind, Result, abi};

/// Where an entry is: its rank, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPlace {
    /// World rank.
    pub rank: u32,
    /// From 0, of the rank's entries of the layer.
    pub number: u64,
}

/// The entries of a layer that each rank has written.
#[derive(Clone, Copy, Debug)]
pub struct LayerCounts<'a> {
    /// The most of a rank: index i names entry `i % most` of rank `i / most`.
    pub most: u64,
    /// By rank.
    pub counts: &'a [u64],
}

impl LayerCounts<'_> {
    /// The entry that an index names; none where no rank has written it.
    pub fn find(&self, index: i64) -> Option<EntryPlace> {
        let index = u64::try_from(index).ok()?;
        let (rank, number) = (index / self.most, index % self.most);
        let count = self.counts.get(usize::try_from(rank).ok()?)?;
        (number < *count).then_some(EntryPlace { rank: rank as u32, number })
    }

    /// The error of a fetch with an index that names no entry.
    #[cold]
    pub fn no_entry(&self, layer: u32, index: i64) -> Error {
        let (ranks, most) = (self.counts.len() as u64, self.most);
        let text = match u64::try_from(index) {
            Ok(index) if index / most < ranks => {
                let (rank, number) = (index / most, index % most);
                let count = self.counts[rank as usize];
                format!(
                    "index {index} is entry {number} of rank {rank}, which has written {count} to layer {layer}"
                )
            }
            _ => format!(
                "index {index} is of no rank; expected 0 to {}, that is {most} for each of {ranks} ranks",
                most * ranks - 1
            ),
        };
        Error::new(ErrorKind::Refused, "fetch entries", text)
    }
}

/// The entries of a layer that each rank has in a write, at most `most`.
///
/// # Errors
/// More of them: core has checked them, so that is a fault of the host.
///
/// # Safety
/// The counts are those of so many ranks, and valid as long as the result is used.
pub unsafe fn counts_of(entries: &abi::TyEntries, ranks: usize, most: u64) -> Result<&[u64]> {
    // SAFETY: by this function's contract.
    let counts = unsafe { std::slice::from_raw_parts(entries.counts, ranks) };
    match counts.iter().max().filter(|found| **found > most) {
        None => Ok(counts),
        Some(found) => {
            let text = format!("found {found} entries; expected at most {most}");
            Err(Error::new(ErrorKind::Internal, "write entries", text))
        }
    }
}

/// The error of a call for a layer that the shape does not have.
#[cold]
pub fn no_layer(layer: u32) -> Error {
    let text = format!("found layer {layer}; expected one of the shape");
    Error::new(ErrorKind::Internal, "use table", text)
}

/// One of the two things that an entry is made of.
#[derive(Clone, Copy, Debug)]
pub struct EntryField {
    /// Memory with so many bytes of each entry, without gaps.
    pub part: *mut std::ffi::c_void,
    /// Bytes of an entry.
    pub width: u64,
    /// How far they lie behind the start of an entry of a window.
    pub behind: u64,
}

/// The parts of `count` entries; those without bytes are left out.
pub fn entry_fields(parts: &[abi::TyPart; 2], count: u64) -> impl Iterator<Item = EntryField> {
    let widths = parts.map(|part| part.bytes.checked_div(count).unwrap_or_default());
    let fields = [(parts[0], 0), (parts[1], widths[0])].into_iter().zip(widths);
    fields
        .map(|((part, behind), width)| EntryField { part: part.data, width, behind })
        .filter(|field| field.width > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTS: LayerCounts<'_> = LayerCounts { most: 10, counts: &[3, 10, 0] };

    #[test]
    fn an_index_names_the_entry_of_a_rank() {
        let named = |index| COUNTS.find(index).map(|entry| (entry.rank, entry.number));
        let found = [0, 2, 10, 19].map(named);
        assert_eq!(found, [(0, 0), (0, 2), (1, 0), (1, 9)].map(Some));
    }

    #[test]
    fn an_index_without_an_entry_is_named_with_what_there_is() {
        let text = |index| {
            assert_eq!(COUNTS.find(index), None, "{index}");
            COUNTS.no_entry(2, index).to_string()
        };
        assert!(text(3).contains("entry 3 of rank 0, which has written 3 to layer 2"));
        assert!(text(20).contains("entry 0 of rank 2, which has written 0 to layer 2"));
        for beyond in [-1, i64::MIN, 30, i64::MAX] {
            let text = text(beyond);
            assert!(
                text.contains("of no rank; expected 0 to 29, that is 10 for each of 3"),
                "{text}"
            );
        }
    }

    #[test]
    fn the_parts_of_an_entry_lie_behind_each_other() {
        let part = |bytes| abi::TyPart { data: std::ptr::null_mut(), bytes };
        let of = |parts, count| {
            let fields = entry_fields(&parts, count);
            fields.map(|field| (field.behind, field.width)).collect::<Vec<_>>()
        };
        assert_eq!(of([part(24), part(12)], 3), [(0, 8), (8, 4)]);
        assert_eq!(of([part(24), part(0)], 3), [(0, 8)]);
        assert_eq!(of([part(0), part(0)], 0), []);
    }
}
