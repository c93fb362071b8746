//! Rows on their way to their places, once each: from this rank's tensors to the peers of its domain
//! and to the rail, and from the rail's landing places to the peers.

use std::ops::Range;

use tokenyard_core::moe::{
    Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, SendPlan, Shape,
};
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::bad_record;
use super::channel::Channel;
use super::commands::Raise;
use super::control::Signal;
use super::engine::{Area, Engine};
use super::handle::WireFormat;
use super::windows::{ARENA, CONTROL};
use super::writer::{RowSource, RowWriter, Target};

/// Rows that one task of the pool handles.
pub(super) const CHUNK: usize = 32;

/// Lets raw addresses into the pool's tasks.
#[derive(Clone, Copy)]
pub(super) struct Shared<T>(pub(super) T);

// SAFETY: used for addresses whose tasks touch disjoint rows; each use says so.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The value. A method, so that closures capture the wrapper and not the field in it.
    pub(super) fn get(&self) -> &T {
        &self.0
    }
}

/// Working memory of a dispatch; allocated once.
#[derive(Debug)]
pub(super) struct RowScratch {
    /// Rows cast to FP8, `[M, H]`, and their scales.
    pub(super) cast_rows: Vec<u8>,
    pub(super) cast_scales: Vec<u8>,
    /// `[M, K]`: expert-major row of each copy at its owner.
    pub(super) slot_of: Vec<u32>,
    /// `[S * El]`: next row in each expert's block.
    next: Vec<u32>,
    /// `[R]`, enough for the peers of a domain and for those of a rail.
    pub(super) spots: Vec<Spot>,
    targets: Vec<Target>,
}

impl RowScratch {
    pub(super) fn new(shape: &Shape, inside: &Shape) -> Self {
        let tokens = shape.max_tokens as usize;
        Self {
            cast_rows: vec![0; tokens * shape.hidden as usize],
            cast_scales: vec![0; tokens * shape.hidden.div_ceil(128) as usize * 4],
            slot_of: vec![0; tokens * shape.topk as usize],
            next: vec![0; inside.experts as usize],
            spots: vec![Spot::default(); shape.ranks as usize],
            targets: vec![Target::default(); shape.ranks as usize],
        }
    }
}

/// Offsets of the first row in each array at one peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spot {
    pub(super) window: u16,
    pub(super) x: u64,
    pub(super) scales: u64,
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) source: u64,
}

/// Which rows move, and over which link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Rows that come from a domain, to the peers of this one.
    Leg(u32),
    /// This rank's rows, to the other domains.
    Rail,
}

/// One move of rows.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) operation: u64,
    pub(super) slot: usize,
    pub(super) handle: usize,
    pub(super) via: Via,
    pub(super) format: WireFormat,
    /// How often the row signal rises for each row.
    pub(super) arrays: u64,
}

#[cold]
pub(super) fn pool_failed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Internal, operation, "a task of the worker pool panicked")
}

impl Engine {
    /// Decides the expert-major row of every copy: the owner's grant says where the source's rows of
    /// each expert start, and they follow in token order. The grants were checked.
    fn place_copies(&mut self, m: &Move, domain: u32) {
        let leg = &self.handles[m.handle].legs[domain as usize];
        let scratch = &mut self.scratch;
        scratch.next.copy_from_slice(&leg.expert_bases);
        for (slot, expert) in scratch.slot_of.iter_mut().zip(&leg.topk) {
            *slot = u32::MAX;
            if let Ok(expert) = usize::try_from(*expert) {
                *slot = scratch.next[expert];
                scratch.next[expert] += 1;
            }
        }
    }

    /// Moves the rows of a domain to their final places in the owners' granted regions.
    ///
    /// # Safety
    /// As [`move_rows`](Self::move_rows).
    pub(super) unsafe fn move_to_regions(
        &mut self,
        m: &Move,
        domain: u32,
        source: &RowSource,
    ) -> Result<()> {
        for peer in 0..self.domains.size {
            self.scratch.spots[peer as usize] = self.spot_in_region(m, domain, peer)?;
        }
        if self.handles[m.handle].arrangement.layout != Layout::Flat {
            self.place_copies(m, domain);
        }
        // SAFETY: by this function's contract.
        unsafe { self.move_rows(m, source) }
    }

