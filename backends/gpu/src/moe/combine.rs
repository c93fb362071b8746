//! Combine: sources read the partial rows at their owners.

use tokenyard_core::abi;
use tokenyard_core::call::CombineCall;
use tokenyard_core::moe::{Holder, Layout, REGION_ALIGN, Region, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::decode::loaded::SumKind;
use crate::decode::steps::DecodeSteps;
use crate::driver::Launch;
use crate::engine::Engine;
use crate::engine::args::{Common, ENTER, THREADS};
use crate::engine::mode::Mode;
use crate::engine::outcome::Refusal;
use crate::engine::path::Transfer;
use crate::engine::step::Step;
use crate::flat_sms::{FlatOp, FlatWork};
use crate::moe::args::{CombineArgs, Crossing, MergeArgs, RINGS, Routing, WEIGHTS_OF_ALL};
use crate::moe::combine_tiling::CombineTiling;
use crate::moe::loaded::summable;
use crate::moe::operation::{CombineOp, Operation};
use crate::moe::push::{Push, Work, merged_unit_shift, unit_shift};
use crate::moe::sizes::landing_bytes;
use crate::moe::spread::RAIL_OF_COMBINE;
use crate::moe::state::MoeState;

/// Arena offsets of rows and of their weights, for peers to read.
#[derive(Clone, Copy, Debug, Default)]
struct Staged {
    region: Option<Region>,
    x: u64,
    weights: u64,
    /// Where kernels put: the places of returned rows and weights. Where rows are pushed, the first as
    /// well; 0 where there is no memory for them.
    landing: [u64; 2],
    /// How this rank's rows are pushed.
    push: Option<Push>,
    /// The blocks of the kernel that merges the rows and pushes them, if one does.
    fused: Option<u32>,
}

/// The place of a combine in its operation. The default is a combine by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SumPlace {
    pub(crate) step: Step,
    /// Among domains: the runs by which sums cross.
    pub(crate) crossing: Crossing,
}

/// The arguments of a combine without rows.
pub(crate) fn arguments(
    common: Common,
    routing: Routing,
    row_bytes: u64,
    combine_tiling: &CombineTiling,
) -> CombineArgs {
    CombineArgs {
        common,
        routing,
        bias0: 0,
        bias1: 0,
        out: 0,
        out_weights: 0,
        x: 0,
        weights: 0,
        row_bytes,
        piece_bytes: combine_tiling.piece_bytes,
        pieces: combine_tiling.pieces,
        stages: combine_tiling.stages,
        stage_bytes: combine_tiling.stage_bytes,
        table_bytes: combine_tiling.table_bytes,
        returns_weights: 0,
        landing: 0,
        landing_weights: 0,
        own: 0,
        flags: 0,
        most_units: 0,
        unit_shift: 0,
        pushers: 0,
        push_warps: 0,
        push_bytes: combine_tiling.push_bytes,
        at_once: 0,
        source_places: 0,
        reserved: 0,
        crossing: Crossing::default(),
    }
}

/// The weights that a call returns, as kernels have it.
pub(crate) fn returned(call: &CombineCall<'_>) -> u32 {
    match (call.returns_weights(), call.sum_weights) {
        (false, _) => 0,
        (true, false) => 1,
        (true, true) => WEIGHTS_OF_ALL,
    }
}

impl MoeState {
    /// Bytes of a row, and of the weights that go with it.
    pub(crate) fn combine_widths(&self, call: &CombineCall<'_>) -> [u64; 2] {
        let (_, element) = summable(call.x.dtype);
        let weights =
            if call.returns_weights() { 4 * u64::from(self.exchange.shape.topk) } else { 0 };
        [u64::from(self.exchange.shape.hidden) * element, weights]
    }

    /// Where kernels put: bytes of the returned rows and weights.
    pub(crate) fn landing(&self, call: &CombineCall<'_>) -> [u64; 2] {
        let tokens = self.routing.handles[call.handle as usize].tokens;
        match self.exchange.path.transfer {
            Transfer::Put => landing_bytes(&self.exchange.shape, self.combine_widths(call), tokens),
            Transfer::Store => [0; 2],
        }
    }
}

/// Combines of one exchange.
#[derive(Debug)]
pub(crate) struct Combine<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) moe: &'a mut MoeState,
}

