use half::bf16;

use crate::moe::oracle::logfmt::round_trip;
use crate::moe::oracle::rng::{Rng, Stream};

/// The product's codec, chunk by chunk.
fn product(row: &[f32]) -> Vec<f32> {
    use tokenyard_core::moe::logfmt::{
        BLOCK, chunk_channels, decode_block, encode_chunk, most_bytes,
    };
    let chunk = chunk_channels(row.len());
    row.chunks(chunk)
        .flat_map(|chunk| {
            let bytes: Vec<u8> =
                chunk.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
            let mut way = vec![0; most_bytes(chunk.len())];
            encode_chunk(&bytes, &mut way);
            let mut at = 0;
            let mut values = Vec::new();
            for _ in 0..chunk.len() / BLOCK {
                let mut block = [0.0; BLOCK];
                at += decode_block(&way[at..], &mut block);
                values.extend(block);
            }
            values
        })
        .collect()
}

/// A row whose groups have their largest magnitude below 2^-`top` and spread over 2^`depth`.
fn row(rng: &mut Rng, hidden: usize) -> Vec<f32> {
    let mut row = Vec::new();
    while row.len() < hidden {
        let (top, depth) = (1 + rng.below(60) as i32, 1 + rng.below(40) as i32);
        let width = if rng.below(2) == 0 { 1.0 } else { depth as f32 };
        row.extend((0..128).map(|_| {
            let unit = |rng: &mut Rng| (rng.bits() >> 40) as f32 / (1 << 24) as f32;
            let magnitude = (-unit(rng) * width).exp2() * 2.0_f32.powi(-top);
            let sign = if rng.below(2) == 0 { 1.0 } else { -1.0 };
            bf16::from_f32(if rng.below(500) == 0 { 0.0 } else { sign * magnitude }).to_f32()
        }));
    }
    row
}

#[test]
fn two_implementations_of_the_format_have_the_same_bits() {
    let mut rng = Rng::new(11, Stream::Tokens, 0);
    let mut changed = 0;
    for turn in 0..200 {
        let row = row(&mut rng, [512, 1024, 1536, 2048][turn % 4]);
        let (expected, found) = (round_trip(&row), product(&row));
        for (i, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert_eq!(expected.to_bits(), found.to_bits(), "turn {turn}, channel {i}: {}", row[i]);
        }
        changed += usize::from(expected != row);
    }
    assert_eq!(changed, 200, "every row has encoded chunks");
}

#[test]
fn a_chunk_is_left_as_it_is_where_one_group_cannot_be_encoded() {
    let mut rng = Rng::new(12, Stream::Tokens, 0);
    for odd in [1.0, 3.5, f32::INFINITY, f32::NAN] {
        let mut row = row(&mut rng, 1536);
        row[700] = odd;
        let values = round_trip(&row);
        let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits();
        let is_same: Vec<bool> = row
            .chunks(512)
            .zip(values.chunks(512))
            .map(|(row, values)| row.iter().zip(values).all(|(a, b)| same(a, b)))
            .collect();
        assert_eq!(is_same, [false, true, false], "{odd}");
        let found = product(&row);
        assert!(found.iter().zip(&values).all(|(a, b)| same(a, b) || a.is_nan() && b.is_nan()));
    }
    // One chunk of 1024 channels, where H is a multiple of that.
    let mut row = row(&mut rng, 1024);
    row[1023] = -2.0;
    assert_eq!(round_trip(&row), row);
}

#[test]
fn values_are_near_what_they_were() {
    let mut rng = Rng::new(13, Stream::Tokens, 0);
    for _ in 0..50 {
        let row = row(&mut rng, 2048);
        for (group, values) in row.chunks(128).zip(round_trip(&row).chunks(128)) {
            let largest = group.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            for (x, value) in group.iter().zip(values) {
                // A step is at most 2^(32/510), which is 1.0445.
                let most = x.abs() * 0.0223 + largest * 2.0_f32.powi(-32);
                assert!((x - value).abs() <= most, "{x} became {value}");
            }
        }
    }
}
