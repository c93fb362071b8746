//! Dispatch and its replay.

use tokenyard_core::abi;
use tokenyard_core::call::DispatchCall;
use tokenyard_core::moe::{Cast, Holder, Layout, Region, RegionLayout, RegionRows, RowFormat};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::Launch;
use crate::engine::Engine;
use crate::engine::mode::Mode;
use crate::engine::outcome::{Called, Refusal, ticket};
use crate::moe::args::{Common, DispatchArgs, ENTER, GroupArgs, Outcome, Routing, THREADS};
use crate::moe::handle::Output;
use crate::moe::operation::{DispatchOp, Operation};
use crate::moe::received::describe;
use crate::moe::sizes::{DispatchTiling, staged_bytes};
use crate::moe::spread::Tokens;
use crate::moe::step::Step;
use crate::moe::wanted::Wanted;

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
        layout: call.layout.code(),
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
        host_counts: 0,
    }
}

impl Engine {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(crate) unsafe fn dispatch_send(
        &mut self,
        call: &DispatchCall<'_>,
        step: &Step,
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        let launched = unsafe { self.dispatch_launch(call, step)? };
        self.dispatch_settle(launched)
    }

    /// The first part of [`dispatch_send`](Self::dispatch_send): its kernel is launched.
    ///
    /// # Errors
    /// A refusal of this rank, once all ranks have received it.
    ///
    /// # Safety
    /// As `dispatch_send`.
    pub(crate) unsafe fn dispatch_launch(
        &mut self,
        call: &DispatchCall<'_>,
        step: &Step,
    ) -> Result<Launched> {
        self.check()?;
        let mode = Mode { deferred: step.deferred, ..self.mode(call.order)? };
        let _relaxed = mode.relax(self.order.context())?;
        if mode.no_host_sync {
            self.watch_no_host_sync()?;
        }
        if let Some(refusal) = &call.refusal {
            return self.refuse_dispatch(call, &Refusal::passed_on(refusal));
        }
        let why = match self.abort_on_fatal(self.order.cannot_capture(&mode))? {
            Some(why) => why.to_owned(),
            None => match Wanted::of(call, &self.exchange.regions, mode) {
                Ok(wanted) => match self.cannot_send(&wanted) {
                    Some(why) => why,
                    // SAFETY: by this function's contract.
                    None => return unsafe { self.send_rows(call, step, &wanted) },
                },
                Err(why) => why.detail(),
            },
        };
        let refusal = self.objection(ErrorKind::Refused, why);
        self.refuse_dispatch(call, &refusal)
    }

    fn cannot_send(&self, wanted: &Wanted) -> Option<String> {
        if self.launcher.waits.masks.is_some() && !self.decodes(wanted.spec.layout) {
            let why = "layout: found one that is not packed; expected packed, because on_failure = \"mask\" on GPUs \
                       covers low-latency operations alone";
            return Some(why.to_owned());
        }
        let RowFormat { x_bytes, scale_bytes, .. } = wanted.format.row;
        self.too_long(wanted.spec.layout, x_bytes.into(), scale_bytes.into())
    }

    /// Enters without rows, so that all ranks learn the reason: no caller may wait for this
    /// operation.
    fn refuse_dispatch<T>(&mut self, call: &DispatchCall<'_>, refusal: &Refusal) -> Result<T> {
        let mode = self.mode(call.order)?;
        if mode.is_recorded() {
            return Err(self.refuse_recorded(&mode, refusal));
        }
        self.order.select_stream(None);
        let mut common = self.refused(call.operation, refusal, mode.no_host_sync);
        // The handle may be another communicator's.
        let routing = Routing::default();
        let called = self.sign(call.operation, &mut common, call.signature);
        let row = RowFormat { x_bytes: 16, scale_bytes: 0, weights: false };
        let dispatch_tiling = self.dispatch_tiling(&row, Layout::Flat, false);
        let arguments = arguments(call, common, routing, &dispatch_tiling);
        // SAFETY: the arguments name no tensors.
        let sent = self.refuse_decode(call.operation, &common).and_then(|refused| match refused {
            true => Ok(()),
            // SAFETY: the arguments name no tensors.
            false => unsafe {
                let blocks = self.launcher.blocks.exchange;
                self.launch_dispatch(call.operation, &arguments, [blocks, dispatch_tiling.shared])
            },
        });
        let outcome = sent.and_then(|()| self.wait_outcome(call.operation, &called));
        self.order.order_refused(self.routing.slot(call.operation), &mode);
        self.abort_on_fatal(self.report_no_host_sync(mode.no_host_sync, outcome))?;
        let message = "all ranks went on with a call that this one refused";
        Err(Error::new(ErrorKind::Internal, "dispatch", message))
    }

