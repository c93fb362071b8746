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
/// copies: 128 tokens took older kernels 49 µs with 8 multiprocessors and 31 to 43 with 16.
pub(crate) const USUAL: u32 = 16;
/// The most that the formula chooses.
pub(crate) const MOST: u32 = CHOICES[CHOICES.len() - 1];
/// The fewest tokens to which the formula applies. An operation on fewer takes [`USUAL`], but for two kinds of combine:
/// [`SUMMED_FASTER`] and [`FEW_SUMMED`].
const LEAST_TOKENS: u32 = 512;
/// Tokens of a combine between two ranks that takes [`MOST`]: 128 tokens took 1 µs of 28 less than with 16.
const SUMMED_FASTER: std::ops::Range<u32> = 64..256;
/// Tokens of a combine among more than two ranks that takes the formula's number, or [`USUAL`] if that is less.
/// Measured between four ranks, hidden 7168, top-8: with 64 and 128 tokens 8 were faster than 12 to 32. Calls that wait
/// took up to 27 % longer than predicted, captured ones as long.
const FEW_SUMMED: std::ops::Range<u32> = 64..LEAST_TOKENS;
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
/// Bytes per µs of rows that one multiprocessor loads.
const LOADED: f64 = 205e3;
/// The time of one multiprocessor for each row that it adds to a sum, beside its load, and for each sum, in µs.
const ADD: f64 = 0.02;
const SUM: f64 = 0.45;
/// Launch, counts and drain, in µs; of them a combine has no counts.
const FIXED: [f64; 2] = [22.0, 18.0];

impl FlatWork {
    /// The fewest multiprocessors with which the operation is predicted to take no longer than with others, but
    /// for 1 %. Of few tokens, it is what was measured to be fast.
    pub fn sms(&self) -> u32 {
        let is_sum_among = |tokens: &std::ops::Range<u32>| {
            self.op == FlatOp::Combine && tokens.contains(&self.tokens)
        };
        match self.ranks {
            0 | 1 => USUAL,
            _ if self.tokens >= LEAST_TOKENS => self.predicted(),
            2 if is_sum_among(&SUMMED_FASTER) => MOST,
            3.. if is_sum_among(&FEW_SUMMED) => self.predicted().min(USUAL),
            _ => USUAL,
        }
    }

    fn predicted(&self) -> u32 {
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
            FlatOp::Combine => all * (ADD + bytes / LOADED) + tokens * SUM,
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
        us: Vec<(u32, f64)>,
    }

    /// A shape: K, bytes of a row, and bytes beside it in a dispatch.
    #[derive(Clone, Copy)]
    struct Row {
        topk: u32,
        bytes: u64,
        beside: u64,
    }

    const fn row(topk: u32, bytes: u64, beside: u64) -> Row {
        Row { topk, bytes, beside }
    }

    /// Hidden 7168, top-8; 3584, top-16; 2880, top-4: FP8 and BF16.
    const LONG: [Row; 2] = [row(8, 7168, 224 + 68), row(8, 14_336, 68)];
    const MANY: [Row; 2] = [row(16, 3584, 112 + 132), row(16, 7168, 132)];
    const SHORT: [Row; 2] = [row(4, 2880, 92 + 36), row(4, 5760, 36)];

    fn work_of(op: FlatOp, ranks: u32, tokens: u32, row: Row) -> FlatWork {
        let beside_bytes = if op == FlatOp::Combine { 0 } else { row.beside };
        FlatWork { op, ranks, topk: row.topk, tokens, row_bytes: row.bytes, beside_bytes }
    }

    fn work(op: FlatOp, ranks: u32, tokens: u32, row_bytes: u64) -> FlatWork {
        work_of(op, ranks, tokens, if row_bytes == 7168 { LONG[0] } else { row(8, row_bytes, 68) })
    }

