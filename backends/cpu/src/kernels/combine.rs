//! Combine: owners make one partial row per (token, rank), sources sum the partials.
//!
//! Where peers can be loaded from, sources read the partials in the owner's arena and then say
//! `Done`; otherwise owners put them into a region that the source names in its entry.

use tokenyard_core::abi;
use tokenyard_core::moe::{DType, Layout, MAX_TOPK, REGION_ALIGN};
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::{Enter, bad_record};
use super::arena::{Holder, Region};
use super::control::{Signal, Signature, Verdict};
use super::dispatch::{refusal, unheard_refusal};
use super::engine::{Block, Body, Engine, Operation, Wait};
use super::merger::Merger;
use super::rows::{Shared, float_type};
use super::windows::ARENA;
use crate::convert::FloatType;
use crate::sum::sum_rows;

/// Tokens that one task of the pool handles.
const CHUNK: usize = 16;

/// Terms of one output row: two biases and a partial per selected rank.
const MOST_TERMS: usize = MAX_TOPK as usize + 2;

/// A combine between send and receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct CombineOp {
    operation: u64,
    handle: usize,
    signature: Signature,
    float: FloatType,
    row_bytes: usize,
    has_weights: bool,
    staging: Option<Region>,
    landing: Offsets,
    out: abi::TyTensor,
    out_weights: abi::TyTensor,
    bias: [abi::TyTensor; 2],
}

/// Arena offsets of rows and of their weights.
#[derive(Clone, Copy, Debug, Default)]
struct Offsets {
    x: u64,
    weights: u64,
}

