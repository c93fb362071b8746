//! How many multiprocessors move flat rows as fast as a link carries them: the number that `sms = "auto"` takes
//! for rows that are not cast, where kernels load and store by bulk copies in one domain.
//!
//! A multiprocessor takes a time for each row that it stores or loads, and the link takes a time for all bytes
//! that cross it. An operation takes the longer of both, and what is fixed. The constants are fitted to
//! operations that were measured with 4 to 32 multiprocessors on 2, 4 and 8 H200 (NVLink 4). The tests hold the
//! formula against those figures. It is not measured on other links.

/// An operation on flat rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlatOp {
    /// Rows are stored at the ranks of their experts.
    Dispatch,
    /// Rows are loaded from those ranks, and summed.
    Combine,
}

/// The work of one rank in an operation, if the routing is uniform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatWork {
    /// The operation.
    pub op: FlatOp,
    /// R.
    pub ranks: u32,
    /// K.
    pub topk: u32,
    /// T of this rank, or the most that it may be.
    pub tokens: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Bytes of its scales and of its row metadata.
    pub beside_bytes: u64,
}

/// The numbers that the formula chooses among.
const CHOICES: [u32; 6] = [4, 8, 12, 16, 24, 32];
/// The fewest for sums: with 4, the prediction for 8 ranks is a third below what was measured.
const LEAST_SUMMING: u32 = 8;
/// The number where the latency of single rows bounds an operation, not a rate, and where rows do not move by bulk
/// copies: 128 tokens took 49 µs with 8 multiprocessors and 31 to 43 with 16.
pub(crate) const USUAL: u32 = 16;
/// The most that the formula chooses.
pub(crate) const MOST: u32 = CHOICES[CHOICES.len() - 1];
/// With fewer tokens, [`USUAL`] is taken, but by the combines of [`SUMMED_FASTER`].
const LEAST_TOKENS: u32 = 512;
/// Tokens of a combine between two ranks that takes [`MOST`]: 128 tokens took 1 µs of 28 less than with 16.
const SUMMED_FASTER: std::ops::Range<u32> = 64..256;
/// A number is enough if no other is predicted to take less than this part of its time.
const ENOUGH: f64 = 0.99;

/// Bytes per µs that cross the link of each GPU: 354 to 365 GB/s were measured between 2 and 4 GPUs, 340 between 8.
/// Pulls reach less.
const PUSHED: f64 = 350e3;
const PULLED: f64 = 330e3;
/// The time of one multiprocessor for a row that it stores: µs, and bytes per µs.
const STORE: f64 = 0.06;
const STORED: f64 = 65e3;
/// So much less, in µs, it takes for a row that stays on its GPU.
const OWN: f64 = 0.05;
/// Bytes per µs of rows that one multiprocessor loads for a dispatch.
const LOADED: f64 = 205e3;
/// The time of one multiprocessor for a row of [`SUMMED_ROW`] bytes that it adds to a sum, and for each sum, in µs.
const ADD: f64 = 0.15;
const SUMMED_ROW: f64 = 14_336.0;
const SUM: f64 = 0.25;
/// Launch, counts and drain, in µs; of them a combine has no counts.
const FIXED: [f64; 2] = [22.0, 18.0];

impl FlatWork {
    /// The fewest multiprocessors with which the operation is predicted to take no longer than with others, but
    /// for 1 %. Nothing is predicted of few tokens: they take what was measured.
    pub fn sms(&self) -> u32 {
        if self.tokens < LEAST_TOKENS || self.ranks < 2 {
            let is_summed = self.op == FlatOp::Combine && self.ranks == 2;
            let is_faster = is_summed && SUMMED_FASTER.contains(&self.tokens);
            return if is_faster { MOST } else { USUAL };
        }
        let least = self.us(MOST);
        let fewest = if self.op == FlatOp::Combine { LEAST_SUMMING } else { 0 };
        let enough = |sms: &u32| *sms >= fewest && self.us(*sms) * ENOUGH <= least;
        CHOICES.into_iter().find(enough).unwrap_or(MOST)
    }