    /// Each number of [`CHOICES`], by waiting calls. 4 H200: 27 November 2026, 200 samples.
    fn on_four_gpus() -> Vec<Measured> {
        use FlatOp::{Combine, Dispatch};
        let of = |op, tokens, row, us: [f64; CHOICES.len()]| Measured {
            work: work_of(op, 4, tokens, row),
            us: CHOICES.into_iter().zip(us).collect(),
        };
        vec![
            of(Dispatch, 512, LONG[0], [89.5, 56.1, 51.5, 51.9, 52.5, 52.7]),
            of(Dispatch, 512, LONG[1], [151.8, 87.9, 79.0, 79.5, 80.2, 79.9]),
            of(Dispatch, 1024, LONG[0], [159.5, 90.8, 80.1, 80.8, 81.9, 80.9]),
            of(Dispatch, 1024, LONG[1], [285.1, 154.8, 136.1, 136.2, 137.6, 136.7]),
            of(Dispatch, 4096, LONG[0], [581.4, 304.4, 260.7, 257.4, 258.2, 257.1]),
            of(Dispatch, 4096, LONG[1], [1080.0, 556.4, 479.8, 477.1, 478.2, 477.4]),
            of(Dispatch, 8192, LONG[0], [1140.5, 588.9, 497.9, 490.7, 491.5, 489.0]),
            of(Dispatch, 8192, LONG[1], [2135.3, 1092.3, 934.8, 928.0, 929.4, 927.8]),
            of(Dispatch, 4096, MANY[0], [359.8, 195.9, 167.7, 161.3, 162.4, 159.5]),
            of(Dispatch, 4096, MANY[1], [626.9, 330.9, 285.8, 279.1, 280.5, 278.3]),
            of(Dispatch, 4096, SHORT[0], [231.6, 129.1, 99.7, 97.9, 98.4, 97.4]),
            of(Dispatch, 4096, SHORT[1], [351.0, 188.4, 161.8, 159.9, 160.8, 160.5]),
            of(Combine, 64, LONG[1], [31.2, 28.2, 29.2, 29.2, 29.5, 29.0]),
            of(Combine, 128, LONG[1], [46.2, 38.6, 39.8, 40.9, 41.8, 41.8]),
            of(Combine, 512, LONG[1], [113.9, 80.7, 81.2, 82.5, 82.6, 83.5]),
            of(Combine, 1024, LONG[1], [219.6, 146.2, 146.4, 147.4, 147.3, 147.3]),
            of(Combine, 4096, LONG[1], [800.5, 505.3, 503.6, 503.8, 501.1, 502.9]),
            of(Combine, 4096, MANY[1], [680.2, 350.5, 284.8, 285.3, 286.8, 287.3]),
            of(Combine, 4096, SHORT[1], [628.0, 323.6, 220.8, 174.3, 171.5, 173.6]),
        ]
    }

    /// H200, hidden 7168, top-8, 4096 tokens unless it says otherwise. Those of 8 GPUs are of older kernels, and
    /// read from plots, so they are right to 2 µs (FP8) and 3 µs.
    fn measured() -> Vec<Measured> {
        use FlatOp::{Combine, Dispatch};
        let of = |work, us: &[(u32, f64)]| Measured { work, us: us.to_vec() };
        let others = [
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
            of(
                work(Dispatch, 2, 4096, 7168),
                &[(4, 325.1), (8, 173.1), (12, 124.0), (16, 106.0), (24, 107.8), (32, 106.7)],
            ),
            of(
                work(Dispatch, 2, 4096, 14_336),
                &[(4, 600.2), (8, 311.0), (12, 215.9), (16, 182.7), (24, 184.8), (32, 183.2)],
            ),
            of(
                work(Combine, 2, 4096, 14_336),
                &[(4, 659.3), (8, 336.3), (12, 230.8), (16, 194.5), (24, 193.5), (32, 194.8)],
            ),
            of(
                work(Combine, 2, 1024, 14_336),
                &[(4, 182.3), (8, 101.5), (12, 75.2), (16, 66.7), (24, 67.2), (32, 67.3)],
            ),
            // H100.
            of(work(Dispatch, 2, 4096, 7168), &[(16, 107.9), (24, 110.0)]),
            of(work(Dispatch, 2, 4096, 14_336), &[(16, 184.4), (24, 186.8)]),
            of(work(Combine, 2, 4096, 14_336), &[(16, 195.1), (24, 195.3)]),
        ];
        on_four_gpus().into_iter().chain(others).collect()
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
        assert_eq!(work_of(FlatOp::Combine, 4, 4096, SHORT[1]).sms(), 24);
    }

    #[test]
    fn predicted_times_are_those_that_were_measured_but_for_a_tenth() {
        let near = |work: FlatWork, sms, found: f64| {
            let ratio = work.us(sms) / found;
            // The formula is of rates. Of few multiprocessors that store short rows it predicts up to 27 % too much.
            let is_usual = work.topk == 8 && work.tokens == 4096 || work.op == FlatOp::Combine;
            let most = match sms {
                0..12 if !is_usual => 1.28,
                12..USUAL if !is_usual => 1.14,
                _ => 1.1,
            };
            assert!((0.9..=most).contains(&ratio), "{work:?}, {sms}: {ratio:.3} of {found}");
        };
        for Measured { work, us } in measured() {
            for (sms, found) in us.into_iter().filter(|_| work.tokens >= LEAST_TOKENS) {
                near(work, sms, found);
            }
        }
        // Other shapes between two GPUs.
        for (row, found) in [(MANY[0], 72.0), (MANY[1], 112.0), (SHORT[0], 61.0), (SHORT[1], 83.0)]
        {
            near(work_of(FlatOp::Dispatch, 2, 4096, row), 16, found);
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
        assert_eq!([1, 63, 64, 128, 511].map(|tokens| sums(4, tokens)), [16, 16, 8, 8, 8]);
        // Short rows, of which the formula has 16 to 32 multiprocessors load more.
        assert_eq!(work_of(FlatOp::Combine, 3, 128, SHORT[1]).sms(), USUAL);
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
