//! Rows on their way to their places, once each: from this rank's tensors to the peers of its domain
//! and to the rail, and from the rail's landing places to the peers.

use tokenyard_core::moe::{
    Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, SendPlan, Shape,
};
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::bad_record;
use super::channel::Channel;
use super::commands::{Block, Raise};
use super::control::Signal;
use super::engine::Engine;
use super::handle::WireFormat;
use super::windows::{ARENA, CONTROL};
use super::writer::{RowSource, RowWriter, Target, first_local};

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
    slot_of: Vec<u32>,
    /// `[S * El]`: next row in each expert's block.
    next: Vec<u32>,
    /// `[R]`, enough for the peers of a domain and for those of a rail.
    spots: Vec<Spot>,
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
struct Spot {
    window: u16,
    x: u64,
    scales: u64,
    ids: u64,
    weights: u64,
    source: u64,
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
    fn spot_in_region(&self, m: &Move, domain: u32, peer: u32) -> Result<Spot> {
        let state = &self.handles[m.handle];
        let leg = &state.legs[domain as usize];
        let place = leg.places[peer as usize];
        let owner = self.domains.place(self.domains.mine, peer);
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
    fn link_of(&self, m: &Move) -> (&Channel, u32) {
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
        let stores = self.stores() && m.via != Via::Rail;
        let stage = self.stage_offsets(m);
        self.aim(m, (!stores).then_some(&stage));
        // SAFETY: by this function's contract.
        unsafe { self.write_rows(m, source, stores)? };
        let (channel, signal) = self.link_of(m);
        let (me, peers) = self.turn(m.via);
        let first = u32::from(m.via == Via::Rail);
        for peer in (first..peers).map(|i| (me + i) % peers) {
            let rows = u64::from(self.plan(m).send.rank_counts()[peer as usize]);
            if rows == 0 {
                continue;
            }
            if stores {
                // The stores above happen before this signal: on a transport with load and store,
                // a signal carries everything this process stored before it (release).
                let raise = Raise { operation: m.operation, add: rows * m.arrays };
                self.raise(channel, m.slot, (peer, signal), raise)?;
            } else {
                self.put_all(m, &stage, peer, (channel, signal))?;
            }
        }
        Ok(())
    }

    /// This rank's number among the peers of a move, and how many there are.
    fn turn(&self, via: Via) -> (u32, u32) {
        match via {
            Via::Leg(_) => (self.domains.index, self.domains.size),
            Via::Rail => (self.domains.mine, self.domains.count),
        }
    }

    /// What a move carries.
    fn plan(&self, m: &Move) -> Carried<'_> {
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

    /// Offsets of the arrays of all rows that leave, in the stage of the slot.
    fn stage_offsets(&self, m: &Move) -> Spot {
        let rows = self.plan(m).send.tokens().len() as u64;
        let k4 = 4 * u64::from(self.shape.topk);
        let mut end = match m.via {
            Via::Leg(domain) => self.sizes.stage(m.slot, domain),
            Via::Rail => self.sizes.rail_stage(m.slot),
        };
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

    /// Turns spots into addresses: at the peers, or in the stage.
    fn aim(&mut self, m: &Move, stage: Option<&Spot>) {
        let k4 = 4 * u64::from(self.shape.topk);
        let row = m.format.row;
        for peer in 0..self.turn(m.via).1 as usize {
            let target = match stage {
                None => {
                    let spot = self.scratch.spots[peer];
                    let area = self.peers[peer][spot.window as usize];
                    Target {
                        x: area.at(spot.x),
                        scales: area.at(spot.scales),
                        ids: area.at(spot.ids),
                        weights: area.at(spot.weights),
                        source: area.at(spot.source),
                    }
                }
                Some(stage) => {
                    let first = u64::from(self.plan(m).send.rank_offsets()[peer]);
                    let at = |start: u64, width: u64| self.control.at(start + first * width);
                    Target {
                        x: at(stage.x, row.x_bytes.into()),
                        scales: at(stage.scales, row.scale_bytes.into()),
                        ids: at(stage.ids, k4),
                        weights: at(stage.weights, k4),
                        source: at(stage.source, 4),
                    }
                }
            };
            self.scratch.targets[peer] = target;
        }
    }

    /// # Safety
    /// As [`move_rows`](Self::move_rows).
    unsafe fn write_rows(&mut self, m: &Move, source: &RowSource, stores: bool) -> Result<()> {
        let state = &self.handles[m.handle];
        let Carried { send, topk } = self.plan(m);
        let (me, peers) = self.turn(m.via);
        let rows = send.tokens().len();
        let leg = m.via != Via::Rail;
        let by_expert = leg && matches!(state.arrangement.layout, Layout::ExpertMajor { .. });
        let writer = Shared(RowWriter {
            shape: Shape { ranks: peers, experts: send.expert_counts().len() as u32, ..self.shape },
            first_source: self.rank * self.shape.max_tokens,
            source: *source,
            format: m.format,
            topk,
            slot_of: by_expert.then_some(self.scratch.slot_of.as_slice()),
            // In the stage, rows lie one after the other whatever their final place.
            x_by_slot: stores,
        });
        let targets = Shared(self.scratch.targets.as_slice());
        let tasks = rows.div_ceil(CHUNK);
        // Each rank starts with its own rows, so that not all write to peer 0 at once. Over the
        // rail there are none.
        let own = (!leg).then_some(me as usize);
        let first = send.rank_offsets()[me as usize] as usize / CHUNK;
        let task = |index: usize| {
            let (writer, targets) = (writer.get(), targets.get());
            let chunk = (index + first) % tasks;
            let start = chunk * CHUNK;
            let offsets = send.rank_offsets();
            let mut peer = offsets.partition_point(|o| *o as usize <= start) - 1;
            for row in start..(start + CHUNK).min(rows) {
                while offsets[peer + 1] as usize <= row {
                    peer += 1;
                }
                if own == Some(peer) {
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

    /// Puts the staged rows of one peer.
    fn put_all(
        &self,
        m: &Move,
        stage: &Spot,
        peer: u32,
        (channel, signal): (&Channel, u32),
    ) -> Result<()> {
        let Carried { send, .. } = self.plan(m);
        let layout = self.handles[m.handle].arrangement.layout;
        let spot = &self.scratch.spots[peer as usize];
        let first = u64::from(send.rank_offsets()[peer as usize]);
        let rows = u64::from(send.rank_counts()[peer as usize]);
        let row = m.format.row;
        let k4 = 4 * u64::from(self.shape.topk);
        let put = |width: u64, from: u64, to: u64, rows: u64| {
            let (src, dst) = ((CONTROL, from), (spot.window, to));
            let operation = m.operation;
            let block = Block { operation, peer, signal, rows, width, src, dst };
            self.put_rows(channel, m.slot, &block)
        };
        let x_bytes = u64::from(row.x_bytes);
        if matches!(layout, Layout::ExpertMajor { .. }) && m.via != Via::Rail {
            for (index, token) in (first..).zip(send.tokens_for(peer)) {
                let slot = u64::from(self.first_copy(m, peer, *token as usize));
                put(x_bytes, stage.x + index * x_bytes, spot.x + slot * x_bytes, 1)?;
            }
        } else {
            put(x_bytes, stage.x + first * x_bytes, spot.x, rows)?;
        }
        let sides = [
            (u64::from(row.scale_bytes), stage.scales, spot.scales),
            (k4, stage.ids, spot.ids),
            (if row.weights { k4 } else { 0 }, stage.weights, spot.weights),
            (4, stage.source, spot.source),
        ];
        for (width, from, to) in sides.into_iter().filter(|(width, ..)| *width > 0) {
            put(width, from + first * width, to, rows)?;
        }
        Ok(())
    }

    /// Expert-major row of a token's first selected expert on `peer`: there the row crosses to.
    fn first_copy(&self, m: &Move, peer: u32, token: usize) -> u32 {
        let topk = self.shape.topk as usize;
        let row = token * topk..(token + 1) * topk;
        first_local(&self.inside, &self.plan(m).topk[row.clone()], peer)
            .map_or(0, |k| self.scratch.slot_of[row][k])
    }
}

/// What a move carries: the rows of each peer, and `[rows, K]` experts.
struct Carried<'a> {
    send: &'a SendPlan,
    topk: &'a [i32],
}
