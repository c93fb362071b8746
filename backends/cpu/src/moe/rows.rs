//! Rows on their way to their places at the peers, once each.

pub(crate) mod moves;
pub(crate) mod pieces;
pub(crate) mod transfer;
pub(crate) mod writer;

use std::ops::Range;

use tokenyard_core::Result;
use tokenyard_core::moe::{Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec};

use crate::engine::areas::ARENA;
use crate::engine::commands::Raise;
use crate::engine::launch::{CHUNK, Shared, pool_failed};
use crate::engine::order::SlotOrder;
use crate::engine::record::bad_record;
use crate::moe::launcher::Launcher;
use crate::moe::routing::RoutingTable;
use crate::moe::rows::moves::{Carried, Move, Spot};
use crate::moe::rows::writer::{RowSource, RowWriter, Target};
use crate::moe::runner::Runner;

/// A copy that its owner drops.
pub(crate) const DROPPED: u32 = u32::MAX;

/// Decides the expert-major row of every copy: the owner's grant says where the source's rows of
/// each expert start, and they follow in token order. The grants were checked. Rows that the owner's region has no room
/// for are dropped.
pub(crate) fn place_copies(routing: &RoutingTable, launcher: &mut Launcher, m: &Move) {
    let shape = &routing.exchange.shape;
    let leg = &routing.handles[m.handle].legs[m.group as usize];
    let scratch = &mut launcher.scratch;
    scratch.next.copy_from_slice(&leg.expert_bases);
    for (slot, expert) in scratch.slot_of.iter_mut().zip(&leg.topk) {
        *slot = DROPPED;
        let Ok(expert) = u32::try_from(*expert) else { continue };
        let row = &mut scratch.next[expert as usize];
        if u64::from(*row) < leg.places[shape.rank_of(expert) as usize].rows {
            *slot = *row;
        }
        *row += 1;
    }
}

/// The places of a move's rows in an owner's granted region.
pub(crate) fn spot_in_region(runner: &Runner, m: &Move, peer: u32) -> Result<Spot> {
    let state = &runner.routing.handles[m.handle];
    let leg = &state.legs[m.group as usize];
    let place = leg.places[peer as usize];
    let owner = runner.exchange.member.rank_of(peer);
    if runner.order.losses().is_given_up(owner) {
        return Ok(Spot::default());
    }
    let layout = state.arrangement.layout;
    let spec = RegionSpec::new(runner.exchange.regions, layout, m.format.row);
    let base = runner.routing.gathered.regions
        [runner.exchange.member.domains.place(m.group, peer) as usize];
    let rows = RegionRows { tokens: place.tokens, experts: place.rows };
    let region =
        RegionLayout::new(&spec, rows).map_err(|error| bad_record(owner, error.detail()))?;
    let inside = base.is_multiple_of(REGION_ALIGN)
        && base
            .checked_add(region.bytes)
            .is_some_and(|end| end <= runner.places.arena_area.bytes());
    let local = runner.exchange.regions.local_experts() as usize;
    let experts = peer as usize * local..(peer as usize + 1) * local;
    let bases = &leg.expert_bases[experts.clone()];
    let taken = u64::from(leg.taken[peer as usize]);
    // Places beyond the region belong to rows that the owner drops.
    let most = if place.drops { i32::MAX as u64 } else { place.rows };
    let fits = place.first.saturating_add(taken) <= place.tokens
        && bases
            .iter()
            .zip(&leg.send.expert_counts()[experts])
            .all(|(base, n)| u64::from(*base) + u64::from(*n) <= most || layout == Layout::Flat);
    if !inside || !fits {
        let found = format!("places outside its region: offset {base}, {place:?}");
        return Err(bad_record(owner, found));
    }
    let width = m.format.row;
    let k4 = 4 * u64::from(runner.exchange.regions.topk);
    let first = place.first;
    let expert_major = layout != Layout::Flat;
    let (ids, scales, weights) = if expert_major {
        (region.slots, region.landed_scales, region.landed_weights)
    } else {
        (region.ids, region.scales, region.weights)
    };
    let x_first = if expert_major { 0 } else { first * u64::from(width.x_bytes) };
    Ok(Spot {
        window: ARENA,
        x: base + region.x.offset + x_first,
        scales: base + scales.offset + first * u64::from(width.scale_bytes),
        ids: base + ids.offset + first * k4,
        weights: base + weights.offset + first * k4,
        source: base + region.source.offset + first * 4,
    })
}

