//! Dispatch and its replay.

use tokenyard_core::abi;
use tokenyard_core::call::DispatchCall;
use tokenyard_core::moe::{
    Cast, Holder, Layout, Region, RegionLayout, RegionRows, RowFormat, Shape,
};
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::decode::steps::DecodeSteps;
use crate::driver::Launch;
use crate::engine::Engine;
use crate::engine::args::{Common, ENTER, Outcome, THREADS};
use crate::engine::mode::Mode;
use crate::engine::outcome::{Called, Refusal, ticket};
use crate::engine::step::Step;
use crate::moe::args::{Crossing, DispatchArgs, GroupArgs, Routing};
use crate::moe::deferred::Grouped;
use crate::moe::exchange::{Exchange, Scope};
use crate::moe::handle::Output;
use crate::moe::operation::{DispatchOp, Operation};
use crate::moe::received::describe;
use crate::moe::sizes::{DispatchTiling, staged_bytes};
use crate::moe::spread::Tokens;
use crate::moe::state::MoeState;
use crate::moe::wanted::Wanted;

/// The place of a dispatch in its operation. The default is a dispatch by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepPlace {
    pub(crate) step: Step,
    /// The groups that are passed on, in a dispatch inside a domain.
    pub(crate) grouped: Option<Grouped>,
    /// Its rows come over a rail meanwhile.
    pub(crate) beside: Option<Beside>,
}

/// An exchange on a rail whose rows a dispatch inside a domain forwards as they arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside {
    pub(crate) crossing: Crossing,
    /// The number by which kernels know that exchange.
    pub(crate) ticket: u32,
}

/// A dispatch whose kernel was launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launched {
    operation: u64,
    handle: u32,
    wanted: Wanted,
    region: Option<Region>,
    staging: Option<Region>,
    called: Called,
    /// The rows that arrive, as far as they are known before the outcome.
    known: RegionRows,
}

/// The layout that kernels know: rank-major rows are flat ones whose places the source fixes.
fn kernel_layout(layout: Layout) -> Layout {
    match layout {
        Layout::RankMajor { .. } => Layout::Flat,
        layout => layout,
    }
}

/// The arguments of a dispatch without rows.
fn arguments(
    call: &DispatchCall<'_>,
    common: Common,
    routing: Routing,
    dispatch_tiling: &DispatchTiling,
) -> DispatchArgs {
    DispatchArgs {
        common,
        routing,
        topk_idx: 0,
        tokens: 0,
        x: 0,
        scales: 0,
        weights: 0,
        scale_stride: [0; 2],
        region: 0,
        capacity: 0,
        row_bytes: 0,
        scale_words: 0,
        replay: 0,
        worst: 0,
        // Determines the number of words of a record, so it is the caller's even where the call is
        // refused.
        layout: kernel_layout(call.layout).code(),
        worst_experts: 0,
        alignment: 1,
        staged: 0,
        piece_bytes: dispatch_tiling.piece_bytes,
        pieces: dispatch_tiling.pieces,
        stages: dispatch_tiling.stages,
        movers: dispatch_tiling.movers,
        table_bytes: dispatch_tiling.table_bytes,
        metadata_tokens: dispatch_tiling.metadata_tokens,
        metadata_bytes: dispatch_tiling.metadata_bytes,
        metadata_scales: dispatch_tiling.metadata_scales.into(),
        metadata_at: dispatch_tiling.metadata_at,
        notes_at: dispatch_tiling.notes_at,
        raw: 0,
        cast: 0,
        dtype: 0,
        hidden: 0,
        source_first: 0,
        sources: 0,
        staging: 0,
        tiles: 0,
        tile_rows: 0,
        zero_padding: 0,
        at_once: 0,
        tally_tokens: dispatch_tiling.tally_tokens,
        stage_bytes: dispatch_tiling.pitch,
        stage_scales: dispatch_tiling.stage_scales,
        pushers: 0,
        part_rows: 1,
        call_tokens: 0,
        rank_major: 0,
        host_counts: 0,
        crossing: Crossing::default(),
    }
}

