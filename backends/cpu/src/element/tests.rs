use super::*;
use crate::samples::{many_f32s, same};

#[test]
fn every_bf16_and_fp16_decodes_to_its_value() {
    for bits in 0..=0xffffu16 {
        assert!(same(bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32()), "{bits:#x}");
        assert!(same(f16_to_f32(bits), half::f16::from_bits(bits).to_f32()), "{bits:#x}");
    }
}

#[test]
fn encoding_to_bf16_and_fp16_rounds_to_nearest_even() {
    for value in many_f32s() {
        let bf16 = half::bf16::from_f32(value).to_bits();
        assert_eq!(f32_to_bf16(value), bf16, "{value:e} ({:#x})", value.to_bits());
        let f16 = half::f16::from_f32(value).to_bits();
        assert_eq!(f32_to_f16(value), f16, "{value:e} ({:#x})", value.to_bits());
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
fn each_value_of_fp8_encodes_to_its_code() {
    for byte in 0..=255u8 {
        assert_eq!(f32_to_fp8(fp8_by_definition(byte) as f32), byte, "{byte:#x}");
    }
}

#[test]
fn encoding_to_fp8_picks_the_nearest_code_and_saturates() {
    let codes: Vec<f64> = (0..0x7f).map(fp8_by_definition).collect();
    for value in many_f32s() {
        let found = f32_to_fp8(value);
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

#[test]
fn types_that_only_travel_are_refused() {
    assert_eq!(FloatType::try_from(DType::F16).unwrap(), FloatType::F16);
    let error = FloatType::try_from(DType::Fp8E4m3).expect_err("cannot be summed");
    assert_eq!(error.message(), "found fp8_e4m3; expected bf16, fp16 or fp32");
}
