//! Combine: owners make one partial row per (token, rank), sources sum the partials.
//!
//! Where peers can be loaded from, sources read the partials in the owner's arena and then say
//! `Done`; otherwise owners put them into a region that the source names in its entry. For rows that
//! came over the rail the forwarder stands in for their source: see `domain_rows`.

use tokenyard_core::abi;
use tokenyard_core::moe::{DType, Holder, Layout, REGION_ALIGN, Region};
use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::{Enter, Terms, ToDomain, ToPeer, bad_record};
use super::commands::Body;
use super::control::Verdict;
use super::dispatch::{refusal, unheard_refusal};
use super::engine::{Engine, Operation};
use super::merger::Merger;
use super::slots::{End, Exposed};
use super::source::float_type;
use crate::convert::FloatType;

/// A combine between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct CombineOp {
    pub(super) operation: u64,
    pub(super) handle: usize,
    pub(super) signature: Signature,
    pub(super) float: FloatType,
    pub(super) row_bytes: usize,
    pub(super) has_weights: bool,
    staging: Option<Region>,
    /// This rank's partial rows.
    pub(super) partials: Offsets,
    /// Where partials from other owners arrive, if they are put.
    pub(super) landing: Offsets,
    /// Several domains: one row per (token, domain) of this rank's tokens.
    pub(super) returned: Offsets,
    /// Several domains: such rows on their way to other domains.
    pub(super) outgoing: Offsets,
    pub(super) out: abi::TyTensor,
    pub(super) out_weights: abi::TyTensor,
    pub(super) missing: abi::TyTensor,
    bias: [abi::TyTensor; 2],
}

/// Arena offsets of rows and of their weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offsets {
    pub(super) x: u64,
    pub(super) weights: u64,
}

impl Offsets {
    /// Those of a row further on.
    pub(super) fn row(self, row: u64, widths: Widths) -> Self {
        Self { x: self.x + row * widths.x, weights: self.weights + row * widths.weights }
    }
}

/// Bytes of a row, and of its K weights.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) x: u64,
    pub(super) weights: u64,
}

/// What must be laid out before a combine can enter.
pub(super) struct Staged {
    region: Option<Region>,
    pub(super) merger: Merger,
    /// `[N, H]` partial rows and `[N, K]` weights, in flat order.
    pub(super) partials: Offsets,
    pub(super) copies_x: bool,
    pub(super) copies_weights: bool,
    landing: Offsets,
    returned: Offsets,
    outgoing: Offsets,
}

impl Engine {
    /// A region for the expert outputs of a handle.
    pub(super) fn combine_input(
        &mut self,
        handle: u32,
        dtype: u32,
    ) -> Result<(u64, abi::TyTensor)> {
        let Some(state) = self.handles.get(handle as usize) else {
            return Err(Error::new(ErrorKind::Internal, "combine input", "no such handle"));
        };
        let rows = state.output_rows;
        let element = DType::from_code(dtype).map_or(4, DType::bytes) as u64;
        let columns = u64::from(self.shape.hidden);
        let region = self.arena.allocate(rows * columns * element, Holder::CombineInput(handle))?;
        let tensor = abi::TyTensor {
            data: self.arena_area.at(region.offset),
            dtype,
            reserved: 0,
            shape: [rows, columns],
            stride: [columns as i64, 1],
        };
        Ok((region.id, tensor))
    }

    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(super) unsafe fn combine_send(&mut self, call: &abi::TyCombine) -> Result<()> {
        self.finish_forward()?;
        let slot = self.enter_slot(call.operation)?;
        // SAFETY: by this function's contract.
        let sent = unsafe { self.combine_in_slot(call, slot) };
        self.take_forward(slot);
        self.leave_if_refused(slot, call.operation, sent)
    }

