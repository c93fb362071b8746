//! Rows of a combine that lie outside the arena, where peers cannot read them. They are copied into the arena
//! first, or pushed to the ranks that sum them while other rows are summed. See `push_combine.cuh`.

use crate::compile::Rows;
use crate::config::Outside;
use crate::moe::args::{PUSH_WARPS, RINGS};

/// The fewest rows of a unit, because a word of its own reports each unit. Units of rows that are merged as
/// they are pushed have this many: their source waits for them soon after they are made.
const LEAST_ROWS: u32 = 2;
/// The fewest rows of a unit of rows that are only moved.
const LEAST_MOVED: u32 = 8;
/// The most units of the rows that one owner has for a source.
const MOST_UNITS: u32 = 4096;
/// The approximate bytes of a unit: its report takes as long as a move of some of its rows.
const UNIT_BYTES: u64 = 112 << 10;

/// The logarithm (base 2) of the rows of a unit, for rows of `row_bytes`; equal on all ranks.
pub(crate) fn unit_shift(row_bytes: u64, max_tokens: u32) -> u32 {
    let wanted = (UNIT_BYTES / row_bytes.max(1)).clamp(1, 1 << 20) as u32;
    least_rows(max_tokens).max(LEAST_MOVED).max(1 << wanted.ilog2()).ilog2()
}

/// The same for rows that are merged as they are pushed.
pub(crate) fn merged_unit_shift(max_tokens: u32) -> u32 {
    least_rows(max_tokens).ilog2()
}

/// Units of one owner's rows for a source, for any rows.
pub(crate) fn most_units(max_tokens: u32) -> u32 {
    max_tokens.div_ceil(least_rows(max_tokens))
}

fn least_rows(max_tokens: u32) -> u32 {
    max_tokens.div_ceil(MOST_UNITS).next_power_of_two().max(LEAST_ROWS)
}

/// How rows are pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Push {
    /// Blocks that push: the first ones.
    pub(crate) blocks: u32,
    /// Warps of each such block.
    pub(crate) warps: u32,
}

/// The work of a combine on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) ranks: u32,
    /// Blocks that the combine has.
    pub(crate) blocks: u32,
    /// Rows of this rank outside the arena; about as many are summed.
    pub(crate) bytes: u64,
    pub(crate) row_bytes: u64,
    pub(crate) topk: u32,
    /// Warps of a block.
    pub(crate) warps: u32,
}

/// Found on H200 with rows of 14 KiB; only the ratios matter. GB/s, that is KB/µs: the rate at which a
/// block pushes, one of its rings sums, a link carries, and the driver copies.
const BLOCK_PUSHES: f64 = 40.0;
const RING_SUMS: f64 = 23.3;
const LINK: f64 = 315.0;
const COPY: f64 = 2100.0;
/// The least time in ns that a token takes a ring, where its rows are waited for.
const TOKEN: f64 = 1700.0;
/// Below this, the other costs of a combine outweigh a copy.
const LEAST_BYTES: u64 = 32 << 20;

impl Work {
    /// How rows are pushed; none where the config or the estimate prefers a copy.
    pub(crate) fn way(&self, outside: Outside, rows: Rows) -> Option<Push> {
        let may = match outside {
            Outside::Auto => rows == Rows::Tma && self.bytes >= LEAST_BYTES,
            Outside::Push => self.bytes > 0,
            Outside::Copy => false,
        };
        if !may {
            return None;
        }
        let warps = if rows == Rows::Tma { PUSH_WARPS } else { self.warps };
        let push = Push { blocks: self.pushers(), warps };
        let wins = outside == Outside::Push || self.pushed(push.blocks) < self.copied();
        wins.then_some(push)
    }

    /// Bytes of the rows that are pushed: this rank reads its own rows in place.
    fn crosses(&self) -> f64 {
        self.bytes as f64 * f64::from(self.ranks - 1) / f64::from(self.ranks)
    }

    /// Rate in GB/s at which a block sums while units are waited for.
    fn sums(&self) -> f64 {
        let ranks = f64::from(self.ranks);
        let of_token = ranks * (1.0 - (1.0 - 1.0 / ranks).powi(self.topk as i32));
        let bytes = of_token * self.row_bytes as f64;
        f64::from(RINGS) * bytes / (bytes / RING_SUMS).max(TOKEN)
    }

