//! The packed layout (decoding): no counting round. Rows land in places that are fixed per source,
//! one copy per (token, rank); the entry carries how many there are. The owner then spreads them
//! over its experts. Landing places are free again when their owner has said `Done`. Over the rail it
//! is the same: rows and an entry at once, which the forwarder hands on.

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::moe::RegionLayout;

use super::agree::{Agreed, Enter, Terms, bad_record};
use super::control::Verdict;
use super::dispatch::DispatchOp;
use super::engine::{Engine, Operation};
use super::output::Output;
use super::rows::{Move, Via};
use super::slots::{End, was_refused};

impl Engine {
    /// # Safety
    /// The call's tensors are valid until the operation is received.
    pub(super) unsafe fn packed_send(
        &mut self,
        call: &abi::TyDispatch,
        slot: usize,
        mut op: DispatchOp,
        enter: &Enter<'_>,
    ) -> Result<()> {
        if enter.refusal.is_some() {
            self.operations[slot] = Operation::Dispatch(op);
            return self.announce_rows(slot, op.handle, enter);
        }
        match self.allocate_output(&op) {
            Ok(output) => op.output = Some(output),
            Err(error) => {
                let text = error.detail();
                let refusal = Some((Verdict::Full, text.as_bytes()));
                self.operations[slot] = Operation::Dispatch(op);
                return self.announce_rows(slot, op.handle, &Enter { refusal, ..*enter });
            }
        }
        self.operations[slot] = Operation::Dispatch(op);
        let m = Move { via: Via::Leg(self.domains.mine), ..op.carry(slot) };
        // SAFETY: by this function's contract.
        unsafe {
            let source = self.row_source(call, &op.format)?;
            self.send_out(slot, &op, &source)?;
            self.move_to_landing(&m, &source)?;
        }
        self.announce_rows(slot, op.handle, enter)
    }

    /// Tells everybody how many rows this rank has sent them, or that it refuses.
    fn announce_rows(&self, slot: usize, handle: usize, enter: &Enter<'_>) -> Result<()> {
        self.enter(
            slot,
            enter,
            &|engine, domain| engine.rows_of_domain(handle, domain),
            &|engine, domain, peer| engine.rows_of_leg(handle, domain, peer),
        )
    }

