use super::*;
use crate::lanes::Portable;
use crate::samples::{Random, many_f32s, same};

fn cast_f32s(x: &[f32], scaling: Scaling) -> (Vec<u8>, Vec<u8>) {
    let row: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let mut out = vec![0xee; x.len()];
    let mut scales = vec![0xee; scaling.quant().scale_bytes(x.len() as u32) as usize];
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
    assert_eq!((q[3], q[0]), (0xfe, f32_to_fp8(112.0)));
    assert_eq!((q[200], q[255]), (0x7e, f32_to_fp8(0.25)));
}

#[test]
fn rounded_scales_are_the_next_power_of_two() {
    let mut x = [0.0f32; 128 * 3];
    // amax / 448 is a little above 2, a quarter (1/448 in f32 is above 1/448), and tiny.
    (x[0], x[128]) = (900.0, 112.0);
    let (q, scales) = cast_f32s(&x, Scaling::RoundedF32);
    let quarter = if 112.0 * (1.0f32 / 448.0) > 0.25 { 0.5 } else { 0.25 };
    assert_eq!(f32s(&scales), [4.0, quarter, 2f32.powi(-22)]);
    assert_eq!(q[0], f32_to_fp8(225.0));
    assert_eq!(q[128], f32_to_fp8(112.0 / quarter));
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
    assert_eq!(q, [0, 0x80, f32_to_fp8(5e-5 * (448.0 / 1e-4)), 0x80]);
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
        encode_row_on::<Portable>(float, &values, &mut portable);
        assert_eq!(vector, portable);

        let row = shifted(&vector);
        let (mut vector, mut portable) = (values.clone(), values.clone());
        decode_row(float, &row[1..], &mut vector);
        decode_row_on::<Portable>(float, &row[1..], &mut portable);
        assert!(vector.iter().zip(&portable).all(|(&a, &b)| same(a, b)));

        for scaling in [Scaling::F32, Scaling::RoundedF32, Scaling::Ue8m0] {
            let cast = |function: fn(FloatType, &[u8], Scaling, &mut [u8], &mut [u8])| {
                let mut out = vec![0; values.len()];
                let mut scales = vec![0; scaling.quant().scale_bytes(values.len() as u32) as usize];
                function(float, &row[1..], scaling, &mut out, &mut scales);
                (out, scales)
            };
            assert!(cast(cast_row) == cast(cast_row_on::<Portable>));
        }
    }
}