    /// # Safety
    /// As [`dispatch_send`](Self::dispatch_send).
    unsafe fn send_rows(
        &mut self,
        call: &DispatchCall<'_>,
        step: &Step,
        wanted: &Wanted,
    ) -> Result<Launched> {
        let entered = self.enter(call.operation, &wanted.mode);
        self.abort_on_fatal(entered)?;
        let renewed = match wanted.replay {
            true => Ok(()),
            false => self.renew(call.handle, wanted.mode.is_recorded()),
        };
        self.abort_on_fatal(renewed)?;
        self.routing.use_handle(call.handle, &wanted.mode);
        let room = self
            .stage_dispatch(call, wanted)
            .and_then(|staging| self.make_room(call, wanted, staging).map(|r| [r, staging]));
        let room = match room {
            Ok(room) => room,
            Err(error) => {
                let refusal = self.objection(ErrorKind::Full, error.detail());
                let refused = self.refuse_dispatch(call, &refusal);
                // Its own reason says more than the text that the other ranks receive, which names the rank.
                let error = error.with_rank(self.exchange.world_rank());
                return refused.map_err(|e| if e.kind() == ErrorKind::Full { error } else { e });
            }
        };
        // SAFETY: by this function's contract.
        let launched = unsafe { self.launch_rows(call, step, wanted, room) };
        match self.abort_on_fatal(launched) {
            Ok(launched) => Ok(launched),
            Err(error) => {
                self.order.order_refused(self.routing.slot(call.operation), &wanted.mode);
                self.places.release(room.iter().flatten());
                Err(error)
            }
        }
    }

    /// The second part of [`dispatch_send`](Self::dispatch_send): waits until the kernel reports how the operation
    /// continues, unless no caller waits for that, or the host does so later.
    pub(crate) fn dispatch_settle(&mut self, launched: Launched) -> Result<()> {
        let Launched { operation, handle, wanted, region, staging, called, known } = launched;
        let counted = match wanted.mode.waits() {
            true => self
                .wait_outcome(operation, &called)
                .map(|Outcome { tokens, rows, .. }| RegionRows { tokens, experts: rows }),
            false => Ok(known),
        };
        let (counted, region) = match (self.abort_on_fatal(counted), region) {
            (Ok(counted), Some(region)) => (counted, region),
            (Ok(_), None) => {
                return Err(Error::new(ErrorKind::Internal, "dispatch", "rows go nowhere"));
            }
            (Err(error), region) => {
                self.order.order_refused(self.routing.slot(operation), &wanted.mode);
                self.places.release(region.iter().chain(&staging));
                return Err(error);
            }
        };
        let arrangement = wanted.spec.layout;
        let rows = wanted.rows(counted);
        let layout = RegionLayout::new(&wanted.spec, rows)?;
        self.places.arena.shrink(region.id, layout.bytes);
        let output =
            Output { region: region.id, address: self.places.address(&region), layout, rows };
        let received = counted.tokens;
        self.order.regions.give(region.id, wanted.mode.stream);
        let state = self.routing.handle(handle);
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
        self.routing.begin(operation, Operation::Dispatch(op));
        Ok(())
    }

