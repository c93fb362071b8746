//! Who is left out of the rows that a combine gets from a domain, where losses are masked.
//!
//! The forwarder says so with the rows: one more row, of a byte per rank of its domain. It leaves from, and
//! arrives in, places for landing rows of the slot, which a combine has no other use for.

use tokenyard_core::Result;

use super::commands::Block;
use super::control::Signal;
use super::engine::Engine;
use super::rail::no_rail;
use super::windows::CONTROL;

impl Engine {
    /// Where this rank notes who of its domain is left out of the sums of a domain's rows.
    fn left_out_here(&self, slot: usize, domain: u32) -> u64 {
        self.sizes.landing(slot, self.domains.place(domain, self.domains.index))
    }

    /// Notes who of this domain is left out of the sums of a domain's rows, which are made.
    pub(super) fn write_left_out(&self, slot: usize, domain: u32) {
        let first = self.domains.place(domain, 0) as usize;
        let partials = self.partials[first..][..self.domains.size as usize].iter();
        for (partial, at) in partials.zip(self.left_out_here(slot, domain)..) {
            // SAFETY: landing places have room for a byte per rank, in the list of those that are lost.
            // Only this rank writes to these, and what it put from there before is done (enter_slot).
            unsafe { self.control.at(at).write(partial.x.is_null().into()) };
        }
    }

    /// Tells the source of a domain who of this one is left out of its rows.
    pub(super) fn put_left_out(&self, slot: usize, operation: u64, domain: u32) -> Result<()> {
        self.write_left_out(slot, domain);
        let Some(rail) = &self.rail else { return Err(no_rail()) };
        let mine = self.domains.mine;
        let block = Block {
            operation,
            peer: domain,
            signal: rail.channel.ids.id(Signal::Rows, slot, mine),
            rows: 1,
            width: self.domains.size.into(),
            src: (CONTROL, self.left_out_here(slot, domain)),
            dst: (CONTROL, self.sizes.rail_landing(slot, mine)),
        };
        self.put_rows(&rail.channel, slot, &block)
    }

    /// Takes note of who is left out of the rows of a domain, which came.
    pub(super) fn take_left_out(&mut self, slot: usize, domain: u32) {
        let from = if domain == self.domains.mine {
            self.left_out_here(slot, domain)
        } else {
            self.sizes.rail_landing(slot, domain)
        };
        let Some(rail) = &mut self.rail else { return };
        let first = self.domains.place(domain, 0) as usize;
        let left_out = &mut rail.left_out[first..][..self.domains.size as usize];
        for (rank, at) in left_out.iter_mut().zip(from..) {
            // SAFETY: as in `write_left_out`; it is complete, as its signal was seen.
            *rank = unsafe { self.control.at(at).read() };
        }
    }
}
