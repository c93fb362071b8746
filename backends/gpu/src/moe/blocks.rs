//! How many blocks kernels have, and what each of them does.

use crate::compile::Rows;
use crate::config::Sms;
use crate::flat_sms::{FlatWork, MOST};

/// The blocks of kernels, one to a multiprocessor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// Blocks of kernels that exchange rows, where there is no formula for them.
    pub(crate) exchange: u32,
    /// Whether `FlatWork` has the number for flat rows.
    pub(crate) by_formula: bool,
    /// Blocks of kernels that touch no other rank.
    pub(crate) local: u32,
    /// Whether the config sets their number.
    pub(crate) local_is_set: bool,
    /// The config's number for low-latency operations.
    pub(crate) decode: Sms,
    /// The multiprocessors of the device.
    pub(crate) all: u32,
}

/// The blocks of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Roles {
    pub(crate) blocks: u32,
    /// The first ones, which count tokens: more counts take longer to sum up.
    pub(crate) counting: u32,
    /// The first ones, which move rows to other ranks, or put them in runs; 0: all blocks do all.
    pub(crate) pushers: u32,
}

/// With fewer blocks than these, those that push have more warps for it: see `most_movers`.
const FEW_BLOCKS: u32 = 64;

impl Roles {
    /// Whether some blocks push, and there are few.
    pub(crate) fn few_push(self) -> bool {
        self.pushers > 0 && self.blocks < FEW_BLOCKS
    }

    /// These blocks put rows in runs. Of as many as both levels may have, others help to count and to gather metadata.
    /// The exchange inside starts behind that, but for one block that waits for it.
    pub(crate) fn helped_by(self, both: u32) -> Self {
        let blocks = both.saturating_sub(1).max(self.blocks);
        Self { blocks, counting: blocks, pushers: self.blocks }
    }

    /// Rows of a share of a tile: few where there are many warps to spread them.
    pub(crate) fn part_rows(self) -> u32 {
        if self.pushers > 0 { 1 } else { 8 }
    }
}

/// All blocks of a dispatch do the same work where a rank has fewer tokens and the config sets no number of
/// blocks, or where there are fewer blocks.
const LEAST_TOKENS: u32 = 512;
const LEAST_BLOCKS: u32 = 24;
/// Blocks that cast rows as fast as a link carries them. On H100, rows of 7168 channels took 16 blocks 213 µs and 24
/// blocks 146, and the link 87.
const CASTING: u32 = 40;
/// With fewer blocks, a separate kernel merges expert rows. Measured on two H200 with 4096 tokens: one kernel took
/// 235, 344, 440 and 630 µs with 64, 32, 24 and 16 blocks. Two took 344, 391, 447 and 562 µs: as many blocks merged,
/// and 16 pulled.
const LEAST_FUSED: u32 = 24;
/// The same without bulk copies, which was measured with another version of the kernels.
const LEAST_FUSED_VECTOR: u32 = 96;

impl Blocks {
    /// The blocks of a call that names this many multiprocessors, or 0: as with both numbers of a config set to it.
    pub(crate) fn of_call(self, sms: u32) -> Self {
        let named = sms.min(self.all);
        match sms {
            0 => self,
            _ => Self {
                exchange: named,
                by_formula: false,
                local: named,
                local_is_set: true,
                ..self
            },
        }
    }

    /// The most blocks that count the tokens of a dispatch.
    pub(crate) fn most_counting(self) -> u32 {
        if self.by_formula { MOST.min(self.all) } else { self.exchange }
    }

    /// Blocks of an operation that moves flat rows. `more`: it may do more than the formula counts, or less, so it has
    /// no fewer blocks than without a formula.
    pub(crate) fn of_link(self, work: &FlatWork, more: bool) -> u32 {
        if !self.by_formula {
            return self.exchange;
        }
        let wanted = work.sms().min(self.all);
        if more { wanted.max(self.exchange) } else { wanted }
    }

    /// Whether a dispatch has the blocks of local work: where no caller overlaps what it waits for, or where the
    /// config sets their number.
    fn has_local(self, at_once: bool, max_tokens: u32) -> bool {
        self.local_is_set || (at_once && max_tokens >= LEAST_TOKENS)
    }

