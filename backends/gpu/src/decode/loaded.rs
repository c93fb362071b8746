//! The kernels of low-latency operations, loaded.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::call::CombineCall;
use tokenyard_core::moe::{Compression, Layout, Shape, logfmt};

use crate::decode::sizes::DecodeSizes;
use crate::driver::{DeviceFacts, Function, Module};
use crate::engine::args::THREADS;
use crate::moe::args::{DecodeCombineArgs, DispatchArgs};
use crate::moe::loaded::summable;
use crate::moe::sizes::DECLARED;

/// Kernels of low-latency operations: see `decode.cuh`.
#[derive(Debug)]
pub(crate) struct DecodeKernels {
    /// Dispatches of rows that are sent as they are given.
    dispatch: ByLength,
    /// Dispatches of rows that are cast.
    cast: ByLength,
    /// Both to rank-major rows; none where masks may leave ranks out.
    rank_major: Option<[ByLength; 2]>,
    /// The kernel for each type, as in [`Kernels`](crate::moe::loaded::Kernels).
    combine: [ByLength; 3],
    /// Combines of bf16 and of fp16 whose sums are rounded once.
    once: [Function; 2],
    /// Combines of bf16 whose sums travel in LogFMT-10.
    logfmt: Function,
    /// Combines of rank-major rows of bf16 and of fp16; none where masks may leave ranks out.
    by_rank: Option<[Function; 2]>,
    /// The kernel of a rank that does not take part.
    pub(crate) refuse: Function,
}

/// A kernel for rows of which each thread has few pieces of 16 bytes, and one for longer rows. Each has the code for
/// its length alone: blocks wait for instructions, too.
#[derive(Debug)]
struct ByLength {
    short: Function,
    /// Most pieces of a row of the first.
    most: u32,
    long: Function,
}

impl ByLength {
    /// `each`: the pieces of a thread in the first.
    fn load(module: &Arc<Module>, name: &str, each: u32, facts: &DeviceFacts) -> Result<Self> {
        let long = decode_kernel(module, &format!("{name}_long"), facts)?;
        Ok(Self { short: decode_kernel(module, name, facts)?, most: each * THREADS, long })
    }

    /// The kernel for rows of this many pieces.
    fn of(&self, pieces: u32) -> &Function {
        if pieces <= self.most { &self.short } else { &self.long }
    }
}

/// Most pieces of a row for which a combine of rank-major rows has a kernel of its own: two of each thread.
const NARROW_PIECES: u32 = 2 * THREADS;
/// Threads of a block of it, in steps that each device has waves for. With fewer, a thread would have more of a short
/// row than it needs.
const NARROW_STEP: u32 = 64;
const FEWEST_NARROW: u32 = 256;

/// Threads of a block of that kernel. They are as many as the row needs, so that two blocks fit a multiprocessor.
fn narrow_threads(pieces: u32) -> u32 {
    pieces.div_ceil(2).next_multiple_of(NARROW_STEP).clamp(FEWEST_NARROW, THREADS)
}

/// A kernel, and what a block of it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen<'a> {
    pub(crate) function: &'a Function,
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

/// A kernel whose blocks wait for each other. If kernels may start early, this one does, and all its blocks
/// are resident soon. A multiprocessor has memory for one block, there are no more blocks than
/// multiprocessors, and the kernels that hold these wait for none of the blocks. Elsewhere the driver ensures
/// it.
fn decode_kernel(module: &Arc<Module>, name: &str, facts: &DeviceFacts) -> Result<Function> {
    let kernel = if facts.starts_early { module.early(name) } else { module.cooperative(name) }?;
    kernel.allow_shared(facts.most_shared.saturating_sub(DECLARED))?;
    Ok(kernel)
}

/// The kind of a low-latency sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumKind {
    /// The index of the type, as in [`Kernels`](crate::moe::loaded::Kernels).
    pub(crate) of_type: usize,
    /// It is rounded once.
    pub(crate) once: bool,
    /// It travels in LogFMT-10: a sum of bf16.
    coded: bool,
}

impl SumKind {
    /// `layout`: that of the dispatch. Where a rank has one row of a token, its part of the sum is that row.
    pub(crate) fn of(call: &CombineCall<'_>, layout: Layout) -> Self {
        let coded = call.compression == Compression::LogFmt10;
        let once = call.round_once && !layout.has_a_row_per_token();
        Self { of_type: summable(call.x.dtype).0, once, coded }
    }

