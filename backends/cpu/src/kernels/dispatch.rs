//! Dispatch with counting, and its replay.
//!
//! Counting is two half rounds: entries carry counts from sources to owners, grants carry places
//! back to whoever brings the rows: the source, or its forwarder. A replay enters with its region's place
//! and needs no grant. No row moves before every rank has said that it takes part.

use tokenyard_core::abi;
use tokenyard_core::moe::{Holder, Layout, RegionLayout, RegionSpec};
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::{Enter, Terms, ToDomain, ToPeer, bad_record};
use super::commands::Body;
use super::control::{Header, Signal, Verdict};
use super::engine::{Engine, Operation, Wait};
use super::handle::{Arrangement, WireFormat};
use super::output::Output;
use super::rows::{Move, Via};
use super::slots::{End, Exposed};
use super::verdicts::refusal_record;
use super::writer::RowSource;

/// A dispatch between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct DispatchOp {
    pub(super) operation: u64,
    pub(super) handle: usize,
    pub(super) signature: Signature,
    pub(super) format: WireFormat,
    /// This rank's output, unless a packed dispatch was refused here.
    pub(super) output: Option<Output>,
    pub(super) packed: bool,
}

impl DispatchOp {
    /// The move of its rows; this rank's own, unless said otherwise.
    pub(super) fn carry(&self, slot: usize) -> Move {
        Move {
            operation: self.operation,
            slot,
            handle: self.handle,
            via: Via::Rail,
            format: self.format,
            arrays: self.signature.arrays(),
        }
    }
}

/// The text of a refusal, if there is one.
///
/// # Safety
/// `text` is valid memory for `'a`, or empty.
pub(super) unsafe fn refusal<'a>(text: abi::TyStr) -> Option<&'a [u8]> {
    if text.bytes == 0 {
        return None;
    }
    // SAFETY: by this function's contract.
    Some(unsafe { std::slice::from_raw_parts(text.data, text.bytes) })
}

impl Engine {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(super) unsafe fn dispatch_send(&mut self, call: &abi::TyDispatch) -> Result<()> {
        self.finish_forward()?;
        let slot = self.enter_slot(call.operation)?;
        // SAFETY: by this function's contract.
        let sent = unsafe { self.dispatch_in_slot(call, slot) };
        self.take_forward(slot);
        self.leave_if_refused(slot, call.operation, sent)
    }

    /// # Safety
    /// As [`dispatch_send`](Self::dispatch_send).
    unsafe fn dispatch_in_slot(&mut self, call: &abi::TyDispatch, slot: usize) -> Result<()> {
        // SAFETY: the host's string is valid for the call.
        let refused = unsafe { refusal(call.refusal) };
        let signature = Signature::dispatch(call);
        let arrangement = Arrangement::of(call)?;
        let format = WireFormat::of(call, self.shape.hidden)?;
        let op = DispatchOp {
            operation: call.operation,
            handle: call.handle as usize,
            signature,
            format,
            output: None,
            packed: arrangement.layout == Layout::Packed,
        };
        let replay = call.flags & abi::TY_DISPATCH_REPLAY != 0;
        if !replay && refused.is_none() {
            // SAFETY: `[T, K]` i64, contiguous and validated by the host.
            let topk = unsafe { i64_slice(&call.topk_idx) };
            let state = &mut self.handles[op.handle];
            let world = (&self.shape, &self.domains);
            state.route(call.operation, topk, world, self.rail.as_mut());
            state.arrangement = arrangement;
        }
        let enter = Enter {
            operation: call.operation,
            signature,
            origin: self.origin(op.handle, refused.is_some()),
            refusal: refused.map(|text| (Verdict::Refused, text)),
        };
        if op.packed {
            // SAFETY: by this function's contract.
            return unsafe { self.packed_send(call, slot, op, &enter) };
        }
        if enter.refusal.is_some() {
            self.enter_refused(slot, &enter)?;
            self.gather_entries(slot, &enter)?;
            return Err(unheard_refusal());
        }
        let output = if replay {
            self.enter_replay(slot, &op, &enter)?
        } else {
            self.enter_counting(slot, &op, &enter)?
        };
        self.operations[slot] = Operation::Dispatch(DispatchOp { output: Some(output), ..op });
        // SAFETY: by this function's contract.
        unsafe {
            let source = self.row_source(call, &format)?;
            self.send_out(slot, &op, &source)?;
            let mine = self.domains.mine;
            let m = Move { via: Via::Leg(mine), ..op.carry(slot) };
            self.move_to_regions(&m, mine, &source)
        }
    }

