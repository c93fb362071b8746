//! Rows on their way from this rank's tensors to their places, once each.

use tokenyard_core::abi;
use tokenyard_core::moe::{Layout, REGION_ALIGN, RegionLayout, RegionRows, RegionSpec, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::bad_record;
use super::control::Signal;
use super::engine::{Block, Engine, Raise};
use super::handle::WireFormat;
use super::windows::{ARENA, CONTROL};
use super::writer::{RowSource, RowWriter, Target, first_local};
use crate::convert::{FloatType, Scaling, cast_row};

/// Rows that one task of the pool handles.
const CHUNK: usize = 32;

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
    cast_rows: Vec<u8>,
    cast_scales: Vec<u8>,
    /// `[M, K]`: expert-major row of each copy at its owner.
    slot_of: Vec<u32>,
    /// `[E]`: next row in each expert's block.
    next: Vec<u32>,
    /// `[R]`.
    spots: Vec<Spot>,
    targets: Vec<Target>,
}

impl RowScratch {
    pub(super) fn new(shape: &Shape) -> Self {
        let tokens = shape.max_tokens as usize;
        Self {
            cast_rows: vec![0; tokens * shape.hidden as usize],
            cast_scales: vec![0; tokens * shape.hidden.div_ceil(128) as usize * 4],
            slot_of: vec![0; tokens * shape.topk as usize],
            next: vec![0; shape.experts as usize],
            spots: vec![Spot::default(); shape.ranks as usize],
            targets: vec![Target::default(); shape.ranks as usize],
        }
    }
}

/// Offsets of this rank's first row in each array at one peer.
#[derive(Clone, Copy, Debug, Default)]
struct Spot {
    window: u16,
    x: u64,
    scales: u64,
    ids: u64,
    weights: u64,
    source: u64,
}

/// One move of rows.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) operation: u64,
    pub(super) slot: usize,
    pub(super) handle: usize,
    pub(super) format: WireFormat,
    /// How often the row signal rises for each row.
    pub(super) arrays: u64,
}

pub(super) fn float_type(dtype: u32) -> Option<FloatType> {
    match dtype {
        1 => Some(FloatType::Bf16),
        2 => Some(FloatType::F16),
        3 => Some(FloatType::F32),
        _ => None,
    }
}

#[cold]
fn pool_failed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Internal, operation, "a task of the worker pool panicked")
}

impl Engine {
    /// Reads the call's tensors, and casts rows where that is asked for.
    ///
    /// # Safety
    /// The call's tensors are valid until this operation is received.
    pub(super) unsafe fn row_source(
        &mut self,
        call: &abi::TyDispatch,
        format: &WireFormat,
    ) -> Result<RowSource> {
        let element = tokenyard_core::moe::DType::from_code(call.x.dtype).map_or(1, |d| d.bytes());
        let x_pitch = self.shape.hidden as usize * element;
        let weights = call.topk_weights.data.cast::<f32>().cast_const();
        if call.cast == abi::TY_CAST_NONE {
            let pitch = call.scales.stride.map(|s| s as isize * 4);
            let scales = call.scales.data.cast_const();
            let x = call.x.data.cast_const();
            return Ok(RowSource { x, x_pitch, scales, scale_pitch: pitch, weights });
        }
        // SAFETY: by this function's contract.
        unsafe { self.cast_rows(call, x_pitch, format.row.scale_bytes as usize)? };
        Ok(RowSource {
            x: self.scratch.cast_rows.as_ptr(),
            x_pitch: self.shape.hidden as usize,
            scales: self.scratch.cast_scales.as_ptr(),
            scale_pitch: [format.row.scale_bytes as isize, 4],
            weights,
        })
    }