    /// Most bytes of a partial row for a row of this many numbers.
    pub(crate) fn partial_bytes(self, hidden: u32) -> u64 {
        if self.coded {
            return logfmt::most_bytes(hidden as usize) as u64;
        }
        u64::from(hidden) * if self.once || self.of_type == 2 { 4 } else { 2 }
    }
}

impl DecodeKernels {
    pub(crate) fn load(module: &Arc<Module>, facts: &DeviceFacts, masks: bool) -> Result<Self> {
        let find = |name: &str, each| ByLength::load(module, name, each, facts);
        let refuse = module.function("ty_refuse_decode")?;
        refuse.allow_shared(facts.most_shared.saturating_sub(DECLARED))?;
        let rank_major = match masks {
            true => None,
            false => Some([
                find("ty_dispatch_decode_rank_major", 2)?,
                find("ty_dispatch_decode_rank_major_cast", 1)?,
            ]),
        };
        let narrow = |name: &str| decode_kernel(module, name, facts);
        let by_rank = match masks {
            true => None,
            false => {
                Some([narrow("ty_combine_rank_major_bf16")?, narrow("ty_combine_rank_major_f16")?])
            }
        };
        Ok(Self {
            dispatch: find("ty_dispatch_decode", 2)?,
            cast: find("ty_dispatch_decode_cast", 1)?,
            rank_major,
            combine: [
                find("ty_combine_decode_bf16", 2)?,
                find("ty_combine_decode_f16", 2)?,
                find("ty_combine_decode_f32", 2)?,
            ],
            once: [
                decode_kernel(module, "ty_combine_decode_bf16_once", facts)?,
                decode_kernel(module, "ty_combine_decode_f16_once", facts)?,
            ],
            logfmt: decode_kernel(module, "ty_combine_decode_bf16_logfmt", facts)?,
            by_rank,
            refuse,
        })
    }

    /// Whether rows of a layout go to inboxes.
    pub(crate) fn take(&self, layout: Layout) -> bool {
        match layout {
            Layout::Packed => true,
            Layout::RankMajor { .. } => self.rank_major.is_some(),
            Layout::Flat | Layout::ExpertMajor { .. } => false,
        }
    }

    /// The kernel of a dispatch.
    pub(crate) fn dispatch(&self, dispatch: &DispatchArgs) -> &Function {
        let [plain, cast] = match &self.rank_major {
            Some(both) if dispatch.rank_major != 0 => both.each_ref(),
            _ => [&self.dispatch, &self.cast],
        };
        let kernels = if dispatch.cast != 0 { cast } else { plain };
        kernels.of((dispatch.row_bytes / 16) as u32 + dispatch.scale_words.div_ceil(4))
    }

    /// The kernel of a combine.
    pub(crate) fn combine(
        &self,
        call: &DecodeCombineArgs,
        kind: SumKind,
        shape: &Shape,
    ) -> Chosen<'_> {
        let pieces = (call.combine.row_bytes / 16) as u32;
        if let Some(kernels) = self.by_rank.as_ref().filter(|_| takes_narrow(call, kind)) {
            let threads = narrow_threads(pieces);
            let shared = DecodeSizes::shared_of_narrow(shape, threads);
            return Chosen { function: &kernels[kind.of_type], threads, shared };
        }
        // Sums of fp32 are rounded once in any case.
        let once = self.once.get(kind.of_type).filter(|_| kind.once);
        let function = match once {
            _ if kind.coded => &self.logfmt,
            Some(kernel) => kernel,
            None => self.combine[kind.of_type].of(pieces),
        };
        Chosen { function, threads: THREADS, shared: DecodeSizes::shared_of_combine(shape) }
    }
}

/// Whether the kernel for rank-major rows of 16-bit numbers takes a combine: no weights go with them.
fn takes_narrow(call: &DecodeCombineArgs, kind: SumKind) -> bool {
    let DecodeCombineArgs { combine, merge, .. } = call;
    let has_weights =
        [merge.weights, merge.dispatch_weights, combine.out_weights, call.topk_weights]
            .iter()
            .any(|&at| at != 0);
    let pieces = combine.row_bytes / 16;
    combine.source_places != 0
        && kind.of_type < 2
        && !kind.coded
        && !kind.once
        && !has_weights
        && pieces <= NARROW_PIECES.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_rank_major_combines_has_the_threads_that_a_row_needs() {
        let threads = |hidden: u32| narrow_threads(hidden / 8);
        assert_eq!([7168, 8192, 4096, 2048, 2880].map(threads), [448, 512, 256, 256, 256]);
    }
}
