use super::*;
use crate::moe::oracle::number::{e4m3_code, e4m3_value};

#[test]
fn e4m3_codes_decode_to_their_published_values() {
    let expected = [(0x00, 0.0), (0x01, 0.001953125), (0x07, 0.013671875), (0x08, 0.015625)];
    let expected = expected.into_iter().chain([(0x38, 1.0), (0x3c, 1.5), (0x77, 240.0)]);
    for (code, value) in expected.chain([(0x78, 256.0), (0x7e, 448.0), (0xb8, -1.0)]) {
        assert_eq!(e4m3_value(code), value, "{code:#x}");
    }
    assert!(e4m3_value(0x7f).is_nan() && e4m3_value(0xff).is_nan());
}

#[test]
fn every_e4m3_value_encodes_to_its_own_code() {
    for code in (0..=0xff).filter(|code| code & 0x7f != 0x7f) {
        assert_eq!(e4m3_code(e4m3_value(code)), code, "{code:#x}");
    }
}

#[test]
fn e4m3_ties_go_to_the_even_code() {
    // Half way between 1.0 (0x38) and 1.125 (0x39), and between 1.125 and 1.25 (0x3a).
    assert_eq!(e4m3_code(1.0625), 0x38);
    assert_eq!(e4m3_code(1.1875), 0x3a);
    assert_eq!(e4m3_code(-1.1875), 0xba);
    // One step of f32 to either side of the first tie.
    assert_eq!(e4m3_code(f32::from_bits(0x3f87_ffff)), 0x38);
    assert_eq!(e4m3_code(f32::from_bits(0x3f88_0001)), 0x39);
    // Half of the smallest subnormal (2^-9) goes to zero, a bit more does not.
    assert_eq!(e4m3_code(0.0009765625), 0x00);
    assert_eq!(e4m3_code(0.0009765626), 0x01);
}

#[test]
fn e4m3_saturates_and_keeps_the_sign_of_zero_and_nan() {
    assert_eq!(e4m3_code(464.0), 0x7e);
    assert_eq!(e4m3_code(1e30), 0x7e);
    assert_eq!(e4m3_code(f32::NEG_INFINITY), 0xfe);
    assert_eq!(e4m3_code(-0.0), 0x80);
    assert_eq!(e4m3_code(f32::from_bits(0x7fc0_0000)), 0x7f);
    assert_eq!(e4m3_code(f32::from_bits(0xffc0_0000)), 0xff);
}

#[test]
fn row_types_round_to_nearest_even() {
    // bf16 has 8 significant bits, fp16 has 11.
    assert_eq!(RowType::Bf16.round(257.0), 256.0);
    assert_eq!(RowType::Bf16.round(259.0), 260.0);
    assert_eq!(RowType::F16.round(2049.0), 2048.0);
    assert_eq!(RowType::F16.round(2051.0), 2052.0);
    assert_eq!(RowType::F32.round(16_777_217.0), 16_777_216.0);
    assert_eq!(RowType::Bf16.encode(&[1.0, -2.0]), [0x80, 0x3f, 0x00, 0xc0]);
    assert_eq!(RowType::F16.encode(&[1.0, -2.0]), [0x00, 0x3c, 0x00, 0xc0]);
    assert_eq!(RowType::F16.decode(&[0x01, 0x00]), [5.9604645e-8]);
}
