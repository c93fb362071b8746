//! Rows that a forwarder announced, and that do not come: their source was lost on the way.
//!
//! Their receivers gave places to them, and count them. So the forwarder has them counted like rows, and
//! writes in their places that they come from nowhere. Totals stay right (INV-2), and nothing is under
//! way to a place that its receiver has given up.

use tokenyard_core::Result;

use super::commands::{Block, Raise};
use super::engine::Engine;
use super::moves::{Move, Via};
use super::operation::{DispatchOp, Output};
use super::pieces::stage_offsets;
use super::record::bad_record;
use super::rows::spot_in_region;
use super::windows::{ARENA, CONTROL};

/// Bytes of what a row is called.
const NAME: u64 = 4;

/// The source of a row that no token has: all its bits are set.
const VOID: i32 = -1;

/// Announces to the peers that the rows of a domain's source will not come, where they were announced.
#[cold]
pub(super) fn hand_on_void(
    engine: &mut Engine,
    slot: usize,
    op: &DispatchOp,
    domain: u32,
) -> Result<()> {
    engine.routing.forget_leg(op, domain);
    let m = Move { via: Via::Leg(domain), ..op.carry(slot) };
    for peer in engine.world.domains.peers() {
        let rows = engine.routing.announced(op, domain, peer);
        if rows > 0 && !engine.order.is_left_out(&m, peer) {
            void_rows(engine, &m, domain, peer, rows)?;
        }
    }
    Ok(())
}

fn void_rows(engine: &Engine, m: &Move, domain: u32, peer: u32, rows: u64) -> Result<()> {
    let place = engine.routing.handles[m.handle].legs[domain as usize].places[peer as usize];
    if place.first.saturating_add(rows) > place.tokens {
        let owner = engine.world.domains.place(engine.world.domains.mine, peer);
        return Err(bad_record(owner, format!("{place:?} for {rows} rows")));
    }
    let at = spot_in_region(engine, m, domain, peer)?.source;
    let bytes = (rows * NAME) as usize;
    let (channel, signal) = engine.order.link_of(m);
    let stored = engine.places.reachable(m, peer).map(|areas| areas[usize::from(ARENA)].at(at));
    let to = stored.unwrap_or_else(|| {
        engine.places.control.at(stage_offsets(&engine.routing, &engine.places, m).x)
    });
    // SAFETY: the places were granted to this source, and checked against the region; or the stage
    // has room for all rows of the source, and nothing else of the operation is staged there.
    unsafe { to.write_bytes(0xff, bytes) };
    let put = if stored.is_some() { 0 } else { 1 };
    let raise = Raise { operation: m.operation, peer, signal, add: rows * (m.arrays - put) };
    engine.order.raise(channel, m.slot, raise)?;
    if stored.is_some() {
        return Ok(());
    }
    let src = (CONTROL, stage_offsets(&engine.routing, &engine.places, m).x);
    let (operation, dst) = (m.operation, (ARENA, at));
    engine.order.put_rows(
        channel,
        m.slot,
        &Block { operation, peer, signal, rows, width: NAME, src, dst },
    )
}

/// Takes note of a source whose rows were all counted here, and are void.
pub(super) fn find_void(engine: &Engine, op: &DispatchOp, output: &Output, source: u32) {
    let recv = &engine.routing.handles[op.handle].recv;
    if !engine.order.masks_domains() || recv.rows_from(source) == 0 {
        return;
    }
    let names = engine.places.array(output, output.layout.source).cast::<i32>();
    // SAFETY: the rows of a source lie inside the arrays of this rank's region, and are complete.
    let name = unsafe { names.add(recv.row_base(source) as usize).read() };
    if name == VOID {
        engine.order.losses.note_gone(source, op.operation + 1);
    }
}
