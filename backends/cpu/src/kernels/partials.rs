//! The partial rows of a combine where they are summed: their owners put them here, or they are read where
//! their owners made them.

use tokenyard_core::Result;
use tokenyard_core::abi;

use super::agree::Enter;
use super::combine::CombineOp;
use super::control::Signal;
use super::engine::{Engine, Wait};
use super::rows::Carried;
use super::sums::{Partial, Sum};
use super::windows::ARENA;

impl Engine {
    /// One domain: biases, then one partial per rank.
    pub(super) fn sum_ranks(&mut self, slot: usize, op: &CombineOp) -> Result<()> {
        if self.stores() {
            let (operation, origin) = (op.operation, self.origin(op.handle, false));
            let enter = Enter { operation, signature: op.signature, origin, refusal: None };
            self.gather_entries(slot, &enter)?;
        }
        self.find_partials(op)?;
        self.wait_partials(slot, op, 0)?;
        // SAFETY: the partials were checked against their arena and are complete: their entry, or their
        // signals, were seen.
        unsafe { self.sum(op)? };
        while self.forget_lost_partials(0) {
            // SAFETY: as above.
            unsafe { self.sum(op)? };
        }
        Ok(())
    }

    /// Leaves out partials of a domain's rows that were read in the memory of a rank that may have
    /// changed them meanwhile: it keeps them only until it knows itself that it was given up, and for a
    /// while (INV-8). Says whether there are such.
    pub(super) fn forget_lost_partials(&mut self, domain: u32) -> bool {
        if !self.stores() {
            return false;
        }
        let mut found = false;
        for peer in self.domains.peers() {
            let place = self.domains.place(domain, peer) as usize;
            if !self.partials[place].x.is_null() && self.is_unread(peer) {
                self.partials[place] = Partial::default();
                found = true;
            }
        }
        found
    }

    /// # Safety
    /// The partials are complete.
    unsafe fn sum(&self, op: &CombineOp) -> Result<()> {
        let leg = &self.handles[op.handle].legs[0];
        let carried = Carried { send: &leg.send, topk: &leg.topk };
        let sum = Sum::of_own_tokens(op, carried, self.inside, &self.partials);
        // SAFETY: biases and outputs are `[T, H]` and `[T, K]` as the host validated; the rest is this
        // function's contract.
        unsafe { sum.run(&self.pool) }
    }

    /// Whether the partial rows of a peer are left out. Those that it has put here are this rank's;
    /// those that lie with it are not to be trusted once it is lost.
    fn is_unread(&self, peer: u32) -> bool {
        let rank = self.domains.place(self.domains.mine, peer);
        self.losses.is_given_up(rank) || self.stores() && self.losses.is_lost(rank)
    }

    /// Notes where the partial rows of each place are, or will be.
    pub(super) fn find_partials(&mut self, op: &CombineOp) -> Result<()> {
        let widths = self.widths(op);
        for (domain, peer) in self.domains.pairs() {
            let send = &self.handles[op.handle].legs[domain as usize].send;
            let place = self.domains.place(domain, peer) as usize;
            if self.is_unread(peer) || self.is_unheard(domain) {
                self.partials[place] = Partial::default();
                continue;
            }
            let area = if self.stores() {
                let rows = send.rank_counts()[peer as usize].into();
                let at = self.entry_at(op, (domain, peer), rows)?;
                // Nothing is read where there are no rows; the offset was not checked.
                if rows == 0 {
                    continue;
                }
                let area = &self.peers[peer as usize][usize::from(ARENA)];
                (area.at(at.x), if op.has_weights { area.at(at.weights) } else { area.at(0) })
            } else {
                let at = if peer == self.domains.index {
                    let source = self.domains.place(domain, peer);
                    op.partials.row(self.partials_of(op, source).start as u64, widths)
                } else {
                    let first = u64::from(send.rank_offsets()[peer as usize]);
                    op.landing.row(first + self.landed_before(op.handle, domain), widths)
                };
                let weights = if op.has_weights { at.weights } else { 0 };
                (self.arena_area.at(at.x), self.arena_area.at(weights))
            };
            self.partials[place] = Partial { x: area.0, weights: area.1.cast() };
        }
        Ok(())
    }

    /// Waits for the partials of a domain's rows, where owners put them.
    pub(super) fn wait_partials(&mut self, slot: usize, op: &CombineOp, domain: u32) -> Result<()> {
        if self.stores() {
            return Ok(());
        }
        for peer in self.domains.peers() {
            let send = &self.handles[op.handle].legs[domain as usize].send;
            let rows = u64::from(send.rank_counts()[peer as usize]);
            if rows == 0 || peer == self.domains.index {
                continue;
            }
            let rank = self.domains.place(self.domains.mine, peer);
            let (operation, phase) = (op.operation, abi::TY_PHASE_COMBINE_ROWS);
            let wait = Wait { operation, add: rows * op.arrays(), phase, rank };
            let place = self.domains.place(domain, peer);
            if !self.wait(Signal::Rows, slot, place, wait)? {
                self.partials[place as usize] = Partial::default();
            }
        }
        Ok(())
    }
}
