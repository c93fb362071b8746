//! Moves of all rows: over loads and stores where peers can be stored to, otherwise piece by piece.

use tokenyard_core::Result;
use tokenyard_core::moe::Layout;

use crate::engine::areas::CONTROL;
use crate::moe::rows::moves::{Move, Spot};
use crate::moe::rows::pieces::{put_in_pieces, stage_offsets};
use crate::moe::rows::writer::RowSource;
use crate::moe::rows::{aim, place_copies, report_stored, spot_in_region, write_rows};
use crate::moe::runner::Runner;

/// Moves the rows of a group to their final places in the owners' granted regions.
///
/// # Safety
/// As `move_rows`.
pub(crate) unsafe fn move_to_regions(
    runner: &mut Runner,
    m: &Move,
    source: &RowSource,
) -> Result<()> {
    for peer in 0..runner.exchange.shape.ranks {
        runner.launcher.scratch.spots[peer as usize] = spot_in_region(runner, m, peer)?;
    }
    if runner.routing.handles[m.handle].arrangement.layout != Layout::Flat {
        place_copies(&runner.routing, &mut runner.launcher, m);
    }
    // SAFETY: by this function's contract.
    unsafe { move_rows(runner, m, source) }
}

/// Moves rows to the landing places that are fixed for their source: those of the packed and the rank-major layout,
/// or on the rail.
///
/// # Safety
/// As `move_rows`.
pub(crate) unsafe fn move_to_landing(
    runner: &mut Runner,
    m: &Move,
    source: &RowSource,
) -> Result<()> {
    let region = runner.landing_layout(&m.format)?;
    let here = runner.exchange.member.domains.place(m.group, runner.exchange.member.domains.index);
    let base = runner.places.slots.landing(m.slot, here);
    let spot = Spot {
        window: CONTROL,
        x: base + region.x.offset,
        scales: base + region.scales.offset,
        ids: base + region.ids.offset,
        weights: base + region.weights.offset,
        source: base + region.source.offset,
    };
    runner.launcher.scratch.spots.fill(spot);
    // SAFETY: by this function's contract.
    unsafe { move_rows(runner, m, source) }
}

/// Moves every row to its spot, and announces this to the peers.
///
/// # Safety
/// `source` is valid until this operation is received.
unsafe fn move_rows(runner: &mut Runner, m: &Move, source: &RowSource) -> Result<()> {
    let stage = stage_offsets(&runner.routing, &runner.places, m);
    aim(runner, m, &stage);
    // SAFETY: by this function's contract.
    unsafe {
        if runner.places.stores() {
            store_rows(runner, m, source)
        } else {
            put_in_pieces(runner, m, source, &stage)
        }
    }
}

/// Stores the rows at their final places, and announces this to each peer.
///
/// # Safety
/// As `move_rows`.
unsafe fn store_rows(runner: &Runner, m: &Move, source: &RowSource) -> Result<()> {
    let rows = 0..runner.routing.plan(m).send.tokens().len();
    // SAFETY: by this function's contract.
    unsafe { write_rows(&runner.routing, &runner.launcher, m, source, rows)? };
    let peers = runner.exchange.member.domains.peers();
    peers
        .filter(|peer| !runner.order.is_left_out(*peer))
        .try_for_each(|peer| report_stored(&runner.routing, &runner.order, m, peer))
}
