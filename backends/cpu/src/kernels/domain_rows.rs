//! Combine among several domains: one row per (token, domain).
//!
//! The forwarder sums the partials of its domain for each row that it handed on in the dispatch, and puts
//! the sum to the row's source; for this rank's own tokens it does the same without the rail. Sources
//! then sum one row per domain. Where losses are masked, the forwarder also says who is left out of its
//! sums: see `left_out`.

use tokenyard_core::{Result, abi};

use super::channel::no_rail;
use super::commands::Block;
use super::control::Signal;
use super::engine::Engine;
use super::entry::{Entry, NO_ENTRY};
use super::left_out::{put_left_out, take_left_out, write_left_out};
use super::moves::Carried;
use super::operation::{CombineOp, Offsets};
use super::order::{Order, Wait};
use super::partials::{check_rows, forget_lost_partials, wait_partials};
use super::routing::RoutingTable;
use super::sums::{Partial, Sum};
use super::windows::ARENA;

/// The forwarder's pending forward: the rows of the other domains first, because others wait for them.
pub(super) fn sum_for_all(engine: &mut Engine, slot: usize, op: &CombineOp) -> Result<()> {
    let widths = engine.routing.widths(op);
    for domain in engine.world.domains.others() {
        if engine.routing.is_source_gone(domain) {
            continue;
        }
        let rows =
            u64::from(engine.routing.handles[op.handle].legs[domain as usize].send.num_tokens());
        let heard = engine.routing.heard(domain)?;
        let (base_x, base_weights) = (heard.base_x, heard.base_weights);
        let entry = Entry { rows: heard.rows.into(), base_x, base_weights, ..NO_ENTRY };
        let source = engine.world.domains.place(domain, engine.world.domains.index);
        let there = check_rows(engine, op, source, &entry, rows)?;
        let here = op.outgoing.row(engine.routing.outgoing_before(op.handle, domain), widths);
        sum_domain(engine, slot, op, domain, here)?;
        let Some(rail) = &engine.order.rail else { return Err(no_rail()) };
        let signal = rail.ids.id(Signal::Rows, slot, engine.world.domains.mine);
        let (operation, peer) = (op.operation, domain);
        let block = |width: u64, from: u64, to: u64| {
            let (src, dst) = ((ARENA, from), (ARENA, to));
            Block { operation, peer, signal, rows, width, src, dst }
        };
        engine.order.put_rows(rail, slot, &block(widths.x, here.x, there.x))?;
        if op.has_weights {
            let block = block(widths.weights, here.weights, there.weights);
            engine.order.put_rows(rail, slot, &block)?;
        }
        if rows > 0 && engine.order.losses.are_masked() {
            put_left_out(engine, slot, op.operation, domain)?;
        }
    }
    let mine = engine.world.domains.mine;
    let here = returned_from(&engine.routing, op, mine);
    sum_domain(engine, slot, op, mine, here)?;
    if engine.order.losses.are_masked() {
        write_left_out(&engine.routing, &engine.places, slot, mine);
    }
    Ok(())
}

/// Where the rows of a domain come back to.
fn returned_from(routing: &RoutingTable, op: &CombineOp, domain: u32) -> Offsets {
    let outward = routing.handles[op.handle].outward.as_ref();
    let first = outward.map_or(0, |outward| outward.send.rank_offsets()[domain as usize]);
    op.returned.row(first.into(), routing.widths(op))
}

/// Sums this domain's partials of the rows that came from a domain.
fn sum_domain(
    engine: &mut Engine,
    slot: usize,
    op: &CombineOp,
    domain: u32,
    here: Offsets,
) -> Result<()> {
    wait_partials(engine, slot, op, domain)?;
    sum_rows_of(engine, op, domain, here)?;
    while forget_lost_partials(engine, domain) {
        sum_rows_of(engine, op, domain, here)?;
    }
    Ok(())
}

