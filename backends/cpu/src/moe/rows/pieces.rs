//! Rows that cannot be stored at their peers. They are staged and put, piece by piece. The partial rows
//! of a combine are made and put in the same way.
//!
//! A piece is put as soon as it is staged. So the link carries it while the next one is staged, and
//! the NIC or the kernel finds it in the cache.

use std::ops::Range;

use tokenyard_core::Result;
use tokenyard_core::moe::{Layout, REGION_ALIGN, logfmt};

use crate::engine::areas::{ARENA, CONTROL};
use crate::engine::commands::{Block, Raise};
use crate::engine::control::Signal;
use crate::engine::places::Places;
use crate::moe::combine::left_out::put_left_out;
use crate::moe::combine::merger::{Staged, make_partials};
use crate::moe::combine::partials::entry_at;
use crate::moe::launcher::Launcher;
use crate::moe::operation::{CombineOp, Offsets};
use crate::moe::routing::RoutingTable;
use crate::moe::rows::moves::{Carried, Move, Spot};
use crate::moe::rows::writer::{RowSource, first_copy};
use crate::moe::rows::{report_stored, write_rows};
use crate::moe::runner::Runner;

/// `rows` in pieces of `most` rows.
fn pieces(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(most).map(move |start| start..(start + most).min(end))
}

/// Stages and puts the rows of every peer. Rows that stay here are stored in between, in
/// proportion: they need no link, and many of them are in the cache because they were just staged.
///
/// # Safety
/// `source` is valid until this operation is received.
pub(crate) unsafe fn put_in_pieces(
    runner: &Runner,
    m: &Move,
    source: &RowSource,
    stage: &Spot,
) -> Result<()> {
    let me = runner.exchange.member.domains.index;
    let own = runner.routing.rows_for(m, me);
    let others =
        || runner.exchange.member.domains.peers().skip(1).filter(|p| !runner.order.is_left_out(*p));
    let leaving: usize = others().map(|peer| runner.routing.rows_for(m, peer).len()).sum();
    let most = runner.launcher.piece_rows(m.format.row.x_bytes.into());
    let (mut left, mut stored) = (0, 0);
    for peer in others() {
        for piece in pieces(runner.routing.rows_for(m, peer), most) {
            // SAFETY: by this function's contract.
            unsafe { write_rows(&runner.routing, &runner.launcher, m, source, piece.clone())? };
            put_rows_of(runner, m, stage, peer, piece.clone())?;
            left += piece.len();
            let until = own.len() * left / leaving;
            // SAFETY: by this function's contract.
            unsafe {
                write_rows(
                    &runner.routing,
                    &runner.launcher,
                    m,
                    source,
                    own.start + stored..own.start + until,
                )?
            };
            stored = until;
            if piece.len() == most && left < leaving {
                // Many links move only when a thread drives them. Short moves end soon, so they do
                // not drive the link.
                runner.order.progress()?;
            }
        }
        put_sides(runner, m, stage, peer)?;
    }
    // SAFETY: by this function's contract.
    unsafe {
        write_rows(&runner.routing, &runner.launcher, m, source, own.start + stored..own.end)?
    };
    if own.is_empty() { Ok(()) } else { report_stored(&runner.routing, &runner.order, m, me) }
}

/// Offsets of the arrays of all rows that leave, in the stage of the slot.
pub(crate) fn stage_offsets(routing: &RoutingTable, places: &Places, m: &Move) -> Spot {
    let rows = routing.plan(m).send.tokens().len() as u64;
    let k4 = 4 * u64::from(routing.exchange.regions.topk);
    let mut end = places.slots.stage(m.slot, m.group);
    let mut next = |width: u64| {
        let start = end;
        end += (rows * width).next_multiple_of(REGION_ALIGN);
        start
    };
    Spot {
        window: CONTROL,
        x: next(m.format.row.x_bytes.into()),
        scales: next(m.format.row.scale_bytes.into()),
        ids: next(k4),
        weights: next(k4),
        source: next(4),
    }
}

/// Puts a piece of a peer's staged rows, without their side arrays.
fn put_rows_of(
    runner: &Runner,
    m: &Move,
    stage: &Spot,
    peer: u32,
    piece: Range<usize>,
) -> Result<()> {
    let spot = &runner.launcher.scratch.spots[peer as usize];
    let width = u64::from(m.format.row.x_bytes);
    let from = |row: usize| stage.x + row as u64 * width;
    let layout = runner.routing.handles[m.handle].arrangement.layout;
    if matches!(layout, Layout::ExpertMajor { .. }) {
        let tokens = &runner.routing.plan(m).send.tokens()[piece.clone()];
        let mut dropped = 0;
        for (row, token) in piece.zip(tokens) {
            let Some(slot) = copy_row(&runner.routing, &runner.launcher, m, peer, *token as usize)
            else {
                dropped += 1;
                continue;
            };
            let to = spot.x + u64::from(slot) * width;
            put_array(runner, m, peer, &StagedArray { from: from(row), to, rows: 1, width })?;
        }
        // The owner counts all rows: it need not know which of them have no copy left.
        let signal = runner.order.rows_signal(m.slot, m.group);
        let raise = Raise { operation: m.operation, peer, signal, add: dropped };
        return runner.order.raise(m.slot, raise);
    }
    let first =
        piece.start as u64 - u64::from(runner.routing.plan(m).send.rank_offsets()[peer as usize]);
    let to = spot.x + first * width;
    let (from, rows) = (from(piece.start), piece.len() as u64);
    put_array(runner, m, peer, &StagedArray { from, to, rows, width })
}