/// Dispatches of one exchange.
#[derive(Debug)]
pub(crate) struct Dispatch<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) moe: &'a mut MoeState,
}

impl Dispatch<'_> {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn send(&mut self, call: &DispatchCall<'_>, place: &StepPlace) -> Result<()> {
        // SAFETY: by this function's contract.
        let launched = unsafe { self.launch(call, place)? };
        self.settle(launched)
    }

    /// The first part of [`send`](Self::send): its kernel is launched.
    ///
    /// # Errors
    /// A refusal of this rank, once all ranks have received it.
    ///
    /// # Safety
    /// As `send`.
    pub(crate) unsafe fn launch(
        &mut self,
        call: &DispatchCall<'_>,
        place: &StepPlace,
    ) -> Result<Launched> {
        self.engine.check()?;
        let mode = Mode { deferred: place.step.deferred, ..self.engine.mode(call.order)? };
        let _relaxed = mode.relax(self.engine.order.context())?;
        if mode.no_host_sync {
            self.engine.watch_no_host_sync()?;
        }
        if let Some(refusal) = &call.refusal {
            return self.refuse(call, &Refusal::passed_on(refusal));
        }
        let why = match self.engine.abort_on_fatal(self.engine.order.cannot_capture(&mode))? {
            Some(why) => why.to_owned(),
            None => match self.wanted(call, mode) {
                Ok(wanted) => match self.cannot_send(call, &wanted) {
                    Some(why) => why,
                    // SAFETY: by this function's contract.
                    None => return unsafe { self.send_rows(call, place, &wanted) },
                },
                Err(why) => why.detail(),
            },
        };
        let refusal = self.engine.objection(ErrorKind::Refused, why);
        self.refuse(call, &refusal)
    }

    fn decode(&mut self) -> DecodeSteps<'_> {
        DecodeSteps { engine: self.engine, moe: self.moe }
    }

    fn wanted(&self, call: &DispatchCall<'_>, mode: Mode) -> Result<Wanted> {
        let max_tokens = match call.is_replay {
            true => self.moe.routing.handles[call.handle as usize].max_tokens,
            false => call.max_tokens,
        };
        Wanted::of(call, &Shape { max_tokens, ..self.moe.exchange.regions }, mode)
    }

    /// The signature that ranks compare: one word. M of a call is in it where it is not the communicator's.
    fn signature(&self, call: &DispatchCall<'_>) -> Option<Signature> {
        let Exchange { scope, regions, .. } = &self.moe.exchange;
        let is_own = *scope != Scope::Flat || call.max_tokens == regions.max_tokens;
        match call.is_replay || is_own {
            true => Some(call.signature),
            false => call.signature.in_one_word(),
        }
    }

    fn cannot_send(&self, call: &DispatchCall<'_>, wanted: &Wanted) -> Option<String> {
        if self.signature(call).is_none() {
            let (m, most) = (call.max_tokens, self.moe.exchange.regions.max_tokens);
            return Some(format!(
                "max_tokens: found {m} in a call of a communicator with {most}; expected {most}, or below 524288 with \
                 fewer than 1024 scale columns"
            ));
        }
        if self.engine.waits.masks.is_some() && !self.moe.decodes(wanted.spec.layout) {
            let why = "layout: found one that is not packed; expected packed, because on_failure = \"mask\" on GPUs \
                       covers low-latency operations alone";
            return Some(why.to_owned());
        }
        let RowFormat { x_bytes, scale_bytes, .. } = wanted.format.row;
        self.moe.too_long(wanted.spec.layout, x_bytes.into(), scale_bytes.into())
    }

    /// Enters without rows, so that all ranks learn the reason: no caller may wait for this
    /// operation.
    fn refuse<T>(&mut self, call: &DispatchCall<'_>, refusal: &Refusal) -> Result<T> {
        let mode = self.engine.mode(call.order)?;
        if mode.is_recorded() {
            return Err(self.engine.refuse_recorded(&mode, refusal));
        }
        self.engine.order.select_stream(None);
        let mut common = self.engine.refused(call.operation, refusal, mode.no_host_sync);
        // The handle may be another communicator's.
        let routing = Routing::default();
        let called = self.engine.sign(call.operation, &mut common, call.signature);
        let row = RowFormat { x_bytes: 16, scale_bytes: 0, weights: false };
        let dispatch_tiling = self.moe.dispatch_tiling(&row, Layout::Flat, false);
        let arguments = arguments(call, common, routing, &dispatch_tiling);
        // SAFETY: the arguments name no tensors.
        let sent =
            self.decode().refuse(call.operation, &common).and_then(|refused| match refused {
                true => Ok(()),
                // SAFETY: the arguments name no tensors.
                false => unsafe {
                    let blocks = self.moe.blocks.of_call(mode.sms).exchange;
                    self.launch_kernel(call.operation, &arguments, [blocks, dispatch_tiling.shared])
                },
            });
        let outcome = sent.and_then(|()| self.engine.wait_outcome(call.operation, &called));
        self.engine.order.order_refused(self.engine.slot(call.operation), &mode);
        self.engine.abort_on_fatal(self.engine.report_no_host_sync(mode.no_host_sync, outcome))?;
        let message = "all ranks went on with a call that this one refused";
        Err(Error::new(ErrorKind::Internal, "dispatch", message))
    }

    /// # Safety
    /// As [`send`](Self::send).
    unsafe fn send_rows(
        &mut self,
        call: &DispatchCall<'_>,
        place: &StepPlace,
        wanted: &Wanted,
    ) -> Result<Launched> {
        let entered = self.engine.enter(call.operation, &wanted.mode);
        self.engine.abort_on_fatal(entered)?;
        let renewed = match wanted.replay {
            true => Ok(()),
            false => self.moe.renew(self.engine, call.handle, wanted.mode.is_recorded()),
        };
        self.engine.abort_on_fatal(renewed)?;
        self.moe.routing.use_handle(call.handle, &wanted.mode);
        let room = self
            .stage(call, wanted)
            .and_then(|staging| self.make_room(call, wanted, staging).map(|r| [r, staging]));
        let room = match room {
            Ok(room) => room,
            Err(error) => {
                let refusal = self.engine.objection(ErrorKind::Full, error.detail());
                let refused = self.refuse(call, &refusal);
                // Its own reason says more than the text that the other ranks receive, which names the rank.
                let error = error.with_rank(self.moe.exchange.world_rank());
                return refused.map_err(|e| if e.kind() == ErrorKind::Full { error } else { e });
            }
        };
        // SAFETY: by this function's contract.
        let launched = unsafe { self.launch_rows(call, place, wanted, room) };
        match self.engine.abort_on_fatal(launched) {
            Ok(launched) => Ok(launched),
            Err(error) => {
                self.engine.order.order_refused(self.engine.slot(call.operation), &wanted.mode);
                self.engine.places.release(room.iter().flatten());
                Err(error)
            }
        }
    }

    /// The second part of [`send`](Self::send): waits until the kernel reports how the operation
    /// continues, unless no caller waits for that, or the host does so later.
    pub(crate) fn settle(&mut self, launched: Launched) -> Result<()> {
        let Launched { operation, handle, wanted, region, staging, called, known } = launched;
        let counted = match wanted.mode.waits() {
            true => self
                .engine
                .wait_outcome(operation, &called)
                .map(|Outcome { tokens, rows, .. }| RegionRows { tokens, experts: rows }),
            false => Ok(known),
        };
        let (counted, region) = match (self.engine.abort_on_fatal(counted), region) {
            (Ok(counted), Some(region)) => (counted, region),
            (Ok(_), None) => {
                return Err(Error::new(ErrorKind::Internal, "dispatch", "rows go nowhere"));
            }
            (Err(error), region) => {
                self.engine.order.order_refused(self.engine.slot(operation), &wanted.mode);
                self.engine.places.release(region.iter().chain(&staging));
                return Err(error);
            }
        };
        let arrangement = wanted.spec.layout;
        let rows = wanted.rows(counted);
        let layout = RegionLayout::new(&wanted.spec, rows)?;
        self.engine.places.arena.shrink(region.id, layout.bytes);
        let output = Output {
            region: region.id,
            address: self.engine.places.address(&region),
            layout,
            rows,
        };
        let received = counted.tokens;
        self.engine.order.regions.give(region.id, wanted.mode.stream);
        let state = self.moe.routing.handle(handle);
        if !wanted.replay {
            state.note_output(&output, received, &wanted.spec);
            state.is_open = wanted.mode.no_host_sync;
            state.stream = wanted.mode.stream;
        }
        let is_open = state.is_open;
        let op = DispatchOp {
            operation,
            format: wanted.format,
            output,
            arrangement,
            mode: wanted.mode,
            handle,
            worst: wanted.worst,
            received,
            is_open,
            staging,
        };
        self.moe.routing.begin(operation, Operation::Dispatch(op));
        Ok(())
    }

    /// Where kernels put: memory for the sources of their puts.
    fn stage(&mut self, call: &DispatchCall<'_>, wanted: &Wanted) -> Result<Option<Region>> {
        if !self.moe.exchange.path.puts() {
            return Ok(None);
        }
        let tokens = match wanted.replay {
            true => self.moe.routing.handles[call.handle as usize].tokens,
            false => call.topk_idx.shape[0] as u32,
        };
        let bytes = staged_bytes(&self.moe.exchange.shape, &wanted.format.row, tokens);
        self.engine.places.allocate(bytes, Holder::Dispatch(call.operation), &wanted.mode).map(Some)
    }

    /// Memory for the rows that arrive. The kernel detects a full arena, because it knows the needed
    /// size; if the call does not wait for the outcome, this function detects it beforehand.
    fn make_room(
        &mut self,
        call: &DispatchCall<'_>,
        wanted: &Wanted,
        staging: Option<Region>,
    ) -> Result<Option<Region>> {
        let holder = Holder::Dispatch(call.operation);
        if wanted.mode.waits() && !self.moe.decodes(wanted.spec.layout) {
            return Ok(self.engine.places.arena.reserve(wanted.room.bytes, holder).ok());
        }
        let rows = wanted.rows(self.moe.routing.handles[call.handle as usize].exact);
        let bytes = RegionLayout::new(&wanted.spec, rows)?.bytes;
        let region = self.engine.places.allocate(bytes, holder, &wanted.mode);
        if region.is_err() {
            self.engine.places.release(&staging);
        }
        region.map(Some)
    }

    /// Launches the kernel. `[region, staging]`: memory for the rows that arrive, and for the sources of puts.
    ///
    /// # Safety
    /// As [`send`](Self::send).
    unsafe fn launch_rows(
        &mut self,
        call: &DispatchCall<'_>,
        place: &StepPlace,
        wanted: &Wanted,
        room: [Option<Region>; 2],
    ) -> Result<Launched> {
        let [region, staging] = room;
        let (region_at, capacity) = region.map_or((0, 0), |r| (r.offset, r.bytes));
        // The holders of the arena, in case it turns out to be too full.
        let scarce = capacity < wanted.room.bytes;
        let holders = if scarce { self.engine.places.arena.holders() } else { String::new() };
        let no_host_sync = wanted.mode.no_host_sync;
        let mut common =
            self.engine.common(call.operation, ENTER, holders.as_bytes(), no_host_sync);
        place.step.follow(&mut common);
        let state = self.moe.routing.handle(call.handle);
        let (tokens, on_device) = match wanted.replay {
            true => (state.tokens, state.has_device_tokens),
            false => (call.topk_idx.shape[0] as u32, !call.tokens.is_null()),
        };
        let roles = self.moe.roles(wanted, call.cast, Tokens { most: tokens, on_device });
        let state = self.moe.routing.handle(call.handle);
        if !wanted.replay {
            state.count(tokens, roles.counting);
            state.has_device_tokens = on_device;
            state.worst = wanted.worst;
            state.layout = wanted.spec.layout;
            state.max_tokens = wanted.max_tokens();
        }
        common.input_rows = state.tokens;
        let (routing, worst) = (state.routing, state.worst);
        let known = match wanted.replay && !state.is_open {
            true => RegionRows { tokens: state.received, ..state.exact },
            false => wanted.most,
        };
        let signature = self.signature(call).unwrap_or(call.signature);
        let called = self.engine.sign(call.operation, &mut common, signature);
        let format = &wanted.format;
        let dispatch_tiling = match call.cast {
            Cast::None => {
                self.moe.dispatch_tiling(&format.row, wanted.spec.layout, roles.few_push())
            }
            _ => self.moe.cast_tiling(&format.row, call.x.dtype),
        };
        let shared = dispatch_tiling.shared;
        let (x, raw) = match call.cast {
            Cast::None => (call.x.data as u64, 0),
            _ => (0, call.x.data as u64),
        };
        let gives = wanted.mode.waits() && !self.moe.decodes(wanted.spec.layout);
        let is_rank_major = matches!(wanted.spec.layout, Layout::RankMajor { .. });
        let slot = self.engine.slot(call.operation);
        let host_counts = self.moe.counts.ask(slot, ticket(call.operation), gives);
        let arguments = DispatchArgs {
            host_counts,
            topk_idx: call.topk_idx.data as u64,
            tokens: call.tokens as u64,
            x,
            scales: call.scales.data as u64,
            weights: call.topk_weights.data as u64,
            scale_stride: call.scales.stride,
            region: region_at,
            capacity,
            row_bytes: format.row.x_bytes.into(),
            scale_words: format.scale_cols as u32,
            replay: wanted.replay.into(),
            worst: (worst || is_rank_major).into(),
            staged: staging.is_some().into(),
            staging: staging.map_or(0, |r| r.offset),
            worst_experts: wanted.most.experts,
            alignment: wanted.spec.layout.alignment(),
            raw,
            cast: call.cast.code(),
            dtype: call.x.dtype,
            hidden: self.moe.exchange.shape.hidden,
            source_first: self.moe.exchange.world_rank() * wanted.max_tokens(),
            sources: place.grouped.map_or(0, |grouped| grouped.sources),
            at_once: wanted.mode.at_once.into(),
            pushers: roles.pushers,
            part_rows: roles.part_rows(),
            call_tokens: self.moe.exchange.call_tokens(wanted.max_tokens()),
            rank_major: is_rank_major.into(),
            tiles: self.moe.sizes.tiles(),
            tile_rows: if wanted.in_tiles(self.moe.has_tiles()) {
                self.moe.sizes.tile_rows
            } else {
                0
            },
            zero_padding: wanted.spec.layout.zero_padding().into(),
            crossing: match (&self.moe.runs, place.beside) {
                (Some(runs), _) => runs.on_the_rail(),
                (None, beside) => beside.map(|beside| beside.crossing).unwrap_or_default(),
            },
            ..arguments(call, common, routing, &dispatch_tiling)
        };
        self.group(call.operation, &arguments, place)?;
        // SAFETY: the tensors are valid by this function's contract.
        unsafe {
            match self.moe.decodes(wanted.spec.layout) {
                true => self.decode().launch_dispatch(call, &arguments, wanted)?,
                false => self.launch_kernel(call.operation, &arguments, [roles.blocks, shared])?,
            }
        }
        let (operation, handle, wanted) = (call.operation, call.handle, *wanted);
        Ok(Launched { operation, handle, wanted, region, staging, called, known })
    }

    /// Inside one of several domains: finds the group of each token, before tokens are counted. Where rows come
    /// meanwhile, it first waits for their metadata.
    fn group(&self, operation: u64, arguments: &DispatchArgs, place: &StepPlace) -> Result<()> {
        let DispatchArgs { common, routing, replay, .. } = arguments;
        let is_replay = *replay != 0;
        let Some(grouped) = place.grouped.filter(|_| !is_replay || place.beside.is_some()) else {
            return Ok(());
        };
        let Some(group) = &self.moe.kernels.group else {
            return Err(Error::new(ErrorKind::Internal, "dispatch", "there are no groups"));
        };
        let (shape, groups) = (&self.moe.exchange.shape, self.moe.exchange.groups);
        let arguments = GroupArgs {
            abort: common.abort,
            report: common.report,
            cap_ns: common.cap_ns,
            former: common.former,
            described: place.beside.map_or(0, |beside| beside.crossing.described),
            ticket: place.beside.map_or(0, |beside| beside.ticket),
            rank: common.rank,
            counts: grouped.counts,
            starts: routing.group_starts,
            zeros: routing.group_counts,
            groups,
            // The counts of a replay are those of its dispatch.
            words: if is_replay { 0 } else { (shape.ranks + shape.experts) * groups },
        };
        let (size, slot) = (Launch::of_threads(1, THREADS, 0), self.engine.slot(operation));
        // SAFETY: the kernel's type; counts lie in a region that is held, the rest in the handle.
        unsafe { self.engine.launch(group, size, &arguments, slot) }
    }

    /// # Safety
    /// Memory that the arguments name, except for the engine's own, is valid until the operation is
    /// received.
    unsafe fn launch_kernel(
        &self,
        operation: u64,
        arguments: &DispatchArgs,
        [blocks, shared]: [u32; 2],
    ) -> Result<()> {
        let size = Launch::of_threads(blocks, THREADS, shared);
        let slot = self.engine.slot(operation);
        // SAFETY: the kernel's type; the rest by this function's contract.
        unsafe { self.engine.launch(&self.moe.kernels.dispatch, size, arguments, slot) }
    }

    /// The place where the output of a dispatch that was sent will lie.
    pub(crate) fn output(&self, operation: u64) -> Result<abi::TyReceived> {
        let op = self.moe.routing.dispatch(operation).ok_or_else(|| not_sent(operation))?;
        Ok(describe(op, &self.moe.exchange.regions, self.lost_of(op)))
    }

    pub(crate) fn receive(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.engine.check()?;
        let of = |op: &Operation| match op {
            Operation::Dispatch(op) if op.operation == operation => Some(*op),
            _ => None,
        };
        let op = self.moe.routing.take(operation, of).ok_or_else(|| not_sent(operation))?;
        let slot = self.engine.slot(operation);
        self.engine.resume(&op.mode)?;
        let rows = match self.moe.decodes(op.arrangement) {
            true => self.decode().receive(operation),
            false => self.engine.arrive_unless(op.mode.at_once, operation, abi::TY_PHASE_ROWS),
        };
        let arrived = rows
            .and_then(|()| self.spread(slot, &op))
            .and_then(|()| self.engine.leave(operation, abi::TY_PHASE_ROWS, &op.mode));
        self.moe.unstage(self.engine, op.staging, op.handle, &op.mode);
        self.engine.abort_on_fatal(arrived)?;
        Ok(describe(&op, &self.moe.exchange.regions, self.lost_of(&op)))
    }

    /// The list of ranks that an output leaves out.
    fn lost_of(&self, op: &DispatchOp) -> u64 {
        match self.engine.waits.masks {
            Some(_) => op.output.address + op.output.layout.lost.offset,
            None => self.moe.lost.address(),
        }
    }
}

fn not_sent(operation: u64) -> Error {
    let message = format!("no dispatch with number {operation} was sent");
    Error::new(ErrorKind::Internal, "receive dispatch", message)
}
