//! Moves of all rows: over loads and stores where peers can be stored to, otherwise piece by piece.

use tokenyard_core::Result;
use tokenyard_core::moe::Layout;

use super::engine::Engine;
use super::moves::{Move, Spot};
use super::pieces::{put_in_pieces, stage_offsets};
use super::rows::{aim, place_copies, report_stored, spot_in_region, write_rows};
use super::windows::CONTROL;
use super::writer::RowSource;

/// Moves the rows of a group to their final places in the owners' granted regions.
///
/// # Safety
/// As `move_rows`.
pub(super) unsafe fn move_to_regions(
    engine: &mut Engine,
    m: &Move,
    source: &RowSource,
) -> Result<()> {
    for peer in 0..engine.exchange.shape.ranks {
        engine.launcher.scratch.spots[peer as usize] = spot_in_region(engine, m, peer)?;
    }
    if engine.routing.handles[m.handle].arrangement.layout != Layout::Flat {
        place_copies(&engine.routing, &mut engine.launcher, m);
    }
    // SAFETY: by this function's contract.
    unsafe { move_rows(engine, m, source) }
}

/// Moves rows to the landing places that are fixed for their source: those of the packed layout,
/// or on the rail.
///
/// # Safety
/// As `move_rows`.
pub(super) unsafe fn move_to_landing(
    engine: &mut Engine,
    m: &Move,
    source: &RowSource,
) -> Result<()> {
    let region = engine.places.landing_layout(&m.format)?;
    let here = engine.exchange.domains.place(m.group, engine.exchange.domains.index);
    let base = engine.places.slots.landing(m.slot, here);
    let spot = Spot {
        window: CONTROL,
        x: base + region.x.offset,
        scales: base + region.scales.offset,
        ids: base + region.ids.offset,
        weights: base + region.weights.offset,
        source: base + region.source.offset,
    };
    engine.launcher.scratch.spots.fill(spot);
    // SAFETY: by this function's contract.
    unsafe { move_rows(engine, m, source) }
}

/// Moves every row to its spot, and announces this to the peers.
///
/// # Safety
/// `source` is valid until this operation is received.
unsafe fn move_rows(engine: &mut Engine, m: &Move, source: &RowSource) -> Result<()> {
    let stage = stage_offsets(&engine.routing, &engine.places, m);
    aim(engine, m, &stage);
    // SAFETY: by this function's contract.
    unsafe {
        if engine.places.stores() {
            store_rows(engine, m, source)
        } else {
            put_in_pieces(engine, m, source, &stage)
        }
    }
}

/// Stores the rows at their final places, and announces this to each peer.
///
/// # Safety
/// As `move_rows`.
unsafe fn store_rows(engine: &Engine, m: &Move, source: &RowSource) -> Result<()> {
    let rows = 0..engine.routing.plan(m).send.tokens().len();
    // SAFETY: by this function's contract.
    unsafe { write_rows(&engine.routing, &engine.launcher, m, source, rows)? };
    let peers = engine.exchange.domains.peers();
    peers
        .filter(|peer| !engine.order.is_left_out(*peer))
        .try_for_each(|peer| report_stored(&engine.routing, &engine.order, m, peer))
}
