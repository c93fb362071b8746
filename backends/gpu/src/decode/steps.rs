//! Low-latency operations: dispatches to the packed layout, and the combines that follow them. Their rows
//! are sent without a request. See `decode.cuh`.
//!
//! With separate send and receive they are two kernels, and no multiprocessor is held between them. Where
//! the host waits for the outcome of a call, one kernel sends and receives.

use tokenyard_core::Result;
use tokenyard_core::call::{CombineCall, DispatchCall};
use tokenyard_core::moe::Layout;

use crate::decode::loaded::SumKind;
use crate::decode::sizes::{DecodeCall, not_packed, senders};
use crate::driver::Launch;
use crate::engine::Engine;
use crate::engine::args::{Common, ENTER, Masking, THREADS};
use crate::engine::masking::Masks;
use crate::engine::mode::Mode;
use crate::moe::args::{
    CombineArgs, DecodeCombineArgs, DecodeDispatchArgs, DecodeRefusalArgs, DispatchArgs, MergeArgs,
    RECEIVES, SENDS,
};
use crate::moe::combine::returned;
use crate::moe::loaded::summable;
use crate::moe::operation::{CombineOp, Operation};
use crate::moe::state::MoeState;
use crate::moe::wanted::Wanted;

/// The kernel that receives an operation whose send was a separate call.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "one per slot, and an operation allocates nothing")]
pub(crate) enum DecodeHalf {
    None,
    Dispatch(DecodeDispatchArgs, Launch),
    Combine(DecodeCombineArgs, SumKind, Launch),
}

/// Low-latency operations of one exchange.
#[derive(Debug)]
pub(crate) struct DecodeSteps<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) moe: &'a mut MoeState,
}