impl Combine<'_> {
    fn decode(&mut self) -> DecodeSteps<'_> {
        DecodeSteps { engine: self.engine, moe: self.moe }
    }

    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn send(&mut self, call: &CombineCall<'_>, place: &SumPlace) -> Result<()> {
        self.engine.check()?;
        let mode = Mode { deferred: place.step.deferred, ..self.engine.mode(call.order)? };
        let _relaxed = mode.relax(self.engine.order.context())?;
        if mode.no_host_sync {
            self.engine.watch_no_host_sync()?;
        }
        if let Some(refusal) = &call.refusal {
            return self.refuse(call, &Refusal::passed_on(refusal));
        }
        let cannot = self.engine.abort_on_fatal(self.engine.order.cannot_capture(&mode))?;
        let why = self.too_long_to_return(call).or_else(|| cannot.map(str::to_owned));
        if let Some(why) = why {
            let refusal = self.engine.objection(ErrorKind::Refused, why);
            return self.refuse(call, &refusal);
        }
        let entered = self.engine.enter(call.operation, &mode);
        self.engine.abort_on_fatal(entered)?;
        self.moe.routing.use_handle(call.handle, &mode);
        if self.moe.decodes(self.moe.routing.handles[call.handle as usize].layout) {
            // SAFETY: by this function's contract.
            return unsafe { self.decode().send_combine(call, &mode) };
        }
        let staged = match self.stage(call, &mode) {
            Ok(staged) => staged,
            Err(error) if error.kind() == ErrorKind::Full => {
                let refusal = self.engine.objection(ErrorKind::Full, error.detail());
                let refused = self.refuse(call, &refusal);
                // Its own reason says more than the text that the other ranks receive.
                return refused.map_err(|e| if e.kind() == ErrorKind::Full { error } else { e });
            }
            Err(error) => return self.engine.abort_on_fatal(Err(error)),
        };
        // SAFETY: by this function's contract.
        let sent = unsafe { self.sum_rows(call, &mode, &staged, place) };
        if let Err(error) = self.engine.abort_on_fatal(sent) {
            self.engine.order.order_refused(self.engine.slot(call.operation), &mode);
            self.engine.places.release(&staged.region);
            return Err(error);
        }
        let op = CombineOp {
            operation: call.operation,
            staging: staged.region,
            handle: call.handle,
            mode,
        };
        self.moe.routing.begin(call.operation, Operation::Combine(op));
        Ok(())
    }

    fn too_long_to_return(&self, call: &CombineCall<'_>) -> Option<String> {
        let layout = self.moe.routing.handles.get(call.handle as usize)?.layout;
        let kind = SumKind::of(call, layout);
        self.moe.too_long(layout, kind.partial_bytes(self.moe.exchange.shape.hidden), 0)
    }

    /// Enters without rows, so that all ranks learn the reason: no caller may wait for this
    /// operation.
    pub(crate) fn refuse(&mut self, call: &CombineCall<'_>, refusal: &Refusal) -> Result<()> {
        let mode = self.engine.mode(call.order)?;
        if mode.is_recorded() {
            return Err(self.engine.refuse_recorded(&mode, refusal));
        }
        self.engine.order.select_stream(None);
        // The handle may be another communicator's, so its routing is not named.
        let mut common = self.engine.refused(call.operation, refusal, mode.no_host_sync);
        let called = self.engine.sign(call.operation, &mut common, call.signature);
        let combine_tiling = self.moe.combine_tiling(16);
        let arguments = arguments(common, Routing::default(), 16, &combine_tiling);
        let sent =
            self.decode().refuse(call.operation, &common).and_then(|refused| match refused {
                true => Ok(()),
                // SAFETY: the arguments name no tensors.
                false => unsafe {
                    let blocks = self.moe.blocks.of_call(mode.sms).exchange;
                    self.launch_kernel(call, &arguments, &combine_tiling, blocks)
                },
            });
        let outcome = sent.and_then(|()| self.engine.wait_outcome(call.operation, &called));
        self.engine.order.order_refused(self.engine.slot(call.operation), &mode);
        self.engine.abort_on_fatal(self.engine.report_no_host_sync(mode.no_host_sync, outcome))?;
        let message = "all ranks went on with a call that this one refused";
        Err(Error::new(ErrorKind::Internal, "combine", message))
    }

    /// How so many blocks push flat or rank-major rows that lie outside the arena, unless these are copied there.
    fn push(&self, blocks: u32, rows: u64, row_bytes: u64) -> Option<Push> {
        let Shape { ranks, topk, .. } = self.moe.exchange.shape;
        let work = Work {
            ranks,
            blocks,
            bytes: rows * row_bytes,
            row_bytes,
            topk,
            warps: self.moe.block.warps(),
        };
        let may = !self.moe.exchange.path.puts() && self.moe.exchange.groups == 1;
        may.then(|| work.way(self.moe.outside, self.moe.kernels.rows)).flatten()
    }

    /// Puts one row per received token where peers can read it: the caller's rows, or copies, or rows
    /// merged from them. Rows that are pushed are not copied, but they have memory here, because a source
    /// may have no memory for them to land in.
    fn stage(&mut self, call: &CombineCall<'_>, mode: &Mode) -> Result<Staged> {
        let state = &self.moe.routing.handles[call.handle as usize];
        let (layout, by_token) = (state.layout, state.layout.has_a_row_per_token());
        let rows = match layout {
            // Their places, with a token or without.
            Layout::RankMajor { .. } => state.rows,
            _ => state.received,
        };
        let widths = self.moe.combine_widths(call);
        let tensors = [call.x.data as u64, call.weights.data as u64];
        let inside = [0, 1].map(|i| match by_token {
            true => self.engine.places.offset_of(tensors[i], rows * widths[i]),
            false => None,
        });
        let room = [0, 1].map(|i| match inside[i] {
            None => (rows * widths[i]).next_multiple_of(REGION_ALIGN),
            Some(_) => 0,
        });
        let pushes = by_token && room[0] > 0;
        let blocks = self.moe.blocks.of_call(mode.sms).exchange;
        let push = if pushes { self.push(blocks, state.received, widths[0]) } else { None };
        let fused = if by_token { None } else { self.fused_blocks(call, mode) };
        let landing = match push.is_some() || fused.is_some() {
            // A graph holds its memory as long as its handle.
            true if mode.is_recorded() => [0; 2],
            true => [self.landing_of_pushed(room[0] + room[1], widths[0]), 0],
            false => self.moe.landing(call),
        };
        let region = match room[0] + room[1] + landing[0] + landing[1] {
            0 => None,
            bytes => {
                Some(self.engine.places.allocate(bytes, Holder::Combine(call.operation), mode)?)
            }
        };
        let base = region.map_or(0, |r| r.offset);
        let starts = [base, base + room[0]];
        let [x, weights] = [0, 1].map(|i| inside[i].unwrap_or(starts[i]));
        let landing_at = if landing[0] > 0 { base + room[0] + room[1] } else { 0 };
        let landing = [landing_at, landing_at + landing[0]];
        let staged = Staged { region, x, weights, landing, push, fused };
        let copies = |i: &usize| room[*i] > 0 && (*i == 1 || push.is_none());
        let copied = match by_token {
            false if fused.is_some() && !call.returns_weights() => Ok(()),
            false => self.merge(call, &staged),
            true => [0, 1].into_iter().filter(copies).try_for_each(|i| {
                let (to, bytes) = (self.engine.places.arena_at + starts[i], rows * widths[i]);
                self.engine.order.work().copy(self.engine.order.context(), to, tensors[i], bytes)
            }),
        };
        if copied.is_err() {
            self.engine.places.release(&region);
        }
        copied.map(|()| staged)
    }

    /// Bytes for rows that other ranks push, beside the needed bytes. None if the arena would then lack
    /// room for an output of as many rows and their metadata: an optimisation must not fill the arena.
    fn landing_of_pushed(&self, needed: u64, row_bytes: u64) -> u64 {
        let rows = u64::from(self.moe.exchange.shape.ranks)
            * u64::from(self.moe.exchange.shape.max_tokens);
        let bytes = rows * row_bytes;
        let spares = self.moe.exchange.shape.ranks > 1
            && needed + 3 * bytes <= self.engine.places.arena.largest_gap();
        if spares { bytes } else { 0 }
    }

    /// The merge of expert rows, to places that the caller adds.
    pub(crate) fn merge_arguments(&self, call: &CombineCall<'_>) -> MergeArgs {
        let state = &self.moe.routing.handles[call.handle as usize];
        let [row_bytes, _] = self.moe.combine_widths(call);
        let combine_tiling = self.moe.combine_tiling(row_bytes);
        MergeArgs {
            x: call.x.data as u64,
            weights: call.weights.data as u64,
            dispatch_weights: if call.weighted { state.weights } else { 0 },
            slots: state.slots,
            out: 0,
            out_weights: 0,
            received: if state.is_open { state.received_at() } else { 0 },
            tokens: state.received,
            rows: state.rows,
            row_bytes,
            topk: self.moe.exchange.shape.topk,
            piece_bytes: combine_tiling.piece_bytes,
            pieces: combine_tiling.pieces,
            stages: combine_tiling.stages,
            stage_bytes: combine_tiling.stage_bytes,
            reserved: 0,
        }
    }

    /// Expert-major and packed: sums the copies of each received token, unless a kernel behind does; returns
    /// the weights.
    fn merge(&self, call: &CombineCall<'_>, staged: &Staged) -> Result<()> {
        let (kernel, _) = summable(call.x.dtype);
        let arguments = MergeArgs {
            out: if staged.fused.is_some() { 0 } else { self.engine.places.arena_at + staged.x },
            out_weights: self.engine.places.arena_at + staged.weights,
            ..self.merge_arguments(call)
        };
        let shared = RINGS * arguments.stages * arguments.stage_bytes;
        let blocks = self.moe.blocks.of_call(call.order.sms).local;
        let size = Launch::of_threads(blocks, THREADS, shared);
        let slot = self.engine.slot(call.operation);
        // SAFETY: the kernel's type; the tensors are valid by the contract of `send`, the
        // rest is held by the handle and the operation.
        unsafe { self.engine.launch(&self.moe.kernels.merge[kernel], size, &arguments, slot) }
    }

    /// Launches the kernel, and waits until it reports how the operation continues, unless the host does so later.
    ///
    /// # Safety
    /// As [`send`](Self::send).
    unsafe fn sum_rows(
        &mut self,
        call: &CombineCall<'_>,
        mode: &Mode,
        staged: &Staged,
        place: &SumPlace,
    ) -> Result<()> {
        let state = &self.moe.routing.handles[call.handle as usize];
        let mut common = self.engine.common(call.operation, ENTER, &[], mode.no_host_sync);
        place.step.follow(&mut common);
        let called = self.engine.sign(call.operation, &mut common, call.signature);
        let (_, element) = summable(call.x.dtype);
        let row_bytes = u64::from(self.moe.exchange.shape.hidden) * element;
        let combine_tiling = self.moe.combine_tiling(row_bytes);
        let max_tokens = self.moe.exchange.shape.max_tokens;
        if !call.missing.data.is_null() {
            // A lost rank ends the communicator, so no expert is left out of a sum.
            let (at, bytes) = (call.missing.data as u64, state.tokens.into());
            self.engine.order.work().zero(self.engine.order.context(), at, bytes)?;
        }
        let push = staged.push.unwrap_or(Push { blocks: 0, warps: 0 });
        let pushes = staged.push.is_some() || staged.fused.is_some();
        let arguments = CombineArgs {
            bias0: call.bias[0].data as u64,
            bias1: call.bias[1].data as u64,
            out: call.out.data as u64,
            out_weights: call.out_weights.data as u64,
            x: staged.x,
            weights: staged.weights,
            returns_weights: returned(call),
            at_once: mode.at_once.into(),
            landing: staged.landing[0],
            landing_weights: staged.landing[1],
            own: if pushes { call.x.data as u64 } else { 0 },
            flags: self.moe.sizes.flags(),
            most_units: self.moe.sizes.units,
            unit_shift: match state.layout.has_a_row_per_token() {
                true => unit_shift(row_bytes, max_tokens),
                false => merged_unit_shift(max_tokens),
            },
            source_places: match state.layout {
                Layout::RankMajor { .. } => state.max_tokens,
                _ => 0,
            },
            crossing: place.crossing,
            pushers: push.blocks,
            push_warps: push.warps,
            ..arguments(common, state.routing, row_bytes, &combine_tiling)
        };
        // SAFETY: the tensors are valid by this function's contract.
        unsafe {
            match staged.fused {
                Some(blocks) => self.launch_fused(call, &arguments, blocks)?,
                None => {
                    let blocks = self.summing_blocks(call, staged, row_bytes);
                    self.launch_kernel(call, &arguments, &combine_tiling, blocks)?
                }
            }
        }
        if mode.waits() {
            self.engine.wait_outcome(call.operation, &called)?;
        }
        if self.moe.exchange.path.puts() {
            // SAFETY: as above.
            unsafe { self.sum_returned(call, &arguments, &combine_tiling)? };
        }
        Ok(())
    }

    /// Blocks of the kernel that sums. The estimate for pushed rows is for as many as an exchange has.
    fn summing_blocks(&self, call: &CombineCall<'_>, staged: &Staged, row_bytes: u64) -> u32 {
        let Shape { ranks, topk, .. } = self.moe.exchange.shape;
        let state = &self.moe.routing.handles[call.handle as usize];
        let (op, tokens) = (FlatOp::Combine, state.tokens);
        let work = FlatWork { op, ranks, topk, tokens, row_bytes, beside_bytes: 0 };
        // Sums of biases, and loads of weights, come on top.
        let is_biased = call.bias.iter().any(|bias| !bias.data.is_null());
        let more = call.returns_weights() || is_biased || state.has_device_tokens;
        let blocks = self.moe.beside(self.moe.blocks.of_call(call.order.sms), RAIL_OF_COMBINE);
        if self.moe.runs.is_some() {
            return blocks.exchange;
        }
        match staged.push {
            Some(_) => blocks.exchange,
            None => blocks.of_link(&work, more),
        }
    }

    /// Where kernels put: sums the rows once they have returned.
    ///
    /// # Safety
    /// As [`send`](Self::send).
    unsafe fn sum_returned(
        &self,
        call: &CombineCall<'_>,
        arguments: &CombineArgs,
        combine_tiling: &CombineTiling,
    ) -> Result<()> {
        if self.moe.runs.is_some() {
            // One kernel puts rows back, and sums those that return. Its end is queued when it is received.
            return Ok(());
        }
        self.engine.arrive(call.operation, abi::TY_PHASE_COMBINE_ROWS)?;
        let (kernel, _) = summable(call.x.dtype);
        let blocks = self.moe.blocks.of_call(call.order.sms).exchange;
        let size = Launch::of_threads(blocks, THREADS, combine_tiling.shared);
        let slot = self.engine.slot(call.operation);
        // SAFETY: the kernel's type; the rest by this function's contract.
        unsafe { self.engine.launch(&self.moe.kernels.combine[kernel], size, arguments, slot) }
    }

    /// # Safety
    /// Memory that the arguments name, except for the engine's own, is valid until the operation is
    /// received.
    unsafe fn launch_kernel(
        &self,
        call: &CombineCall<'_>,
        arguments: &CombineArgs,
        combine_tiling: &CombineTiling,
        blocks: u32,
    ) -> Result<()> {
        let slot = self.engine.slot(call.operation);
        let puts_first = self.moe.kernels.combine_put.as_ref().filter(|_| self.moe.runs.is_none());
        let (kernel, size) = match puts_first {
            Some(combine_put) => {
                (combine_put, Launch::of_threads(1, THREADS, combine_tiling.table_bytes))
            }
            None => {
                let (kernel, _) = summable(call.x.dtype);
                (
                    &self.moe.kernels.combine[kernel],
                    Launch::of_threads(blocks, THREADS, combine_tiling.shared),
                )
            }
        };
        // SAFETY: the kernel's type; the rest by this function's contract.
        unsafe { self.engine.launch(kernel, size, arguments, slot) }
    }

    /// Removes the combine with this number from those that were sent.
    pub(crate) fn take(&mut self, operation: u64) -> Option<CombineOp> {
        self.moe.routing.take(operation, |op| match op {
            Operation::Combine(op) if op.operation == operation => Some(*op),
            _ => None,
        })
    }

    pub(crate) fn receive(&mut self, operation: u64) -> Result<()> {
        self.engine.check()?;
        let Some(op) = self.take(operation) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "receive combine",
                format!("no combine with number {operation} was sent"),
            ));
        };
        self.engine.resume(&op.mode)?;
        // The caller may change its rows after this, so no peer may still read them. Where kernels put,
        // the wait for the returned rows has also waited until these rows have left.
        let layout = self.moe.routing.handles[op.handle as usize].layout;
        let read = match self.moe.exchange.path.transfer {
            _ if self.moe.decodes(layout) => self.decode().receive(operation),
            Transfer::Put if self.moe.runs.is_some() => {
                self.engine.arrive(operation, abi::TY_PHASE_COMBINE_ROWS)
            }
            Transfer::Put => Ok(()),
            Transfer::Store => {
                self.engine.arrive_unless(op.mode.at_once, operation, abi::TY_PHASE_DONE)
            }
        };
        let done = read.and_then(|()| self.engine.leave(operation, abi::TY_PHASE_DONE, &op.mode));
        self.moe.unstage(self.engine, op.staging, op.handle, &op.mode);
        self.engine.abort_on_fatal(done)
    }
}