    /// How many rows of a domain's source a peer gets.
    pub(super) fn rows_of_leg(&self, handle: usize, domain: u32, peer: u32) -> Terms<'_> {
        let send = &self.handles[handle].legs[domain as usize].send;
        Terms::rows(send.rank_counts()[peer as usize])
    }

    /// How this rank entered a packed dispatch, as far as others' entries are compared with it.
    pub(super) fn packed_enter(&self, op: &DispatchOp) -> Enter<'static> {
        let refusal = op.output.is_none().then_some((Verdict::Refused, &[][..]));
        let origin = self.origin(op.handle, refusal.is_some());
        Enter { operation: op.operation, signature: op.signature, origin, refusal }
    }

    pub(super) fn packed_recv(&mut self, slot: usize, op: &DispatchOp) -> Result<abi::TyReceived> {
        let operation = op.operation;
        let heard = self.hear_entries(slot, &self.packed_enter(op))?;
        let refused = self.agreed[slot].take().map_or(heard, |Agreed(refused)| refused);
        let verdict = refused.map_or(Ok(()), |refusal| Err(refusal.error()));
        // Rows of those that took part are on their way even where somebody refused: they are
        // counted, so that the totals stay right, and given up.
        for (domain, peer) in self.domains.pairs() {
            let source = self.domains.place(domain, peer);
            let entry = self.gathered.entries[source as usize];
            self.wait_rows(slot, source, operation, entry.rows * entry.arrays)?;
        }
        for source in 0..self.shape.ranks {
            if self.is_gone(source) {
                self.forget_entry(source);
            }
        }
        let result = match (verdict, op.output) {
            (Ok(()), Some(output)) => {
                self.unpack(slot, op, &output).map(|()| self.describe(op, &output))
            }
            (verdict, output) => {
                if let Some(output) = output {
                    self.arena.release(output.region.id);
                }
                verdict.and_then(|()| Err(super::dispatch::unheard_refusal()))
            }
        };
        let refused = result.as_ref().is_err_and(was_refused);
        self.leave(slot, operation, if refused { End::Refused } else { End::Done })?;
        if let (Ok(_), Some(output)) = (&result, op.output)
            && op.signature.is_fresh()
        {
            self.remember_output(op.handle, &output);
        }
        result
    }

    /// Spreads landed rows over the experts, by source rank, then source token.
    fn unpack(&mut self, slot: usize, op: &DispatchOp, output: &Output) -> Result<()> {
        let landing = self.landing_layout(&op.format)?;
        let shape = self.shape;
        let local = shape.local_experts() as usize;
        let places = (shape.ranks * shape.max_tokens) as usize;
        let counts = self.array(output, output.layout.expert_counts).cast::<i32>();
        let ranges = self.array(output, output.layout.ranges).cast::<i64>();
        // SAFETY: the region is this rank's; these arrays are written by nobody else.
        unsafe { counts.write_bytes(0, local) };
        let mut tokens = 0;
        for source in 0..shape.ranks {
            // SAFETY: as above; El counts and El * R ranges.
            let begin = |e: usize| unsafe { counts.add(e).read() };
            for e in 0..local {
                let range = ranges.wrapping_add(e * shape.ranks as usize + source as usize);
                // SAFETY: as above. The count is added once the rows are placed.
                unsafe { range.write(i64::from(begin(e)) << 32) };
            }
            let rows = self.gathered.entries[source as usize].rows as usize;
            if self.is_gone(source) && !op.signature.is_fresh() {
                self.gathered.rows[source as usize] = self.unpack_lost(op, output, source);
                tokens += self.gathered.rows[source as usize] as usize;
            }
            let base = self.sizes.landing(slot, source);
            for row in 0..rows {
                let from = Landed { base, layout: &landing, row, source };
                self.unpack_row(op, output, &from, tokens)?;
                tokens += 1;
            }
            for e in 0..local {
                let range = ranges.wrapping_add(e * shape.ranks as usize + source as usize);
                // SAFETY: as above.
                unsafe {
                    let start = range.read();
                    range.write(start | (i64::from(begin(e)) - (start >> 32)));
                }
            }
        }
        debug_assert!(places * local >= tokens);
        self.finish_packed(op, output, tokens)
    }

    fn unpack_row(
        &self,
        op: &DispatchOp,
        output: &Output,
        from: &Landed<'_>,
        token: usize,
    ) -> Result<()> {
        let shape = &self.shape;
        let topk = shape.topk as usize;
        let places = (shape.ranks * shape.max_tokens) as usize;
        let (x_bytes, scale_bytes) =
            (op.format.row.x_bytes as usize, op.format.row.scale_bytes as usize);
        let landed = |span: tokenyard_core::moe::Span, width: usize| {
            self.control.at(from.base + span.offset).wrapping_add(from.row * width)
        };
        let counts = self.array(output, output.layout.expert_counts).cast::<i32>();
        let out = |span| self.array(output, span);
        for k in 0..topk {
            // SAFETY: landed rows are complete (their signal was seen) and have K ids each.
            let id = unsafe { landed(from.layout.ids, 4 * topk).cast::<i32>().add(k).read() };
            let slots = out(output.layout.slots).cast::<i32>().wrapping_add(token * topk + k);
            if id < 0 {
                // SAFETY: N <= R*M rows of K slots, in this rank's region.
                unsafe { slots.write(-1) };
                continue;
            }
            if id as u32 >= shape.local_experts() {
                return Err(bad_record(from.source, format!("local expert {id}")));
            }
            // SAFETY: expert `id` is in range; a valid routing selects it at most once per token,
            // so its block of R*M rows cannot overflow, which is checked all the same.
            let place = unsafe {
                let count = counts.add(id as usize);
                let place = count.read();
                count.write(place + 1);
                place as usize
            };
            if place >= places {
                return Err(bad_record(
                    from.source,
                    format!("more than {places} rows for expert {id}"),
                ));
            }
            let row = id as usize * places + place;
            // SAFETY: `row` is below El * R*M; source and target are different windows.
            unsafe {
                slots.write(row as i32);
                std::ptr::copy_nonoverlapping(
                    landed(from.layout.x, x_bytes),
                    out(output.layout.x).add(row * x_bytes),
                    x_bytes,
                );
                std::ptr::copy_nonoverlapping(
                    landed(from.layout.scales, scale_bytes),
                    out(output.layout.scales).add(row * scale_bytes),
                    scale_bytes,
                );
                if op.format.row.weights {
                    let weight = landed(from.layout.weights, 4 * topk).cast::<f32>().add(k).read();
                    out(output.layout.weights).cast::<f32>().add(row).write(weight);
                }
                let source = landed(from.layout.source, 4).cast::<i32>().read();
                out(output.layout.source).cast::<i32>().add(row).write(source);
            }
        }
        Ok(())
    }

    /// Counts per source, totals, and the receive plan that combine works with.
    fn finish_packed(&mut self, op: &DispatchOp, output: &Output, tokens: usize) -> Result<()> {
        let layout = &output.layout;
        let local = self.shape.local_experts() as usize;
        let ranks = self.shape.ranks as usize;
        let ranges = self.array(output, layout.ranges).cast::<i64>();
        // SAFETY: the region is this rank's until it is released; all ranges were just written.
        unsafe {
            let counts = self.array(output, layout.rank_counts).cast::<u32>();
            for source in 0..ranks {
                counts.add(source).write(self.gathered.rows[source]);
                for e in 0..local {
                    let range = ranges.add(e * ranks + source).read();
                    self.gathered.counts[source * local + e] = range as u32;
                }
            }
        }
        let state = &mut self.handles[op.handle];
        state.recv.build(1, &self.gathered.rows, &self.gathered.counts)?;
        state.tokens = tokens as u64;
        state.rows = state.recv.num_expert_rows().into();
        // SAFETY: as above.
        unsafe {
            let totals = self.array(output, layout.totals).cast::<i64>();
            totals.write(tokens as i64);
            totals.add(1).write(self.handles[op.handle].rows as i64);
        }
        Ok(())
    }
}

/// A row in its landing place.
struct Landed<'a> {
    base: u64,
    layout: &'a RegionLayout,
    row: usize,
    source: u32,
}
