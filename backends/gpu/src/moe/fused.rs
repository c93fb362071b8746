//! Combine from expert-major and packed rows in one kernel, where kernels load and store in one domain: it
//! merges expert rows, pushes partial rows and sums. See `fused_combine.cuh`.

use tokenyard_core::call::CombineCall;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile::Rows;
use crate::driver::Launch;
use crate::engine::args::THREADS;
use crate::engine::mode::Mode;
use crate::moe::args::{CombineArgs, FusedCombineArgs};
use crate::moe::combine::Combine;
use crate::moe::combine_tiling::LONGEST_FUSED;
use crate::moe::loaded::summable;

impl Combine<'_> {
    /// The blocks of the kernel that merges the rows of a call as it pushes them; none where a kernel of its
    /// own merges them first.
    pub(crate) fn fused_blocks(&self, call: &CombineCall<'_>, mode: &Mode) -> Option<u32> {
        self.moe.kernels.fused.as_ref()?;
        let [row_bytes, _] = self.moe.combine_widths(call);
        let is_tma = self.moe.kernels.rows == Rows::Tma;
        if is_tma && self.moe.combine_tiling(row_bytes).piece_bytes > LONGEST_FUSED {
            return None;
        }
        let state = &self.moe.routing.handles[call.handle as usize];
        let rows = state.received + u64::from(state.tokens);
        self.moe.blocks.of_call(mode.sms).of_fused(mode.at_once, self.moe.kernels.rows, rows)
    }

    /// Launches that kernel.
    ///
    /// # Safety
    /// As [`send`](Self::send).
    pub(crate) unsafe fn launch_fused(
        &self,
        call: &CombineCall<'_>,
        combine: &CombineArgs,
        blocks: u32,
    ) -> Result<()> {
        let Some(kernels) = &self.moe.kernels.fused else {
            return Err(Error::new(ErrorKind::Internal, "combine", "there is no such kernel"));
        };
        let (kernel, _) = summable(call.x.dtype);
        let [row_bytes, _] = self.moe.combine_widths(call);
        let tiling = self.moe.combine_tiling(row_bytes);
        let shared = match self.moe.kernels.rows {
            Rows::Tma => tiling.fused_shared,
            Rows::Vector => tiling.table_bytes,
        };
        let launch = Launch::of_threads(blocks, THREADS, shared);
        let arguments = FusedCombineArgs {
            combine: CombineArgs { stages: tiling.fused_stages, ..*combine },
            merge: self.merge_arguments(call),
        };
        let slot = self.engine.slot(call.operation);
        // SAFETY: the kernel's type; the rest by this function's contract.
        unsafe { self.engine.launch(&kernels[kernel], launch, &arguments, slot) }
    }
}