/// Announces that the rows of a peer were stored. The stores come before this signal: where a
/// peer's memory can be stored to, a signal carries all earlier stores of this process (release).
pub(crate) fn report_stored(
    routing: &RoutingTable,
    order: &SlotOrder,
    m: &Move,
    peer: u32,
) -> Result<()> {
    let rows = u64::from(routing.plan(m).taken[peer as usize]);
    let signal = order.rows_signal(m.slot, m.group);
    order.raise(m.slot, Raise { operation: m.operation, peer, signal, add: rows * m.arrays })
}

/// Turns spots into addresses: in peers' memory where this rank can store there, otherwise in the
/// stage.
pub(crate) fn aim(runner: &mut Runner, m: &Move, stage: &Spot) {
    let k4 = 4 * u64::from(runner.exchange.regions.topk);
    let row = m.format.row;
    for peer in 0..runner.exchange.shape.ranks {
        let target = match runner.places.reachable(peer) {
            // No place: nothing is written.
            Some(_) if runner.order.is_left_out(peer) => Target::default(),
            Some(areas) => {
                let spot = runner.launcher.scratch.spots[peer as usize];
                let area = areas[spot.window as usize];
                Target {
                    x: area.at(spot.x),
                    scales: area.at(spot.scales),
                    ids: area.at(spot.ids),
                    weights: area.at(spot.weights),
                    source: area.at(spot.source),
                    staged: false,
                }
            }
            None => {
                let first = u64::from(runner.routing.plan(m).send.rank_offsets()[peer as usize]);
                let at = |start: u64, width: u64| runner.places.control.at(start + first * width);
                Target {
                    x: at(stage.x, row.x_bytes.into()),
                    scales: at(stage.scales, row.scale_bytes.into()),
                    ids: at(stage.ids, k4),
                    weights: at(stage.weights, k4),
                    source: at(stage.source, 4),
                    staged: true,
                }
            }
        };
        runner.launcher.scratch.targets[peer as usize] = target;
    }
}

/// Writes some rows of the list to their targets.
///
/// # Safety
/// As `move_rows`.
pub(crate) unsafe fn write_rows(
    routing: &RoutingTable,
    launcher: &Launcher,
    m: &Move,
    source: &RowSource,
    rows: Range<usize>,
) -> Result<()> {
    let state = &routing.handles[m.handle];
    let Carried { send, taken, topk } = routing.plan(m);
    let me = routing.exchange.member.domains.index;
    let by_expert = matches!(state.arrangement.layout, Layout::ExpertMajor { .. });
    let writer = Shared(RowWriter {
        shape: routing.exchange.shape,
        first_source: routing.exchange.member.rank * state.max_tokens,
        source: *source,
        format: m.format,
        topk,
        slot_of: by_expert.then_some(launcher.scratch.slot_of.as_slice()),
    });
    let targets = Shared(launcher.scratch.targets.as_slice());
    let chunk = rows.len().div_ceil(launcher.pool.threads()).clamp(1, CHUNK);
    let tasks = rows.len().div_ceil(chunk);
    // Each rank starts with its own rows, so that not all ranks write to peer 0 at once.
    let offsets = send.rank_offsets();
    let first = (offsets[me as usize] as usize).saturating_sub(rows.start) / chunk;
    let task = |index: usize| {
        let (writer, targets) = (writer.get(), targets.get());
        let start = rows.start + (index + first) % tasks * chunk;
        let mut peer = offsets.partition_point(|o| *o as usize <= start) - 1;
        for row in start..(start + chunk).min(rows.end) {
            while offsets[peer + 1] as usize <= row {
                peer += 1;
            }
            if targets[peer].x.is_null() {
                continue;
            }
            let index = row - offsets[peer] as usize;
            if index >= taken[peer] as usize {
                continue;
            }
            let token = send.tokens()[row] as usize;
            // SAFETY: every row of the list belongs to one task, and its targets are its own:
            // spots were checked against the peer's region.
            unsafe { writer.write(&targets[peer], peer as u32, index, token) };
        }
    };
    launcher.pool.run(tasks, &task).map_err(|_| pool_failed("write rows"))
}