/// Puts the side arrays of all of a peer's staged rows: they are small.
fn put_sides(runner: &Runner, m: &Move, stage: &Spot, peer: u32) -> Result<()> {
    let Carried { send, taken, .. } = runner.routing.plan(m);
    let spot = &runner.launcher.scratch.spots[peer as usize];
    let first = u64::from(send.rank_offsets()[peer as usize]);
    let rows = u64::from(taken[peer as usize]);
    let row = m.format.row;
    let k4 = 4 * u64::from(runner.exchange.regions.topk);
    let sides = [
        (u64::from(row.scale_bytes), stage.scales, spot.scales),
        (k4, stage.ids, spot.ids),
        (if row.weights { k4 } else { 0 }, stage.weights, spot.weights),
        (4, stage.source, spot.source),
    ];
    sides.into_iter().filter(|(width, ..)| *width > 0).try_for_each(|(width, from, to)| {
        let from = from + first * width;
        put_array(runner, m, peer, &StagedArray { from, to, rows, width })
    })
}

/// Rows of one array of the stage: from where to where they go in the windows of the stage and of the peer's spot.
struct StagedArray {
    from: u64,
    to: u64,
    rows: u64,
    width: u64,
}

fn put_array(runner: &Runner, m: &Move, peer: u32, array: &StagedArray) -> Result<()> {
    let StagedArray { from, to, rows, width } = *array;
    let signal = runner.order.rows_signal(m.slot, m.group);
    let (src, dst) = ((CONTROL, from), (runner.launcher.scratch.spots[peer as usize].window, to));
    let block = Block { operation: m.operation, peer, signal, rows, width, src, dst };
    runner.order.put_rows(m.slot, &block)
}

/// The expert-major row to which a token crosses on `peer`.
fn copy_row(
    routing: &RoutingTable,
    launcher: &Launcher,
    m: &Move,
    peer: u32,
    token: usize,
) -> Option<u32> {
    let topk = routing.exchange.regions.topk as usize;
    let row = token * topk..(token + 1) * topk;
    let slots = &launcher.scratch.slot_of[row.clone()];
    first_copy(&routing.exchange.shape, &routing.plan(m).topk[row], slots, peer)
}

/// Makes every source's partial rows and puts them where it, or its forwarder, wants them, piece by
/// piece. Then those of this rank's own rows, which are read where they are made.
///
/// # Safety
/// As `combine_send`.
pub(crate) unsafe fn push(
    runner: &Runner,
    slot: usize,
    op: &CombineOp,
    staged: &Staged,
) -> Result<()> {
    let own = runner.exchange.member.domains.index;
    let is_own = |place: &u32| runner.exchange.member.domains.peer_of(*place) == own;
    for place in runner.exchange.member.domains.places().filter(|place| !is_own(place)) {
        let forwarder_is_lost =
            runner.order.losses().is_given_up(runner.exchange.member.forwarder(place));
        // The forwarder needs no partials of rows whose source is lost.
        if forwarder_is_lost || runner.routing.gathered.entries[place as usize].gone {
            continue;
        }
        // SAFETY: by this function's contract.
        unsafe { push_to(runner, slot, op, staged, place)? };
    }
    for domain in runner.exchange.member.domains.all() {
        let rows =
            runner.routing.partials_of(op, runner.exchange.member.domains.place(domain, own));
        // SAFETY: by this function's contract.
        unsafe { make_partials(&runner.places, &runner.launcher, staged, rows)? };
    }
    Ok(())
}

/// # Safety
/// As `push`.
unsafe fn push_to(
    runner: &Runner,
    slot: usize,
    op: &CombineOp,
    staged: &Staged,
    place: u32,
) -> Result<()> {
    let (operation, widths) = (op.operation, runner.routing.widths(op));
    let domains = &runner.exchange.member.domains;
    let peer = domains.peer_of(place);
    let rows = runner.routing.partials_of(op, place);
    let there = entry_at(runner, op, place, rows.len() as u64)?;
    let here = domains.place(domains.domain_of(place), domains.index);
    let signal = runner.order.channel.ids.id(Signal::Rows, slot, here);
    let put = |rows: usize, width: u64, from: u64, to: u64| {
        let (rows, src, dst) = (rows as u64, (ARENA, from), (ARENA, to));
        let block = Block { operation, peer, signal, rows, width, src, dst };
        runner.order.put_rows(slot, &block)
    };
    let at = |area: Offsets, row: usize| area.row(row as u64, widths);
    let most =
        if staged.copies_x { runner.launcher.piece_rows(widths.x) } else { rows.len().max(1) };
    for piece in pieces(rows.clone(), most) {
        if piece.start > rows.start {
            // As in a dispatch: many links move only when a thread drives them.
            runner.order.progress()?;
        }
        // SAFETY: by this function's contract.
        unsafe { make_partials(&runner.places, &runner.launcher, staged, piece.clone())? };
        let (from, to) = (at(staged.partials, piece.start), at(there, piece.start - rows.start));
        if !op.partial.is_coded {
            put(piece.len(), widths.x, from.x, to.x)?;
            continue;
        }
        // Each row is as long as its words say: the rest of its room stays here.
        for row in 0..piece.len() as u64 {
            let (from, to) = (from.row(row, widths).x, to.row(row, widths).x);
            let row = runner.places.arena_area.at(from);
            // SAFETY: `make_partials` has made the row in its room, and no thread writes it.
            let row = unsafe { std::slice::from_raw_parts(row, op.partial.bytes) };
            let bytes = logfmt::row_bytes(runner.exchange.shape.hidden as usize, row);
            put(1, bytes as u64, from, to)?;
        }
    }
    if op.has_weights {
        let from = at(staged.partials, rows.start).weights;
        put(rows.len(), widths.weights, from, there.weights)?;
    }
    if op.says_left_out && !rows.is_empty() {
        put_left_out(runner, slot, op.operation, peer)?;
    }
    Ok(())
}
