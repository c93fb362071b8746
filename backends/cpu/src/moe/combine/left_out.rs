//! Ranks that are left out of the rows that a combine gets from a domain, where losses are masked.
//!
//! The forwarder reports them with the rows, in one more row of a byte per rank of its domain. That row leaves from
//! the stage of the slot and arrives in landing places, which a combine does not use otherwise.

use tokenyard_core::Result;

use crate::engine::areas::CONTROL;
use crate::engine::commands::Block;
use crate::engine::control::Signal;
use crate::moe::runner::Runner;

/// Ranks of a domain.
fn size(rail: &Runner) -> u64 {
    u64::from(rail.order.ranks() / rail.exchange.shape.ranks)
}

/// The memory where this rank notes which ranks of its domain are left out of the sums of a group's
/// rows.
fn left_out_here(rail: &Runner, slot: usize, group: u32) -> u64 {
    rail.places.slots.stage(slot, 0) + u64::from(group) * size(rail)
}

/// Notes which ranks of this domain are left out of the sums of a group's rows. The sums are made.
pub(crate) fn write_left_out(owners: &Runner, rail: &Runner, slot: usize, group: u32) {
    let first = owners.exchange.member.domains.place(group, 0) as usize;
    let size = size(rail) as usize;
    let partials = &owners.routing.partials[first..][..size];
    for (partial, at) in partials.iter().zip(left_out_here(rail, slot, group)..) {
        // SAFETY: a stage has room for a byte per rank of the world. Only this rank writes to it, and what it
        // put from there before is done (open_slot).
        unsafe { rail.places.control.at(at).write(partial.x.is_null().into()) };
    }
}

/// Announces to the source of a group which ranks of this domain are left out of its rows.
pub(crate) fn put_left_out(rail: &Runner, slot: usize, operation: u64, group: u32) -> Result<()> {
    let mine = rail.exchange.member.domains.index;
    let block = Block {
        operation,
        peer: group,
        signal: rail.order.channel.ids.id(Signal::Rows, slot, mine),
        rows: 1,
        width: size(rail),
        src: (CONTROL, left_out_here(rail, slot, group)),
        dst: (CONTROL, rail.places.slots.landing(slot, mine)),
    };
    rail.order.put_rows(slot, &block)
}

/// Notes which ranks are left out of the rows of a domain. The rows have arrived.
pub(crate) fn take_left_out(rail: &mut Runner, slot: usize, domain: u32) {
    let size = size(rail) as usize;
    let from = match domain == rail.exchange.member.domains.index {
        true => left_out_here(rail, slot, domain),
        false => rail.places.slots.landing(slot, domain),
    };
    let left_out = &mut rail.routing.left_out[domain as usize * size..][..size];
    for (rank, at) in left_out.iter_mut().zip(from..) {
        // SAFETY: landing places have room for a byte per rank of a domain; it is complete, as its signal was
        // seen.
        *rank = unsafe { rail.places.control.at(at).read() };
    }
}
