//! The partial rows of a combine at the rank that sums them. Their owners put them here, or this rank
//! reads them at their owners.

use tokenyard_core::{Result, abi};

use crate::engine::areas::ARENA;
use crate::engine::control::Signal;
use crate::engine::order::{SlotOrder, Wait};
use crate::engine::places::Places;
use crate::engine::record::bad_record;
use crate::moe::combine::left_out::take_left_out;
use crate::moe::combine::sums::{Partial, Sum};
use crate::moe::entry::{Enter, Entry};
use crate::moe::handle::Leg;
use crate::moe::launcher::Launcher;
use crate::moe::operation::{CombineOp, Offsets};
use crate::moe::routing::RoutingTable;
use crate::moe::rows::moves::Carried;
use crate::moe::runner::Runner;
use crate::moe::verdicts::gather_entries;

/// The place of `rows` rows in the arena of `rank`, as an entry states it.
pub(crate) fn check_rows(
    runner: &Runner,
    op: &CombineOp,
    rank: u32,
    entry: &Entry,
    rows: u64,
) -> Result<Offsets> {
    let (found, at) = (entry.rows, Offsets { x: entry.base_x, weights: entry.base_weights });
    let widths = runner.routing.widths(op);
    let fits = |base: u64, width: u64| {
        base.checked_add(rows * width).is_some_and(|end| end <= runner.places.arena_area.bytes())
    };
    let good = found == rows
        && (rows == 0 || fits(at.x, widths.x))
        && (rows == 0 || !op.has_weights || fits(at.weights, widths.weights))
        && at.weights.is_multiple_of(4);
    if good {
        return Ok(at);
    }
    Err(bad_record(rank, format!("{found} rows at {}; expected {rows} inside the arena", at.x)))
}

/// The terms of the entry in a place about `rows` rows in the arena of its peer.
pub(crate) fn entry_at(runner: &Runner, op: &CombineOp, place: u32, rows: u64) -> Result<Offsets> {
    let entry = &runner.routing.gathered.entries[place as usize];
    check_rows(runner, op, runner.exchange.member.forwarder(place), entry, rows)
}

/// The sums of this rank's own tokens: biases, then one partial per peer.
pub(crate) fn sum_ranks(runner: &mut Runner, slot: usize, op: &CombineOp) -> Result<()> {
    if runner.places.stores() {
        let (operation, origin) = (op.operation, runner.routing.origin(op.handle, false));
        let enter = Enter { operation, signature: op.signature, origin, refusal: None };
        gather_entries(runner, slot, &enter)?;
    }
    find_partials(runner, op)?;
    wait_partials(runner, slot, op, 0)?;
    if op.says_left_out {
        take_all_left_out(runner, slot, op);
    }
    // SAFETY: the partials were checked against their arena and are complete: their entry, or their
    // signals, were seen.
    unsafe { sum(&runner.routing, &runner.launcher, op)? };
    while forget_lost_partials(runner, 0) {
        // SAFETY: as above.
        unsafe { sum(&runner.routing, &runner.launcher, op)? };
    }
    Ok(())
}

/// Notes which ranks are left out of the rows that came from other domains.
fn take_all_left_out(runner: &mut Runner, slot: usize, op: &CombineOp) {
    for peer in runner.exchange.member.domains.peers() {
        let rows = runner.routing.handles[op.handle].legs[0].taken[peer as usize];
        if rows > 0 && !runner.routing.partials[peer as usize].x.is_null() {
            take_left_out(runner, slot, peer);
        }
    }
}

/// Leaves out partial rows that were read in the memory of a rank that may have changed them
/// meanwhile. That rank preserves them only until it learns that it was given up, and for a while
/// after that (INV-8). Returns whether there are such rows.
pub(crate) fn forget_lost_partials(runner: &mut Runner, group: u32) -> bool {
    if !runner.places.stores() {
        return false;
    }
    let mut found = false;
    for peer in runner.exchange.member.domains.peers() {
        let place = runner.exchange.member.domains.place(group, peer) as usize;
        if !runner.routing.partials[place].x.is_null()
            && is_unread(&runner.places, &runner.order, peer)
        {
            runner.routing.partials[place] = Partial::default();
            found = true;
        }
    }
    found
}

