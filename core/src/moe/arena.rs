use super::REGION_ALIGN;
use crate::{Error, ErrorKind, Result};

/// The use of a region; named when the arena is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The output of dispatch number n, held by the caller or its handle.
    Dispatch(u64),
    /// Room for the expert outputs of a handle.
    CombineInput(u32),
    /// Rows of combine number n on their way.
    Combine(u64),
    /// Memory that a lost rank may still write.
    Lost,
}

/// A piece of the arena.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Identifies the region; never used twice.
    pub id: u64,
    /// Offset from the start of the arena in bytes; a multiple of [`REGION_ALIGN`].
    pub offset: u64,
    /// Length in bytes; a multiple of [`REGION_ALIGN`].
    pub bytes: u64,
    holder: Holder,
}

/// Gives out pieces of the arena window, first fit. Its lists have their room from the start.
#[derive(Debug)]
pub struct Arena {
    bytes: u64,
    /// Sorted by offset.
    regions: Vec<Region>,
    next_id: u64,
    /// The config key that makes the arena larger.
    key: String,
}

/// Most regions that may be held at once.
const MOST_REGIONS: usize = 4096;

impl Arena {
    /// An empty arena of `bytes`; `key` is the config key that would make it larger.
    pub fn new(bytes: u64, key: impl Into<String>) -> Self {
        let key = key.into();
        Self { bytes, regions: Vec::with_capacity(MOST_REGIONS), next_id: 1, key }
    }

    /// A region of at least `bytes` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Full`], naming the holders.
    pub fn allocate(&mut self, bytes: u64, holder: Holder) -> Result<Region> {
        let bytes = bytes.max(1).next_multiple_of(REGION_ALIGN);
        let mut start = 0;
        let mut index = 0;
        for region in &self.regions {
            if region.offset - start >= bytes {
                break;
            }
            start = region.offset + region.bytes;
            index += 1;
        }
        if self.bytes.saturating_sub(start) < bytes || self.regions.len() == MOST_REGIONS {
            return Err(self.full(bytes));
        }
        let region = Region { id: self.next_id, offset: start, bytes, holder };
        self.next_id += 1;
        self.regions.insert(index, region);
        Ok(region)
    }

    /// A region for rows that are not counted yet: the first gap of `most` bytes, else the largest gap.
    /// To be cut to the needed size with [`shrink`](Self::shrink).
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate), if there is no gap at all.
    pub fn reserve(&mut self, most: u64, holder: Holder) -> Result<Region> {
        self.allocate(most.min(self.largest_gap()), holder)
    }

    /// Bytes that the next region may have; a multiple of [`REGION_ALIGN`].
    pub fn largest_gap(&self) -> u64 {
        let mut largest = 0;
        let mut start = 0;
        let ends = self.regions.iter().map(|r| (r.offset, r.offset + r.bytes));
        for (gap_end, next) in ends.chain([(self.bytes, self.bytes)]) {
            largest = largest.max((gap_end - start) / REGION_ALIGN * REGION_ALIGN);
            start = next;
        }
        largest
    }

    /// Frees the end of a region. A region that is not held is ignored.
    pub fn shrink(&mut self, id: u64, bytes: u64) {
        if let Some(region) = self.regions.iter_mut().find(|r| r.id == id) {
            region.bytes = region.bytes.min(bytes.max(1).next_multiple_of(REGION_ALIGN));
        }
    }

    /// Frees a region; a region that is not held is ignored.
    pub fn release(&mut self, id: u64) {
        let held = |r: &Region| r.id == id && r.holder != Holder::Lost;
        if let Some(index) = self.regions.iter().position(held) {
            self.regions.remove(index);
        }
    }

    /// Quarantines a region for ever (INV-8).
    #[cold]
    pub fn quarantine(&mut self, id: u64) {
        if let Some(region) = self.regions.iter_mut().find(|r| r.id == id) {
            // The former id is gone, so no caller can free the region.
            (region.holder, region.id) = (Holder::Lost, 0);
        }
    }

    /// The largest holders, for messages.
    pub fn holders(&self) -> String {
        let mut largest = self.regions.clone();
        largest.sort_by_key(|r| std::cmp::Reverse(r.bytes));
        let mut holders: Vec<_> = largest.iter().take(3).map(describe).collect();
        if largest.len() > 3 {
            holders.push(format!("{} more", largest.len() - 3));
        }
        if holders.is_empty() { "no operation".into() } else { holders.join(", ") }
    }

    #[cold]
    fn full(&self, bytes: u64) -> Error {
        let held: u64 = self.regions.iter().map(|r| r.bytes).sum();
        Error::new(
            ErrorKind::Full,
            "allocate region",
            format!(
                "the arena has {} bytes, {held} of them held; needed {bytes} in one piece; held by {}",
                self.bytes,
                self.holders()
            ),
        )
        .with_fix(format!("drop outputs and handles that are done, or raise {}", self.key))
    }
}