    /// Where kernels put: memory for the sources of their puts.
    fn stage_dispatch(
        &mut self,
        call: &DispatchCall<'_>,
        wanted: &Wanted,
    ) -> Result<Option<Region>> {
        if !self.exchange.path.puts() {
            return Ok(None);
        }
        let tokens = match wanted.replay {
            true => self.routing.handles[call.handle as usize].tokens,
            false => call.topk_idx.shape[0] as u32,
        };
        let bytes = staged_bytes(&self.exchange.shape, &wanted.format.row, tokens);
        self.places.allocate(bytes, Holder::Dispatch(call.operation), &wanted.mode).map(Some)
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
        if wanted.mode.waits() && !self.decodes(wanted.spec.layout) {
            return Ok(self.places.arena.reserve(wanted.room.bytes, holder).ok());
        }
        let rows = wanted.rows(self.routing.handles[call.handle as usize].exact);
        let bytes = RegionLayout::new(&wanted.spec, rows)?.bytes;
        let region = self.places.allocate(bytes, holder, &wanted.mode);
        if region.is_err() {
            self.places.release(&staging);
        }
        region.map(Some)
    }

    /// Launches the kernel. `[region, staging]`: memory for the rows that arrive, and for the sources of puts.
    ///
    /// # Safety
    /// As [`dispatch_send`](Self::dispatch_send).
    unsafe fn launch_rows(
        &mut self,
        call: &DispatchCall<'_>,
        step: &Step,
        wanted: &Wanted,
        room: [Option<Region>; 2],
    ) -> Result<Launched> {
        let [region, staging] = room;
        let (place, capacity) = region.map_or((0, 0), |r| (r.offset, r.bytes));
        // The holders of the arena, in case it turns out to be too full.
        let scarce = capacity < wanted.room.bytes;
        let holders = if scarce { self.places.arena.holders() } else { String::new() };
        let no_host_sync = wanted.mode.no_host_sync;
        let mut common = self.common(call.operation, ENTER, holders.as_bytes(), no_host_sync);
        step.follow(&mut common);
        let state = self.routing.handle(call.handle);
        let (tokens, on_device) = match wanted.replay {
            true => (state.tokens, state.has_device_tokens),
            false => (call.topk_idx.shape[0] as u32, !call.tokens.is_null()),
        };
        let roles = self.roles(wanted, call.cast, Tokens { most: tokens, on_device });
        let state = self.routing.handle(call.handle);
        if !wanted.replay {
            state.count(tokens, roles.counting);
            state.has_device_tokens = on_device;
            state.worst = wanted.worst;
            state.layout = wanted.spec.layout;
        }
        common.input_rows = state.tokens;
        let (routing, worst) = (state.routing, state.worst);
        let known = match wanted.replay && !state.is_open {
            true => RegionRows { tokens: state.received, ..state.exact },
            false => wanted.most,
        };
        let called = self.sign(call.operation, &mut common, call.signature);
        if let Some(grouped) = step.grouped.filter(|_| !wanted.replay) {
            self.group(self.routing.slot(call.operation), &routing, grouped.counts)?;
        }
        let format = &wanted.format;
        let dispatch_tiling = match call.cast {
            Cast::None => self.dispatch_tiling(&format.row, wanted.spec.layout, roles.few_push()),
            _ => self.cast_tiling(&format.row, call.x.dtype),
        };
        let shared = dispatch_tiling.shared;
        let (x, raw) = match call.cast {
            Cast::None => (call.x.data as u64, 0),
            _ => (0, call.x.data as u64),
        };
        let gives = wanted.mode.waits() && !self.decodes(wanted.spec.layout);
        let slot = self.routing.slot(call.operation);
        let host_counts = self.launcher.counts.ask(slot, ticket(call.operation), gives);
        let arguments = DispatchArgs {
            host_counts,
            topk_idx: call.topk_idx.data as u64,
            tokens: call.tokens as u64,
            x,
            scales: call.scales.data as u64,
            weights: call.topk_weights.data as u64,
            scale_stride: call.scales.stride,
            region: place,
            capacity,
            row_bytes: format.row.x_bytes.into(),
            scale_words: format.scale_cols as u32,
            replay: wanted.replay.into(),
            worst: worst.into(),
            staged: staging.is_some().into(),
            staging: staging.map_or(0, |r| r.offset),
            worst_experts: wanted.most.experts,
            alignment: wanted.spec.layout.alignment(),
            raw,
            cast: call.cast.code(),
            dtype: call.x.dtype,
            hidden: self.exchange.shape.hidden,
            source_first: self.exchange.world_rank() * self.exchange.shape.max_tokens,
            sources: step.grouped.map_or(0, |grouped| grouped.sources),
            at_once: wanted.mode.at_once.into(),
            pushers: roles.pushers,
            part_rows: roles.part_rows(),
            tiles: self.sizes.tiles(),
            tile_rows: if wanted.in_tiles(self.has_tiles()) { self.sizes.tile_rows } else { 0 },
            zero_padding: matches!(
                wanted.spec.layout,
                Layout::ExpertMajor { zero_padding: true, .. }
            )
            .into(),
            ..arguments(call, common, routing, &dispatch_tiling)
        };
        // SAFETY: the tensors are valid by this function's contract.
        unsafe {
            match self.decodes(wanted.spec.layout) {
                true => self.launch_decode_dispatch(call, &arguments, &wanted.mode)?,
                false => {
                    self.launch_dispatch(call.operation, &arguments, [roles.blocks, shared])?
                }
            }
        }
        let (operation, handle, wanted) = (call.operation, call.handle, *wanted);
        Ok(Launched { operation, handle, wanted, region, staging, called, known })
    }

