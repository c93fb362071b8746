//! Combine among several domains: one row per (token, domain).
//!
//! The forwarder sums the partials of its domain for each row that it handed on in the dispatch, and puts
//! the sum to the row's source; for this rank's own tokens it does the same without the rail. Sources
//! then sum one row per domain. Where losses are masked, the forwarder also says who is left out of its
//! sums: see `left_out`.

use tokenyard_core::Result;
use tokenyard_core::abi;

use super::combine::{CombineOp, Offsets};
use super::commands::Block;
use super::control::Signal;
use super::engine::{Engine, Wait};
use super::rail::no_rail;
use super::rows::Carried;
use super::sums::{Partial, Sum};
use super::windows::ARENA;

impl Engine {
    /// Rows that this rank owes the other domains before this one.
    pub(super) fn outgoing_before(&self, handle: usize, domain: u32) -> u64 {
        let legs = self.handles[handle].legs.iter().zip(0..).take(domain as usize);
        let others = legs.filter(|(_, from)| *from != self.domains.mine);
        others.map(|(leg, _)| u64::from(leg.send.num_tokens())).sum()
    }

    /// The forwarder's pending forward: the rows of the other domains first, because others wait for them.
    pub(super) fn sum_for_all(&mut self, slot: usize, op: &CombineOp) -> Result<()> {
        let widths = self.widths(op);
        for domain in self.domains.others() {
            if self.is_unheard(domain) {
                continue;
            }
            let rows = u64::from(self.handles[op.handle].legs[domain as usize].send.num_tokens());
            let heard = self.heard(domain)?;
            let there = Offsets { x: heard.base_x, weights: heard.base_weights };
            let source = self.domains.place(domain, self.domains.index);
            self.check_rows(op, source, (heard.rows.into(), there), rows)?;
            let here = op.outgoing.row(self.outgoing_before(op.handle, domain), widths);
            self.sum_domain(slot, op, domain, here)?;
            let Some(rail) = &self.rail else { return Err(no_rail()) };
            let signal = rail.channel.ids.id(Signal::Rows, slot, self.domains.mine);
            let (operation, peer) = (op.operation, domain);
            let block = |width: u64, from: u64, to: u64| {
                let (src, dst) = ((ARENA, from), (ARENA, to));
                Block { operation, peer, signal, rows, width, src, dst }
            };
            self.put_rows(&rail.channel, slot, &block(widths.x, here.x, there.x))?;
            if op.has_weights {
                let block = block(widths.weights, here.weights, there.weights);
                self.put_rows(&rail.channel, slot, &block)?;
            }
            if rows > 0 && self.losses.are_masked() {
                self.put_left_out(slot, op.operation, domain)?;
            }
        }
        let mine = self.domains.mine;
        let here = self.returned_from(op, mine);
        self.sum_domain(slot, op, mine, here)?;
        if self.losses.are_masked() {
            self.write_left_out(slot, mine);
        }
        Ok(())
    }

    /// Where the rows of a domain come back to.
    fn returned_from(&self, op: &CombineOp, domain: u32) -> Offsets {
        let outward = self.handles[op.handle].outward.as_ref();
        let first = outward.map_or(0, |outward| outward.send.rank_offsets()[domain as usize]);
        op.returned.row(first.into(), self.widths(op))
    }

    /// Sums this domain's partials of the rows that came from a domain.
    fn sum_domain(
        &mut self,
        slot: usize,
        op: &CombineOp,
        domain: u32,
        here: Offsets,
    ) -> Result<()> {
        self.wait_partials(slot, op, domain)?;
        self.sum_rows_of(op, domain, here)?;
        while self.forget_lost_partials(domain) {
            self.sum_rows_of(op, domain, here)?;
        }
        Ok(())
    }

    fn sum_rows_of(&self, op: &CombineOp, domain: u32, here: Offsets) -> Result<()> {
        let state = &self.handles[op.handle];
        let leg = &state.legs[domain as usize];
        let own = state.outward.as_ref().filter(|_| domain == self.domains.mine);
        let first = self.domains.place(domain, 0) as usize;
        let weights = if op.has_weights {
            self.arena_area.at(here.weights).cast()
        } else {
            std::ptr::null_mut()
        };
        let sum = Sum {
            send: &leg.send,
            topk: &leg.topk,
            shape: self.inside,
            partials: &self.partials[first..][..self.domains.size as usize],
            biases: [std::ptr::null(); 2],
            // Of this rank's own tokens, those that have business in this domain.
            tokens: own.map(|outward| outward.send.tokens_for(domain)),
            out: self.arena_area.at(here.x),
            out_weights: weights,
            missing: std::ptr::null_mut(),
            left_out: &[],
            float: op.float,
            row_bytes: op.row_bytes,
        };
        // SAFETY: the region has room for these rows; partials were checked against their arena and
        // are complete: their entry, or their signals, were seen.
        unsafe { sum.run(&self.pool) }
    }

    /// Biases, then one row per domain.
    pub(super) fn sum_domains(&mut self, slot: usize, op: &CombineOp) -> Result<()> {
        for domain in self.domains.others() {
            let came = self.wait_returned(slot, op, domain)?;
            self.take_returned(slot, op, (domain, came))?;
        }
        self.take_returned(slot, op, (self.domains.mine, true))?;
        let (Some(rail), Some(outward)) = (&self.rail, &self.handles[op.handle].outward) else {
            return Err(no_rail());
        };
        let carried = Carried { send: &outward.send, topk: &outward.topk };
        let sum = Sum::of_own_tokens(op, carried, rail.shape, &rail.returned);
        let sum = Sum { left_out: &rail.left_out, ..sum };
        // SAFETY: biases and outputs are `[T, H]` and `[T, K]` as the host validated; the rows of
        // all domains are in this rank's region, and their signals were seen.
        unsafe { sum.run(&self.pool) }
    }

    /// Waits for the rows of another domain. Says whether they came: not so where its forwarder is lost.
    fn wait_returned(&mut self, slot: usize, op: &CombineOp, domain: u32) -> Result<bool> {
        let outward = self.handles[op.handle].outward.as_ref();
        let rows = outward.map_or(0, |o| o.send.rank_counts()[domain as usize]);
        if rows == 0 {
            return Ok(true);
        }
        let rank = self.domains.place(domain, self.domains.index);
        let (operation, phase) = (op.operation, abi::TY_PHASE_COMBINE_ROWS);
        let add = u64::from(rows) * op.arrays() + u64::from(self.losses.are_masked());
        let wait = Wait { operation, add, phase, rank };
        self.wait_rail(Signal::Rows, slot, domain, wait)
    }

    /// Notes where the rows of a domain are, and who is left out of them, if they came.
    fn take_returned(
        &mut self,
        slot: usize,
        op: &CombineOp,
        (domain, came): (u32, bool),
    ) -> Result<()> {
        let at = self.returned_from(op, domain);
        let weights = if op.has_weights { at.weights } else { 0 };
        let here = Partial {
            x: self.arena_area.at(at.x),
            weights: self.arena_area.at(weights).cast_const().cast(),
        };
        if came && self.losses.are_masked() {
            self.take_left_out(slot, domain);
        }
        let Some(rail) = &mut self.rail else { return Err(no_rail()) };
        rail.returned[domain as usize] = if came { here } else { Partial::default() };
        Ok(())
    }
}
