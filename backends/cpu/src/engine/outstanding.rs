//! Commands that are under way.

use std::cell::Cell;

use crate::engine::losses::Losses;

/// Commands that are not done (INV-4), on both links, by slot and world rank.
#[derive(Debug)]
pub(crate) struct Outstanding {
    ranks: usize,
    counts: Vec<Cell<u32>>,
    /// The sum of each slot's counts, for a quick look.
    totals: Vec<Cell<u32>>,
    /// The sum of each world rank's counts.
    to: Vec<Cell<u32>>,
}

impl Outstanding {
    pub(crate) fn new(slots: usize, ranks: usize) -> Self {
        let none = |count: usize| vec![Cell::new(0); count];
        Self { ranks, counts: none(slots * ranks), totals: none(slots), to: none(ranks) }
    }

    /// The load of a command, so that its end is counted right.
    pub(crate) fn tag(&self, slot: usize, rank: u32) -> u64 {
        (slot * self.ranks + rank as usize) as u64
    }

    /// The world rank that a command went to; none for a tag that was never given.
    pub(crate) fn rank_of(&self, tag: u64) -> Option<u32> {
        let tag = tag as usize;
        (tag < self.counts.len()).then(|| (tag % self.ranks) as u32)
    }

    pub(crate) fn posted(&self, tag: u64) {
        self.count(tag, u32::saturating_add);
    }

    pub(crate) fn done(&self, tag: u64) {
        self.count(tag, u32::saturating_sub);
    }

    fn count(&self, tag: u64, step: fn(u32, u32) -> u32) {
        let tag = tag as usize;
        let Some(count) = self.counts.get(tag) else { return };
        for count in [count, &self.totals[tag / self.ranks], &self.to[tag % self.ranks]] {
            count.set(step(count.get(), 1));
        }
    }

    /// How many commands to a rank are under way.
    pub(crate) fn to(&self, rank: u32) -> u32 {
        self.to[rank as usize].get()
    }

    /// The first rank with a command of a slot that is not done, but for lost ranks. Their commands may
    /// never end, and the data only goes to the lost rank.
    pub(crate) fn left(&self, slot: usize, losses: &Losses) -> Option<u32> {
        if self.totals[slot].get() == 0 {
            return None;
        }
        (0..)
            .zip(&self.counts[slot * self.ranks..][..self.ranks])
            .find(|(rank, count)| count.get() != 0 && !losses.is_lost(*rank))
            .map(|(rank, _)| rank)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;

    #[test]
    fn a_slot_is_done_when_what_is_left_of_it_goes_to_lost_ranks() {
        static LOST: [AtomicU8; 3] = [const { AtomicU8::new(0) }; 3];
        let losses = Losses::of(Some(&LOST), 3);
        let outstanding = Outstanding::new(2, 3);
        let [live, dying] = [1, 2].map(|rank| outstanding.tag(1, rank));
        outstanding.posted(live);
        outstanding.posted(dying);
        outstanding.posted(dying);
        assert_eq!([0, 1].map(|slot| outstanding.left(slot, &losses)), [None, Some(1)]);
        LOST[2].store(1, Ordering::Release);
        assert_eq!(outstanding.left(1, &losses), Some(1), "a command to a live rank is under way");
        outstanding.done(live);
        assert_eq!(outstanding.left(1, &losses), None);
    }

    #[test]
    fn commands_are_counted_by_rank_over_all_slots() {
        let outstanding = Outstanding::new(2, 3);
        outstanding.posted(outstanding.tag(0, 1));
        outstanding.posted(outstanding.tag(1, 1));
        outstanding.posted(outstanding.tag(1, 2));
        assert_eq!([0, 1, 2].map(|rank| outstanding.to(rank)), [0, 2, 1]);
        outstanding.done(outstanding.tag(0, 1));
        assert_eq!(outstanding.to(1), 1);
        // A tag that no command had: it comes from a transport.
        outstanding.done(u64::MAX);
        assert_eq!(outstanding.to(2), 1);
    }
}
