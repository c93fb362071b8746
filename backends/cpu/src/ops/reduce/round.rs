//! f32 to bf16 with stochastic rounding, for parts on their way. The noise is a hash of bits and places, so that it is
//! the same in every run. `docs/pipes.md` has the rule.

use std::ops::Range;

/// Rounds a part of a tensor of f32.
pub(super) fn round_part(tensor: &[[u8; 4]], part: Range<usize>, to: &mut [[u8; 2]]) {
    for quad in part.start / 4..part.end.div_ceil(4) {
        let bits =
            [0, 1, 2, 3].map(|k| tensor.get(4 * quad + k).map_or(0, |x| u32::from_le_bytes(*x)));
        let noise = noise(bits, quad as u32);
        for k in 0..4 {
            let place = (4 * quad + k).checked_sub(part.start);
            if let Some(to) = place.and_then(|place| to.get_mut(place)) {
                *to = round(bits[k], noise[k]).to_le_bytes();
            }
        }
    }
}

/// 16 bits for each of four elements that follow each other.
fn noise(bits: [u32; 4], quad: u32) -> [u32; 4] {
    const FACTORS: [u32; 4] = [0x5671_d42b, 0x9995_e499, 0xace1_b8a5, 0xe153_538d];
    let products = bits.iter().zip(FACTORS).map(|(bits, factor)| bits.wrapping_mul(factor));
    let mut hash = products.fold(quad, u32::wrapping_add);
    hash ^= hash >> 23;
    hash = hash.wrapping_mul(0x7feb_352d);
    hash ^= hash >> 16;
    let [first, second] = [0x846c_a68b, 0xd35a_2d97_u32].map(|factor| {
        let word = hash.wrapping_mul(factor);
        word ^ word >> 11
    });
    [first & 0xffff, first >> 16, second & 0xffff, second >> 16]
}

/// The upper half of the bits, one more where the noise carries. NaN stays NaN.
fn round(bits: u32, noise: u32) -> u16 {
    if f32::from_bits(bits).is_nan() {
        return 0x7fff;
    }
    (bits.wrapping_add(noise) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(values: &[f32], part: Range<usize>) -> Vec<f32> {
        let tensor: Vec<[u8; 4]> = values.iter().map(|value| value.to_le_bytes()).collect();
        let mut to = vec![[0; 2]; part.len()];
        round_part(&tensor, part, &mut to);
        let back = |to: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*to)) << 16);
        to.iter().map(back).collect()
    }

    #[test]
    fn values_of_bf16_stay_and_others_become_a_neighbour() {
        let exact = [1.0, -0.0, f32::INFINITY, 3.5, -f32::INFINITY, 0.0, 2.0_f32.powi(-130)];
        let found = rounded(&exact, 0..7);
        assert_eq!(found.map_bits(), exact.to_vec().map_bits());
        assert!(rounded(&[f32::NAN, -f32::NAN], 0..2).iter().all(|value| value.is_nan()));
        // Beyond the largest number of bf16.
        assert!(rounded(&[f32::MAX; 64], 0..64).contains(&f32::INFINITY));
        for value in rounded(&[1.001; 64], 0..64) {
            assert!(value == 1.0 || value == 1.007_812_5, "{value}");
        }
    }

    trait MapBits {
        fn map_bits(&self) -> Vec<u32>;
    }
    impl MapBits for Vec<f32> {
        fn map_bits(&self) -> Vec<u32> {
            self.iter().map(|value| value.to_bits()).collect()
        }
    }

    #[test]
    fn the_mean_of_many_is_that_of_the_values() {
        let values = vec![1.001_f32; 1 << 16];
        let mean =
            rounded(&values, 0..1 << 16).iter().map(|x| f64::from(*x)).sum::<f64>() / 65536.0;
        assert!((mean - 1.001).abs() < 1e-4, "{mean}");
    }

    #[test]
    fn a_part_rounds_as_the_whole_does_wherever_it_begins() {
        let values: Vec<f32> = (0..23).map(|i| 0.1 + i as f32 * 0.7).collect();
        let whole = rounded(&values, 0..23);
        for start in 0..23 {
            for end in start..=23 {
                assert_eq!(rounded(&values, start..end), whole[start..end], "{start}..{end}");
            }
        }
    }

    #[test]
    fn the_noise_is_that_of_the_rule() {
        // Computed by hand of the rule, for the first four elements 1, 2, 3, 4.
        let bits = [1.0_f32, 2.0, 3.0, 4.0].map(f32::to_bits);
        assert_eq!(noise(bits, 0), NOISE_0);
        assert_eq!(noise(bits, 5), NOISE_5);
    }
    const NOISE_0: [u32; 4] = [0x61da, 0x3075, 0xaa96, 0x742d];
    const NOISE_5: [u32; 4] = [0x92ba, 0xef92, 0xb3c8, 0xb41b];
}