    /// The fewest blocks that push as fast as the others sum.
    fn pushers(&self) -> u32 {
        let [crosses, sums] = [self.crosses(), self.sums()];
        let keeps_up = |pushers: &u32| {
            let [push, sum] = [*pushers, self.blocks - pushers].map(f64::from);
            crosses * sum * sums <= self.bytes as f64 * push * BLOCK_PUSHES
        };
        (1..self.blocks).find(keeps_up).unwrap_or(self.blocks)
    }

    /// Nanoseconds: once all is pushed, all blocks sum the remaining rows.
    fn pushed(&self, pushers: u32) -> f64 {
        let [push, sum, all] = [pushers, self.blocks - pushers, self.blocks].map(f64::from);
        let until = self.crosses() / LINK.min(push * BLOCK_PUSHES);
        let left = self.bytes as f64 - until * sum * self.sums();
        until + left.max(0.0) / (all * self.sums())
    }

    fn copied(&self) -> f64 {
        let sums = f64::from(self.blocks * RINGS) * RING_SUMS;
        self.bytes as f64 / COPY + (self.bytes as f64 / sums).max(self.crosses() / LINK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 4096 tokens, top-8, of 7168 bf16: the rows of a rank among this many ranks.
    fn work(ranks: u32, blocks: u32) -> Work {
        let hit = 1.0 - (1.0 - 1.0 / f64::from(ranks)).powi(8);
        let rows = f64::from(4096 * ranks) * hit;
        Work { ranks, blocks, bytes: rows as u64 * 14_336, row_bytes: 14_336, topk: 8, warps: 16 }
    }

    #[test]
    fn rows_are_pushed_where_that_was_found_faster_than_a_copy() {
        let pushes = |work: Work| work.way(Outside::Auto, Rows::Tma).map(|push| push.blocks);
        assert_eq!(
            [16, 20, 24].map(|blocks| pushes(work(4, blocks))),
            [Some(8), Some(10), Some(12)]
        );
        // 598 and 689 µs were measured there, and 603 for a copy.
        assert_eq!([14, 12].map(|blocks| pushes(work(4, blocks))), [None; 2]);
        // Between two ranks, a token's few rows take less time than the wait for them: 317 to 330 and 253;
        // 247 and 252.
        assert_eq!([16, 20].map(|blocks| pushes(work(2, blocks))), [None; 2]);
        assert!(pushes(work(2, 24)).is_some() && pushes(work(8, 16)).is_some());
        let few = |tokens: u64| Work { bytes: work(4, 16).bytes / 4096 * tokens, ..work(4, 16) };
        assert_eq!([768, 512].map(|tokens| pushes(few(tokens)).is_some()), [true, false]);
    }

    #[test]
    fn the_config_decides_before_the_model_but_nothing_is_pushed_where_there_are_no_rows() {
        let of = |work: Work, outside, rows| work.way(outside, rows);
        assert_eq!(of(work(8, 16), Outside::Copy, Rows::Tma), None);
        assert_eq!(of(work(8, 16), Outside::Auto, Rows::Vector), None);
        let vectors = of(work(8, 16), Outside::Push, Rows::Vector);
        assert_eq!(vectors, Some(Push { blocks: 9, warps: 16 }));
        // One block pushes all, then sums; a rank alone has nothing to push.
        for (ranks, blocks) in [(8, 1), (1, 16), (1, 1)] {
            let push = of(work(ranks, blocks), Outside::Push, Rows::Tma);
            assert_eq!(push, Some(Push { blocks: 1, warps: PUSH_WARPS }));
        }
        assert_eq!(of(Work { bytes: 0, ..work(2, 16) }, Outside::Push, Rows::Tma), None);
    }

    #[test]
    fn every_row_has_a_unit_and_every_unit_a_word() {
        for max_tokens in [1_u32, 7, 8, 9, 4096, 32_768, 32_769, 1 << 24] {
            for row_bytes in [16, 4096, 14_336, 28_672, 1 << 20] {
                let units = max_tokens.div_ceil(1 << unit_shift(row_bytes, max_tokens));
                assert!(units <= most_units(max_tokens) && units <= MOST_UNITS);
            }
            let units = max_tokens.div_ceil(1 << merged_unit_shift(max_tokens));
            assert!(units <= most_units(max_tokens) && units <= MOST_UNITS);
        }
        assert_eq!([14_336, 4096, 28_672].map(|bytes| unit_shift(bytes, 4096)), [3, 4, 3]);
        assert_eq!([4096, 32_768].map(merged_unit_shift), [1, 3]);
    }
}