fn sum_rows_of(engine: &Engine, op: &CombineOp, domain: u32, here: Offsets) -> Result<()> {
    let state = &engine.routing.handles[op.handle];
    let leg = &state.legs[domain as usize];
    let own = state.outward.as_ref().filter(|_| domain == engine.world.domains.mine);
    let first = engine.world.domains.place(domain, 0) as usize;
    let weights = if op.has_weights {
        engine.places.arena_area.at(here.weights).cast()
    } else {
        std::ptr::null_mut()
    };
    let sum = Sum {
        send: &leg.send,
        topk: &leg.topk,
        shape: engine.world.inside,
        partials: &engine.routing.partials[first..][..engine.world.domains.size as usize],
        biases: [std::ptr::null(); 2],
        // This rank's tokens that have an expert in this domain.
        tokens: own.map(|outward| outward.send.tokens_for(domain)),
        out: engine.places.arena_area.at(here.x),
        out_weights: weights,
        missing: std::ptr::null_mut(),
        left_out: &[],
        row: op.partial,
        partial: op.partial,
        sums_weights: op.sums_weights,
    };
    // SAFETY: the region has room for these rows; partials were checked against their arena and
    // are complete: their entry, or their signals, were seen.
    unsafe { sum.run(&engine.launcher.pool) }
}

/// Biases, then one row per domain.
pub(super) fn sum_domains(engine: &mut Engine, slot: usize, op: &CombineOp) -> Result<()> {
    for domain in engine.world.domains.others() {
        let came = wait_returned(&engine.routing, &mut engine.order, slot, op, domain)?;
        take_returned(engine, slot, op, domain, came)?;
    }
    take_returned(engine, slot, op, engine.world.domains.mine, true)?;
    let (Some(rail), Some(outward)) =
        (&engine.routing.rail, &engine.routing.handles[op.handle].outward)
    else {
        return Err(no_rail());
    };
    let carried = Carried { send: &outward.send, topk: &outward.topk };
    let sum = Sum::of_own_tokens(op, carried, rail.shape, &rail.returned);
    let sum = Sum { left_out: &rail.left_out, ..sum };
    // SAFETY: biases and outputs are `[T, H]` and `[T, K]` as the host validated; the rows of
    // all domains are in this rank's region, and their signals were seen.
    unsafe { sum.run(&engine.launcher.pool) }
}

/// Waits for the rows of another domain. Says whether they came: not so where its forwarder is lost.
fn wait_returned(
    routing: &RoutingTable,
    order: &mut Order,
    slot: usize,
    op: &CombineOp,
    domain: u32,
) -> Result<bool> {
    let outward = routing.handles[op.handle].outward.as_ref();
    let rows = outward.map_or(0, |o| o.send.rank_counts()[domain as usize]);
    if rows == 0 {
        return Ok(true);
    }
    let rank = routing.world.domains.place(domain, routing.world.domains.index);
    let (operation, phase) = (op.operation, abi::TY_PHASE_COMBINE_ROWS);
    let add = u64::from(rows) * op.arrays() + u64::from(order.losses.are_masked());
    let wait = Wait { operation, add, phase, rank };
    order.wait_rail(Signal::Rows, slot, domain, wait)
}

/// Notes where the rows of a domain are, and who is left out of them, if they came.
fn take_returned(
    engine: &mut Engine,
    slot: usize,
    op: &CombineOp,
    domain: u32,
    came: bool,
) -> Result<()> {
    let at = returned_from(&engine.routing, op, domain);
    let weights = if op.has_weights { at.weights } else { 0 };
    let here = Partial {
        x: engine.places.arena_area.at(at.x),
        weights: engine.places.arena_area.at(weights).cast_const().cast(),
    };
    if came && engine.order.losses.are_masked() {
        take_left_out(&mut engine.routing, &engine.places, slot, domain);
    }
    let Some(rail) = &mut engine.routing.rail else { return Err(no_rail()) };
    rail.returned[domain as usize] = if came { here } else { Partial::default() };
    Ok(())
}
