use super::*;
use crate::convert::{decode_row, encode_row};
use crate::lanes::Portable;
use crate::samples::{Random, same, special_f32s};

const FLOATS: [FloatType; 3] = [FloatType::Bf16, FloatType::F16, FloatType::F32];

fn row(float: FloatType, values: &[f32]) -> Vec<u8> {
    let mut row = vec![0; values.len() * float.bytes()];
    encode_row(float, values, &mut row);
    row
}

fn values(float: FloatType, row: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; row.len() / float.bytes()];
    decode_row(float, row, &mut values);
    values
}

/// The definition, channel by channel.
fn naive(
    float: FloatType,
    terms: &[Vec<u8>],
    weights: Option<&[f32]>,
    channels: usize,
) -> Vec<f32> {
    let terms: Vec<Vec<f32>> = terms.iter().map(|term| values(float, term)).collect();
    let channel = |c: usize| match weights {
        None => terms.iter().map(|term| term[c]).reduce(|sum, x| sum + x),
        Some(weights) => {
            let mut sum = None;
            for (term, &w) in terms.iter().zip(weights) {
                sum = Some(match sum {
                    None => w * term[c],
                    Some(sum) => w.mul_add(term[c], sum),
                });
            }
            sum
        }
    };
    let sums: Vec<f32> = (0..channels).map(|c| channel(c).unwrap_or(0.0)).collect();
    // Rounded once.
    values(float, &row(float, &sums))
}

/// Random terms of which the last channels are special values against each other.
fn random_terms(float: FloatType, count: usize, channels: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(seed);
    let special = special_f32s();
    (0..count)
        .map(|_| {
            let value = |c: usize| match c % 4 {
                0 => special[random.next() as usize % special.len()],
                1 => random.any_f32(),
                _ => random.plain_f32(),
            };
            row(float, &(0..channels).map(value).collect::<Vec<_>>())
        })
        .collect()
}

type Unweighted = fn(FloatType, &mut [u8], &[&[u8]]);
type Weighted = fn(FloatType, &mut [u8], &[&[u8]], &[f32]);

#[test]
fn sums_equal_the_definition_bit_by_bit_in_every_version() {
    for float in FLOATS {
        for (count, channels) in [(0, 8), (1, 64), (2, 200), (3, 63), (8, 1024), (34, 129)] {
            let terms = random_terms(float, count, channels, channels as u64);
            let slices: Vec<&[u8]> = terms.iter().map(Vec::as_slice).collect();
            let mut random = Random(count as u64);
            let weights: Vec<f32> = (0..count).map(|_| random.plain_f32()).collect();
            let mut out = vec![0xee; channels * float.bytes()];

            let expected = naive(float, &terms, None, channels);
            for version in [sum_rows as Unweighted, sum_rows_on::<Portable>] {
                version(float, &mut out, &slices);
                let found = values(float, &out);
                assert!(
                    found.iter().zip(&expected).all(|(&a, &b)| same(a, b)),
                    "{float:?} {count}"
                );
            }
            let expected = naive(float, &terms, Some(&weights), channels);
            for version in [sum_rows_weighted as Weighted, sum_rows_weighted_on::<Portable>] {
                version(float, &mut out, &slices, &weights);
                let found = values(float, &out);
                assert!(
                    found.iter().zip(&expected).all(|(&a, &b)| same(a, b)),
                    "{float:?} {count}"
                );
            }
        }
    }
}

#[test]
fn a_sum_starts_with_its_first_term_and_so_keeps_negative_zero() {
    for float in FLOATS {
        let minus = row(float, &[-0.0; 65]);
        let plus = row(float, &[0.0; 65]);
        let sum_of = |terms: &[&[u8]]| {
            let mut out = vec![0xee; minus.len()];
            sum_rows(float, &mut out, terms);
            out
        };
        assert_eq!(sum_of(&[]), plus);
        assert_eq!(sum_of(&[&minus]), minus);
        assert_eq!(sum_of(&[&minus, &minus]), minus);
        assert_eq!(sum_of(&[&minus, &plus]), plus);
        let mut out = plus.clone();
        sum_rows_weighted(float, &mut out, &[&minus], &[1.0]);
        assert_eq!(out, minus);
        sum_rows_weighted(float, &mut out, &[], &[]);
        assert_eq!(out, plus);
    }
}

#[test]
fn a_sum_is_rounded_once_and_follows_the_order_of_its_terms() {
    // 256 + 1 + 1 in bf16: rounding after each addition would lose both ones.
    let [big, one] = [256.0, 1.0].map(|x| row(FloatType::Bf16, &[x; 64]));
    let mut out = vec![0; 128];
    sum_rows(FloatType::Bf16, &mut out, &[&big, &one, &one]);
    assert_eq!(values(FloatType::Bf16, &out), [258.0; 64]);
    // In f32, 2^24 + 1 - 2^24 is 0 and 2^24 - 2^24 + 1 is 1.
    let [big, minus, one] =
        [2f32.powi(24), -2f32.powi(24), 1.0].map(|x| row(FloatType::F32, &[x; 3]));
    let mut out = vec![0; 12];
    sum_rows(FloatType::F32, &mut out, &[&big, &one, &minus]);
    assert_eq!(values(FloatType::F32, &out), [0.0; 3]);
    sum_rows(FloatType::F32, &mut out, &[&big, &minus, &one]);
    assert_eq!(values(FloatType::F32, &out), [1.0; 3]);
}

#[test]
fn weighted_sums_fuse_all_products_but_the_first() {
    // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the last bit survives only if it is not rounded away
    // before the subtraction.
    let x = row(FloatType::F32, &[1.0 + 2f32.powi(-12); 2]);
    let minus = row(FloatType::F32, &[-(1.0 + 2f32.powi(-11)); 2]);
    let w = 1.0 + 2f32.powi(-12);
    let mut out = vec![0; 8];
    sum_rows_weighted(FloatType::F32, &mut out, &[&minus, &x], &[1.0, w]);
    assert_eq!(values(FloatType::F32, &out), [2f32.powi(-24); 2]);
    sum_rows_weighted(FloatType::F32, &mut out, &[&x, &minus], &[w, 1.0]);
    assert_eq!(values(FloatType::F32, &out), [0.0; 2]);
}
