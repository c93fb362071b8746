//! Samples in pairs: a ceiling, then what is measured, each behind a barrier, so that both ran under the same
//! conditions. A sample lasts from the first rank's start to the last rank's end.

use serde::{Deserialize, Serialize};

use crate::spread::{Spread, median};

/// Start and end on one rank, of `CLOCK_MONOTONIC` in nanoseconds.
pub type Lasted = (u64, u64);

/// Figures of pairs of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PairFigures {
    /// Median of the ceiling, in milliseconds.
    pub ceiling_ms: f64,
    /// Median of what is measured, in milliseconds.
    pub ms: f64,
    /// The fastest, in milliseconds.
    pub min_ms: f64,
    /// 99 of 100 take no longer; in milliseconds.
    pub p99_ms: f64,
    /// GB/s per rank at the median.
    pub gb_per_s: f64,
    /// Median of ceiling / measured over the pairs.
    pub ratio: f64,
    /// Fastest ceiling / fastest measured: about the ratio on an idle machine.
    pub fastest_ratio: f64,
    /// Pairs.
    pub samples: usize,
}

impl PairFigures {
    /// Of the pairs of all ranks, one list for each. `bytes`: those of a rank. None without a pair.
    pub(crate) fn of(by_rank: &[&[(Lasted, Lasted)]], bytes: u64) -> Option<Self> {
        Self::of_spans(&spans(by_rank), bytes)
    }

    fn of_spans(spans: &[(f64, f64)], bytes: u64) -> Option<Self> {
        let ratio = median(spans.iter().map(|(ceiling, ms)| ceiling / ms))?;
        let ceiling = Spread::of(spans.iter().map(|pair| pair.0))?;
        let measured = Spread::of(spans.iter().map(|pair| pair.1))?;
        Some(Self {
            ceiling_ms: ceiling.median,
            ms: measured.median,
            min_ms: measured.min,
            p99_ms: measured.p99,
            gb_per_s: bytes as f64 / measured.median / 1e6,
            ratio,
            fastest_ratio: ceiling.min / measured.min,
            samples: spans.len(),
        })
    }
}

/// Milliseconds of (ceiling, measured) per sample: first start to last end over all ranks.
fn spans(by_rank: &[&[(Lasted, Lasted)]]) -> Vec<(f64, f64)> {
    let samples = by_rank.iter().map(|samples| samples.len()).min().unwrap_or(0);
    let span = |index: usize, pick: &dyn Fn(&(Lasted, Lasted)) -> Lasted| {
        let spans = || by_rank.iter().map(|samples| pick(&samples[index]));
        let start = spans().map(|s| s.0).min().unwrap_or(0);
        let end = spans().map(|s| s.1).max().unwrap_or(0);
        end.saturating_sub(start).max(1) as f64 / 1e6
    };
    (0..samples).map(|index| (span(index, &|pair| pair.0), span(index, &|pair| pair.1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_lasts_from_the_first_start_to_the_last_end() {
        let ms = 1_000_000;
        let first = [((0, 2 * ms), (10 * ms, 14 * ms))];
        let second = [((ms, 3 * ms), (9 * ms, 13 * ms))];
        assert_eq!(spans(&[&first, &second]), [(3.0, 5.0)]);
    }

    #[test]
    fn the_figure_is_the_median_of_the_ratios_not_the_ratio_of_the_medians() {
        let spans = [(1.0, 1.0), (1.0, 2.0), (10.0, 100.0)];
        let found = PairFigures::of_spans(&spans, 2_000_000).expect("samples");
        assert_eq!((found.ratio, found.fastest_ratio), (0.5, 1.0));
        assert_eq!((found.ms, found.ceiling_ms), (2.0, 1.0));
        assert_eq!((found.min_ms, found.p99_ms, found.gb_per_s), (1.0, 100.0, 1.0));
    }
}
