//! Owners' half of combine: one partial row per token, from the rows of its copies.

use std::ops::Range;

use tokenyard_core::call::CombineCall;
use tokenyard_core::moe::{Layout, MAX_TOPK, Region};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::coded::sum_rows_coded;
use crate::engine::launch::Shared;
use crate::engine::places::Places;
use crate::moe::combine::sums::{CHUNK, pool_failed};
use crate::moe::launcher::Launcher;
use crate::moe::operation::{CombineOp, Offsets, RowType};
use crate::moe::routing::RoutingTable;
use crate::sum::{sum_rows, sum_rows_exactly, sum_rows_weighted};

/// The memory that must be laid out before a combine can enter.
pub(crate) struct Staged {
    pub(crate) region: Option<Region>,
    pub(crate) merger: Merger,
    /// `[N, H]` partial rows and `[N, K]` weights, in flat order.
    pub(crate) partials: Offsets,
    pub(crate) copies_x: bool,
    pub(crate) copies_weights: bool,
    /// Where partials from other owners arrive, if they are put.
    pub(crate) landing: Offsets,
}

/// Sums the experts of one rank into partial rows.
pub(crate) struct Merger {
    pub(crate) x: *const u8,
    pub(crate) rows: usize,
    pub(crate) weights: *const f32,
    /// `[N, K]` weights of copies, for a weighted combine.
    pub(crate) copy_weights: Option<CopyWeights>,
    /// `[N, K]`; `[N]` of rank-major rows.
    pub(crate) slots: *const i32,
    pub(crate) layout: Layout,
    pub(crate) topk: usize,
    pub(crate) row: RowType,
    pub(crate) partial: RowType,
}

/// Where the weight of a copy is.
#[derive(Clone, Copy)]
pub(crate) enum CopyWeights {
    /// `[N, K]`, that of the dispatch.
    Dispatched(*const f32),
    /// Beside each copy, `[rows, width]`: K weights, and a word whose bits say which of them count.
    Beside { rows: *const f32, width: usize },
}

impl Merger {
    /// The rows of a token's copies, in k order.
    ///
    /// # Safety
    /// `token` is below N.
    unsafe fn copies(&self, token: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..self.topk).filter_map(move |k| {
            // SAFETY: `[N, K]`, by this function's contract.
            let slot = unsafe { self.slots.add(token * self.topk + k).read() };
            usize::try_from(slot).ok().filter(|slot| *slot < self.rows).map(|slot| (k, slot))
        })
    }

    /// The row of a token that has one row already.
    ///
    /// # Safety
    /// `token` is below N.
    unsafe fn row_of(&self, token: usize) -> usize {
        match self.layout {
            // SAFETY: `[N]`, by this function's contract. The dispatch wrote rows of its output there.
            Layout::RankMajor { .. } => unsafe { self.slots.add(token).read() as usize },
            _ => token,
        }
    }

    /// # Safety
    /// `token` is below N; `out` has room for one row that no other thread uses.
    unsafe fn make_row(&self, token: usize, out: *mut u8) {
        // SAFETY: by this function's contract.
        unsafe {
            if self.layout.has_a_row_per_token() {
                let from = self.x.add(self.row_of(token) * self.row.bytes);
                std::ptr::copy_nonoverlapping(from, out, self.row.bytes);
            } else {
                self.merge(token, out);
            }
        }
    }

    /// # Safety
    /// `token` is below N; `out` has room for K weights that no other thread uses.
    unsafe fn make_weights(&self, token: usize, out: *mut f32) {
        // SAFETY: by this function's contract.
        unsafe {
            if self.layout.has_a_row_per_token() {
                let from = self.weights.add(self.row_of(token) * self.topk);
                std::ptr::copy_nonoverlapping(from, out, self.topk);
            } else {
                self.gather_weights(token, out);
            }
        }
    }

    /// The weight of a token's copy, if it counts; 1 where a combine is not weighted.
    ///
    /// # Safety
    /// `token` is below N, and its copy `k` is row `slot`.
    unsafe fn weight(&self, token: usize, k: usize, slot: usize) -> Option<f32> {
        match self.copy_weights {
            None => Some(1.0),
            Some(CopyWeights::Dispatched(all)) => {
                // SAFETY: `[N, K]`, by this function's contract.
                Some(unsafe { all.add(token * self.topk + k).read() })
            }
            Some(CopyWeights::Beside { rows, width }) => {
                let row = rows.wrapping_add(slot * width);
                // SAFETY: as many rows as copies, each of more than K numbers.
                let (weight, bits) =
                    unsafe { (row.add(k).read(), row.add(self.topk).read().to_bits()) };
                (bits >> k & 1 == 1).then_some(weight)
            }
        }
    }

    /// # Safety
    /// `token` is below N; `out` has room for one row that no other thread uses.
    unsafe fn merge(&self, token: usize, out: *mut u8) {
        let mut terms: [&[u8]; MAX_TOPK as usize] = [&[]; MAX_TOPK as usize];
        let mut weights = [0.0_f32; MAX_TOPK as usize];
        let mut count = 0;
        // SAFETY: rows were checked against the tensor; weights have as many rows.
        let out = unsafe {
            for (k, slot) in self.copies(token) {
                let Some(weight) = self.weight(token, k, slot) else { continue };
                terms[count] =
                    std::slice::from_raw_parts(self.x.add(slot * self.row.bytes), self.row.bytes);
                weights[count] = weight;
                count += 1;
            }
            std::slice::from_raw_parts_mut(out, self.partial.bytes)
        };
        let (terms, weights) = (&terms[..count], &weights[..count]);
        let weights = self.copy_weights.map(|_| weights);
        match weights {
            _ if self.partial.is_coded => sum_rows_coded(self.row.bytes, out, terms, weights),
            _ if self.row.float != self.partial.float => {
                sum_rows_exactly(self.row.float, out, terms, weights);
            }
            Some(weights) => sum_rows_weighted(self.row.float, out, terms, weights),
            None => sum_rows(self.row.float, out, terms),
        }
    }

    /// # Safety
    /// `token` is below N; `out` has room for K weights that no other thread uses.
    unsafe fn gather_weights(&self, token: usize, out: *mut f32) {
        // SAFETY: as in `merge`.
        unsafe {
            out.write_bytes(0, self.topk);
            for (k, slot) in self.copies(token) {
                out.add(k).write(self.weights.add(slot).read());
            }
        }
    }
}

