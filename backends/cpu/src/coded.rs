//! Sums of rows that travel in LogFMT-10: a rank's sum is encoded as it is made, and decoded where it is summed.
//!
//! All is done in pieces that stay in the cache. Bits are those of [`sum`](crate::sum) and of the codec.

use tokenyard_core::moe::MAX_TOPK;
use tokenyard_core::moe::logfmt::{BLOCK, chunk_channels, decode_block, encode_chunk};

use crate::lanes::{Lanes, multiversion};

/// Bytes of the longest chunk of bf16.
const MOST_CHUNK: usize = 4 * BLOCK;

multiversion! {
    /// Sums `terms`, rows of bf16 of `row_bytes` bytes, as [`sum_rows`](crate::sum::sum_rows) does, or with weights as
    /// [`sum_rows_weighted`](crate::sum::sum_rows_weighted), and encodes the sum at the start of `out`.
    ///
    /// # Panics
    /// If a term is shorter or has no weight, or `out` is shorter than an encoded row may be.
    pub fn sum_rows_coded, sum_rows_coded_on<L>(
        row_bytes: usize,
        out: &mut [u8],
        terms: &[&[u8]],
        weights: Option<&[f32]>,
    ) {
        let bytes = 2 * chunk_channels(row_bytes / 2);
        let mut chunk = [0; MOST_CHUNK];
        let chunk = &mut chunk[..bytes];
        let mut used = 0;
        for start in (0..row_bytes).step_by(bytes) {
            sum_chunk::<L>(chunk, start, terms, weights);
            used += encode_chunk(chunk, &mut out[used..]);
        }
    }
}

multiversion! {
    /// Sums `biases`, rows of bf16, and `terms`, encoded rows, into a row of bf16: rounded once. Nothing to sum gives
    /// +0.0.
    ///
    /// # Panics
    /// If a bias is shorter than `out`, a term is shorter than an encoded row may be, or there are too many terms.
    pub fn sum_coded_rows, sum_coded_rows_on<L>(
        out: &mut [u8],
        biases: &[&[u8]],
        terms: &[&[u8]],
    ) {
        let mut used = [0; MAX_TOPK as usize];
        let used = &mut used[..terms.len()];
        for (at, out) in out.chunks_exact_mut(2 * BLOCK).enumerate() {
            let mut sum = [0.0; BLOCK];
            let mut value = [0.0; BLOCK];
            let mut is_first = true;
            for bias in biases {
                load_block::<L>(&bias[2 * BLOCK * at..], &mut value);
                add_block::<L>(&mut sum, &value, is_first);
                is_first = false;
            }
            for (term, used) in terms.iter().zip(used.iter_mut()) {
                *used += decode_block(&term[*used..], &mut value);
                add_block::<L>(&mut sum, &value, is_first);
                is_first = false;
            }
            for (from, to) in sum.as_chunks().0.iter().zip(out.as_chunks_mut::<2>().0.as_chunks_mut().0) {
                L::from_array(from).store_bf16(to);
            }
        }
    }
}

/// Sums the part of the terms from byte `start` on.
#[inline(always)]
fn sum_chunk<L: Lanes>(chunk: &mut [u8], start: usize, terms: &[&[u8]], weights: Option<&[f32]>) {
    for (at, to) in chunk.as_chunks_mut::<2>().0.as_chunks_mut().0.iter_mut().enumerate() {
        let mut sum: Option<L> = None;
        for (i, term) in terms.iter().enumerate() {
            let lanes = &term[start + 16 * at..][..16];
            let x = lanes.as_chunks::<2>().0.first_chunk().map_or(L::splat(0.0), L::load_bf16);
            sum = Some(match (sum, weights) {
                (None, None) => x,
                (None, Some(weights)) => x.mul(L::splat(weights[i])),
                (Some(sum), None) => sum.add(x),
                (Some(sum), Some(weights)) => x.mul_add(L::splat(weights[i]), sum),
            });
        }
        sum.unwrap_or(L::splat(0.0)).store_bf16(to);
    }
}

#[inline(always)]
fn load_block<L: Lanes>(from: &[u8], to: &mut [f32; BLOCK]) {
    for (from, to) in from.as_chunks::<2>().0.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
        *to = L::load_bf16(from).to_array();
    }
}

