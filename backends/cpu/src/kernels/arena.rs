use tokenyard_core::moe::REGION_ALIGN;
use tokenyard_core::{Error, ErrorKind, Result};

/// What a region is used for; named when the arena is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// The output of dispatch number n, held by the caller or its handle.
    Dispatch(u64),
    /// Room for the expert outputs of a handle.
    CombineInput(u32),
    /// Rows of combine number n on their way.
    Combine(u64),
    /// What a lost rank may still write to.
    Lost,
}

/// A piece of the arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) id: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    holder: Holder,
}

/// Gives out pieces of the arena window, first fit. Its lists have their room from the start.
#[derive(Debug)]
pub(super) struct Arena {
    bytes: u64,
    /// Sorted by offset.
    regions: Vec<Region>,
    next_id: u64,
}

/// Regions that may be held at once.
const MOST_REGIONS: usize = 4096;

impl Arena {
    pub(super) fn new(bytes: u64) -> Self {
        Self { bytes, regions: Vec::with_capacity(MOST_REGIONS), next_id: 1 }
    }

    /// A region of at least `bytes` bytes at a multiple of [`REGION_ALIGN`].
    pub(super) fn allocate(&mut self, bytes: u64, holder: Holder) -> Result<Region> {
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

    /// Takes a region back; one that is not held is ignored.
    pub(super) fn release(&mut self, id: u64) {
        let held = |r: &Region| r.id == id && r.holder != Holder::Lost;
        if let Some(index) = self.regions.iter().position(held) {
            self.regions.remove(index);
        }
    }

    /// Keeps a region out of use for good (INV-8).
    #[cold]
    pub(super) fn quarantine(&mut self, id: u64) {
        if let Some(region) = self.regions.iter_mut().find(|r| r.id == id) {
            // No longer that of its former id, so nobody can give it back.
            (region.holder, region.id) = (Holder::Lost, 0);
        }
    }

    #[cold]
    fn full(&self, bytes: u64) -> Error {
        let mut largest = self.regions.clone();
        largest.sort_by_key(|r| std::cmp::Reverse(r.bytes));
        let mut holders: Vec<_> = largest.iter().take(3).map(describe).collect();
        if largest.len() > 3 {
            holders.push(format!("{} more", largest.len() - 3));
        }
        let held: u64 = self.regions.iter().map(|r| r.bytes).sum();
        Error::new(
            ErrorKind::Full,
            "allocate region",
            format!(
                "the arena has {} bytes, {held} of them held; needed {bytes} in one piece; held by {}",
                self.bytes,
                if holders.is_empty() { "nobody".into() } else { holders.join(", ") }
            ),
        )
        .with_fix("drop outputs and handles that are done, or raise [kernels.cpu] arena_mib")
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
        let mut arena = Arena::new(1024);
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
        let mut arena = Arena::new(512);
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
        let mut arena = Arena::new(512);
        arena.allocate(384, Holder::Dispatch(7)).expect("room");
        let error = arena.allocate(256, Holder::Combine(8)).expect_err("full");
        assert_eq!(error.kind(), ErrorKind::Full);
        let text = error.to_string();
        assert!(text.contains("held by dispatch 7 (384 bytes)"), "{text}");
        assert!(text.contains("arena_mib"), "{text}");
    }
}