    /// Blocks of a dispatch whose rows are spread over experts as they arrive. A quarter of them pushes rows, or as
    /// many as the config names for an exchange if that is fewer; more where they cast. Fewer fill the link alone,
    /// but not beside blocks that spread: on two H200, 4096 tokens, top-8, 16, 24 and 32 of 132 took 207, 172 and
    /// 161 µs with FP8, and 266, 239 and 233 with BF16.
    pub(crate) fn of_tiles(self, at_once: bool, casts: bool, max_tokens: u32) -> Roles {
        let Self { local, .. } = self;
        let quarter = local / 4;
        let wanted = self.has_local(at_once, max_tokens);
        // Where the config lets all blocks push, a quarter does.
        let exchange = if self.exchange < local { self.exchange } else { quarter };
        let most = if self.by_formula { self.most_counting() } else { exchange };
        let counting = exchange.max(most.min(quarter));
        let pushers = if casts { CASTING.min(local / 3) } else { counting.min(quarter) };
        match wanted && local >= LEAST_BLOCKS {
            true => Roles { blocks: local, counting, pushers },
            false => self.alike(),
        }
    }

    /// Blocks of a dispatch that all do the same, where there is no formula.
    pub(crate) fn alike(self) -> Roles {
        Roles { blocks: self.exchange, counting: self.exchange, pushers: 0 }
    }

    /// Blocks of a dispatch that casts flat rows.
    pub(crate) fn of_flat_cast(self, at_once: bool, max_tokens: u32) -> Roles {
        let more = self.has_local(at_once, max_tokens);
        let blocks = if more { CASTING.min(self.local).max(self.exchange) } else { self.exchange };
        Roles { blocks, ..self.alike() }
    }

    /// Blocks of a dispatch of flat rows that are not cast.
    pub(crate) fn of_flat(self, work: &FlatWork, more: bool) -> Roles {
        let blocks = self.of_link(work, more);
        Roles { blocks, counting: blocks, pushers: 0 }
    }

    /// Blocks of a kernel that merges this many rows and sums, and exchanges them: those of local work, where
    /// each has rows. None where a caller may overlap what it waits for, unless the config sets a number; and none
    /// with too few of them.
    pub(crate) fn of_fused(self, at_once: bool, by: Rows, rows: u64) -> Option<u32> {
        let least = if by == Rows::Tma { LEAST_FUSED } else { LEAST_FUSED_VECTOR };
        let wins = self.local >= least && (at_once || self.local_is_set);
        let needed = rows.div_ceil(2).clamp(1, self.local.max(1).into()) as u32;
        wins.then(|| needed.max(self.exchange.min(self.local)))
    }