    /// Sends rows over the rail, where there are other domains: they have the longer way.
    ///
    /// # Safety
    /// `source` is valid until this operation is received.
    pub(super) unsafe fn send_out(
        &mut self,
        slot: usize,
        op: &DispatchOp,
        source: &RowSource,
    ) -> Result<()> {
        if self.rail.is_none() {
            return Ok(());
        }
        let m = Move { via: Via::Rail, ..op.carry(slot) };
        // SAFETY: by this function's contract.
        unsafe { self.move_to_landing(&m, source) }
    }

    /// Sends counts, hears counts, and turns them into places on both sides.
    fn enter_counting(
        &mut self,
        slot: usize,
        op: &DispatchOp,
        enter: &Enter<'_>,
    ) -> Result<Output> {
        let handle = op.handle;
        self.enter(
            slot,
            enter,
            &|engine, domain| engine.counts_of_domain(handle, domain),
            &|engine, domain, peer| {
                let send = &engine.handles[handle].legs[domain as usize].send;
                let local = engine.shape.local_experts() as usize;
                let counts = &send.expert_counts()[peer as usize * local..][..local];
                let rows = send.rank_counts()[peer as usize];
                Terms { body: Body::Counts([counts, &[]]), ..Terms::rows(rows) }
            },
        )?;
        self.relay(slot, op.operation, &|engine, domain, peer| {
            let announced = engine.rail.as_ref().map(|rail| rail.announced(domain, peer));
            let (rows, counts) = announced.unwrap_or((0, &[]));
            Terms { body: Body::Counts([counts, &[]]), ..Terms::rows(rows) }
        })?;
        let refused = self.hear_entries(slot, enter)?;
        if refused.is_some() {
            self.conclude(slot, enter, refused)?;
        }
        let state = &mut self.handles[op.handle];
        let alignment = state.arrangement.layout.alignment();
        let built = state.recv.build(alignment, &self.gathered.rows, &self.gathered.counts);
        state.tokens = state.recv.num_rows().into();
        state.rows = state.recv.num_expert_rows().into();
        let output = built.and_then(|()| self.allocate_output(op));
        self.send_grants(slot, op, &output)?;
        let heard = self.gather_grants(slot, (op.operation, op.signature), op.handle);
        let output = match (heard, output) {
            (Ok(()), Ok(output)) => output,
            (Err(error), Ok(output)) => {
                self.exposed = Some(Exposed { region: Some(output.region) });
                return Err(error);
            }
            // A peer whose counts contradict each other is out of step, not short of room.
            (_, Err(own)) if own.kind() == ErrorKind::Protocol => return Err(own),
            (Err(error), Err(_)) | (Ok(()), Err(error)) => return Err(error),
        };
        self.remember_output(op.handle, &output);
        Ok(output)
    }