    /// The predicted time with this many multiprocessors, in µs. It never grows with their number.
    pub fn us(&self, sms: u32) -> f64 {
        let busy = self.processor_us() / f64::from(sms.max(1));
        let fixed = FIXED[usize::from(self.op == FlatOp::Combine)];
        fixed + busy.max(self.link_us())
    }

    /// Rows of this rank's tokens, one for each token and rank: those for one rank, and those for all.
    fn rows(&self) -> [f64; 2] {
        let ranks = f64::from(self.ranks.max(1));
        let goes = 1.0 - (1.0 - 1.0 / ranks).powf(f64::from(self.topk));
        [goes, ranks * goes].map(|rows| rows * f64::from(self.tokens))
    }

    /// The time of one multiprocessor for everything.
    fn processor_us(&self) -> f64 {
        let ([own, all], tokens, bytes) =
            (self.rows(), f64::from(self.tokens), self.row_bytes as f64);
        match self.op {
            FlatOp::Dispatch => {
                all * (STORE + bytes / STORED) - own * OWN + tokens * bytes / LOADED
            }
            FlatOp::Combine => all * ADD * bytes / SUMMED_ROW + tokens * SUM,
        }
    }

    fn link_us(&self) -> f64 {
        let [own, all] = self.rows();
        let bytes = (all - own) * (self.row_bytes + self.beside_bytes) as f64;
        bytes / if self.op == FlatOp::Dispatch { PUSHED } else { PULLED }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation that was measured: times in µs by number of multiprocessors, all of one version of the kernels.
    struct Measured {
        work: FlatWork,
        us: &'static [(u32, f64)],
    }

    fn work(op: FlatOp, ranks: u32, tokens: u32, row_bytes: u64) -> FlatWork {
        let beside_bytes = match (op, row_bytes) {
            (FlatOp::Combine, _) => 0,
            (_, 7168) => 224 + 68,
            _ => 68,
        };
        FlatWork { op, ranks, topk: 8, tokens, row_bytes, beside_bytes }
    }

    /// H200, hidden 7168, top-8, 4096 tokens unless it says otherwise. Those of 8 GPUs are read from plots, so
    /// they are right to 2 µs (FP8) and 3 µs.
    fn measured() -> Vec<Measured> {
        use FlatOp::{Combine, Dispatch};
        let of = |work, us| Measured { work, us };
        vec![
            of(
                work(Dispatch, 4, 4096, 7168),
                &[(4, 588.0), (8, 304.0), (12, 268.5), (16, 268.7), (24, 271.0), (32, 271.0)],
            ),
            of(
                work(Dispatch, 4, 4096, 14_336),
                &[(4, 1087.0), (8, 555.0), (12, 488.0), (16, 487.4), (24, 490.0), (32, 491.0)],
            ),
            of(
                work(Combine, 4, 4096, 14_336),
                &[(4, 824.0), (8, 505.0), (12, 507.0), (16, 506.5), (24, 506.0), (32, 509.0)],
            ),
            of(
                work(Dispatch, 8, 4096, 7168),
                &[(4, 942.0), (8, 507.0), (12, 461.0), (16, 449.8), (24, 450.0), (32, 450.0)],
            ),
            of(
                work(Dispatch, 8, 4096, 14_336),
                &[(4, 1596.0), (8, 838.0), (12, 834.0), (16, 831.2), (24, 834.0), (32, 834.0)],
            ),
            of(
                work(Combine, 8, 4096, 14_336),
                &[(8, 872.0), (12, 866.0), (16, 860.0), (24, 860.0), (32, 872.0)],
            ),
            // H100.
            of(work(Dispatch, 2, 4096, 7168), &[(16, 107.9), (24, 110.0)]),
            of(work(Dispatch, 2, 4096, 14_336), &[(16, 184.4), (24, 186.8)]),
            of(work(Combine, 2, 4096, 14_336), &[(16, 195.1), (24, 195.3)]),
        ]
    }

    #[test]
    fn the_choice_takes_at_most_3_percent_longer_than_the_best_that_was_measured() {
        for Measured { work, us } in measured() {
            let best = us.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
            let chosen = us.iter().find(|(sms, _)| *sms == work.sms());
            let (sms, found) = chosen.unwrap_or_else(|| panic!("{work:?}: {}", work.sms()));
            assert!(*found <= 1.03 * best, "{work:?}: {found} with {sms}, {best} at best");
        }
    }

    #[test]
    fn fewer_multiprocessors_are_chosen_where_ranks_are_many_and_rows_are_long() {
        let of = |op, ranks, bytes| work(op, ranks, 4096, bytes).sms();
        assert_eq!([2, 4, 8].map(|ranks| of(FlatOp::Dispatch, ranks, 7168)), [16, 12, 12]);
        assert_eq!([2, 4, 8].map(|ranks| of(FlatOp::Dispatch, ranks, 14_336)), [16, 12, 8]);
        assert_eq!([2, 4, 8].map(|ranks| of(FlatOp::Combine, ranks, 14_336)), [16, 8, 8]);
    }

    #[test]
    fn predicted_times_are_those_that_were_measured_but_for_a_tenth() {
        for Measured { work, us } in measured() {
            for (sms, found) in us {
                let ratio = work.us(*sms) / found;
                assert!((0.9..=1.1).contains(&ratio), "{work:?}, {sms}: {ratio:.3} of {found}");
            }
        }
        // Other shapes between two GPUs with 16 multiprocessors.
        let small = |topk, row_bytes, beside_bytes| FlatWork {
            topk,
            row_bytes,
            beside_bytes,
            ..work(FlatOp::Dispatch, 2, 4096, 7168)
        };
        for (work, found) in [
            (small(16, 3584, 112 + 132), 72.0),
            (small(16, 7168, 132), 112.0),
            (small(4, 2880, 92 + 36), 61.0),
            (small(4, 5760, 36), 83.0),
            (work(FlatOp::Dispatch, 4, 1024, 7168), 81.1),
            (work(FlatOp::Dispatch, 4, 8192, 7168), 498.0),
            (work(FlatOp::Dispatch, 4, 8192, 14_336), 936.0),
        ] {
            let ratio = work.us(16) / found;
            assert!((0.9..=1.1).contains(&ratio), "{work:?}: {ratio:.3} of {found}");
        }
    }

    #[test]
    fn few_tokens_and_a_rank_alone_have_the_usual_number_but_sums_of_some() {
        assert_eq!(work(FlatOp::Dispatch, 8, 511, 14_336).sms(), USUAL);
        assert_eq!(work(FlatOp::Dispatch, 2, 128, 14_336).sms(), USUAL);
        assert_eq!(work(FlatOp::Combine, 1, 4096, 14_336).sms(), USUAL);
        assert_eq!(work(FlatOp::Combine, 1, 128, 14_336).sms(), USUAL);
        let sums = |ranks, tokens| work(FlatOp::Combine, ranks, tokens, 14_336).sms();
        assert_eq!([63, 64, 255, 256, 511].map(|tokens| sums(2, tokens)), [16, 32, 32, 16, 16]);
        assert_eq!(sums(4, 128), USUAL);
        assert_eq!(work(FlatOp::Dispatch, 8, 512, 14_336).sms(), 8);
    }

    #[test]
    fn no_shape_has_a_number_outside_of_the_choices() {
        for ranks in [2, 3, 8, 72, 1024] {
            for topk in [1, 8, 32] {
                for bytes in [16, 256, 7168, 32_768, 1 << 20] {
                    for op in [FlatOp::Dispatch, FlatOp::Combine] {
                        let work = FlatWork { topk, ..work(op, ranks, 4096, bytes) };
                        assert!(CHOICES.contains(&work.sms()), "{work:?}");
                        let sums = op == FlatOp::Combine;
                        assert!(!sums || work.sms() >= LEAST_SUMMING, "{work:?}");
                    }
                }
            }
        }
    }
}
