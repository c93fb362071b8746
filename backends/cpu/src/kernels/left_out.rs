//! Ranks that are left out of the rows that a combine gets from a domain, where losses are masked.
//!
//! The forwarder says so with the rows: one more row, of a byte per rank of its domain. It leaves from, and
//! arrives in, places for landing rows of the slot, which a combine has no other use for.

use tokenyard_core::Result;

use super::channel::no_rail;
use super::commands::Block;
use super::control::Signal;
use super::engine::Engine;
use super::places::Places;
use super::routing::RoutingTable;
use super::windows::CONTROL;

/// Where this rank notes who of its domain is left out of the sums of a domain's rows.
fn left_out_here(places: &Places, slot: usize, domain: u32) -> u64 {
    places.sizes.landing(slot, places.world.domains.place(domain, places.world.domains.index))
}

/// Notes who of this domain is left out of the sums of a domain's rows, which are made.
pub(super) fn write_left_out(routing: &RoutingTable, places: &Places, slot: usize, domain: u32) {
    let first = routing.world.domains.place(domain, 0) as usize;
    let partials = routing.partials[first..][..routing.world.domains.size as usize].iter();
    for (partial, at) in partials.zip(left_out_here(places, slot, domain)..) {
        // SAFETY: landing places have room for a byte per rank, in the list of those that are lost.
        // Only this rank writes to these, and what it put from there before is done (open_slot).
        unsafe { places.control.at(at).write(partial.x.is_null().into()) };
    }
}

/// Announces to the source of a domain which ranks of this one are left out of its rows.
pub(super) fn put_left_out(
    engine: &Engine,
    slot: usize,
    operation: u64,
    domain: u32,
) -> Result<()> {
    write_left_out(&engine.routing, &engine.places, slot, domain);
    let Some(rail) = &engine.order.rail else { return Err(no_rail()) };
    let mine = engine.world.domains.mine;
    let block = Block {
        operation,
        peer: domain,
        signal: rail.ids.id(Signal::Rows, slot, mine),
        rows: 1,
        width: engine.world.domains.size.into(),
        src: (CONTROL, left_out_here(&engine.places, slot, domain)),
        dst: (CONTROL, engine.places.sizes.rail_landing(slot, mine)),
    };
    engine.order.put_rows(rail, slot, &block)
}

/// Takes note of who is left out of the rows of a domain, which came.
pub(super) fn take_left_out(routing: &mut RoutingTable, places: &Places, slot: usize, domain: u32) {
    let from = if domain == routing.world.domains.mine {
        left_out_here(places, slot, domain)
    } else {
        places.sizes.rail_landing(slot, domain)
    };
    let Some(rail) = &mut routing.rail else { return };
    let first = routing.world.domains.place(domain, 0) as usize;
    let left_out = &mut rail.left_out[first..][..routing.world.domains.size as usize];
    for (rank, at) in left_out.iter_mut().zip(from..) {
        // SAFETY: as in `write_left_out`; it is complete, as its signal was seen.
        *rank = unsafe { places.control.at(at).read() };
    }
}