    /// What the forwarder in a domain must know before rows come: how many each rank and expert gets.
    fn counts_of_domain(&self, handle: usize, domain: u32) -> Terms<'_> {
        let Some(outward) = &self.handles[handle].outward else { return Terms::rows(0) };
        let (domain, ranks) = (domain as usize, self.inside.ranks as usize);
        let experts = self.inside.experts as usize;
        let body = Body::Counts([
            &outward.rank_rows[domain * ranks..][..ranks],
            &outward.send.expert_counts()[domain * experts..][..experts],
        ]);
        Terms { body, ..Terms::rows(outward.send.rank_counts()[domain]) }
    }

    /// What combine of this handle will read: the first output, not that of a replay.
    pub(super) fn remember_output(&mut self, handle: usize, output: &Output) {
        let shape = self.shape;
        let state = &mut self.handles[handle];
        state.region_offset = output.region.offset;
        state.region = Some(output.layout);
        state.output_rows = state.rows_of_output(&shape, &output.rows);
    }

    /// Tells whoever brings rows where those of each source go, or why there is no room.
    fn send_grants(&self, slot: usize, op: &DispatchOp, output: &Result<Output>) -> Result<()> {
        let recv = &self.handles[op.handle].recv;
        let text = output.as_ref().err().map(|error| error.detail());
        for (domain, peer) in self.domains.pairs() {
            let source = self.domains.place(domain, peer);
            let record = match (output, &text) {
                (Ok(o), _) => (
                    Header([
                        op.operation,
                        Verdict::Go as u64,
                        o.region.offset,
                        o.rows.tokens,
                        o.rows.experts,
                        recv.row_base(source).into(),
                        0,
                        0,
                    ]),
                    Body::Counts([recv.expert_bases(source), &[]]),
                ),
                (Err(_), text) => {
                    let text = text.as_deref().unwrap_or("").as_bytes();
                    refusal_record(op.operation, (Verdict::Full, self.rank), text)
                }
            };
            self.send_record(Signal::Grant, slot, (domain, peer), record)?;
        }
        Ok(())
    }

    /// Enters with the place of this rank's region; the counts are those of the handle.
    fn enter_replay(&mut self, slot: usize, op: &DispatchOp, enter: &Enter<'_>) -> Result<Output> {
        let output = match self.allocate_output(op) {
            Ok(output) => output,
            Err(error) => {
                let text = error.detail();
                let refusal = Some((Verdict::Full, text.as_bytes()));
                let enter = Enter { refusal, ..*enter };
                self.enter_refused(slot, &enter)?;
                self.gather_entries(slot, &enter)?;
                return Err(error);
            }
        };
        let (handle, base_x) = (op.handle, output.region.offset);
        let to_domain: &ToDomain<'_> = &|engine, domain| engine.rows_of_domain(handle, domain);
        let to_peer: &ToPeer<'_> = &|engine, domain, peer| {
            let send = &engine.handles[handle].legs[domain as usize].send;
            Terms { base_x, ..Terms::rows(send.rank_counts()[peer as usize]) }
        };
        self.enter(slot, enter, to_domain, to_peer)?;
        self.relay(slot, op.operation, to_peer)?;
        if let Err(error) = self.gather_entries(slot, enter) {
            self.exposed = Some(Exposed { region: Some(output.region) });
            return Err(error);
        }
        self.check_replay(op.handle)?;
        Ok(output)
    }

    /// How many rows this rank sends to a domain.
    pub(super) fn rows_of_domain(&self, handle: usize, domain: u32) -> Terms<'_> {
        let outward = self.handles[handle].outward.as_ref();
        Terms::rows(outward.map_or(0, |outward| outward.send.rank_counts()[domain as usize]))
    }

    /// A replay brings as many rows as its dispatch did.
    fn check_replay(&mut self, handle: usize) -> Result<()> {
        let state = &self.handles[handle];
        let wrong = |source: u32, rows: u64, expected: u64| {
            Err(bad_record(source, format!("{rows} rows in a replay of {expected}")))
        };
        for source in 0..self.shape.ranks {
            let entry = self.gathered.entries[source as usize];
            let expected = u64::from(state.recv.rows_from(source));
            if entry.rows != expected && !self.is_gone(source) {
                return wrong(source, entry.rows, expected);
            }
            self.gathered.regions[source as usize] = entry.base_x;
        }
        Ok(())
    }

    pub(super) fn allocate_output(&mut self, op: &DispatchOp) -> Result<Output> {
        let state = &self.handles[op.handle];
        let spec =
            RegionSpec { shape: self.shape, layout: state.arrangement.layout, row: op.format.row };
        let rows = state.region_rows(&spec)?;
        let layout = RegionLayout::new(&spec, rows)?;
        let region = self.arena.allocate(layout.bytes, Holder::Dispatch(op.operation))?;
        Ok(Output { region, layout, rows })
    }

    pub(super) fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let slot = self.slot(operation);
        let op = match std::mem::replace(&mut self.operations[slot], Operation::None) {
            Operation::Dispatch(op) if op.operation == operation => op,
            other => {
                self.operations[slot] = other;
                return Err(Error::new(
                    ErrorKind::Internal,
                    "receive dispatch",
                    format!("no dispatch with number {operation} was sent"),
                ));
            }
        };
        self.serve(slot, &Operation::Dispatch(op))?;
        if op.packed {
            return self.packed_recv(slot, &op);
        }
        let Some(output) = op.output else {
            return Err(Error::new(ErrorKind::Internal, "receive dispatch", "it has no output"));
        };
        for (domain, peer) in self.domains.pairs() {
            let source = self.domains.place(domain, peer);
            let rows = u64::from(self.handles[op.handle].recv.rows_from(source));
            if self.losses.is_handed_on(source, operation)
                && self.wait_rows(slot, source, operation, rows * op.signature.arrays())?
            {
                self.find_void(&op, &output, source);
            }
        }
        let torn = (0..self.shape.ranks).any(|source| self.lacks(&op, source));
        let output = if torn { self.mend(&op, output)? } else { output };
        self.leave(slot, operation, End::Done)?;
        self.write_counts(&op, &output);
        if let Layout::ExpertMajor { zero_padding, .. } = self.handles[op.handle].arrangement.layout
        {
            self.spread_copies(&op, &output)?;
            if zero_padding {
                self.zero_padding(&op, &output);
            }
        }
        Ok(self.describe(&op, &output))
    }

    /// Waits until the row signal of a source has risen so often. Says whether it has: not so where
    /// the source was given up.
    pub(super) fn wait_rows(
        &mut self,
        slot: usize,
        source: u32,
        operation: u64,
        add: u64,
    ) -> Result<bool> {
        if add == 0 {
            return Ok(true);
        }
        // Sources send before anybody receives; a forwarder hands on when it receives.
        let rank = self.domains.place(self.domains.mine, source % self.domains.size);
        let wait = Wait { operation, add, phase: abi::TY_PHASE_ROWS, rank };
        self.wait(Signal::Rows, slot, source, wait)
    }

    /// What an entry says about its handle; a refused call names none.
    pub(super) fn origin(&self, handle: usize, refused: bool) -> u64 {
        if refused { 0 } else { self.handles[handle].origin }
    }

    /// Copies each row from its first expert's place to the others, with its scales and weights.
    fn spread_copies(&self, op: &DispatchOp, output: &Output) -> Result<()> {
        let state = &self.handles[op.handle];
        let layout = &output.layout;
        let topk = self.shape.topk as usize;
        let (x_bytes, scale_bytes) =
            (op.format.row.x_bytes as usize, op.format.row.scale_bytes as usize);
        let (x, slots) = (self.array(output, layout.x), self.array(output, layout.slots));
        let (scales, landed_scales) =
            (self.array(output, layout.scales), self.array(output, layout.landed_scales));
        let (weights, landed_weights) =
            (self.array(output, layout.weights), self.array(output, layout.landed_weights));
        for token in 0..state.tokens as usize {
            let mut first = None;
            for k in 0..topk {
                // SAFETY: the arrays have N rows; what peers wrote there is complete.
                let slot = unsafe { slots.cast::<i32>().add(token * topk + k).read() };
                let Ok(slot) = usize::try_from(slot) else { continue };
                if slot as u64 >= output.rows.experts {
                    return Err(bad_record(
                        self.source_of_row(op.handle, token),
                        format!("expert-major row {slot} of {}", output.rows.experts),
                    ));
                }
                let from = *first.get_or_insert(slot);
                // SAFETY: both rows were just checked against X; they differ, so do not overlap.
                unsafe {
                    if slot != from {
                        std::ptr::copy_nonoverlapping(
                            x.add(from * x_bytes),
                            x.add(slot * x_bytes),
                            x_bytes,
                        );
                    }
                    std::ptr::copy_nonoverlapping(
                        landed_scales.add(token * scale_bytes),
                        scales.add(slot * scale_bytes),
                        scale_bytes,
                    );
                    if op.format.row.weights {
                        let weight = landed_weights.cast::<f32>().add(token * topk + k).read();
                        weights.cast::<f32>().add(slot).write(weight);
                    }
                }
            }
        }
        Ok(())
    }

    /// The rank that a flat row came from.
    fn source_of_row(&self, handle: usize, row: usize) -> u32 {
        let recv = &self.handles[handle].recv;
        (0..self.shape.ranks).rfind(|r| recv.row_base(*r) as usize <= row).unwrap_or(0)
    }

    fn zero_padding(&self, op: &DispatchOp, output: &Output) {
        let recv = &self.handles[op.handle].recv;
        let layout = &output.layout;
        let row = op.format.row;
        let widths = [
            (layout.x, row.x_bytes as usize),
            (layout.scales, row.scale_bytes as usize),
            (layout.weights, if row.weights { 4 } else { 0 }),
        ];
        let starts = recv.expert_starts();
        for (expert, count) in recv.expert_counts().iter().enumerate() {
            let begin = (starts[expert] + count) as usize;
            let end = starts[expert + 1] as usize;
            for (span, width) in widths {
                // SAFETY: rows [begin, end) are padding inside the region's X rows.
                unsafe {
                    self.array(output, span)
                        .add(begin * width)
                        .write_bytes(0, (end - begin) * width);
                }
            }
        }
    }
}

/// # Safety
/// The tensor is contiguous i64 and valid for `'a`.
unsafe fn i64_slice<'a>(tensor: &abi::TyTensor) -> &'a [i64] {
    let count = (tensor.shape[0] * tensor.shape[1]) as usize;
    if count == 0 {
        return &[];
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(tensor.data.cast(), count) }
}

#[cold]
pub(super) fn unheard_refusal() -> Error {
    Error::new(ErrorKind::Internal, "enter operation", "this rank's own refusal was not heard")
}