    /// Blocks of a low-latency operation of at most this many tokens of a rank.
    pub(crate) fn of_decode(self, tokens: u32) -> u32 {
        self.decode.decode_blocks(self.all, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flat_sms::FlatOp;

    const BLOCKS: Blocks = Blocks {
        exchange: 16,
        by_formula: false,
        local: 132,
        local_is_set: false,
        decode: Sms::Auto,
        all: 132,
    };
    const ALIKE: Roles = Roles { blocks: 16, counting: 16, pushers: 0 };

    #[test]
    fn a_quarter_of_the_blocks_pushes_rows_that_the_others_spread_unless_there_is_too_little_of_both()
     {
        let of = |blocks: Blocks| blocks.of_tiles(true, false, 4096);
        assert_eq!(of(BLOCKS), Roles { blocks: 132, pushers: 16, ..ALIKE });
        assert_eq!(of(Blocks { local: 32, ..BLOCKS }), Roles { blocks: 32, pushers: 8, ..ALIKE });
        assert_eq!(of(Blocks { local: 16, ..BLOCKS }), ALIKE);
        assert_eq!(
            [(false, 4096), (true, 128)].map(|(at_once, m)| BLOCKS.of_tiles(at_once, false, m)),
            [ALIKE; 2]
        );
        let set = Blocks { local: 64, local_is_set: true, ..BLOCKS };
        assert_eq!(set.of_tiles(false, false, 16), Roles { blocks: 64, pushers: 16, ..ALIKE });
        let auto = Blocks { by_formula: true, ..BLOCKS };
        assert_eq!(of(auto), Roles { blocks: 132, counting: 32, pushers: 32 });
        // Not all of them, even if the config would let them.
        let same = Blocks { exchange: 64, ..set };
        assert_eq!(of(same), Roles { blocks: 64, counting: 16, pushers: 16 });
    }

    #[test]
    fn more_blocks_cast_rows_than_fill_the_link() {
        assert_eq!(BLOCKS.of_flat_cast(true, 4096), Roles { blocks: 40, ..ALIKE });
        assert_eq!(BLOCKS.of_tiles(true, true, 4096), Roles { blocks: 132, pushers: 40, ..ALIKE });
        let few = [(false, 4096), (true, 128)];
        assert_eq!(few.map(|(at_once, m)| BLOCKS.of_flat_cast(at_once, m)), [ALIKE; 2]);
        let set = Blocks { local: 24, local_is_set: true, ..BLOCKS };
        assert_eq!(set.of_flat_cast(false, 16).blocks, 24);
    }

    #[test]
    fn the_formula_has_the_blocks_of_flat_rows_unless_the_config_sets_their_number() {
        let of = |op, row_bytes| FlatWork {
            op,
            ranks: 8,
            topk: 8,
            tokens: 4096,
            row_bytes,
            beside_bytes: 68,
        };
        let [fp8, bf16] = [7168, 14_336].map(|bytes| of(FlatOp::Dispatch, bytes));
        let auto = Blocks { by_formula: true, ..BLOCKS };
        assert_eq!(auto.of_flat(&fp8, false), Roles { blocks: 12, counting: 12, pushers: 0 });
        assert_eq!(
            [auto.of_link(&bf16, false), auto.of_link(&of(FlatOp::Combine, 14_336), false)],
            [8; 2]
        );
        assert_eq!(Blocks { all: 4, ..auto }.of_flat(&bf16, false).blocks, 4);
        assert_eq!(BLOCKS.of_flat(&bf16, false), ALIKE);
        // Weights, biases, and T that only the device knows are not in the formula.
        let bias = of(FlatOp::Combine, 14_336);
        assert_eq!([auto, BLOCKS].map(|blocks| blocks.of_link(&bias, true)), [16; 2]);
        let short = FlatWork { topk: 4, row_bytes: 2880, ranks: 2, ..of(FlatOp::Dispatch, 2880) };
        assert_eq!(auto.of_link(&short, true), 24);
        // Handles have memory for what as many blocks count as any operation has.
        assert_eq!([auto, BLOCKS].map(Blocks::most_counting), [32, 16]);
        assert_eq!(Blocks { all: 20, ..auto }.most_counting(), 20);
    }

    #[test]
    fn a_call_may_name_its_blocks_and_a_device_bounds_them() {
        let auto = Blocks { by_formula: true, ..BLOCKS };
        for blocks in [auto, BLOCKS] {
            assert_eq!(blocks.of_call(0).alike(), blocks.alike());
            assert_eq!([1, 24, 200].map(|sms| blocks.of_call(sms).alike().blocks), [1, 24, 132]);
            assert!(!blocks.of_call(24).by_formula);
        }
        // As the config's number, for local work too: not all of them push.
        let set = Blocks { exchange: 64, local: 64, local_is_set: true, ..BLOCKS };
        let of = |blocks: Blocks| blocks.of_tiles(false, false, 16);
        assert_eq!(of(auto.of_call(64)), of(set));
    }

    #[test]
    fn rows_are_merged_by_as_many_blocks_as_have_some_and_apart_where_a_caller_may_overlap() {
        let of = |rows| BLOCKS.of_fused(true, Rows::Tma, rows);
        assert_eq!([8000, 200, 1, 0].map(of), [Some(132), Some(100), Some(16), Some(16)]);
        assert_eq!(BLOCKS.of_fused(false, Rows::Tma, 8000), None);
        let set = |local| Blocks { local, local_is_set: true, ..BLOCKS };
        assert_eq!(set(24).of_fused(false, Rows::Tma, 8000), Some(24));
        assert_eq!(set(23).of_fused(true, Rows::Tma, 8000), None);
        assert_eq!([96, 95].map(|b| set(b).of_fused(true, Rows::Vector, 8000)), [Some(96), None]);
    }
}
