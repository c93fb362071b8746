//! The forwarder's pending forward in a dispatch: rows that came over the rail go to the peers that want them.
//!
//! A pending forward is done in the operation's receive, in an earlier one's that waits for all ranks, or before
//! the next operation is sent, whichever comes first. So every rank does send 0, pending forward 0, send 1, pending forward 1, ... in this order, each of which needs
//! only earlier ones of other ranks, and no rank waits in a circle.

use tokenyard_core::{Result, abi};

use super::agree::{hand_on, poll_entries, poll_entry};
use super::control::Signal;
use super::domain_rows::sum_for_all;
use super::engine::Engine;
use super::entry::{Agreed, Terms};
use super::moves::{Move, Via};
use super::operation::{DispatchOp, Operation};
use super::order::{Order, Wait};
use super::places::Places;
use super::record::bad_record;
use super::routing::RoutingTable;
use super::transfer::{move_to_landing, move_to_regions};
use super::verdicts::settle_verdict;
use super::void::hand_on_void;
use super::writer::RowSource;

/// Remembers that this rank has a pending forward in the operation that was just sent.
pub(super) fn take_forward(order: &mut Order, slot: usize) {
    let open = !matches!(order.operations[slot], Operation::None);
    order.pending_forward = (order.rail.is_some() && open).then_some(slot);
}

/// Does the pending forward of the last operation, if that was not done in its receive.
pub(super) fn finish_forward(engine: &mut Engine) -> Result<()> {
    let Some(slot) = engine.order.pending_forward else { return Ok(()) };
    let operation = engine.order.operations[slot];
    serve(engine, slot, &operation)
}

/// Does the pending forward of an operation, if it is still to be done.
pub(super) fn serve(engine: &mut Engine, slot: usize, operation: &Operation) -> Result<()> {
    if engine.order.pending_forward != Some(slot) {
        return Ok(());
    }
    engine.order.pending_forward = None;
    match operation {
        Operation::Dispatch(op) if op.packed => forward_packed(engine, slot, op),
        Operation::Dispatch(op) => forward(engine, slot, op),
        Operation::Combine(op) => sum_for_all(engine, slot, op),
        Operation::None => Ok(()),
    }
}

/// Hands on the rows of every other domain, to their final places.
fn forward(engine: &mut Engine, slot: usize, op: &DispatchOp) -> Result<()> {
    for domain in engine.world.domains.others() {
        if engine.routing.is_source_gone(domain) {
            engine.routing.forget_leg(op, domain);
            continue;
        }
        let Some(rows) = land(engine, slot, op, domain)? else {
            hand_on_void(engine, slot, op, domain)?;
            continue;
        };
        if op.signature.is_fresh() {
            let source = engine.world.domains.place(domain, engine.world.domains.index);
            let leg = &engine.routing.handles[op.handle].legs[domain as usize];
            engine
                .routing
                .rail
                .as_ref()
                .map_or(Ok(()), |rail| rail.compare(domain, source, leg))?;
        }
        if rows == 0 {
            continue;
        }
        let source = landed_rows(&engine.places, slot, op, domain)?;
        let m = Move { via: Via::Leg(domain), ..op.carry(slot) };
        // SAFETY: landing places stay as they are until this rank has left the operation.
        unsafe { move_to_regions(engine, &m, domain, &source)? };
    }
    Ok(())
}