    /// Inside one of several domains: finds the group of each token, before tokens are counted.
    fn group(&self, slot: usize, routing: &Routing, counts: u64) -> Result<()> {
        let Some(group) = &self.launcher.kernels.group else {
            return Err(Error::new(ErrorKind::Internal, "dispatch", "there are no groups"));
        };
        let (shape, groups) = (&self.exchange.shape, self.exchange.groups);
        let arguments = GroupArgs {
            counts,
            starts: routing.group_starts,
            zeros: routing.group_counts,
            groups,
            words: (shape.ranks + shape.experts) * groups,
        };
        // SAFETY: the kernel's type; counts lie in a region that is held, the rest in the handle.
        unsafe { self.launch(group, Launch::of_threads(1, THREADS, 0), &arguments, slot) }
    }

    /// # Safety
    /// Memory that the arguments name, except for the engine's own, is valid until the operation is
    /// received.
    unsafe fn launch_dispatch(
        &self,
        operation: u64,
        arguments: &DispatchArgs,
        [blocks, shared]: [u32; 2],
    ) -> Result<()> {
        let size = Launch::of_threads(blocks, THREADS, shared);
        let slot = self.routing.slot(operation);
        // SAFETY: the kernel's type; the rest by this function's contract.
        unsafe { self.launch(&self.launcher.kernels.dispatch, size, arguments, slot) }
    }

    /// The place where the output of a dispatch that was sent will lie.
    pub(crate) fn dispatch_output(&self, operation: u64) -> Result<abi::TyReceived> {
        let op = self.routing.dispatch(operation).ok_or_else(|| not_sent(operation))?;
        Ok(describe(op, &self.exchange.regions, self.lost_of(op)))
    }

    pub(crate) fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.check()?;
        let of = |op: &Operation| match op {
            Operation::Dispatch(op) if op.operation == operation => Some(*op),
            _ => None,
        };
        let op = self.routing.take(operation, of).ok_or_else(|| not_sent(operation))?;
        let slot = self.routing.slot(operation);
        self.resume(&op.mode)?;
        let rows = match self.decodes(op.arrangement) {
            true => self.receive_decode(operation),
            false => self.arrive_unless(op.mode.at_once, operation, abi::TY_PHASE_ROWS),
        };
        let arrived = rows
            .and_then(|()| self.spread(slot, &op))
            .and_then(|()| self.leave(operation, abi::TY_PHASE_ROWS, &op.mode));
        self.unstage(op.staging, op.handle, &op.mode);
        self.abort_on_fatal(arrived)?;
        Ok(describe(&op, &self.exchange.regions, self.lost_of(&op)))
    }

    /// The list of ranks that an output leaves out.
    fn lost_of(&self, op: &DispatchOp) -> u64 {
        match self.launcher.waits.masks {
            Some(_) => op.output.address + op.output.layout.lost.offset,
            None => self.launcher.memory.lost.address(),
        }
    }
}

fn not_sent(operation: u64) -> Error {
    let message = format!("no dispatch with number {operation} was sent");
    Error::new(ErrorKind::Internal, "receive dispatch", message)
}
