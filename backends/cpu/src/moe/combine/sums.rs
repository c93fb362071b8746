//! The sums of combine: a row is its biases, then one partial row per peer that the token went to,
//! in combine order; rounded once.

use tokenyard_core::moe::{Fan, MAX_TOPK, SendPlan, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::coded::sum_coded_rows;
use crate::engine::launch::Shared;
use crate::moe::operation::{CombineOp, RowType};
use crate::moe::rows::moves::Carried;
use crate::pool::Pool;
use crate::sum::{sum_exact_rows, sum_rows};

/// Tokens that one task of the pool handles.
pub(crate) const CHUNK: usize = 16;

/// Terms of one row: two biases and a partial per selected peer.
const MOST_TERMS: usize = MAX_TOPK as usize + 2;

/// The first partial row of one peer, and its weights, `[rows, K]`. Null if the peer was given up and
/// its rows are left out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partial {
    pub(crate) x: *const u8,
    pub(crate) weights: *const f32,
}

impl Default for Partial {
    fn default() -> Self {
        Self { x: std::ptr::null(), weights: std::ptr::null() }
    }
}

/// Rows that are summed from partial rows.
pub(crate) struct Sum<'a> {
    /// The peers that a token went to, and its row at each of them.
    pub(crate) send: &'a SendPlan,
    /// By peer: rows that it got, the first ones. The others are in no sum.
    pub(crate) taken: &'a [u32],
    /// `[tokens, K]`, and which peer has which expert.
    pub(crate) topk: &'a [i32],
    pub(crate) shape: Shape,
    /// The partial rows of each peer.
    pub(crate) partials: &'a [Partial],
    /// `[tokens, H]`; null where there is none.
    pub(crate) biases: [*const u8; 2],
    /// `[rows, H]`, and `[rows, K]`; null where no weights travel.
    pub(crate) out: *mut u8,
    pub(crate) out_weights: *mut f32,
    /// `[rows]`: how many experts of each token are left out; null where it is not asked for.
    pub(crate) missing: *mut u8,
    /// `[R]`: ranks that are left out of the rows of their domain, if the rows themselves count. Empty
    /// where partial rows belong to single ranks.
    pub(crate) left_out: &'a [u8],
    /// Biases and sums.
    pub(crate) row: RowType,
    /// Partial rows.
    pub(crate) partial: RowType,
    /// Returned weights are sums over peers.
    pub(crate) sums_weights: bool,
}

impl<'a> Sum<'a> {
    /// The rows of a combine's own tokens.
    pub(crate) fn of_own_tokens(
        op: &CombineOp,
        Carried { send, taken, topk }: Carried<'a>,
        shape: Shape,
        partials: &'a [Partial],
    ) -> Self {
        Self {
            send,
            taken,
            topk,
            shape,
            partials,
            biases: op.biases(),
            out: op.out.data,
            out_weights: op.out_weights.data.cast(),
            missing: op.missing.data,
            left_out: &[],
            row: op.row,
            partial: op.partial,
            sums_weights: op.sums_weights,
        }
    }

    /// Writes all rows.
    ///
    /// # Safety
    /// All addresses are valid for the rows that the plan names, and the partials are complete.
    pub(crate) unsafe fn run(&self, pool: &Pool) -> Result<()> {
        let rows = self.send.num_tokens() as usize;
        let sum = Shared(self);
        let task = |chunk: usize| {
            let sum = sum.get();
            for row in chunk * CHUNK..((chunk + 1) * CHUNK).min(rows) {
                // SAFETY: by this function's contract; every row belongs to one task.
                unsafe { sum.row(row) };
            }
        };
        pool.run(rows.div_ceil(CHUNK), &task).map_err(|_| pool_failed())
    }

