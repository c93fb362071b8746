//! How kernels are launched, and their results for the host.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::wait::WaitFor;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::compile::Rows;
use crate::config::Sms;
use crate::driver::{Buffer, Context, Function, Launch, Pinned, RawStream, copy};
use crate::engine::host_counts::HostCounts;
use crate::engine::limits::BlockLimits;
use crate::engine::loaded::Kernels;
use crate::engine::waits::Waits;
use crate::flat_sms::{FlatWork, MOST};
use crate::moe::args::{Outcome, Trace};
use crate::moe::exchange::Exchange;

/// Memory of the device that kernels of all operations share.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) state: Buffer,
    /// Totals of row signals that are waited for, and of done signals: `[slots, R]` each.
    pub(crate) _expected: [Buffer; 2],
    /// `[R]`: bytes that kernels have put to each rank.
    pub(crate) _put_bytes: Buffer,
    /// `[slots]`: operations that this rank has entered.
    pub(crate) _entered: Buffer,
    /// `[R]`: sums of `_expected` of each rank.
    pub(crate) _tallies: Buffer,
    /// `[R]` zeros: the ranks that an output leaves out where a lost rank ends the communicator.
    pub(crate) lost: Buffer,
    /// Per slot: the state that its first kernel leaves for the kernels behind it.
    pub(crate) cells: Buffer,
    /// Bytes of the cell of one slot.
    pub(crate) cell_bytes: u64,
}

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
    /// The first ones, which move rows to other ranks; 0: all blocks do all.
    pub(crate) pushers: u32,
}

/// With fewer blocks than these, those that push have more warps for it: see `most_movers`.
const FEW_BLOCKS: u32 = 64;

impl Roles {
    /// Whether some blocks push, and there are few.
    pub(crate) fn few_push(self) -> bool {
        self.pushers > 0 && self.blocks < FEW_BLOCKS
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

/// Kernels, their arguments, and their outcomes.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) kernels: Kernels,
    /// `DeviceApi::Params`, in words of 8 bytes for its alignment.
    pub(crate) params: Vec<u64>,
    pub(crate) outcomes: Pinned<Outcome>,
    pub(crate) counts: HostCounts,
    /// The failure of an operation that no caller waits for; the first one only.
    pub(crate) late: Pinned<Outcome>,
    /// `[slots]` of [`Trace`], on the device: a store to the host at the end of a kernel holds up the next one.
    pub(crate) traces: Buffer,
    pub(crate) waits: Arc<Waits>,
    pub(crate) memory: DeviceState,
    pub(crate) cap_ns: u64,
    pub(crate) blocks: Blocks,
    /// The memory and the warps of each block.
    pub(crate) block: BlockLimits,
}

impl Launcher {
    /// Launches a kernel on a stream.
    ///
    /// # Safety
    /// `arguments` are of the kernel's type; the memory that they name stays valid until the
    /// operation ends.
    pub(crate) unsafe fn run<T>(
        &self,
        kernel: &Function,
        work: RawStream,
        launch: Launch,
        arguments: &T,
    ) -> Result<()> {
        let mut pointers = [
            std::ptr::from_ref(arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        // SAFETY: by this function's contract; the second parameter is the device API's.
        unsafe { kernel.launch(work, launch, &mut pointers) }
    }

    /// The place where the kernels of a slot leave state for the kernels behind them.
    pub(crate) fn cell(&self, slot: usize) -> u64 {
        self.memory.cells.address() + slot as u64 * self.memory.cell_bytes
    }

    /// The epoch of the outcome of a slot's kernel; the kernel writes it last.
    pub(crate) fn epoch(&self, slot: usize) -> u64 {
        let at = self.outcomes.at(slot);
        // SAFETY: pinned memory that lives as long as `self`; the epoch is a word that the kernel
        // writes last, with release order.
        unsafe { AtomicU64::from_ptr(&raw mut (*at).epoch).load(Ordering::Acquire) }
    }

    /// The outcome of a slot's kernel, once its [`epoch`](Self::epoch) says that it is complete.
    pub(crate) fn outcome(&self, slot: usize) -> Outcome {
        // SAFETY: pinned memory that lives as long as `self`; the kernel has written it and does not
        // touch it again.
        unsafe { self.outcomes.at(slot).read_volatile() }
    }

    /// The failure of an operation that no caller waits for.
    pub(crate) fn late_outcome(&self) -> Option<Outcome> {
        let at = self.late.at(0);
        // SAFETY: pinned memory that lives as long as `self`; the kernel writes the word last, with
        // release order, and then nothing more.
        unsafe {
            let epoch = AtomicU64::from_ptr(&raw mut (*at).epoch);
            (epoch.load(Ordering::Acquire) != 0).then(|| at.read_volatile())
        }
    }

    /// The place of the times of a slot.
    pub(crate) fn trace_at(&self, slot: usize) -> u64 {
        self.traces.address() + (slot * size_of::<Trace>()) as u64
    }

    /// The times of the operation of a slot, no kernel of which runs.
    pub(crate) fn trace(&self, context: &Context, slot: usize) -> Result<Trace> {
        let mut trace = Trace::default();
        let at = &raw mut trace as u64;
        copy(context, at, self.trace_at(slot), size_of::<Trace>() as u64)?;
        Ok(trace)
    }

    /// Waits until all puts of kernels are done (INV-4). No kernel runs.
    pub(crate) fn flush_puts(&self, exchange: &Exchange) -> Result<()> {
        let Some(ring) = self.waits.posting.ring() else { return Ok(()) };
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: exchange.world_rank(),
            signal: 0,
            expected: ring.numbered()?,
            operation: 0,
            level: exchange.level,
        };
        self.waits.waiter.until(&what, || ring.done(), || self.waits.posting.explain())
    }

    /// Ends every wait of this rank's kernels after an error that closes the communicator: no other code
    /// does so, and memory must not be freed while a kernel runs.
    pub(crate) fn abort_on_fatal<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error: &Error| {
            if !matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full) {
                self.waits.end_all();
            }
        })
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