    /// # Safety
    /// As [`combine_send`](Self::combine_send).
    unsafe fn combine_in_slot(&mut self, call: &abi::TyCombine, slot: usize) -> Result<()> {
        let signature = Signature::combine(call);
        // SAFETY: the host's string is valid for the call.
        let refused = unsafe { refusal(call.refusal) };
        let enter = Enter {
            operation: call.operation,
            signature,
            origin: self.origin(call.handle as usize, refused.is_some()),
            refusal: refused.map(|text| (Verdict::Refused, text)),
        };
        if enter.refusal.is_some() {
            self.enter_refused(slot, &enter)?;
            self.gather_entries(slot, &enter)?;
            return Err(unheard_refusal());
        }
        let float = float_type(call.x.dtype).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "combine", format!("row type {}", call.x.dtype))
        })?;
        let mut op = CombineOp {
            operation: call.operation,
            handle: call.handle as usize,
            signature,
            float,
            row_bytes: self.shape.hidden as usize * float.bytes(),
            has_weights: !call.weights.data.is_null(),
            staging: None,
            partials: Offsets::default(),
            landing: Offsets::default(),
            returned: Offsets::default(),
            outgoing: Offsets::default(),
            out: call.out,
            out_weights: call.out_weights,
            missing: call.missing,
            bias: [call.bias0, call.bias1],
        };
        let merger = self.merger(call, &op)?;
        let staged = match self.stage(call, &op, merger) {
            Ok(staged) => staged,
            Err(error) => {
                let text = error.detail();
                let refusal = Some((Verdict::Full, text.as_bytes()));
                let enter = Enter { refusal, ..enter };
                self.enter_refused(slot, &enter)?;
                self.gather_entries(slot, &enter)?;
                return Err(error);
            }
        };
        (op.staging, op.partials) = (staged.region, staged.partials);
        (op.landing, op.returned, op.outgoing) = (staged.landing, staged.returned, staged.outgoing);
        // SAFETY: by this function's contract.
        if let Err(error) = unsafe { self.enter_combine(slot, &op, &enter, &staged) } {
            self.exposed = Some(Exposed { region: op.staging });
            return Err(error);
        }
        self.operations[slot] = Operation::Combine(op);
        Ok(())
    }

    /// Enters, and goes as far as this rank can without its caller's outputs. Who enters where peers
    /// read the partial rows says by it that they are there.
    ///
    /// # Safety
    /// As [`combine_send`](Self::combine_send).
    unsafe fn enter_combine(
        &mut self,
        slot: usize,
        op: &CombineOp,
        enter: &Enter<'_>,
        staged: &Staged,
    ) -> Result<()> {
        if self.stores() {
            let all = 0..self.handles[op.handle].tokens as usize;
            // SAFETY: by this function's contract.
            unsafe { self.make_partials(staged, all)? };
        }
        self.send_entries(slot, op, enter, staged)?;
        let several = self.rail.is_some();
        if several || !self.stores() {
            self.gather_entries(slot, enter)?;
        }
        if several {
            // Kept now: the next operation's entries take the place of these.
            self.find_partials(op)?;
        }
        if self.stores() {
            return Ok(());
        }
        // SAFETY: by this function's contract.
        unsafe { self.push(slot, op, staged) }
    }

    fn unstage(&mut self, op: &CombineOp) {
        let Some(region) = op.staging else { return };
        if self.is_still_written(op) {
            self.arena.quarantine(region.id);
        } else {
            self.arena.release(region.id);
        }
    }

    /// Owners put partials into the region of a combine, and forwarders put rows of other domains. One that
    /// was given up may still be about to (INV-8).
    fn is_still_written(&self, op: &CombineOp) -> bool {
        let state = &self.handles[op.handle];
        let from_owner = |peer: u32| {
            let owner = self.domains.place(self.domains.mine, peer);
            let owes = state.legs.iter().any(|leg| leg.send.rank_counts()[peer as usize] > 0);
            owes && self.losses.may_write(owner, op.operation)
        };
        let from_forwarder = |domain: u32| {
            let forwarder = self.domains.place(domain, self.domains.index);
            let rows = state.outward.as_ref().map(|o| o.send.rank_counts()[domain as usize]);
            rows.is_some_and(|rows| rows > 0) && self.losses.may_write(forwarder, op.operation)
        };
        !self.stores() && self.domains.peers().any(from_owner)
            || self.domains.others().any(from_forwarder)
    }

    /// Decides what must be copied, and takes the room for it in one region.
    fn stage(&mut self, call: &abi::TyCombine, op: &CombineOp, merger: Merger) -> Result<Staged> {
        let state = &self.handles[op.handle];
        let flat = state.arrangement.layout == Layout::Flat;
        let widths = self.widths(op);
        let in_arena = |tensor: &abi::TyTensor, width: u64| {
            let bytes = state.tokens * width;
            let offset = self.arena_area.offset_of(tensor.data, bytes)?;
            (flat && offset.is_multiple_of(16)).then_some(offset)
        };
        let x = in_arena(&call.x, widths.x);
        let weights = in_arena(&call.weights, widths.weights);
        let copies_weights = op.has_weights && weights.is_none();
        let landing = if self.stores() { 0 } else { self.landed_before(op.handle, u32::MAX) };
        let returned = state.outward.as_ref().map_or(0, |o| o.send.tokens().len() as u64);
        let outgoing = self.outgoing_before(op.handle, u32::MAX);
        let mut end = 0;
        let mut room = |rows: u64, width: u64| {
            let start = end;
            end += (rows * width).next_multiple_of(REGION_ALIGN);
            start
        };
        let mut rooms = |rows: u64, weighted: u64| Offsets {
            x: room(rows, widths.x),
            weights: room(weighted, widths.weights),
        };
        let back = |rows: u64| if op.has_weights { rows } else { 0 };
        let made = rooms(
            if x.is_none() { state.tokens } else { 0 },
            if copies_weights { state.tokens } else { 0 },
        );
        let areas = [landing, returned, outgoing].map(|rows| rooms(rows, back(rows)));
        let region = match end {
            0 => None,
            bytes => Some(self.arena.allocate(bytes, Holder::Combine(op.operation))?),
        };
        let base = region.map_or(0, |r| r.offset);
        let at = |area: Offsets| Offsets { x: base + area.x, weights: base + area.weights };
        let [landing, returned, outgoing] = areas.map(at);
        Ok(Staged {
            region,
            merger,
            partials: Offsets {
                x: x.unwrap_or(at(made).x),
                weights: weights.unwrap_or(at(made).weights),
            },
            copies_x: x.is_none(),
            copies_weights,
            landing,
            returned,
            outgoing,
        })
    }

    pub(super) fn widths(&self, op: &CombineOp) -> Widths {
        Widths { x: op.row_bytes as u64, weights: 4 * u64::from(self.shape.topk) }
    }

    /// Partial rows that owners owe this rank for the rows of the domains before this one.
    pub(super) fn landed_before(&self, handle: usize, domain: u32) -> u64 {
        let legs = self.handles[handle].legs.iter().take(domain as usize);
        legs.map(|leg| leg.send.tokens().len() as u64).sum()
    }

    /// Tells each peer where its rows are (to be read) or where this rank's rows go (to be put), and
    /// each other domain where its rows go.
    fn send_entries(
        &mut self,
        slot: usize,
        op: &CombineOp,
        enter: &Enter<'_>,
        staged: &Staged,
    ) -> Result<()> {
        let (handle, widths) = (op.handle, self.widths(op));
        let (partials, landing, returned) = (staged.partials, staged.landing, staged.returned);
        let terms = |rows: u32, first: u64, area: Offsets| {
            let Offsets { x: base_x, weights: base_weights } = area.row(first, widths);
            Terms { rows: rows.into(), base_x, base_weights, body: Body::Nothing }
        };
        let to_domain: &ToDomain<'_> = &|engine, domain| {
            let Some(outward) = &engine.handles[handle].outward else { return Terms::rows(0) };
            let first = outward.send.rank_offsets()[domain as usize];
            terms(outward.send.rank_counts()[domain as usize], first.into(), returned)
        };
        let to_peer: &ToPeer<'_> = &|engine, domain, peer| {
            let state = &engine.handles[handle];
            if engine.stores() {
                let source = engine.domains.place(domain, peer);
                let first = state.recv.row_base(source);
                return terms(state.recv.rows_from(source), first.into(), partials);
            }
            let send = &state.legs[domain as usize].send;
            let first = u64::from(send.rank_offsets()[peer as usize]);
            let first = first + engine.landed_before(handle, domain);
            terms(send.rank_counts()[peer as usize], first, landing)
        };
        self.enter(slot, enter, to_domain, to_peer)?;
        self.relay(slot, op.operation, to_peer)
    }

    /// Checks what an entry says about `rows` rows in the arena of `rank`.
    pub(super) fn check_rows(
        &self,
        op: &CombineOp,
        rank: u32,
        (found, at): (u64, Offsets),
        rows: u64,
    ) -> Result<()> {
        let widths = self.widths(op);
        let fits = |base: u64, width: u64| {
            base.checked_add(rows * width).is_some_and(|end| end <= self.arena_area.bytes())
        };
        let good = found == rows
            && (rows == 0 || fits(at.x, widths.x))
            && (rows == 0 || !op.has_weights || fits(at.weights, widths.weights))
            && at.weights.is_multiple_of(4);
        if good {
            return Ok(());
        }
        Err(bad_record(rank, format!("{found} rows at {}; expected {rows} inside the arena", at.x)))
    }

    /// What the entry in a place says about `rows` rows in the arena of its peer.
    pub(super) fn entry_at(
        &self,
        op: &CombineOp,
        (domain, peer): (u32, u32),
        rows: u64,
    ) -> Result<Offsets> {
        let entry = self.gathered.entries[self.domains.place(domain, peer) as usize];
        let at = Offsets { x: entry.base_x, weights: entry.base_weights };
        let rank = self.domains.place(self.domains.mine, peer);
        self.check_rows(op, rank, (entry.rows, at), rows).map(|()| at)
    }

    pub(super) fn combine_recv(&mut self, operation: u64) -> Result<()> {
        let slot = self.slot(operation);
        let op = match std::mem::replace(&mut self.operations[slot], Operation::None) {
            Operation::Combine(op) if op.operation == operation => op,
            other => {
                self.operations[slot] = other;
                return Err(Error::new(
                    ErrorKind::Internal,
                    "receive combine",
                    format!("no combine with number {operation} was sent"),
                ));
            }
        };
        let result = self.finish_combine(slot, &op);
        match result {
            Ok(()) => self.unstage(&op),
            Err(_) => self.exposed = Some(Exposed { region: op.staging }),
        }
        self.leave_if_refused(slot, operation, result)
    }

    /// Sums the partials, and lets their owners go.
    fn finish_combine(&mut self, slot: usize, op: &CombineOp) -> Result<()> {
        let operation = op.operation;
        if self.rail.is_some() {
            self.serve(slot, &Operation::Combine(*op))?;
            self.sum_domains(slot, op)?;
        } else {
            self.sum_ranks(slot, op)?;
        }
        // What this rank put must be gone before its region is.
        self.wait_posted(slot, operation)?;
        self.leave(slot, operation, End::Done)?;
        if self.stores() {
            // Peers may be receiving the next operation already, for a refused one is received
            // where it is sent: they wait for this rank's pending forward there, and it for their `Done` here.
            self.finish_forward()?;
            // The caller may change its rows after this, so nobody may still be reading them.
            self.wait_done(slot, operation, abi::TY_PHASE_DONE)?;
        }
        Ok(())
    }
}

impl CombineOp {
    /// How often the row signal rises for each row.
    pub(super) fn arrays(&self) -> u64 {
        1 + u64::from(self.has_weights)
    }

    pub(super) fn biases(&self) -> [*const u8; 2] {
        self.bias.map(|bias| bias.data.cast_const())
    }
}