    /// # Safety
    /// As [`row_source`](Self::row_source).
    unsafe fn cast_rows(
        &mut self,
        call: &abi::TyDispatch,
        x_pitch: usize,
        scale_bytes: usize,
    ) -> Result<()> {
        let scaling = match call.cast {
            abi::TY_CAST_FP8 => Scaling::F32,
            abi::TY_CAST_FP8_ROUND => Scaling::RoundedF32,
            _ => Scaling::Ue8m0,
        };
        let float = float_type(call.x.dtype).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "cast rows", format!("type {}", call.x.dtype))
        })?;
        let (tokens, hidden) = (call.x.shape[0] as usize, self.shape.hidden as usize);
        let from = Shared(call.x.data.cast_const());
        let rows = Shared(self.scratch.cast_rows.as_mut_ptr());
        let scales = Shared(self.scratch.cast_scales.as_mut_ptr());
        let task = |chunk: usize| {
            let (from, rows, scales) = (from.get(), rows.get(), scales.get());
            for token in chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens) {
                // SAFETY: row `token` is inside the tensor (T rows, validated by the host) and
                // inside the scratch (M >= T rows); every token belongs to one task.
                unsafe {
                    cast_row(
                        float,
                        std::slice::from_raw_parts(from.add(token * x_pitch), x_pitch),
                        scaling,
                        std::slice::from_raw_parts_mut(rows.add(token * hidden), hidden),
                        std::slice::from_raw_parts_mut(
                            scales.add(token * scale_bytes),
                            scale_bytes,
                        ),
                    );
                }
            }
        };
        self.pool.run(tokens.div_ceil(CHUNK), &task).map_err(|_| pool_failed("cast rows"))
    }

    /// Decides the expert-major row of every copy: the owner's grant says where this rank's rows of
    /// each expert start, and they follow in token order. The grants were checked.
    pub(super) fn place_copies(&mut self, handle: usize) {
        let state = &self.handles[handle];
        let scratch = &mut self.scratch;
        scratch.next.copy_from_slice(&state.expert_bases);
        for (slot, expert) in scratch.slot_of.iter_mut().zip(&state.topk) {
            *slot = u32::MAX;
            if let Ok(expert) = usize::try_from(*expert) {
                *slot = scratch.next[expert];
                scratch.next[expert] += 1;
            }
        }
    }

    /// Where this rank's rows go in every owner's granted region.
    pub(super) fn spots_in_regions(&mut self, m: &Move) -> Result<()> {
        let state = &self.handles[m.handle];
        let layout = state.arrangement.layout;
        let spec = RegionSpec { shape: self.shape, layout, row: m.format.row };
        let local = self.shape.local_experts() as usize;
        for (peer, place) in state.places.iter().enumerate() {
            let base = self.gathered.regions[peer];
            let rows = RegionRows { tokens: place.tokens, experts: place.rows };
            let region = RegionLayout::new(&spec, rows)
                .map_err(|error| bad_record(peer as u32, error.detail()))?;
            let inside = base.is_multiple_of(REGION_ALIGN)
                && base.checked_add(region.bytes).is_some_and(|end| end <= self.arena_area.bytes());
            let experts = peer * local..(peer + 1) * local;
            let bases = &state.expert_bases[experts.clone()];
            let fits = bases.iter().zip(&state.send.expert_counts()[experts]).all(|(base, n)| {
                u64::from(*base) + u64::from(*n) <= place.rows || layout == Layout::Flat
            });
            if !inside || !fits {
                return Err(bad_record(
                    peer as u32,
                    format!("places outside its region: offset {base}, {place:?}"),
                ));
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
            self.scratch.spots[peer] = Spot {
                window: ARENA,
                x: base + region.x.offset + x_first,
                scales: base + scales.offset + first * u64::from(width.scale_bytes),
                ids: base + ids.offset + first * k4,
                weights: base + weights.offset + first * k4,
                source: base + region.source.offset + first * 4,
            };
        }
        Ok(())
    }

    /// Where this rank's rows land at every peer in the packed layout.
    pub(super) fn spots_in_landing(&mut self, m: &Move) -> Result<()> {
        let region = self.landing_layout(&m.format)?;
        let base = self.sizes.landing(m.slot, self.rank);
        let spot = Spot {
            window: CONTROL,
            x: base + region.x.offset,
            scales: base + region.scales.offset,
            ids: base + region.ids.offset,
            weights: base + region.weights.offset,
            source: base + region.source.offset,
        };
        self.scratch.spots.fill(spot);
        Ok(())
    }

    /// The layout of one source's landing places: flat, room for M rows.
    pub(super) fn landing_layout(&self, format: &WireFormat) -> Result<RegionLayout> {
        let spec = RegionSpec { shape: self.shape, layout: Layout::Flat, row: format.row };
        let rows = RegionRows { tokens: self.shape.max_tokens.into(), experts: 0 };
        let region = RegionLayout::new(&spec, rows)?;
        debug_assert!(region.bytes <= self.sizes.landing_pitch);
        Ok(region)
    }

    /// Moves every row to its spot, and says so to the peers.
    ///
    /// # Safety
    /// `source` is valid until this operation is received.
    pub(super) unsafe fn move_rows(&mut self, m: &Move, source: &RowSource) -> Result<()> {
        let stage = self.stage_offsets(m);
        self.aim(m, &stage);
        // SAFETY: by this function's contract.
        unsafe { self.write_rows(m, source)? };
        for peer in self.rotation() {
            let rows = u64::from(self.handles[m.handle].send.rank_counts()[peer as usize]);
            if rows == 0 {
                continue;
            }
            if self.stores() {
                // The stores above happen before this signal: on a transport with load and store,
                // a signal carries everything this process stored before it (release).
                let add = rows * m.arrays;
                let raise = Raise { operation: m.operation, add };
                self.raise(Signal::Rows, m.slot, peer, raise)?;
            } else {
                self.put_all(m, &stage, peer)?;
            }
        }
        Ok(())
    }

    /// Offsets of the arrays of all rows that leave, in the stage of the slot.
    fn stage_offsets(&self, m: &Move) -> Spot {
        let rows = self.handles[m.handle].send.tokens().len() as u64;
        let k4 = 4 * u64::from(self.shape.topk);
        let mut end = self.sizes.stage(m.slot);
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
    fn aim(&mut self, m: &Move, stage: &Spot) {
        let k4 = 4 * u64::from(self.shape.topk);
        for peer in 0..self.shape.ranks as usize {
            let spot = self.scratch.spots[peer];
            self.scratch.targets[peer] = if self.stores() {
                let area = self.peers[peer][spot.window as usize];
                Target {
                    x: area.at(spot.x),
                    scales: area.at(spot.scales),
                    ids: area.at(spot.ids),
                    weights: area.at(spot.weights),
                    source: area.at(spot.source),
                }
            } else {
                let first = u64::from(self.handles[m.handle].send.rank_offsets()[peer]);
                let row = m.format.row;
                Target {
                    x: self.control.at(stage.x + first * u64::from(row.x_bytes)),
                    scales: self.control.at(stage.scales + first * u64::from(row.scale_bytes)),
                    ids: self.control.at(stage.ids + first * k4),
                    weights: self.control.at(stage.weights + first * k4),
                    source: self.control.at(stage.source + first * 4),
                }
            };
        }
    }

    /// # Safety
    /// As [`move_rows`](Self::move_rows).
    unsafe fn write_rows(&mut self, m: &Move, source: &RowSource) -> Result<()> {
        let state = &self.handles[m.handle];
        let rows = state.send.tokens().len();
        let writer = Shared(RowWriter {
            shape: self.shape,
            rank: self.rank,
            source: *source,
            format: m.format,
            topk: &state.topk,
            slot_of: matches!(state.arrangement.layout, Layout::ExpertMajor { .. })
                .then_some(self.scratch.slot_of.as_slice()),
            // In the stage, rows lie one after the other whatever their final place.
            x_by_slot: self.stores(),
        });
        let targets = Shared(self.scratch.targets.as_slice());
        let send = &state.send;
        let tasks = rows.div_ceil(CHUNK);
        // Each rank starts with its own rows, so that not all write to rank 0 at once.
        let first = send.rank_offsets()[self.rank as usize] as usize / CHUNK;
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
    fn put_all(&self, m: &Move, stage: &Spot, peer: u32) -> Result<()> {
        let state = &self.handles[m.handle];
        let spot = &self.scratch.spots[peer as usize];
        let first = u64::from(state.send.rank_offsets()[peer as usize]);
        let rows = u64::from(state.send.rank_counts()[peer as usize]);
        let row = m.format.row;
        let k4 = 4 * u64::from(self.shape.topk);
        let block = |width: u64, from: u64, to: u64, rows: u64| Block {
            peer,
            rows,
            width,
            src: (CONTROL, from),
            dst: (spot.window, to),
        };
        let x_bytes = u64::from(row.x_bytes);
        if matches!(state.arrangement.layout, Layout::ExpertMajor { .. }) {
            for (index, token) in (first..).zip(state.send.tokens_for(peer)) {
                let slot = u64::from(self.first_copy(m.handle, peer, *token as usize));
                let from = stage.x + index * x_bytes;
                let block = block(x_bytes, from, spot.x + slot * x_bytes, 1);
                self.put_rows(m.slot, &block, m.operation)?;
            }
        } else {
            let block = block(x_bytes, stage.x + first * x_bytes, spot.x, rows);
            self.put_rows(m.slot, &block, m.operation)?;
        }
        let sides = [
            (u64::from(row.scale_bytes), stage.scales, spot.scales),
            (k4, stage.ids, spot.ids),
            (if row.weights { k4 } else { 0 }, stage.weights, spot.weights),
            (4, stage.source, spot.source),
        ];
        for (width, from, to) in sides.into_iter().filter(|(width, ..)| *width > 0) {
            let block = block(width, from + first * width, to, rows);
            self.put_rows(m.slot, &block, m.operation)?;
        }
        Ok(())
    }

    /// Expert-major row of a token's first selected expert on `peer`: there the row crosses to.
    fn first_copy(&self, handle: usize, peer: u32, token: usize) -> u32 {
        let topk = self.shape.topk as usize;
        let row = token * topk..(token + 1) * topk;
        first_local(&self.shape, &self.handles[handle].topk[row.clone()], peer)
            .map_or(0, |k| self.scratch.slot_of[row][k])
    }
}
