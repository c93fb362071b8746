use super::*;
use crate::samples::{Random, same, special_f32s};

fn many_f32s() -> Vec<f32> {
    let mut random = Random(1);
    let mut values = special_f32s();
    values.extend((0..100_000).map(|_| random.any_f32()));
    // Where fp16 and FP8 have their values, and so their ties.
    for bits in 0..=0xffffu16 {
        let half = half::f16::from_bits(bits).to_f32();
        let next = half::f16::from_bits(bits.wrapping_add(1)).to_f32();
        let middle = (half + next) / 2.0;
        values.extend([half, middle, middle.next_up(), middle.next_down()]);
    }
    values
}

#[test]
fn every_bf16_and_fp16_decodes_to_its_value() {
    for bits in 0..=0xffffu16 {
        let bytes = bits.to_ne_bytes();
        assert!(same(Bf16::decode(bytes), half::bf16::from_bits(bits).to_f32()), "{bits:#x}");
        assert!(same(F16::decode(bytes), half::f16::from_bits(bits).to_f32()), "{bits:#x}");
    }
}

#[test]
fn encoding_to_bf16_and_fp16_rounds_to_nearest_even() {
    for value in many_f32s() {
        let bf16 = half::bf16::from_f32(value).to_bits().to_ne_bytes();
        assert_eq!(Bf16::encode(value), bf16, "{value:e} ({:#x})", value.to_bits());
        let f16 = half::f16::from_f32(value).to_bits().to_ne_bytes();
        assert_eq!(F16::encode(value), f16, "{value:e} ({:#x})", value.to_bits());
    }
}