fn describe(region: &Region) -> String {
    match region.holder {
        Holder::Dispatch(n) => format!("dispatch {n} ({} bytes)", region.bytes),
        Holder::CombineInput(h) => format!("combine input of handle {h} ({} bytes)", region.bytes),
        Holder::Combine(n) => format!("combine {n} ({} bytes)", region.bytes),
        Holder::Lost => format!("what a lost rank may still write to ({} bytes)", region.bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap_and_gaps_are_used_again() {
        let mut arena = Arena::new(1024, "");
        let a = arena.allocate(200, Holder::Dispatch(0)).expect("room");
        let b = arena.allocate(256, Holder::Dispatch(1)).expect("room");
        let c = arena.allocate(512, Holder::Combine(2)).expect("room");
        assert_eq!((a.offset, b.offset, c.offset), (0, 256, 512));
        arena.release(b.id);
        arena.release(b.id);
        let d = arena.allocate(100, Holder::CombineInput(3)).expect("room");
        let e = arena.allocate(128, Holder::Dispatch(4)).expect("room");
        assert_eq!((d.offset, e.offset), (256, 384));
    }

    #[test]
    fn a_region_in_quarantine_is_never_given_out_again() {
        let mut arena = Arena::new(512, "");
        let a = arena.allocate(256, Holder::Dispatch(7)).expect("room");
        arena.quarantine(a.id);
        arena.release(a.id);
        arena.release(0);
        assert_eq!(arena.allocate(128, Holder::Combine(8)).expect("room").offset, 256);
        let error = arena.allocate(256, Holder::Combine(9)).expect_err("full");
        assert!(error.to_string().contains("what a lost rank may still write to (256 bytes)"));
    }

    #[test]
    fn a_full_arena_names_its_holders_and_the_fix() {
        let mut arena = Arena::new(512, "[kernels.cpu] arena_mib");
        arena.allocate(384, Holder::Dispatch(7)).expect("room");
        let error = arena.allocate(256, Holder::Combine(8)).expect_err("full");
        assert_eq!(error.kind(), ErrorKind::Full);
        let text = error.to_string();
        assert!(text.contains("held by dispatch 7 (384 bytes)"), "{text}");
        assert!(text.contains("arena_mib"), "{text}");
    }

    #[test]
    fn a_reservation_takes_the_largest_gap_and_gives_the_rest_back() {
        let mut arena = Arena::new(1024, "");
        let a = arena.allocate(256, Holder::Dispatch(0)).expect("room");
        let b = arena.reserve(512, Holder::Dispatch(1)).expect("room");
        assert_eq!((b.offset, b.bytes, arena.largest_gap()), (256, 512, 256));
        arena.shrink(b.id, 100);
        let c = arena.reserve(4096, Holder::Dispatch(2)).expect("room");
        assert_eq!((c.offset, c.bytes), (384, 640));
        assert_eq!(
            arena.reserve(1, Holder::Dispatch(3)).expect_err("full").kind(),
            ErrorKind::Full
        );
        arena.release(a.id);
        assert_eq!(arena.reserve(4096, Holder::Dispatch(4)).expect("room").bytes, 256);
    }
}