/// Adds to a sum, or begins it.
#[inline(always)]
fn add_block<L: Lanes>(sum: &mut [f32; BLOCK], value: &[f32; BLOCK], is_first: bool) {
    for (sum, value) in sum.as_chunks_mut().0.iter_mut().zip(value.as_chunks().0) {
        let x = L::from_array(value);
        *sum = if is_first { x } else { L::from_array(sum).add(x) }.to_array();
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::moe::logfmt::{most_bytes, row_bytes};

    use super::*;
    use crate::convert::{decode_row, encode_row};
    use crate::element::FloatType;
    use crate::lanes::Portable;
    use crate::samples::Random;
    use crate::sum::{sum_exact_rows, sum_rows, sum_rows_weighted};

    const HIDDEN: usize = 1536;

    /// Rows of bf16, of which some chunks may be encoded.
    fn rows(random: &mut Random, count: usize) -> Vec<Vec<u8>> {
        let mut row = |_| {
            let scale = |i: usize| if i / 512 % 3 == 1 { 2.0 } else { 0.2 };
            let mut unit = || (random.next() as i32) as f32 / (1_u32 << 31) as f32;
            let values: Vec<f32> = (0..HIDDEN).map(|i| unit() * scale(i)).collect();
            let mut bytes = vec![0; 2 * HIDDEN];
            encode_row(FloatType::Bf16, &values, &mut bytes);
            bytes
        };
        (0..count).map(&mut row).collect()
    }

    fn slices(rows: &[Vec<u8>]) -> Vec<&[u8]> {
        rows.iter().map(Vec::as_slice).collect()
    }

    /// The values of an encoded row, and those of the row itself in f32.
    fn decoded(coded: &[u8]) -> Vec<u8> {
        let mut at = 0;
        let mut values = Vec::new();
        for _ in 0..HIDDEN / BLOCK {
            let mut block = [0.0; BLOCK];
            at += decode_block(&coded[at..], &mut block);
            values.extend(block.iter().flat_map(|value| value.to_ne_bytes()));
        }
        values
    }

    #[test]
    fn a_sum_is_encoded_as_if_it_were_made_first_with_any_lanes() {
        let mut random = Random(3);
        for count in [0, 1, 2, 5] {
            let rows = rows(&mut random, count);
            let (rows, weights) = (slices(&rows), [0.5, 0.25, 0.1, 0.3, 0.7]);
            for weights in [None, Some(&weights[..count])] {
                let mut sum = vec![0; 2 * HIDDEN];
                match weights {
                    None => sum_rows(FloatType::Bf16, &mut sum, &rows),
                    Some(weights) => sum_rows_weighted(FloatType::Bf16, &mut sum, &rows, weights),
                }
                let mut expected = vec![0; most_bytes(HIDDEN)];
                let mut used = 0;
                for chunk in sum.chunks_exact(2 * BLOCK) {
                    used += encode_chunk(chunk, &mut expected[used..]);
                }
                let (mut found, mut portable) = (vec![0; expected.len()], vec![0; expected.len()]);
                sum_rows_coded(2 * HIDDEN, &mut found, &rows, weights);
                sum_rows_coded_on::<Portable>(2 * HIDDEN, &mut portable, &rows, weights);
                assert_eq!((&found, &portable), (&expected, &expected), "{count} rows");
                assert_eq!(row_bytes(HIDDEN, &found), used);
            }
        }
    }

    #[test]
    fn encoded_rows_are_summed_in_f32_behind_biases_with_any_lanes() {
        let mut random = Random(5);
        for (biases, terms) in [(0, 0), (0, 1), (1, 0), (1, 3), (2, 2)] {
            let (biases, terms) = (rows(&mut random, biases), rows(&mut random, terms));
            let coded: Vec<Vec<u8>> = terms
                .iter()
                .map(|term| {
                    let mut coded = vec![0; most_bytes(HIDDEN)];
                    sum_rows_coded(2 * HIDDEN, &mut coded, &[term.as_slice()], None);
                    coded
                })
                .collect();
            let exact: Vec<Vec<u8>> = coded.iter().map(|coded| decoded(coded)).collect();
            let mut expected = vec![0; 2 * HIDDEN];
            sum_exact_rows(FloatType::Bf16, &mut expected, &slices(&biases), &slices(&exact));
            let (mut found, mut portable) = (vec![1; 2 * HIDDEN], vec![1; 2 * HIDDEN]);
            sum_coded_rows(&mut found, &slices(&biases), &slices(&coded));
            sum_coded_rows_on::<Portable>(&mut portable, &slices(&biases), &slices(&coded));
            assert_eq!((&found, &portable), (&expected, &expected));
            let mut values = vec![0.0; HIDDEN];
            decode_row(FloatType::Bf16, &found, &mut values);
            assert!(values.iter().all(|value| value.is_finite()));
        }
    }
}