    /// # Safety
    /// As [`run`](Self::run); no other thread writes the row.
    unsafe fn row(&self, row: usize) {
        let token = row;
        let mut terms: [&[u8]; MOST_TERMS] = [&[]; MOST_TERMS];
        let biases = self.biases.iter().filter(|bias| !bias.is_null());
        let biases = biases.map(|bias| bias.wrapping_add(token * self.row.bytes));
        let partials = self.fan(token).map(|fan| {
            let first = self.partials[fan.rank as usize].x;
            first.wrapping_add(fan.index as usize * self.partial.bytes)
        });
        let mut count = 0;
        let mut add = |address: *const u8, bytes: usize| {
            // SAFETY: by this function's contract.
            terms[count] = unsafe { std::slice::from_raw_parts(address, bytes) };
            count += 1;
        };
        biases.for_each(|bias| add(bias, self.row.bytes));
        partials.for_each(|partial| add(partial, self.partial.bytes));
        let out = self.out.wrapping_add(row * self.row.bytes);
        // SAFETY: by this function's contract.
        let out = unsafe { std::slice::from_raw_parts_mut(out, self.row.bytes) };
        let biases = self.biases.iter().filter(|bias| !bias.is_null()).count();
        let (biases, partials) = terms[..count].split_at(biases);
        if self.row == self.partial {
            sum_rows(self.row.float, out, &terms[..count]);
        } else if self.partial.is_coded {
            sum_coded_rows(out, biases, partials);
        } else {
            sum_exact_rows(self.row.float, out, biases, partials);
        }
        if !self.out_weights.is_null() {
            // SAFETY: as above.
            unsafe { self.return_weights(row, token) };
        }
        if !self.missing.is_null() {
            // SAFETY: as above.
            unsafe { self.missing.add(row).write(self.left_out(token)) };
        }
    }

    /// The peers that have a partial row of a token.
    fn fan(&self, token: usize) -> impl Iterator<Item = &Fan> {
        let is_there = |fan: &&Fan| {
            let peer = fan.rank as usize;
            fan.index < self.taken[peer] && !self.partials[peer].x.is_null()
        };
        self.send.fan(token as u32).iter().filter(is_there)
    }

    /// How many of a token's experts are left out of its sum. K is at most 32.
    fn left_out(&self, token: usize) -> u8 {
        let topk = self.shape.topk as usize;
        let experts = self.topk[token * topk..][..topk].iter();
        let experts = experts.filter_map(|expert| u32::try_from(*expert).ok());
        let is_left_out = |expert: &u32| {
            let peer = self.shape.rank_of(*expert) as usize;
            // Ranks have equally many experts, and so have the peers, which may be domains.
            let rank = *expert as usize * self.left_out.len() / self.shape.experts as usize;
            self.partials[peer].x.is_null() || self.left_out.get(rank).is_some_and(|out| *out != 0)
        };
        experts.filter(is_left_out).count() as u8
    }

    /// Returns each copy's weight to its (token, k).
    ///
    /// # Safety
    /// As [`row`](Self::row).
    unsafe fn return_weights(&self, row: usize, token: usize) {
        let topk = self.shape.topk as usize;
        for (k, expert) in self.topk[token * topk..][..topk].iter().enumerate() {
            let peer = u32::try_from(*expert).ok().map(|e| self.shape.rank_of(e));
            let fans = self.fan(token);
            let fans = fans.filter(|fan| self.sums_weights || Some(fan.rank) == peer);
            let returned = fans.map(|fan| {
                let weights = self.partials[fan.rank as usize].weights;
                // SAFETY: `[rows, K]` of that peer, by this function's contract.
                unsafe { weights.add(fan.index as usize * topk + k).read() }
            });
            let weight = returned.reduce(|sum, weight| sum + weight).unwrap_or(0.0);
            // SAFETY: `[rows, K]`, by this function's contract.
            unsafe { self.out_weights.add(row * topk + k).write(weight) };
        }
    }
}

#[cold]
pub(crate) fn pool_failed() -> Error {
    Error::new(ErrorKind::Internal, "combine", "a task of the worker pool panicked")
}