/// Forwards packed rows, which are announced when they are here. Where not both take part in the
/// same way no rank will use them, so they are counted and given up.
fn forward_packed(engine: &mut Engine, slot: usize, op: &DispatchOp) -> Result<()> {
    let handle = op.handle;
    for domain in engine.world.domains.others() {
        poll_entry(engine, slot, domain, op.operation)?;
        if !wait_landed(&mut engine.routing, &mut engine.order, slot, op, domain)? {
            engine.routing.forget_leg(op, domain);
            hand_on(engine, slot, domain, op.operation, &|_, _, _| Terms::rows(0))?;
            continue;
        }
        if op.output.is_none() || engine.routing.heard(domain)?.signature != op.signature {
            hand_on(engine, slot, domain, op.operation, &|_, _, _| Terms::rows(0))?;
            continue;
        }
        if learn_landed(&mut engine.routing, &engine.places, slot, op, domain)? > 0 {
            let source = landed_rows(&engine.places, slot, op, domain)?;
            let m = Move { via: Via::Leg(domain), ..op.carry(slot) };
            // SAFETY: as in `forward`.
            unsafe { move_to_landing(engine, &m, &source)? };
        }
        hand_on(engine, slot, domain, op.operation, &|routing, domain, peer| {
            routing.rows_of_leg(handle, domain, peer)
        })?;
    }
    if engine.order.masks_domains() {
        // Here, and not in the receive: a rank that refuses receives while others still have an
        // earlier operation to receive, in which they wait for it.
        let refused = poll_entries(engine, slot, &engine.routing.packed_enter(op))?;
        let refused = settle_verdict(engine, slot, op.operation, op.signature, refused)?;
        engine.routing.agreed[slot] = Some(Agreed(refused));
    }
    Ok(())
}

/// Waits for the rows of a domain, and learns where they go. Returns how many there are; nothing
/// where their source is lost.
fn land(engine: &mut Engine, slot: usize, op: &DispatchOp, domain: u32) -> Result<Option<u32>> {
    if !wait_landed(&mut engine.routing, &mut engine.order, slot, op, domain)? {
        return Ok(None);
    }
    learn_landed(&mut engine.routing, &engine.places, slot, op, domain).map(Some)
}

/// Learns where the rows of a domain go, which are here. Returns how many there are.
fn learn_landed(
    routing: &mut RoutingTable,
    places: &Places,
    slot: usize,
    op: &DispatchOp,
    domain: u32,
) -> Result<u32> {
    let rows = routing.heard(domain)?.rows;
    let layout = places.landing_layout(&op.format)?;
    let source = routing.world.domains.place(domain, routing.world.domains.index);
    let leg = &mut routing.handles[op.handle].legs[domain as usize];
    let (Some(rail), true) = (&mut routing.rail, op.signature.is_fresh()) else {
        let expected = leg.send.num_tokens();
        return if rows == expected {
            Ok(rows)
        } else {
            Err(bad_record(source, format!("{rows} rows in a replay of {expected}")))
        };
    };
    let ids = places.sizes.rail_landing(slot, domain) + layout.ids.offset;
    let count = rows as usize * routing.world.shape.topk as usize;
    // SAFETY: there is room for M rows of K ids; they are complete, and stay as they are until
    // this rank has left the operation.
    let ids = unsafe { std::slice::from_raw_parts(places.control.at(ids).cast::<i32>(), count) };
    rail.learn(ids, source, leg)?;
    Ok(rows)
}

/// Whether all rows of a domain are here; not so where their source is lost.
fn wait_landed(
    routing: &mut RoutingTable,
    order: &mut Order,
    slot: usize,
    op: &DispatchOp,
    domain: u32,
) -> Result<bool> {
    let heard = routing.heard(domain)?;
    if heard.rows == 0 {
        return Ok(!heard.gone);
    }
    // Counted by the sender's signature: a rank that refuses has no format of its own.
    let add = u64::from(heard.rows) * heard.signature.arrays();
    let rank = routing.world.domains.place(domain, routing.world.domains.index);
    let wait = Wait { operation: op.operation, add, phase: abi::TY_PHASE_ROWS, rank };
    let came = order.wait_rail(Signal::Rows, slot, domain, wait)?;
    if !came {
        routing.lose_source(domain);
    }
    Ok(came)
}

/// The rows that landed from a domain, as a source.
fn landed_rows(places: &Places, slot: usize, op: &DispatchOp, domain: u32) -> Result<RowSource> {
    let layout = places.landing_layout(&op.format)?;
    let base = places.sizes.rail_landing(slot, domain);
    let at = |offset: u64| places.control.at(base + offset).cast_const();
    Ok(RowSource {
        x: at(layout.x.offset),
        x_pitch: op.format.row.x_bytes as usize,
        scales: at(layout.scales.offset),
        scale_pitch: [op.format.row.scale_bytes as isize, 4],
        weights: at(layout.weights.offset).cast(),
        sources: at(layout.source.offset).cast(),
    })
}
