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
    /// Memory that captured graphs write when they are launched: for captured operations only.
    Graphs,
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
    /// Whether graphs write it, also after it was released.
    is_captured: bool,
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
        let region = Region { id: self.next_id, offset: start, bytes, holder, is_captured: false };
        self.next_id += 1;
        self.regions.insert(index, region);
        Ok(region)
    }

    /// A region for an operation that a graph records: of what earlier ones have released, else of the rest of the
    /// arena. When it is released, only such operations get it again: each launch of the graph writes there.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_captured(&mut self, bytes: u64, holder: Holder) -> Result<Region> {
        let wanted = bytes.max(1).next_multiple_of(REGION_ALIGN);
        let fits = |r: &Region| r.holder == Holder::Graphs && r.bytes >= wanted;
        let Some(index) = self.regions.iter().position(fits) else {
            let id = self.allocate(bytes, holder)?.id;
            return self.mark_captured(id).ok_or_else(|| self.full(wanted));
        };
        let free = self.regions[index];
        let has_rest = free.bytes > wanted && self.regions.len() < MOST_REGIONS;
        let bytes = if has_rest { wanted } else { free.bytes };
        let region = Region { id: self.next_id, holder, bytes, ..free };
        self.next_id += 1;
        self.regions[index] = region;
        if has_rest {
            let (offset, bytes) = (free.offset + bytes, free.bytes - bytes);
            self.regions.insert(index + 1, Region { offset, bytes, ..free });
        }
        Ok(region)
    }

    fn mark_captured(&mut self, id: u64) -> Option<Region> {
        let region = self.regions.iter_mut().find(|r| r.id == id)?;
        region.is_captured = true;
        Some(*region)
    }

    /// Whether graphs write a region that is held.
    pub fn is_captured(&self, id: u64) -> bool {
        self.regions.iter().any(|r| r.id == id && r.is_captured)
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
        // The end of a captured region may belong to graphs as well.
        if let Some(region) = self.regions.iter_mut().find(|r| r.id == id && !r.is_captured) {
            region.bytes = region.bytes.min(bytes.max(1).next_multiple_of(REGION_ALIGN));
        }
    }

    /// Frees a region; a region that is not held is ignored. A captured one is free for captured operations only.
    pub fn release(&mut self, id: u64) {
        let held = |r: &Region| r.id == id && !matches!(r.holder, Holder::Lost | Holder::Graphs);
        let Some(index) = self.regions.iter().position(held) else { return };
        if !self.regions[index].is_captured {
            self.regions.remove(index);
            return;
        }
        (self.regions[index].holder, self.regions[index].id) = (Holder::Graphs, 0);
        self.join(index + 1);
        self.join(index);
    }

    /// Makes one of a region that captured operations may have and the one before it, if both are and touch.
    fn join(&mut self, index: usize) {
        let Some([before, region]) = index
            .checked_sub(1)
            .and_then(|first| self.regions.get_mut(first..)?.first_chunk_mut::<2>())
        else {
            return;
        };
        let both = before.holder == Holder::Graphs && region.holder == Holder::Graphs;
        if both && before.offset + before.bytes == region.offset {
            before.bytes += region.bytes;
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
        Holder::Graphs => format!("captured graphs ({} bytes)", region.bytes),
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
    fn what_captured_operations_release_serves_captured_operations_only() {
        let mut arena = Arena::new(1024, "");
        let first = arena.allocate_captured(256, Holder::Dispatch(0)).expect("room");
        assert!(arena.is_captured(first.id));
        arena.release(first.id);
        arena.release(first.id);
        assert!(!arena.is_captured(first.id));
        assert_eq!(arena.allocate(128, Holder::Dispatch(1)).expect("room").offset, 256);
        let again = arena.allocate_captured(256, Holder::Dispatch(2)).expect("room");
        assert_eq!((again.offset, again.bytes), (0, 256));
        assert_ne!(again.id, first.id);
        // Its end belongs to graphs, so it does not become free.
        arena.shrink(again.id, 128);
        assert_eq!(arena.largest_gap(), 1024 - 384);
        let text = arena.allocate(2048, Holder::Dispatch(3)).expect_err("full").to_string();
        assert!(text.contains("dispatch 2 (256 bytes)"), "{text}");
        arena.release(again.id);
        let text = arena.allocate(2048, Holder::Dispatch(3)).expect_err("full").to_string();
        assert!(text.contains("captured graphs (256 bytes)"), "{text}");
    }

    #[test]
    fn thousands_of_captured_operations_of_all_sizes_take_the_memory_of_the_largest_few() {
        let mut arena = Arena::new(1 << 20, "");
        let eager = arena.allocate(REGION_ALIGN, Holder::Dispatch(0)).expect("room");
        let mut held = std::collections::VecDeque::new();
        for operation in 0..10_000 {
            // Two outputs live at a time, of 1 to 24 KiB.
            let bytes = 1024 * (1 + operation % 24);
            let region = arena.allocate_captured(bytes, Holder::Dispatch(operation)).expect("room");
            assert!(region.offset > eager.offset);
            held.push_back(region.id);
            if held.len() > 2 {
                arena.release(held.pop_front().expect("three"));
            }
        }
        held.into_iter().for_each(|id| arena.release(id));
        assert!(arena.regions.len() <= 2, "free neighbours are one: {:?}", arena.regions);
        assert!(arena.largest_gap() >= (1 << 20) - 128 * 1024, "{}", arena.largest_gap());
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
