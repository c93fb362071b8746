//! The generator behind every generated input: xoshiro256++, seeded by splitmix64.
//!
//! Both are public-domain algorithms by Blackman and Vigna. They are written out here, so that every
//! process, on every machine and with every version of any library, makes the same inputs.

/// The purpose of a stream of random numbers. Streams of different purposes are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Stream {
    /// Token counts of all ranks.
    Tokens = 1,
    /// The `topk_idx` of one rank.
    Routing = 2,
    /// The `topk_weights` of one rank.
    Weights = 3,
    /// The token rows of one rank.
    Rows = 4,
    /// The opaque scales of one rank.
    Scales = 5,
    /// The first bias of one rank.
    Bias0 = 6,
    /// The second bias of one rank.
    Bias1 = 7,
    /// Values in which all ranks must agree, such as the busiest expert.
    Shared = 8,
}

/// One stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

/// One step of splitmix64: advances `state` and returns the next value.
fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The stream of `seed` for this purpose on this rank.
    pub fn new(seed: u64, stream: Stream, rank: usize) -> Self {
        let mut state = seed;
        for part in [stream as u64, rank as u64] {
            state = splitmix64(&mut state) ^ part;
        }
        Self(std::array::from_fn(|_| splitmix64(&mut state)))
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number from 0 to `n - 1`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// `count` different numbers below `n`, in random order. `count` must be at most `n`.
    pub fn distinct_below(&mut self, n: usize, count: usize) -> Vec<usize> {
        debug_assert!(count <= n);
        let mut picked = Vec::with_capacity(count);
        while picked.len() < count {
            let candidate = self.below(n);
            if !picked.contains(&candidate) {
                picked.push(candidate);
            }
        }
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_matches_the_published_sequence() {
        // The first outputs for state 1234567, as published with the reference implementation.
        let mut state = 1_234_567;
        assert_eq!(splitmix64(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(splitmix64(&mut state), 3_203_168_211_198_807_973);
    }

    #[test]
    fn xoshiro_matches_the_published_sequence() {
        // The first outputs for state [1, 2, 3, 4].
        let mut rng = Rng([1, 2, 3, 4]);
        assert_eq!(
            [rng.bits(), rng.bits(), rng.bits()],
            [41_943_041, 58_720_359, 3_588_806_011_781_223]
        );
    }

    #[test]
    fn streams_differ_by_seed_purpose_and_rank() {
        let first = |seed, stream, rank| Rng::new(seed, stream, rank).bits();
        let base = first(0, Stream::Rows, 0);
        assert_eq!(base, first(0, Stream::Rows, 0));
        assert_ne!(base, first(1, Stream::Rows, 0));
        assert_ne!(base, first(0, Stream::Weights, 0));
        assert_ne!(base, first(0, Stream::Rows, 1));
    }

    #[test]
    fn distinct_numbers_are_distinct_even_when_all_are_taken() {
        let mut picked = Rng::new(3, Stream::Routing, 0).distinct_below(8, 8);
        picked.sort_unstable();
        assert_eq!(picked, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
