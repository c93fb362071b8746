//! The forwarder's pending forward in a dispatch: rows that came over the rail go to the peers that want them.
//!
//! A pending forward is done in the operation's receive, in an earlier one's that waits for everybody, or before
//! the next operation is sent, whichever comes first. So every rank does send 0, pending forward 0, send 1, pending forward 1, ... in this order, each of which needs
//! only earlier ones of other ranks, and nobody waits in a circle.

use tokenyard_core::Result;
use tokenyard_core::abi;

use super::agree::{Agreed, Terms, bad_record};
use super::control::Signal;
use super::dispatch::DispatchOp;
use super::engine::{Engine, Operation, Wait};
use super::rows::{Move, Via};
use super::writer::RowSource;

impl Engine {
    /// Remembers that this rank has a pending forward in the operation that was just sent.
    pub(super) fn take_forward(&mut self, slot: usize) {
        let open = !matches!(self.operations[slot], Operation::None);
        self.pending_forward = (self.rail.is_some() && open).then_some(slot);
    }

    /// Does the pending forward of the last operation, if that was not done in its receive.
    pub(super) fn finish_forward(&mut self) -> Result<()> {
        let Some(slot) = self.pending_forward else { return Ok(()) };
        let operation = self.operations[slot];
        self.serve(slot, &operation)
    }

    /// Does the pending forward of an operation, if it is still to be done.
    pub(super) fn serve(&mut self, slot: usize, operation: &Operation) -> Result<()> {
        if self.pending_forward != Some(slot) {
            return Ok(());
        }
        self.pending_forward = None;
        match operation {
            Operation::Dispatch(op) if op.packed => self.forward_packed(slot, op),
            Operation::Dispatch(op) => self.forward(slot, op),
            Operation::Combine(op) => self.sum_for_all(slot, op),
            Operation::None => Ok(()),
        }
    }

    /// Hands on the rows of every other domain, to their final places.
    fn forward(&mut self, slot: usize, op: &DispatchOp) -> Result<()> {
        for domain in self.domains.others() {
            if self.is_unheard(domain) {
                self.forget_leg(op, domain);
                continue;
            }
            let Some(rows) = self.land(slot, op, domain)? else {
                self.hand_on_void(slot, op, domain)?;
                continue;
            };
            if op.signature.is_fresh() {
                let source = self.domains.place(domain, self.domains.index);
                let leg = &self.handles[op.handle].legs[domain as usize];
                self.rail.as_ref().map_or(Ok(()), |rail| rail.compare(domain, source, leg))?;
            }
            if rows == 0 {
                continue;
            }
            let source = self.landed_rows(slot, op, domain)?;
            let m = Move { via: Via::Leg(domain), ..op.carry(slot) };
            // SAFETY: landing places stay as they are until this rank has left the operation.
            unsafe { self.move_to_regions(&m, domain, &source)? };
        }
        Ok(())
    }

    /// The same for packed rows, which are announced when they are here. Where not both take part in
    /// the same way nobody will use them, so they are counted and given up.
    fn forward_packed(&mut self, slot: usize, op: &DispatchOp) -> Result<()> {
        let handle = op.handle;
        for domain in self.domains.others() {
            self.hear(slot, domain, op.operation)?;
            if !self.wait_landed(slot, op, domain)? {
                self.forget_leg(op, domain);
                self.hand_on(slot, domain, op.operation, &|_, _, _| Terms::rows(0))?;
                continue;
            }
            if op.output.is_none() || self.heard(domain)?.signature != op.signature {
                self.hand_on(slot, domain, op.operation, &|_, _, _| Terms::rows(0))?;
                continue;
            }
            if self.learn_landed(slot, op, domain)? > 0 {
                let source = self.landed_rows(slot, op, domain)?;
                let m = Move { via: Via::Leg(domain), ..op.carry(slot) };
                // SAFETY: as in `forward`.
                unsafe { self.move_to_landing(&m, &source)? };
            }
            self.hand_on(slot, domain, op.operation, &|engine, domain, peer| {
                engine.rows_of_leg(handle, domain, peer)
            })?;
        }
        if self.masks_domains() {
            // Here, and not in the receive: a rank that refuses receives while others still have an
            // earlier operation to receive, in which they wait for it.
            let refused = self.hear_entries(slot, &self.packed_enter(op))?;
            let refused = self.settle_verdict(slot, (op.operation, op.signature), refused)?;
            self.agreed[slot] = Some(Agreed(refused));
        }
        Ok(())
    }

    /// Waits for the rows of a domain, and learns where they go. Returns how many there are; nothing
    /// where their source is lost.
    fn land(&mut self, slot: usize, op: &DispatchOp, domain: u32) -> Result<Option<u32>> {
        if !self.wait_landed(slot, op, domain)? {
            return Ok(None);
        }
        self.learn_landed(slot, op, domain).map(Some)
    }

    /// Learns where the rows of a domain go, which are here. Returns how many there are.
    fn learn_landed(&mut self, slot: usize, op: &DispatchOp, domain: u32) -> Result<u32> {
        let rows = self.heard(domain)?.rows;
        let layout = self.landing_layout(&op.format)?;
        let source = self.domains.place(domain, self.domains.index);
        let leg = &mut self.handles[op.handle].legs[domain as usize];
        let (Some(rail), true) = (&mut self.rail, op.signature.is_fresh()) else {
            let expected = leg.send.num_tokens();
            return if rows == expected {
                Ok(rows)
            } else {
                Err(bad_record(source, format!("{rows} rows in a replay of {expected}")))
            };
        };
        let ids = self.sizes.rail_landing(slot, domain) + layout.ids.offset;
        let count = rows as usize * self.shape.topk as usize;
        // SAFETY: there is room for M rows of K ids; they are complete, and stay as they are until
        // this rank has left the operation.
        let ids = unsafe { std::slice::from_raw_parts(self.control.at(ids).cast::<i32>(), count) };
        rail.learn(ids, source, leg)?;
        Ok(rows)
    }

    /// Whether all rows of a domain are here; not so where their source is lost.
    fn wait_landed(&mut self, slot: usize, op: &DispatchOp, domain: u32) -> Result<bool> {
        let heard = self.heard(domain)?;
        if heard.rows == 0 {
            return Ok(!heard.gone);
        }
        // Counted by the sender's signature: a rank that refuses has no format of its own.
        let add = u64::from(heard.rows) * heard.signature.arrays();
        let rank = self.domains.place(domain, self.domains.index);
        let wait = Wait { operation: op.operation, add, phase: abi::TY_PHASE_ROWS, rank };
        let came = self.wait_rail(Signal::Rows, slot, domain, wait)?;
        if !came {
            self.lose_source(domain);
        }
        Ok(came)
    }

    /// The rows that landed from a domain, as a source.
    fn landed_rows(&self, slot: usize, op: &DispatchOp, domain: u32) -> Result<RowSource> {
        let layout = self.landing_layout(&op.format)?;
        let base = self.sizes.rail_landing(slot, domain);
        let at = |offset: u64| self.control.at(base + offset).cast_const();
        Ok(RowSource {
            x: at(layout.x.offset),
            x_pitch: op.format.row.x_bytes as usize,
            scales: at(layout.scales.offset),
            scale_pitch: [op.format.row.scale_bytes as isize, 4],
            weights: at(layout.weights.offset).cast(),
            sources: at(layout.source.offset).cast(),
        })
    }
}
