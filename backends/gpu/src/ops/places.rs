//! Places in the window of an operation: first the words by which ranks wait for each other, then the records and bytes
//! of each rank and slot.

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::ops::record::RECORD;

/// A word of 8 bytes that another rank stores into this rank's window: the number of the last gather or message in a
/// slot that has come so far, plus 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The record of a rank is here; of a message, its bytes are, too.
    Entered = 0,
    /// The shards of a rank are here.
    Arrived = 1,
    /// The rank has read all that this rank wrote there. Of a message, its credit is here.
    Left = 2,
}

const WORDS: u64 = 3;
const WORD_BYTES: u64 = 8;

/// See the [module](self). Each rank and slot has a place for a record and bytes, and one for a credit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankPlaces {
    pub(crate) ranks: u32,
    pub(crate) in_flight: u32,
    /// Room for the bytes of a rank in a slot.
    pub(crate) room: u64,
}

impl RankPlaces {
    pub(crate) fn new(shape: &KernelShape) -> Self {
        let room = shape.message_bytes.next_multiple_of(64);
        Self { ranks: shape.ranks, in_flight: shape.in_flight, room }
    }

    /// Bytes of the window; none where they are beyond the address space.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let places = u64::from(self.ranks) * u64::from(self.in_flight);
        let one = (2 * RECORD).checked_add(self.room)?;
        let bytes = one.checked_mul(places)?.checked_add(self.words())?;
        (bytes < 1 << 47).then_some(bytes)
    }

    /// Bytes of all words, in whole lines.
    fn words(&self) -> u64 {
        let words = WORDS * u64::from(self.in_flight) * u64::from(self.ranks);
        (words * WORD_BYTES).next_multiple_of(RECORD)
    }

    /// The slot of a gather or a message.
    pub(crate) fn slot(&self, number: u64) -> usize {
        (number % u64::from(self.in_flight)) as usize
    }

    /// The number of a word that `rank` stores. Those of all ranks follow each other.
    pub(crate) fn index(&self, word: Word, slot: usize, rank: u32) -> u32 {
        (word as u32 * self.in_flight + slot as u32) * self.ranks + rank
    }

    /// Where a word lies.
    pub(crate) fn word(&self, word: Word, slot: usize, rank: u32) -> u64 {
        WORD_BYTES * u64::from(self.index(word, slot, rank))
    }

    /// Where the record of a rank lies; its bytes follow.
    pub(crate) fn record(&self, rank: u32, slot: usize) -> u64 {
        let number = slot as u64 * u64::from(self.ranks) + u64::from(rank);
        self.words() + (2 * RECORD + self.room) * number
    }

    /// Where the bytes of a rank lie.
    pub(crate) fn data(&self, rank: u32, slot: usize) -> u64 {
        self.record(rank, slot) + RECORD
    }

    /// Where the credit of a rank for a message lies. At the place of this rank itself: the record that it copies from.
    pub(crate) fn credit(&self, rank: u32, slot: usize) -> u64 {
        self.data(rank, slot) + self.room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_places_of_all_ranks_and_slots_are_apart_and_within_the_window() {
        let places = RankPlaces { ranks: 3, in_flight: 5, room: 128 };
        let mut spans = Vec::new();
        for (rank, slot) in (0..3).flat_map(|rank| (0..5).map(move |slot| (rank, slot))) {
            for word in [Word::Entered, Word::Arrived, Word::Left] {
                let at = places.word(word, slot, rank);
                spans.push((at, at + WORD_BYTES));
            }
            let [record, data, credit] =
                [places.record(rank, slot), places.data(rank, slot), places.credit(rank, slot)];
            assert!([record, data, credit].iter().all(|at| at.is_multiple_of(64)), "{record}");
            let ends = [record + RECORD, data + places.room, credit + RECORD];
            spans.extend([record, data, credit].into_iter().zip(ends));
        }
        spans.sort_unstable();
        assert!(spans.windows(2).all(|two| two[0].1 <= two[1].0), "{spans:?}");
        assert_eq!(spans.last().map(|(_, end)| *end), places.bytes());
    }

    #[test]
    fn the_words_of_all_ranks_in_a_slot_follow_each_other() {
        let places = RankPlaces { ranks: 4, in_flight: 2, room: 64 };
        let at = [0, 1, 2, 3].map(|rank| places.word(Word::Left, 1, rank));
        assert_eq!(at, [at[0], at[0] + 8, at[0] + 16, at[0] + 24]);
        assert_eq!([4, 5, 4].map(|operation| places.slot(operation)), [0, 1, 0]);
    }
}
