//! Random draws that depend only on the seed.

/// SplitMix64: small, and good enough for faults.
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// A separate stream for each value of `parts`.
    pub fn new(seed: u64, parts: [u32; 2]) -> Self {
        let mut rng = Self(seed);
        for part in parts {
            rng.0 = rng.next() ^ u64::from(part);
        }
        rng
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 if there is none.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The product's upper half is uniform enough for every bound that is used here.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// True with a probability of `percent` in a hundred.
    pub fn percent(&mut self, percent: u32) -> bool {
        self.below(100) < u64::from(percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(seed: u64, parts: [u32; 2]) -> Vec<u64> {
        let mut rng = Rng::new(seed, parts);
        (0..64).map(|_| rng.below(10)).collect()
    }

    #[test]
    fn the_same_seed_draws_the_same_and_every_rank_and_queue_its_own() {
        assert_eq!(draws(7, [0, 1]), draws(7, [0, 1]));
        for other in [draws(8, [0, 1]), draws(7, [1, 0]), draws(7, [0, 0]), draws(7, [0, 2])] {
            assert_ne!(draws(7, [0, 1]), other);
        }
        let all = draws(7, [0, 1]);
        assert!((0..10).all(|n| all.contains(&n)), "{all:?}");
        assert_eq!(Rng::new(1, [0, 0]).below(0), 0);
    }
}