/// The sources of a combine's partial rows.
pub(crate) fn merger(
    routing: &RoutingTable,
    call: &CombineCall<'_>,
    op: &CombineOp,
) -> Result<Merger> {
    let state = &routing.handles[op.handle];
    if !state.is_made {
        return Err(Error::new(ErrorKind::Internal, "combine", "the handle has no dispatch"));
    }
    let copy_weights = if call.beside.data.is_null() {
        CopyWeights::Dispatched(state.weights.as_ptr())
    } else {
        let (rows, width) = (call.beside.data.cast_const().cast(), call.beside.shape[1] as usize);
        CopyWeights::Beside { rows, width }
    };
    Ok(Merger {
        x: call.x.data.cast_const(),
        rows: call.x.shape[0] as usize,
        weights: call.weights.data.cast_const().cast(),
        copy_weights: call.weighted.then_some(copy_weights),
        slots: state.slots.as_ptr(),
        layout: state.arrangement.layout,
        topk: routing.exchange.regions.topk as usize,
        row: op.row,
        partial: op.partial,
    })
}

/// Makes some of the `[N, H]` partial rows and of the `[N, K]` weights, unless they are there
/// already.
///
/// # Safety
/// As `combine_send`.
pub(crate) unsafe fn make_partials(
    places: &Places,
    launcher: &Launcher,
    staged: &Staged,
    tokens: Range<usize>,
) -> Result<()> {
    let (copies_x, copies_weights) = (staged.copies_x, staged.copies_weights);
    if !copies_x && !copies_weights {
        return Ok(());
    }
    let merger = Shared(&staged.merger);
    let x_out = Shared(places.arena_area.at(staged.partials.x));
    let weights_out = Shared(places.arena_area.at(staged.partials.weights).cast::<f32>());
    let task = |chunk: usize| {
        let (merger, x_out, weights_out) = (merger.get(), x_out.get(), weights_out.get());
        let first = tokens.start + chunk * CHUNK;
        for token in first..(first + CHUNK).min(tokens.end) {
            // SAFETY: N rows were staged; every token belongs to one task; inputs are valid by
            // the contract of `combine_send`.
            unsafe {
                if copies_x {
                    merger.make_row(token, x_out.add(token * merger.partial.bytes));
                }
                if copies_weights {
                    merger.make_weights(token, weights_out.add(token * merger.topk));
                }
            }
        }
    };
    launcher.pool.run(tokens.len().div_ceil(CHUNK), &task).map_err(|_| pool_failed())
}