/// What must be laid out before a combine can enter.
struct Staged {
    region: Option<Region>,
    /// `[N, H]` partial rows and `[N, K]` weights, in flat order.
    partials: Offsets,
    copies_x: bool,
    copies_weights: bool,
    /// Where partials from owners arrive, if they are put.
    landing: Offsets,
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
        let slot = self.enter_slot(call.operation)?;
        // SAFETY: by this function's contract.
        let sent = unsafe { self.combine_in_slot(call, slot) };
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
            landing: Offsets::default(),
            out: call.out,
            out_weights: call.out_weights,
            bias: [call.bias0, call.bias1],
        };
        let staged = match self.stage(call, &op) {
            Ok(staged) => staged,
            Err(error) => {
                let text = error.detail();
                let refusal = Some((Verdict::Full, text.as_str()));
                let enter = Enter { refusal, ..enter };
                self.enter_refused(slot, &enter)?;
                self.gather_entries(slot, &enter)?;
                return Err(error);
            }
        };
        op.staging = staged.region;
        op.landing = staged.landing;
        // SAFETY: by this function's contract.
        unsafe { self.make_partials(call, &op, &staged)? };
        self.send_entries(slot, &op, &enter, &staged)?;
        if !self.stores()
            && let Err(error) = self.push(slot, &op, &enter, &staged)
        {
            self.unstage(&op);
            return Err(error);
        }
        self.operations[slot] = Operation::Combine(op);
        Ok(())
    }

    fn unstage(&mut self, op: &CombineOp) {
        if let Some(region) = op.staging {
            self.arena.release(region.id);
        }
    }

    /// Decides what must be copied, and takes the room for it in one region.
    fn stage(&mut self, call: &abi::TyCombine, op: &CombineOp) -> Result<Staged> {
        let state = &self.handles[op.handle];
        let flat = state.arrangement.layout == Layout::Flat;
        let k4 = 4 * u64::from(self.shape.topk);
        let row = op.row_bytes as u64;
        let in_arena = |tensor: &abi::TyTensor, width: u64| {
            let bytes = state.tokens * width;
            let offset = self.arena_area.offset_of(tensor.data, bytes)?;
            (flat && offset.is_multiple_of(16)).then_some(offset)
        };
        let x = in_arena(&call.x, row);
        let weights = in_arena(&call.weights, k4);
        let copies_weights = op.has_weights && weights.is_none();
        let put = !self.stores();
        let sent = state.send.tokens().len() as u64;
        let mut end = 0;
        let mut room = |rows: u64, width: u64, wanted: bool| {
            let start = end;
            if wanted {
                end += (rows * width).next_multiple_of(REGION_ALIGN);
            }
            start
        };
        let offsets = [
            room(state.tokens, row, x.is_none()),
            room(state.tokens, k4, copies_weights),
            room(sent, row, put),
            room(sent, k4, put && op.has_weights),
        ];
        let region = match end {
            0 => None,
            bytes => Some(self.arena.allocate(bytes, Holder::Combine(op.operation))?),
        };
        let base = region.map_or(0, |r| r.offset);
        Ok(Staged {
            region,
            partials: Offsets {
                x: x.unwrap_or(base + offsets[0]),
                weights: weights.unwrap_or(base + offsets[1]),
            },
            copies_x: x.is_none(),
            copies_weights,
            landing: Offsets { x: base + offsets[2], weights: base + offsets[3] },
        })
    }

    /// Makes the `[N, H]` partial rows and the `[N, K]` weights, where they are not there already.
    ///
    /// # Safety
    /// As [`combine_send`](Self::combine_send).
    unsafe fn make_partials(
        &self,
        call: &abi::TyCombine,
        op: &CombineOp,
        staged: &Staged,
    ) -> Result<()> {
        let state = &self.handles[op.handle];
        let tokens = state.tokens as usize;
        let flat = state.arrangement.layout == Layout::Flat;
        let topk = self.shape.topk as usize;
        let merger = state.region.map(|layout| Merger {
            x: call.x.data.cast_const(),
            rows: call.x.shape[0] as usize,
            weights: call.weights.data.cast_const().cast(),
            dispatch_weights: (call.flags & abi::TY_COMBINE_WEIGHTED != 0).then(|| {
                self.arena_area.at(state.region_offset + layout.weights.offset).cast_const().cast()
            }),
            slots: self
                .arena_area
                .at(state.region_offset + layout.slots.offset)
                .cast_const()
                .cast(),
            topk,
            float: op.float,
            row_bytes: op.row_bytes,
        });
        let Some(merger) = merger else {
            return Err(Error::new(ErrorKind::Internal, "combine", "the handle has no dispatch"));
        };
        let merger = Shared(merger);
        let x_out = Shared(self.arena_area.at(staged.partials.x));
        let weights_out = Shared(self.arena_area.at(staged.partials.weights).cast::<f32>());
        let (copies_x, copies_weights) = (staged.copies_x, staged.copies_weights);
        let task = |chunk: usize| {
            let (merger, x_out, weights_out) = (merger.get(), x_out.get(), weights_out.get());
            for token in chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens) {
                // SAFETY: N rows were staged; every token belongs to one task; inputs are valid by
                // the contract of `combine_send`.
                unsafe {
                    if copies_x {
                        let out = x_out.add(token * merger.row_bytes);
                        if flat {
                            let from = merger.x.add(token * merger.row_bytes);
                            std::ptr::copy_nonoverlapping(from, out, merger.row_bytes);
                        } else {
                            merger.merge(token, out);
                        }
                    }
                    if copies_weights {
                        let out = weights_out.add(token * merger.topk);
                        if flat {
                            let from = merger.weights.add(token * merger.topk);
                            std::ptr::copy_nonoverlapping(from, out, merger.topk);
                        } else {
                            merger.gather_weights(token, out);
                        }
                    }
                }
            }
        };
        if !copies_x && !copies_weights {
            return Ok(());
        }
        self.pool.run(tokens.div_ceil(CHUNK), &task).map_err(|_| pool_failed())
    }

    /// Tells each rank where its rows are (to be read) or where this rank's rows go (to be put).
    fn send_entries(
        &self,
        slot: usize,
        op: &CombineOp,
        enter: &Enter<'_>,
        staged: &Staged,
    ) -> Result<()> {
        let state = &self.handles[op.handle];
        let (row, k4) = (op.row_bytes as u64, 4 * u64::from(self.shape.topk));
        for peer in self.rotation() {
            let (base, first, rows) = if self.stores() {
                (staged.partials, state.recv.row_base(peer), state.recv.rows_from(peer))
            } else {
                let peer = peer as usize;
                let first = state.send.rank_offsets()[peer];
                (staged.landing, first, state.send.rank_counts()[peer])
            };
            let first = u64::from(first);
            let header = enter.header(rows.into(), base.x + first * row, base.weights + first * k4);
            self.send_record(Signal::Entry, slot, peer, (header, Body::Nothing))?;
        }
        Ok(())
    }

    /// Checks what a peer's entry says about `rows` rows in its arena.
    fn check_entry(&self, peer: u32, rows: u64, op: &CombineOp) -> Result<Offsets> {
        let entry = self.gathered.entries[peer as usize];
        let (row, k4) = (op.row_bytes as u64, 4 * u64::from(self.shape.topk));
        let fits = |base: u64, width: u64| {
            base.checked_add(rows * width).is_some_and(|end| end <= self.arena_area.bytes())
        };
        let good = entry.rows == rows
            && (rows == 0 || fits(entry.base_x, row))
            && (rows == 0 || !op.has_weights || fits(entry.base_weights, k4))
            && entry.base_weights.is_multiple_of(4);
        if !good {
            return Err(bad_record(
                peer,
                format!(
                    "{} rows at {}; expected {rows} inside the arena",
                    entry.rows, entry.base_x
                ),
            ));
        }
        Ok(Offsets { x: entry.base_x, weights: entry.base_weights })
    }

    /// Puts every source's partial rows where it wants them.
    fn push(
        &mut self,
        slot: usize,
        op: &CombineOp,
        enter: &Enter<'_>,
        staged: &Staged,
    ) -> Result<()> {
        self.gather_entries(slot, enter)?;
        let (row, k4) = (op.row_bytes as u64, 4 * u64::from(self.shape.topk));
        for peer in self.rotation() {
            let recv = &self.handles[op.handle].recv;
            let (first, rows) = (u64::from(recv.row_base(peer)), u64::from(recv.rows_from(peer)));
            let there = self.check_entry(peer, rows, op)?;
            let block = |width: u64, from: u64, to: u64| Block {
                peer,
                rows,
                width,
                src: (ARENA, from + first * width),
                dst: (ARENA, to),
            };
            self.put_rows(slot, &block(row, staged.partials.x, there.x), op.operation)?;
            if op.has_weights {
                let block = block(k4, staged.partials.weights, there.weights);
                self.put_rows(slot, &block, op.operation)?;
            }
        }
        Ok(())
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
        let result = if self.stores() { self.pull(slot, &op) } else { self.land(slot, &op) };
        self.unstage(&op);
        self.leave_if_refused(slot, operation, result)
    }

    /// Reads the partials in their owners' arenas, sums them, and lets the owners go.
    fn pull(&mut self, slot: usize, op: &CombineOp) -> Result<()> {
        let operation = op.operation;
        let origin = self.origin(op.handle, false);
        let enter = Enter { operation, signature: op.signature, origin, refusal: None };
        self.gather_entries(slot, &enter)?;
        for peer in 0..self.shape.ranks {
            let rows = self.handles[op.handle].send.rank_counts()[peer as usize];
            self.check_entry(peer, rows.into(), op)?;
        }
        self.sum_tokens(op, &|engine: &Self, peer: u32| {
            let entry = engine.gathered.entries[peer as usize];
            let area = &engine.peers[peer as usize][ARENA as usize];
            (area.at(entry.base_x), area.at(entry.base_weights))
        })?;
        self.leave(slot, operation)?;
        // The caller may change its rows after this, so nobody may still be reading them.
        self.wait_done(slot, operation, abi::TY_PHASE_DONE)
    }

    /// Waits for the partials that owners put here, and sums them.
    fn land(&mut self, slot: usize, op: &CombineOp) -> Result<()> {
        let operation = op.operation;
        for peer in self.rotation() {
            let rows = u64::from(self.handles[op.handle].send.rank_counts()[peer as usize]);
            if rows > 0 {
                let add = rows * (1 + u64::from(op.has_weights));
                let wait = Wait { operation, add, phase: abi::TY_PHASE_COMBINE_ROWS };
                self.wait(Signal::Rows, slot, peer, wait)?;
            }
        }
        let (row, k4) = (op.row_bytes as u64, 4 * u64::from(self.shape.topk));
        let (handle, landing) = (op.handle, op.landing);
        self.sum_tokens(op, &|engine: &Self, peer: u32| {
            let first = engine.handles[handle].send.rank_offsets()[peer as usize];
            let first = u64::from(first);
            (
                engine.arena_area.at(landing.x + first * row),
                engine.arena_area.at(landing.weights + first * k4),
            )
        })?;
        // The partials that this rank put must be gone before their region is.
        self.wait_posted(slot, operation)?;
        self.leave(slot, operation)
    }

    /// Writes every output row: biases, then one partial per rank in combine order.
    fn sum_tokens(
        &self,
        op: &CombineOp,
        base_of: &(dyn Fn(&Self, u32) -> (*mut u8, *mut u8) + Sync),
    ) -> Result<()> {
        let state = &self.handles[op.handle];
        let tokens = state.send.num_tokens() as usize;
        let row_bytes = op.row_bytes;
        let engine = Shared(self);
        let op = Shared(*op);
        let task = |chunk: usize| {
            let (engine, op) = (*engine.get(), op.get());
            let mut terms: [&[u8]; MOST_TERMS] = [&[]; MOST_TERMS];
            for token in chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens) {
                let mut count = 0;
                let biases = op.bias.iter().filter(|b| !b.data.is_null());
                let biases = biases.map(|b| b.data.wrapping_add(token * row_bytes));
                let partials = state.send.fan(token as u32).iter().map(|fan| {
                    let rows = base_of(engine, fan.rank).0;
                    rows.wrapping_add(fan.index as usize * row_bytes)
                });
                for address in biases.chain(partials) {
                    // SAFETY: biases are `[T, H]`; partials were checked against their arena, and
                    // are complete: their owner's entry, or the rows' signals, were seen.
                    terms[count] = unsafe { std::slice::from_raw_parts(address, row_bytes) };
                    count += 1;
                }
                // SAFETY: `out` is `[T, H]`, and every token belongs to one task.
                let out = unsafe {
                    std::slice::from_raw_parts_mut(
                        op.out.data.wrapping_add(token * row_bytes),
                        row_bytes,
                    )
                };
                sum_rows(op.float, out, &terms[..count]);
                if op.has_weights {
                    engine.return_weights(op, token, base_of);
                }
            }
        };
        self.pool.run(tokens.div_ceil(CHUNK), &task).map_err(|_| pool_failed())
    }

    /// Brings each copy's weight back to its (token, k).
    fn return_weights(
        &self,
        op: &CombineOp,
        token: usize,
        base_of: &(dyn Fn(&Self, u32) -> (*mut u8, *mut u8) + Sync),
    ) {
        let state = &self.handles[op.handle];
        let topk = self.shape.topk as usize;
        let out = op.out_weights.data.cast::<f32>().wrapping_add(token * topk);
        for k in 0..topk {
            let expert = state.topk[token * topk + k];
            let rank = u32::try_from(expert).ok().map(|e| self.shape.rank_of(e));
            let fan = state.send.fan(token as u32).iter().find(|fan| Some(fan.rank) == rank);
            let weight = fan.map_or(0.0, |fan| {
                let weights = base_of(self, fan.rank).1.cast::<f32>();
                // SAFETY: `[rows, K]` at the owner, checked and complete like the rows.
                unsafe { weights.add(fan.index as usize * topk + k).read() }
            });
            // SAFETY: `out_weights` is `[T, K]`, and every token belongs to one task.
            unsafe { out.add(k).write(weight) };
        }
    }
}

#[cold]
fn pool_failed() -> Error {
    Error::new(ErrorKind::Internal, "combine", "a task of the worker pool panicked")
}
