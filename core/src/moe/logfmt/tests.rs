use super::*;
use proptest::prelude::*;

fn bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The values after a round trip of one chunk, and its bytes on the way.
fn round_trip(chunk: &[u16]) -> (Vec<f32>, usize) {
    let bytes: Vec<u8> = chunk.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let mut way = vec![0; most_bytes(chunk.len())];
    let used = encode_chunk(&bytes, &mut way);
    let mut values = Vec::new();
    let mut at = 0;
    for _ in 0..chunk.len() / BLOCK {
        let mut block = [0.0; BLOCK];
        at += decode_block(&way[at..], &mut block);
        values.extend(block);
    }
    assert_eq!((at, row_bytes(chunk.len(), &way)), (used, used));
    (values, used)
}

/// A block whose first group has these magnitudes in turn, and whose other groups may be encoded.
fn block_of(first: &[u16]) -> Vec<u16> {
    let mut block = [bf16(0.5), bf16(0.25)].repeat(BLOCK / 2);
    for (to, from) in block[..GROUP].iter_mut().zip(first.iter().cycle()) {
        *to = *from;
    }
    block
}

#[test]
fn a_row_of_7168_takes_9184_bytes_where_all_of_it_is_encoded_and_14560_at_most() {
    let chunk = [bf16(0.5), bf16(-0.25)].repeat(BLOCK);
    assert_eq!(chunk_channels(7168), chunk.len());
    assert_eq!(7 * round_trip(&chunk).1, 9184);
    assert_eq!(most_bytes(7168), 14_560);
    assert_eq!((chunk_channels(1536), chunk_channels(2048)), (512, 1024));
    assert!(takes(512) && !takes(0) && !takes(768));
}

#[test]
fn the_largest_magnitude_of_any_group_has_code_511_and_the_smallest_one_that_counts_code_1() {
    // Mantissas repeat in each exponent: two exponents of the largest magnitude are enough.
    for amax in [37_u32 << 7, 126 << 7].into_iter().flat_map(|first| first..first + 128) {
        for amin in (amax - 33 * 128).min(amax - 1)..amax {
            let scale = Scale::of(amax << 16 | amin);
            assert_eq!(scale.code(amax), 511, "{amax:#x} {amin:#x}");
            let bottom = log2(amin, scale.base);
            let expected = if bottom > scale.bottom - scale.step / 4.0 { 1 } else { 0 };
            let is_near = (bottom - scale.bottom).abs() < scale.step / 2.0;
            assert!(scale.code(amin) == expected || is_near, "{amax:#x} {amin:#x}");
        }
    }
}

#[test]
fn codes_of_a_group_never_fall_where_magnitudes_rise() {
    for (amax, amin) in [(0x3f7f, 0x3f7e), (0x3f00, 0x3eff), (0x3f7f, 0), (0x3d12, 0x3a01)] {
        let scale = Scale::of(amax << 16 | amin);
        let codes: Vec<u32> = (0..=amax).map(|bits| scale.code(bits)).collect();
        assert!(codes.is_sorted() && codes[amax as usize] == 511, "{amax:#x} {amin:#x}");
        let values: Vec<f32> = (0..512).map(|code| scale.value(code)).collect();
        assert!(values.is_sorted() && values[0] == 0.0, "{amax:#x} {amin:#x}");
    }
}

#[test]
fn polynomials_are_as_near_as_they_say() {
    for bits in 0x80..0x7f80_u32 {
        let exact = f64::from(widen(bits as u16)).log2() - (f64::from(bits >> 7) - 127.0);
        let found = f64::from(log2(bits, bits >> 7));
        assert!((found - exact).abs() < 2.1e-6, "{bits:#x}: {found} and {exact}");
    }
    let scale = Scale { base: 127, bottom: 0.0, step: 1.0 / 512.0, inverse: 0.0, rounding: 0.0 };
    for code in 1..512 {
        let exact = (f64::from(code - 1) / 512.0).exp2();
        let found = f64::from(scale.value(code as u32));
        assert!((found / exact - 1.0).abs() < 3e-6, "{code}: {found} and {exact}");
    }
}

#[test]
fn a_chunk_with_a_group_that_cannot_be_encoded_keeps_its_bits() {
    let one = bf16(1.0);
    for (name, group) in [
        ("one", vec![one, bf16(0.5)]),
        ("infinity", vec![bf16(f32::INFINITY), bf16(0.5)]),
        ("NaN", vec![bf16(f32::NAN), bf16(0.5)]),
        ("NaN with a sign", vec![0xffc1, bf16(0.5)]),
        ("zeros", vec![0, 0x8000]),
        ("one magnitude", vec![bf16(0.5), bf16(-0.5)]),
        ("subnormal numbers", vec![0x0001, 0x007f]),
        ("numbers below 2^-90", vec![(37 << 7) - 1, 0]),
    ] {
        for channels in [BLOCK, 2 * BLOCK] {
            let mut chunk = block_of(&group);
            chunk.resize(channels, bf16(0.25));
            let (values, bytes) = round_trip(&chunk);
            assert_eq!(bytes, most_bytes(channels), "{name}");
            let bits: Vec<u16> = values.iter().map(|value| bf16(*value)).collect();
            assert_eq!(bits, chunk, "{name}");
        }
    }
}

#[test]
fn zeros_keep_their_sign_and_numbers_far_below_the_largest_become_zero() {
    let (values, bytes) = round_trip(&block_of(&[bf16(0.5), 0, 0x8000, 0x8001, bf16(-1e-30)]));
    assert_eq!(bytes, CODED_BYTES);
    let bits: Vec<u32> = values[1..5].iter().map(|value| value.to_bits()).collect();
    assert_eq!(bits, [0, 1 << 31, 1 << 31, 1 << 31]);
    let (values, _) = round_trip(&block_of(&[37 << 7, 0, 1]));
    assert!((values[0] / 2.0_f32.powi(-90) - 1.0).abs() < 1e-5);
}

#[test]
fn bytes_that_no_encoder_writes_are_decoded_without_a_panic() {
    let mut out = [0.0; BLOCK];
    for byte in 0..=u8::MAX {
        decode_block(&[byte; BLOCK_BYTES], &mut out);
    }
}

proptest! {
    #[test]
    fn a_value_is_as_near_as_half_a_step(
        seeds in prop::collection::vec((0.0_f32..1.0, any::<bool>()), GROUP),
        width in 0.02_f32..60.0,
        top in -80.0_f32..0.0,
    ) {
        let magnitude = |at: f32| bf16((top - 0.001 - at * width).exp2());
        let group: Vec<u16> = seeds
            .iter()
            .map(|(at, negative)| magnitude(*at) | u16::from(*negative) << 15)
            .collect();
        let (values, bytes) = round_trip(&block_of(&group));
        let of = |bits: &u16| widen(bits & 0x7fff);
        let amax = group.iter().map(of).fold(0.0, f32::max);
        let amin = group.iter().map(of).fold(1.0, f32::min);
        if amin == amax {
            return Ok(());
        }
        prop_assert_eq!(bytes, CODED_BYTES);
        let bottom = amin.max(amax / 2.0_f32.powi(32));
        let gap = (amax / bottom).powf(1.0 / 510.0) - 1.0;
        for (bits, value) in group.iter().zip(values) {
            let exact = widen(*bits);
            let error = (value - exact).abs();
            let most = exact.abs() * (gap / 2.0 + 1e-5) + if exact.abs() < bottom { bottom } else { 0.0 };
            prop_assert!(error <= most, "{exact} became {value}: {error} is above {most}");
        }
    }
}