impl DecodeSteps<'_> {
    /// A call without statistics. Masks are empty where a lost rank ends the communicator.
    fn call(&self) -> DecodeCall {
        let masks = self.engine.waits.masks.as_ref();
        let masking = masks.map_or_else(Masking::default, Masks::arguments);
        DecodeCall { masking, ..DecodeCall::default() }
    }

    /// The phases of a kernel that sends.
    fn phases(mode: &Mode) -> u32 {
        if mode.at_once || !mode.no_host_sync { SENDS | RECEIVES } else { SENDS }
    }

    /// The launch of an operation, with a block's bytes of shared memory. Blocks are as many as M of the call needs:
    /// where this rank has few tokens, the rows of other ranks may still be many.
    fn size(&self, shared: u32, max_tokens: u32) -> Launch {
        let blocks = self.moe.blocks.of_decode(max_tokens);
        Launch::of_threads(blocks, THREADS, shared)
    }

    /// Launches a dispatch.
    ///
    /// # Safety
    /// Memory that the arguments name, except for the engine's own, is valid until the operation is
    /// received.
    pub(crate) unsafe fn launch_dispatch(
        &mut self,
        of: &DispatchCall<'_>,
        dispatch: &DispatchArgs,
        wanted: &Wanted,
    ) -> Result<()> {
        let (operation, format) = (of.operation, &of.format);
        let rows = wanted.most.tokens;
        let call = DecodeCall {
            waited_ns: of.waited_ns as u64,
            expert_totals: of.expert_totals as u64,
            scale_stride: format.scale_layout.strides(rows, format.scale_cols).map(|n| n as u32),
            source_step: format.source_index.step(wanted.max_tokens()),
            ..self.call()
        };
        let layout = wanted.spec.layout;
        let Some((kernels, sizes)) = self.moe.decode(layout) else {
            return Err(not_packed());
        };
        let (slot, phases) = (self.engine.slot(operation), Self::phases(&wanted.mode));
        let kernel = kernels.dispatch(dispatch);
        let shared = sizes.shared(&self.moe.exchange.shape);
        let launch = self.size(shared, wanted.max_tokens());
        let apart = phases == SENDS;
        // Of rank-major rows each block has the same share.
        let alike = apart || layout.has_a_row_per_token();
        let by_role = if alike { 0 } else { senders(self.moe.exchange.shape.ranks, launch.blocks) };
        let decode = sizes.arguments(&self.moe.exchange.shape, phases, by_role, &call);
        let sources = self.moe.routing.handles[of.handle as usize].place_sources;
        let arguments = DecodeDispatchArgs { dispatch: *dispatch, decode, sources };
        // SAFETY: the kernel's type; the rest by this function's contract.
        unsafe { self.engine.launch(kernel, launch, &arguments, slot)? };
        let decode = sizes.arguments(&self.moe.exchange.shape, RECEIVES, 0, &call);
        self.moe.routing.halves[slot] = match apart {
            true => DecodeHalf::Dispatch(DecodeDispatchArgs { decode, ..arguments }, launch),
            false => DecodeHalf::None,
        };
        Ok(())
    }

    /// Sends the combine of a handle whose rows were sent without a request.
    ///
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn send_combine(
        &mut self,
        call: &CombineCall<'_>,
        mode: &Mode,
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        let sent = unsafe { self.launch_combine(call, mode) };
        if let Err(error) = self.engine.abort_on_fatal(sent) {
            self.engine.order.order_refused(self.engine.slot(call.operation), mode);
            return Err(error);
        }
        let (operation, handle) = (call.operation, call.handle);
        let op = CombineOp { operation, staging: None, handle, mode: *mode };
        self.moe.routing.begin(operation, Operation::Combine(op));
        Ok(())
    }

    /// # Safety
    /// As [`send_combine`](Self::send_combine).
    unsafe fn launch_combine(&mut self, call: &CombineCall<'_>, mode: &Mode) -> Result<()> {
        let mut common = self.engine.common(call.operation, ENTER, &[], mode.no_host_sync);
        let called = self.engine.sign(call.operation, &mut common, call.signature);
        let state = &self.moe.routing.handles[call.handle as usize];
        let Some((kernels, sizes)) = self.moe.decode(state.layout) else {
            return Err(not_packed());
        };
        let (kind, (_, element)) = (SumKind::of(call, state.layout), summable(call.x.dtype));
        let is_rank_major = state.layout.has_a_row_per_token();
        let row_bytes = u64::from(self.moe.exchange.shape.hidden) * element;
        let masks = self.engine.waits.masks.is_some();
        // With masks the kernel writes this for each of T tokens, which takes less than work that is queued before it.
        if !call.missing.data.is_null() && (!masks || state.has_device_tokens) {
            let (at, bytes) = (call.missing.data as u64, state.tokens.into());
            self.engine.order.work().zero(self.engine.order.context(), at, bytes)?;
        }
        let own_weights = call.topk_weights.data as u64;
        let merge = MergeArgs {
            x: call.x.data as u64,
            weights: call.weights.data as u64,
            dispatch_weights: if call.weighted && own_weights == 0 { state.weights } else { 0 },
            slots: if is_rank_major { 0 } else { state.slots },
            rows: state.rows,
            row_bytes,
            topk: self.moe.exchange.shape.topk,
            ..MergeArgs::default()
        };
        let combine = CombineArgs {
            bias0: call.bias[0].data as u64,
            bias1: call.bias[1].data as u64,
            out: call.out.data as u64,
            out_weights: call.out_weights.data as u64,
            returns_weights: returned(call),
            source_places: if is_rank_major { state.max_tokens } else { 0 },
            ..crate::moe::combine::arguments(
                common,
                state.routing,
                row_bytes,
                &self.moe.combine_tiling(16),
            )
        };
        let (slot, phases) = (self.engine.slot(call.operation), Self::phases(mode));
        let of = DecodeCall { waited_ns: call.waited_ns as u64, ..self.call() };
        let decode = sizes.arguments(&self.moe.exchange.shape, phases, 0, &of);
        let arguments = DecodeCombineArgs {
            combine,
            merge,
            decode,
            sources: if is_rank_major { state.place_sources } else { state.landed_sources },
            topk_weights: own_weights,
            topk_idx: call.topk_idx.data as u64,
            missing: if of.masking.masks == 0 { 0 } else { call.missing.data as u64 },
        };
        let kernel = kernels.combine(&arguments, kind, &self.moe.exchange.shape);
        let launch =
            Launch { threads: kernel.threads, ..self.size(kernel.shared, state.max_tokens) };
        // SAFETY: the kernel's type; the tensors are valid by this function's contract, the rest is held by
        // the handle.
        unsafe { self.engine.launch(kernel.function, launch, &arguments, slot)? };
        let decode = sizes.arguments(&self.moe.exchange.shape, RECEIVES, 0, &of);
        self.moe.routing.halves[slot] = match phases {
            SENDS => DecodeHalf::Combine(DecodeCombineArgs { decode, ..arguments }, kind, launch),
            _ => DecodeHalf::None,
        };
        if mode.no_host_sync {
            return Ok(());
        }
        self.engine.wait_outcome(call.operation, &called).map(drop)
    }

    /// Launches the kernel that receives an operation whose send was separate; none where its kernel has
    /// received it.
    pub(crate) fn receive(&mut self, operation: u64) -> Result<()> {
        let slot = self.engine.slot(operation);
        let half = std::mem::replace(&mut self.moe.routing.halves[slot], DecodeHalf::None);
        let Some((kernels, _)) = self.moe.decode(Layout::Packed) else {
            return Err(not_packed());
        };
        // SAFETY: the kernels' types; the memory that they name is valid until the operation is
        // received, by the contract of the call that sent it.
        unsafe {
            match half {
                DecodeHalf::None => Ok(()),
                DecodeHalf::Dispatch(arguments, launch) => {
                    let kernel = kernels.dispatch(&arguments.dispatch);
                    self.engine.launch(kernel, launch, &arguments, slot)
                }
                DecodeHalf::Combine(arguments, kind, launch) => {
                    let kernel = kernels.combine(&arguments, kind, &self.moe.exchange.shape);
                    self.engine.launch(kernel.function, launch, &arguments, slot)
                }
            }
        }
    }

    /// Reports that this rank refuses, and removes the rows that others have sent it; false where no
    /// low-latency operations run.
    pub(crate) fn refuse(&self, operation: u64, common: &Common) -> Result<bool> {
        let Some((kernels, sizes)) = self.moe.decode(Layout::Packed) else { return Ok(false) };
        let decode = sizes.arguments(&self.moe.exchange.shape, SENDS | RECEIVES, 0, &self.call());
        let launch = Launch::of_threads(1, THREADS, sizes.shared(&self.moe.exchange.shape));
        let slot = self.engine.slot(operation);
        let arguments = DecodeRefusalArgs { common: *common, decode };
        // SAFETY: the kernel's type; it names memory of the engine only.
        unsafe { self.engine.launch(&kernels.refuse, launch, &arguments, slot).map(|()| true) }
    }
}