    /// Where the rows of a domain's source go in an owner's granted region.
    pub(super) fn spot_in_region(&self, m: &Move, domain: u32, peer: u32) -> Result<Spot> {
        let state = &self.handles[m.handle];
        let leg = &state.legs[domain as usize];
        let place = leg.places[peer as usize];
        let owner = self.domains.place(self.domains.mine, peer);
        if self.losses.is_given_up(owner) {
            return Ok(Spot::default());
        }
        let layout = state.arrangement.layout;
        let spec = RegionSpec { shape: self.shape, layout, row: m.format.row };
        let base = self.gathered.regions[self.domains.place(domain, peer) as usize];
        let rows = RegionRows { tokens: place.tokens, experts: place.rows };
        let region =
            RegionLayout::new(&spec, rows).map_err(|error| bad_record(owner, error.detail()))?;
        let inside = base.is_multiple_of(REGION_ALIGN)
            && base.checked_add(region.bytes).is_some_and(|end| end <= self.arena_area.bytes());
        let local = self.shape.local_experts() as usize;
        let experts = peer as usize * local..(peer as usize + 1) * local;
        let bases = &leg.expert_bases[experts.clone()];
        let sent = u64::from(leg.send.rank_counts()[peer as usize]);
        let fits = place.first.saturating_add(sent) <= place.tokens
            && bases.iter().zip(&leg.send.expert_counts()[experts]).all(|(base, n)| {
                u64::from(*base) + u64::from(*n) <= place.rows || layout == Layout::Flat
            });
        if !inside || !fits {
            let found = format!("places outside its region: offset {base}, {place:?}");
            return Err(bad_record(owner, found));
        }
        let width = m.format.row;
        let k4 = 4 * u64::from(self.shape.topk);
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

    /// Moves rows to the landing places that are fixed for this source: those of the packed layout,
    /// or those of the rail.
    ///
    /// # Safety
    /// As [`move_rows`](Self::move_rows).
    pub(super) unsafe fn move_to_landing(&mut self, m: &Move, source: &RowSource) -> Result<()> {
        let region = self.landing_layout(&m.format)?;
        let base = match m.via {
            Via::Leg(domain) => {
                self.sizes.landing(m.slot, self.domains.place(domain, self.domains.index))
            }
            Via::Rail => self.sizes.rail_landing(m.slot, self.domains.mine),
        };
        let spot = Spot {
            window: CONTROL,
            x: base + region.x.offset,
            scales: base + region.scales.offset,
            ids: base + region.ids.offset,
            weights: base + region.weights.offset,
            source: base + region.source.offset,
        };
        self.scratch.spots.fill(spot);
        // SAFETY: by this function's contract.
        unsafe { self.move_rows(m, source) }
    }

    /// The layout of one source's landing places: flat, room for M rows.
    pub(super) fn landing_layout(&self, format: &WireFormat) -> Result<RegionLayout> {
        let spec = RegionSpec { shape: self.shape, layout: Layout::Flat, row: format.row };
        let rows = RegionRows { tokens: self.shape.max_tokens.into(), experts: 0 };
        let region = RegionLayout::new(&spec, rows)?;
        debug_assert!(region.bytes <= self.sizes.landing_pitch);
        Ok(region)
    }

    /// The link of a move, and the signal that counts its rows there.
    pub(super) fn link_of(&self, m: &Move) -> (&Channel, u32) {
        match (m.via, &self.rail) {
            (Via::Rail, Some(rail)) => {
                let ids = rail.channel.ids;
                (&rail.channel, ids.id(Signal::Rows, m.slot, self.domains.mine))
            }
            (Via::Leg(domain), _) => {
                let place = self.domains.place(domain, self.domains.index);
                (&self.channel, self.channel.ids.id(Signal::Rows, m.slot, place))
            }
            // Moves over the rail are made where there is one.
            (Via::Rail, None) => (&self.channel, 0),
        }
    }

    /// Moves every row to its spot, and says so to the peers.
    ///
    /// # Safety
    /// `source` is valid until this operation is received.
    unsafe fn move_rows(&mut self, m: &Move, source: &RowSource) -> Result<()> {
        let stage = self.stage_offsets(m);
        self.aim(m, &stage);
        // SAFETY: by this function's contract.
        unsafe {
            if self.stores() && m.via != Via::Rail {
                self.store_rows(m, source)
            } else {
                self.put_in_pieces(m, source, &stage)
            }
        }
    }

    /// Stores the rows where they belong, and says so to each peer.
    ///
    /// # Safety
    /// As [`move_rows`](Self::move_rows).
    unsafe fn store_rows(&self, m: &Move, source: &RowSource) -> Result<()> {
        let rows = 0..self.plan(m).send.tokens().len();
        // SAFETY: by this function's contract.
        unsafe { self.write_rows(m, source, rows)? };
        let (me, peers) = self.turn(m.via);
        (0..peers)
            .map(|i| (me + i) % peers)
            .filter(|peer| !self.is_left_out(m, *peer))
            .try_for_each(|peer| self.tell_stored(m, peer))
    }

    /// Whether nothing goes to a peer any more.
    pub(super) fn is_left_out(&self, m: &Move, peer: u32) -> bool {
        self.losses.is_given_up(self.link_of(m).0.rank_of(peer))
    }

    /// Says that the rows of a peer were stored. The stores happened before this signal: where a
    /// peer's memory can be stored to, a signal carries everything that this process stored before it
    /// (release).
    pub(super) fn tell_stored(&self, m: &Move, peer: u32) -> Result<()> {
        let rows = u64::from(self.plan(m).send.rank_counts()[peer as usize]);
        let (channel, signal) = self.link_of(m);
        let raise = Raise { operation: m.operation, add: rows * m.arrays };
        self.raise(channel, m.slot, (peer, signal), raise)
    }

    /// This rank's number among the peers of a move, and how many there are.
    pub(super) fn turn(&self, via: Via) -> (u32, u32) {
        match via {
            Via::Leg(_) => (self.domains.index, self.domains.size),
            Via::Rail => (self.domains.mine, self.domains.count),
        }
    }

    /// What a move carries.
    pub(super) fn plan(&self, m: &Move) -> Carried<'_> {
        let state = &self.handles[m.handle];
        match (m.via, &state.outward) {
            (Via::Leg(domain), _) => {
                let leg = &state.legs[domain as usize];
                Carried { send: &leg.send, topk: &leg.topk }
            }
            (Via::Rail, Some(outward)) => Carried { send: &outward.send, topk: &outward.topk },
            (Via::Rail, None) => Carried { send: &state.legs[0].send, topk: &[] },
        }
    }