/// # Safety
/// The partials are complete.
unsafe fn sum(routing: &RoutingTable, launcher: &Launcher, op: &CombineOp) -> Result<()> {
    let leg = &routing.handles[op.handle].legs[0];
    let carried = Carried { send: &leg.send, taken: &leg.taken, topk: &leg.topk };
    let sum = Sum::of_own_tokens(op, carried, routing.exchange.shape, &routing.partials);
    let sum = Sum { left_out: &routing.left_out, ..sum };
    // SAFETY: biases and outputs are `[T, H]` and `[T, K]` as the host validated; the rest is this
    // function's contract.
    unsafe { sum.run(&launcher.pool) }
}

/// Whether the partial rows of a peer are left out. Rows that the peer has put here belong to this
/// rank. Rows in the peer's own memory do not count once the peer is lost.
fn is_unread(places: &Places, order: &SlotOrder, peer: u32) -> bool {
    let rank = places.member.rank_of(peer);
    order.losses().is_given_up(rank) || places.stores() && order.losses().is_lost(rank)
}

/// Notes the place of the partial rows for each place of the exchange.
pub(crate) fn find_partials(runner: &mut Runner, op: &CombineOp) -> Result<()> {
    let widths = runner.routing.widths(op);
    for place in runner.exchange.member.domains.places() {
        let domains = &runner.exchange.member.domains;
        let (domain, peer) = (domains.domain_of(place), domains.peer_of(place));
        let Leg { send, taken, .. } = &runner.routing.handles[op.handle].legs[domain as usize];
        if is_unread(&runner.places, &runner.order, peer) || runner.routing.is_source_gone(domain) {
            runner.routing.partials[place as usize] = Partial::default();
            continue;
        }
        let area = if runner.places.stores() {
            let rows = taken[peer as usize].into();
            let at = entry_at(runner, op, place, rows)?;
            // Nothing is read where there are no rows; the offset was not checked. The peer counts all the same.
            let at = if rows == 0 { Offsets::default() } else { at };
            let area = &runner.places.peers[peer as usize][usize::from(ARENA)];
            (area.at(at.x), if op.has_weights { area.at(at.weights) } else { area.at(0) })
        } else {
            let at = if peer == runner.exchange.member.domains.index {
                op.partials.row(runner.routing.partials_of(op, place).start as u64, widths)
            } else {
                let first = u64::from(send.rank_offsets()[peer as usize]);
                op.landing.row(first + runner.routing.landed_before(op.handle, domain), widths)
            };
            let weights = if op.has_weights { at.weights } else { 0 };
            (runner.places.arena_area.at(at.x), runner.places.arena_area.at(weights))
        };
        runner.routing.partials[place as usize] = Partial { x: area.0, weights: area.1.cast() };
    }
    Ok(())
}

/// Waits for the partials of a group's rows, where owners put them.
pub(crate) fn wait_partials(
    runner: &mut Runner,
    slot: usize,
    op: &CombineOp,
    group: u32,
) -> Result<()> {
    if runner.places.stores() {
        return Ok(());
    }
    for peer in runner.exchange.member.domains.peers() {
        let taken = &runner.routing.handles[op.handle].legs[group as usize].taken;
        let rows = u64::from(taken[peer as usize]);
        if rows == 0 || peer == runner.exchange.member.domains.index {
            continue;
        }
        let rank = runner.exchange.member.rank_of(peer);
        let (operation, phase) = (op.operation, abi::TY_PHASE_COMBINE_ROWS);
        let add = rows * op.arrays() + u64::from(op.says_left_out);
        let wait = Wait { operation, add, phase, rank };
        let place = runner.exchange.member.domains.place(group, peer);
        if !runner.order.wait(Signal::Rows, slot, place, wait)? {
            runner.routing.partials[place as usize] = Partial::default();
        }
    }
    Ok(())
}
