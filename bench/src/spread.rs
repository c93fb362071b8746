//! Minimum, median and tail of samples, the same for every scenario.

use serde::{Deserialize, Serialize};

/// The spread of the samples of one measurement, in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The least sample.
    pub min: f64,
    /// The middle sample; of two middles their mean.
    pub median: f64,
    /// The least sample that 99 % of the samples do not exceed. With fewer than 100 samples this is
    /// the greatest one.
    pub p99: f64,
}

impl Spread {
    /// The spread of `samples`, in any order; `None` without any.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() {
            0 => return None,
            n if n % 2 == 1 => sorted[middle],
            _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
        };
        // The nearest-rank method: the result is a sample that was measured, not a value between
        // two.
        let rank = (sorted.len() * 99).div_ceil(100);
        Some(Self { min: sorted[0], median, p99: sorted[rank - 1] })
    }

    /// The greater of each value: the spread of the slowest rank.
    pub(crate) fn slowest(self, other: Self) -> Self {
        Self {
            min: self.min.max(other.min),
            median: self.median.max(other.median),
            p99: self.p99.max(other.p99),
        }
    }
}

/// The middle of `samples`; `None` without any.
pub(crate) fn median(samples: impl IntoIterator<Item = f64>) -> Option<f64> {
    Spread::of(samples).map(|spread| spread.median)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_sample_has_no_spread_and_one_is_all_three_values() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([3.0]), Some(Spread { min: 3.0, median: 3.0, p99: 3.0 }));
        assert_eq!(median([4.0, 1.0]), Some(2.5));
    }

    #[test]
    fn the_tail_of_a_hundred_samples_leaves_out_one_and_that_of_two_hundred_two() {
        let of = |n: u32| Spread::of((1..=n).rev().map(f64::from)).unwrap().p99;
        assert_eq!([of(99), of(100), of(101), of(200)], [99.0, 99.0, 100.0, 198.0]);
    }

    proptest! {
        #[test]
        fn values_are_in_order_and_the_tail_was_seen(
            samples in prop::collection::vec(0.0f64..1e9, 1..300),
        ) {
            let spread = Spread::of(samples.iter().copied()).unwrap();
            prop_assert!(spread.min <= spread.median && spread.median <= spread.p99);
            prop_assert!(samples.contains(&spread.p99) && samples.contains(&spread.min));
            let beyond = samples.iter().filter(|sample| **sample > spread.p99).count();
            prop_assert!(beyond * 100 <= samples.len());
        }
    }
}
