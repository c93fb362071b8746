//! Owners' half of combine: one partial row per token, from the rows of its copies.

use tokenyard_core::abi;
use tokenyard_core::moe::{Layout, MAX_TOPK};
use tokenyard_core::{Error, ErrorKind, Result};

use super::combine::{CombineOp, Staged};
use super::engine::Engine;
use super::rows::Shared;
use super::sums::{CHUNK, pool_failed};
use crate::convert::FloatType;
use crate::sum::{sum_rows, sum_rows_weighted};

/// Sums the experts of one rank into partial rows.
pub(super) struct Merger {
    pub(super) x: *const u8,
    pub(super) rows: usize,
    pub(super) weights: *const f32,
    /// Weights that the dispatch brought, for a weighted combine.
    pub(super) dispatch_weights: Option<*const f32>,
    pub(super) slots: *const i32,
    pub(super) topk: usize,
    pub(super) float: FloatType,
    pub(super) row_bytes: usize,
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

    /// # Safety
    /// `token` is below N; `out` has room for one row that nobody else uses.
    pub(super) unsafe fn merge(&self, token: usize, out: *mut u8) {
        let mut terms: [&[u8]; MAX_TOPK as usize] = [&[]; MAX_TOPK as usize];
        let mut weights = [0.0_f32; MAX_TOPK as usize];
        let mut count = 0;
        // SAFETY: rows were checked against the tensor; weights have as many rows.
        let out = unsafe {
            for (_, slot) in self.copies(token) {
                terms[count] =
                    std::slice::from_raw_parts(self.x.add(slot * self.row_bytes), self.row_bytes);
                if let Some(all) = self.dispatch_weights {
                    weights[count] = all.add(slot).read();
                }
                count += 1;
            }
            std::slice::from_raw_parts_mut(out, self.row_bytes)
        };
        if self.dispatch_weights.is_some() {
            sum_rows_weighted(self.float, out, &terms[..count], &weights[..count]);
        } else {
            sum_rows(self.float, out, &terms[..count]);
        }
    }

    /// # Safety
    /// `token` is below N; `out` has room for K weights that nobody else uses.
    pub(super) unsafe fn gather_weights(&self, token: usize, out: *mut f32) {
        // SAFETY: as in `merge`.
        unsafe {
            out.write_bytes(0, self.topk);
            for (k, slot) in self.copies(token) {
                out.add(k).write(self.weights.add(slot).read());
            }
        }
    }
}

impl Engine {
    /// Makes the `[N, H]` partial rows and the `[N, K]` weights, where they are not there already.
    ///
    /// # Safety
    /// As [`combine_send`](Self::combine_send).
    pub(super) unsafe fn make_partials(
        &self,
        call: &abi::TyCombine,
        op: &CombineOp,
        staged: &Staged,
    ) -> Result<()> {
        let state = &self.handles[op.handle];
        let tokens = state.tokens as usize;
        let flat = state.arrangement.layout == Layout::Flat;
        let topk = self.shape.topk as usize;
        let merger = state.region.map(|layout| Merger {
            x: call.x.data.cast_const(),
            rows: call.x.shape[0] as usize,
            weights: call.weights.data.cast_const().cast(),
            dispatch_weights: (call.flags & abi::TY_COMBINE_WEIGHTED != 0).then(|| {
                self.arena_area.at(state.region_offset + layout.weights.offset).cast_const().cast()
            }),
            slots: self
                .arena_area
                .at(state.region_offset + layout.slots.offset)
                .cast_const()
                .cast(),
            topk,
            float: op.float,
            row_bytes: op.row_bytes,
        });
        let Some(merger) = merger else {
            return Err(Error::new(ErrorKind::Internal, "combine", "the handle has no dispatch"));
        };
        let merger = Shared(merger);
        let x_out = Shared(self.arena_area.at(staged.partials.x));
        let weights_out = Shared(self.arena_area.at(staged.partials.weights).cast::<f32>());
        let (copies_x, copies_weights) = (staged.copies_x, staged.copies_weights);
        let task = |chunk: usize| {
            let (merger, x_out, weights_out) = (merger.get(), x_out.get(), weights_out.get());
            for token in chunk * CHUNK..((chunk + 1) * CHUNK).min(tokens) {
                // SAFETY: N rows were staged; every token belongs to one task; inputs are valid by
                // the contract of `combine_send`.
                unsafe {
                    if copies_x {
                        let out = x_out.add(token * merger.row_bytes);
                        if flat {
                            let from = merger.x.add(token * merger.row_bytes);
                            std::ptr::copy_nonoverlapping(from, out, merger.row_bytes);
                        } else {
                            merger.merge(token, out);
                        }
                    }
                    if copies_weights {
                        let out = weights_out.add(token * merger.topk);
                        if flat {
                            let from = merger.weights.add(token * merger.topk);
                            std::ptr::copy_nonoverlapping(from, out, merger.topk);
                        } else {
                            merger.gather_weights(token, out);
                        }
                    }
                }
            }
        };
        if !copies_x && !copies_weights {
            return Ok(());
        }
        self.pool.run(tokens.div_ceil(CHUNK), &task).map_err(|_| pool_failed())
    }
}
