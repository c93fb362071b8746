//! Owners' half of combine: one partial row per token, from the rows of its copies.

use tokenyard_core::moe::MAX_TOPK;

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