    /// Turns spots into addresses where this rank can store, and else into those in the stage.
    fn aim(&mut self, m: &Move, stage: &Spot) {
        let k4 = 4 * u64::from(self.shape.topk);
        let row = m.format.row;
        for peer in 0..self.turn(m.via).1 {
            let target = match self.reachable(m, peer) {
                // No place: nothing is written.
                Some(_) if self.is_left_out(m, peer) => Target::default(),
                Some(areas) => {
                    let spot = self.scratch.spots[peer as usize];
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
                    let first = u64::from(self.plan(m).send.rank_offsets()[peer as usize]);
                    let at = |start: u64, width: u64| self.control.at(start + first * width);
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
            self.scratch.targets[peer as usize] = target;
        }
    }

    /// The windows of a peer that rows are stored to: of every peer or of none but this rank.
    pub(super) fn reachable(&self, m: &Move, peer: u32) -> Option<[Area; 2]> {
        if m.via == Via::Rail {
            return None;
        }
        let own = peer == self.domains.index;
        self.peers
            .get(peer as usize)
            .copied()
            .or_else(|| own.then_some([self.control, self.arena_area]))
    }

    /// Writes some rows of the list to their targets.
    ///
    /// # Safety
    /// As [`move_rows`](Self::move_rows).
    pub(super) unsafe fn write_rows(
        &self,
        m: &Move,
        source: &RowSource,
        rows: Range<usize>,
    ) -> Result<()> {
        let state = &self.handles[m.handle];
        let Carried { send, topk } = self.plan(m);
        let (me, peers) = self.turn(m.via);
        let by_expert =
            m.via != Via::Rail && matches!(state.arrangement.layout, Layout::ExpertMajor { .. });
        let writer = Shared(RowWriter {
            shape: Shape { ranks: peers, experts: send.expert_counts().len() as u32, ..self.shape },
            first_source: self.rank * self.shape.max_tokens,
            source: *source,
            format: m.format,
            topk,
            slot_of: by_expert.then_some(self.scratch.slot_of.as_slice()),
        });
        let targets = Shared(self.scratch.targets.as_slice());
        let chunk = rows.len().div_ceil(self.pool.threads()).clamp(1, CHUNK);
        let tasks = rows.len().div_ceil(chunk);
        // Each rank starts with its own rows, so that not all write to peer 0 at once.
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
                let token = send.tokens()[row] as usize;
                // SAFETY: every row of the list belongs to one task, and its targets are its own:
                // spots were checked against the peer's region.
                unsafe { writer.write(&targets[peer], peer as u32, index, token) };
            }
        };
        self.pool.run(tasks, &task).map_err(|_| pool_failed("write rows"))
    }
}

/// What a move carries: the rows of each peer, and `[rows, K]` experts.
pub(super) struct Carried<'a> {
    pub(super) send: &'a SendPlan,
    pub(super) topk: &'a [i32],
}
