//! Bytes that must cross a link, and the times that follow from them.

use std::fmt;

use tokenyard_core::moe::Quant;

use super::case::{Fixed, Phase, Rows};

/// Bytes of one (token, rank) pair on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairBytes {
    /// The row.
    pub row: u64,
    /// Its scales.
    pub scales: u64,
    /// Row metadata: ids and weights, one of each per selection, and the source.
    pub beside: u64,
}

impl PairBytes {
    /// The bytes of an operation. A combine moves bf16 rows only; a pair moves both.
    pub fn new(phase: Phase, rows: Rows, fixed: &Fixed) -> Self {
        let (hidden, topk) = (u64::from(fixed.hidden), u64::from(fixed.topk));
        match (phase, rows) {
            (Phase::Combine, _) => Self { row: 2 * hidden, scales: 0, beside: 0 },
            (Phase::Pair, _) => {
                let [there, back] =
                    [Phase::Dispatch, Phase::Combine].map(|phase| Self::new(phase, rows, fixed));
                Self { row: there.row + back.row, ..there }
            }
            (Phase::Dispatch, Rows::Bf16) => {
                Self { row: 2 * hidden, scales: 0, beside: 8 * topk + 4 }
            }
            (Phase::Dispatch, Rows::Fp8 | Rows::Cast) => Self {
                row: hidden,
                scales: Quant::FP8.scale_bytes(fixed.hidden).into(),
                beside: 8 * topk + 4,
            },
        }
    }

    /// The sum: the bytes that must cross the link.
    pub fn all(&self) -> u64 {
        self.row + self.scales + self.beside
    }

    /// The bytes that benchmarks of other systems count: rows and scales.
    pub fn counted(&self) -> u64 {
        self.row + self.scales
    }
}

/// (token, rank) pairs of one exchange. A combine sends the same ones back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traffic {
    /// Pairs that cross the busiest port of any rank, in its busier direction; pairs of a rank with
    /// itself do not cross.
    pub busiest: u64,
    /// Pairs that a rank receives, its own included: the mean over ranks.
    pub received: f64,
}

impl Traffic {
    /// The traffic, from the number of pairs that each rank sends to each.
    pub fn new(sends: &[Vec<u64>]) -> Self {
        let ranks = sends.len();
        let at = |from: usize, to: usize| sends[from].get(to).copied().unwrap_or(0);
        let others = |rank: usize| (0..ranks).filter(move |other| *other != rank);
        let busiest = (0..ranks)
            .map(|rank| {
                let out: u64 = others(rank).map(|peer| at(rank, peer)).sum();
                let back: u64 = others(rank).map(|peer| at(peer, rank)).sum();
                out.max(back)
            })
            .max()
            .unwrap_or(0);
        let all: u64 = sends.iter().flatten().sum();
        Self { busiest, received: all as f64 / ranks.max(1) as f64 }
    }
}

/// The time in microseconds that `bytes` take at `gb_s` GB/s; 0 where that is 0, because the rate is not known.
pub fn us_of(bytes: f64, gb_s: f64) -> f64 {
    if gb_s > 0.0 { bytes / gb_s / 1e3 } else { 0.0 }
}

/// GB/s of `bytes` in `us` microseconds.
pub fn gb_s(bytes: f64, us: f64) -> f64 {
    bytes / us / 1e3
}

/// The longest time that is allowed for an operation, by its floor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// A multiple of the floor,
    part: f64,
    /// and microseconds.
    more_us: f64,
}

impl Rule {
    /// Of rows that go direct.
    pub const ONE_LEVEL: Self = Self { part: 1.05, more_us: 20.0 };
    /// Of several domains. It is that of runs that the link between domains binds, and is applied to all.
    pub const TWO_LEVELS: Self = Self { part: 1.08, more_us: 25.0 };

    /// The rule of an operation over one level or several.
    pub fn of(has_levels: bool) -> Self {
        if has_levels { Self::TWO_LEVELS } else { Self::ONE_LEVEL }
    }

    /// The longest time in microseconds, with this floor in microseconds.
    pub fn us(self, floor_us: f64) -> f64 {
        self.part * floor_us + self.more_us
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x floor + {} us", self.part, self.more_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXED: Fixed = Fixed { hidden: 7168, topk: 8, experts: 256 };

    #[test]
    fn a_pair_brings_its_row_scales_ids_weights_and_source() {
        let fp8 = PairBytes::new(Phase::Dispatch, Rows::Fp8, &FIXED);
        assert_eq!(fp8, PairBytes { row: 7168, scales: 224, beside: 68 });
        assert_eq!(PairBytes::new(Phase::Dispatch, Rows::Cast, &FIXED), fp8);
        assert_eq!((fp8.all(), fp8.counted()), (7460, 7392));
        let bf16 = PairBytes::new(Phase::Dispatch, Rows::Bf16, &FIXED);
        assert_eq!((bf16.all(), bf16.counted()), (14404, 14336));
        let combine = PairBytes::new(Phase::Combine, Rows::Bf16, &FIXED);
        assert_eq!((combine.all(), combine.counted()), (14336, 14336));
        let odd = Fixed { hidden: 2880, ..FIXED };
        assert_eq!(PairBytes::new(Phase::Dispatch, Rows::Fp8, &odd).scales, 4 * 23);
    }

    #[test]
    fn the_busiest_direction_of_the_busiest_rank_counts_without_its_own_rows() {
        // All ranks send to rank 0.
        let skewed = vec![vec![50, 1, 1], vec![40, 9, 0], vec![30, 0, 9]];
        assert_eq!(Traffic::new(&skewed), Traffic { busiest: 70, received: 140.0 / 3.0 });
        let out = vec![vec![5, 7, 8], vec![1, 0, 0], vec![1, 0, 0]];
        assert_eq!(Traffic::new(&out).busiest, 15);
        assert_eq!(Traffic::new(&[vec![9]]), Traffic { busiest: 0, received: 9.0 });
    }

    #[test]
    fn floors_and_the_rule_are_those_of_the_named_case() {
        // 18,982 remote rows of FP8 with all metadata at 342 GB/s.
        let floor = us_of(18_982.0 * 7460.0, 342.0);
        assert!((floor - 414.0).abs() < 0.1, "{floor}");
        assert!((Rule::of(false).us(floor) - (1.05 * floor + 20.0)).abs() < 1e-9);
        let words = [false, true].map(|has_levels| Rule::of(has_levels).to_string());
        assert_eq!(words, ["1.05 x floor + 20 us", "1.08 x floor + 25 us"]);
        assert!((gb_s(18_982.0 * 7460.0, floor) - 342.0).abs() < 1e-9);
    }
}