/// FP8 e4m3 by its definition: (-1)^s * 2^(e-7) * 1.m, subnormal 2^-6 * 0.m.
fn fp8_by_definition(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match exponent {
        15 if mantissa == 7.0 => f64::NAN,
        0 => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn every_fp8_decodes_to_its_value_and_back() {
    for byte in 0..=255u8 {
        let value = decode_fp8(byte);
        assert!(same(value, fp8_by_definition(byte) as f32), "{byte:#x}");
        assert_eq!(encode_fp8(value), byte, "{byte:#x}");
    }
}

#[test]
fn encoding_to_fp8_picks_the_nearest_code_and_saturates() {
    let codes: Vec<f64> = (0..0x7f).map(fp8_by_definition).collect();
    for value in many_f32s() {
        let found = encode_fp8(value);
        assert_eq!(found & 0x80 != 0, value.is_sign_negative());
        if value.is_nan() {
            assert_eq!(found & 0x7f, 0x7f);
            continue;
        }
        let magnitude = f64::from(value).abs();
        // Codes ascend, so the nearest is one of the two around the value.
        let above = codes.partition_point(|&code| code < magnitude).min(0x7e);
        let below = above.saturating_sub(1);
        let (down, up) = (magnitude - codes[below], codes[above] - magnitude);
        let expected = match down.partial_cmp(&up).unwrap() {
            std::cmp::Ordering::Less => below,
            std::cmp::Ordering::Greater => above,
            std::cmp::Ordering::Equal => below + below % 2,
        };
        assert_eq!(usize::from(found & 0x7f), expected, "{value:e} ({:#x})", value.to_bits());
    }
}

fn cast_f32s(x: &[f32], scaling: Scaling) -> (Vec<u8>, Vec<u8>) {
    let row: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let mut out = vec![0xee; x.len()];
    let mut scales = vec![0xee; scaling.bytes(x.len())];
    cast_row(FloatType::F32, &row, scaling, &mut out, &mut scales);
    (out, scales)
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect()
}

#[test]
fn a_group_is_scaled_so_that_its_largest_magnitude_becomes_448() {
    let mut x = [0.5f32; 256];
    (x[3], x[200]) = (-2.0, 896.0);
    let (q, scales) = cast_f32s(&x, Scaling::F32);
    // 1/448 is rounded to f32 before it is multiplied.
    assert_eq!(f32s(&scales), [2.0 * (1.0f32 / 448.0), 896.0 * (1.0f32 / 448.0)]);
    assert_eq!((q[3], q[0]), (0xfe, encode_fp8(112.0)));
    assert_eq!((q[200], q[255]), (0x7e, encode_fp8(0.25)));
}

#[test]
fn rounded_scales_are_the_next_power_of_two() {
    let mut x = [0.0f32; 128 * 3];
    // amax / 448 is a little above 2, a quarter (1/448 in f32 is above 1/448), and tiny.
    (x[0], x[128]) = (900.0, 112.0);
    let (q, scales) = cast_f32s(&x, Scaling::RoundedF32);
    let quarter = if 112.0 * (1.0f32 / 448.0) > 0.25 { 0.5 } else { 0.25 };
    assert_eq!(f32s(&scales), [4.0, quarter, 2f32.powi(-22)]);
    assert_eq!(q[0], encode_fp8(225.0));
    assert_eq!(q[128], encode_fp8(112.0 / quarter));
}

#[test]
fn ue8m0_packs_the_exponents_of_rounded_scales_and_pads_with_zeros() {
    let mut random = Random(5);
    let x: Vec<f32> = (0..128 * 5 + 16).map(|_| random.plain_f32()).collect();
    let (rounded_q, rounded) = cast_f32s(&x, Scaling::RoundedF32);
    let (q, packed) = cast_f32s(&x, Scaling::Ue8m0);
    assert_eq!(q, rounded_q);
    let mut expected: Vec<u8> =
        f32s(&rounded).iter().map(|scale| (scale.log2() as i32 + 127) as u8).collect();
    assert_eq!(expected.len(), 6);
    expected.extend([0, 0]);
    assert_eq!(packed, expected);
}

#[test]
fn a_partial_group_has_a_scale_of_its_own() {
    let x: Vec<f32> = (0..132).map(|i| if i < 128 { 4.0 } else { 1.0 }).collect();
    let (q, scales) = cast_f32s(&x, Scaling::F32);
    assert_eq!(f32s(&scales), [4.0 * (1.0f32 / 448.0), 1.0f32 / 448.0]);
    assert_eq!(q, [0x7e; 132]);
}

#[test]
fn small_groups_use_the_smallest_scale() {
    let (q, scales) = cast_f32s(&[0.0, -0.0, 5e-5, -1e-30], Scaling::F32);
    assert_eq!(f32s(&scales), [1e-4 * (1.0f32 / 448.0)]);
    assert_eq!(q, [0, 0x80, encode_fp8(5e-5 * (448.0 / 1e-4)), 0x80]);
}

#[test]
fn a_nan_stays_one_and_does_not_spoil_its_group() {
    let (q, scales) = cast_f32s(&[1.0, f32::NAN, -f32::NAN], Scaling::F32);
    assert_eq!((q, f32s(&scales)), (vec![0x7e, 0x7f, 0xff], vec![1.0f32 / 448.0]));
    let (q, scales) = cast_f32s(&[f32::INFINITY, -f32::INFINITY, 2.0], Scaling::F32);
    assert_eq!((q, f32s(&scales)), (vec![0x7f, 0xff, 0], vec![f32::INFINITY]));
    let (q, scales) = cast_f32s(&[f32::INFINITY, -3.0], Scaling::RoundedF32);
    assert_eq!((q, f32s(&scales)), (vec![0x7e, 0x80], vec![f32::INFINITY]));
}

#[test]
fn rows_of_every_type_survive_the_way_to_f32_and_back() {
    let mut random = Random(9);
    for float in [FloatType::Bf16, FloatType::F16, FloatType::F32] {
        let values: Vec<f32> = (0..203).map(|_| random.plain_f32()).collect();
        let mut row = vec![0; values.len() * float.bytes()];
        encode_row(float, &values, &mut row);
        let mut decoded = vec![0.0; values.len()];
        decode_row(float, &row, &mut decoded);
        let mut again = vec![0; row.len()];
        encode_row(float, &decoded, &mut again);
        assert_eq!(row, again);
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= a.abs() / 256.0 || b.is_infinite();
        assert!(values.iter().zip(&decoded).all(close));
    }
}

/// A view into the middle of a buffer, so that nothing is aligned by luck.
fn shifted(bytes: &[u8]) -> Vec<u8> {
    [&[0], bytes].concat()
}

#[test]
fn vector_and_portable_versions_give_the_same_bits() {
    let values = many_f32s();
    for float in [FloatType::Bf16, FloatType::F16, FloatType::F32] {
        let mut vector = vec![0; values.len() * float.bytes()];
        let mut portable = vector.clone();
        encode_row(float, &values, &mut vector);
        encode_row_portable(float, &values, &mut portable);
        assert_eq!(vector, portable);

        let row = shifted(&vector);
        let (mut vector, mut portable) = (values.clone(), values.clone());
        decode_row(float, &row[1..], &mut vector);
        decode_row_portable(float, &row[1..], &mut portable);
        assert!(vector.iter().zip(&portable).all(|(&a, &b)| same(a, b)));

        for scaling in [Scaling::F32, Scaling::RoundedF32, Scaling::Ue8m0] {
            let cast = |function: fn(FloatType, &[u8], Scaling, &mut [u8], &mut [u8])| {
                let mut out = vec![0; values.len()];
                let mut scales = vec![0; scaling.bytes(values.len())];
                function(float, &row[1..], scaling, &mut out, &mut scales);
                (out, scales)
            };
            assert!(cast(cast_row) == cast(cast_row_portable));
        }
    }
}

#[test]
fn types_that_only_travel_are_refused() {
    assert_eq!(FloatType::try_from(DType::F16).unwrap(), FloatType::F16);
    let error = FloatType::try_from(DType::Fp8E4m3).expect_err("cannot be summed");
    assert_eq!(error.message(), "found fp8_e4m3; expected bf16, fp16 or fp32");
}
