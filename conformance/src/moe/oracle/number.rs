//! Element types and their conversions to and from f32.

use std::fmt;

use half::{bf16, f16};

/// The type of one element of a row that combine can sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl RowType {
    /// Every row type.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        Elem::from(self).bytes()
    }

    /// `value` rounded to this type: nearest, ties to even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Self::Bf16 => bf16::from_f32(value).to_f32(),
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::F32 => value,
        }
    }

    /// The elements of `bytes` as f32, exactly.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::Bf16 => words2(bytes).map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            Self::F16 => words2(bytes).map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            Self::F32 => f32s(bytes),
        }
    }

    /// The bytes of `values`, each rounded to this type.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            Self::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }
}

impl fmt::Display for RowType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Elem::from(*self).fmt(f)
    }
}

/// The type of one element of any array of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// FP8 e4m3, the "fn" variant: no infinities, largest value 448, NaN is 0x7f and 0xff.
    E4m3,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// 32 bits of no meaning to the exchange: opaque scales, packed UE8M0 bytes.
    Bits32,
}

impl From<RowType> for Elem {
    fn from(row: RowType) -> Self {
        match row {
            RowType::Bf16 => Self::Bf16,
            RowType::F16 => Self::F16,
            RowType::F32 => Self::F32,
        }
    }
}

impl Elem {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::E4m3 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 | Self::Bits32 => 4,
            Self::I64 => 8,
        }
    }

    /// Whether one element is NaN.
    pub fn is_nan(self, bytes: &[u8]) -> bool {
        let first_is_nan = |values: Vec<f32>| values.first().is_some_and(|value| value.is_nan());
        match self {
            Self::Bf16 => first_is_nan(RowType::Bf16.decode(bytes)),
            Self::F16 => first_is_nan(RowType::F16.decode(bytes)),
            Self::F32 => first_is_nan(f32s(bytes)),
            Self::E4m3 => bytes.first().is_some_and(|code| e4m3_value(*code).is_nan()),
            Self::I32 | Self::I64 | Self::Bits32 => false,
        }
    }

    /// The value of one element as a person reads it. Meant for messages.
    pub fn show(self, bytes: &[u8]) -> String {
        match self {
            Self::Bf16 => format!("{:e}", RowType::Bf16.decode(bytes).first().unwrap_or(&0.0)),
            Self::F16 => format!("{:e}", RowType::F16.decode(bytes).first().unwrap_or(&0.0)),
            Self::F32 => format!("{:e}", f32s(bytes).first().unwrap_or(&0.0)),
            Self::E4m3 => format!("{:e}", e4m3_value(*bytes.first().unwrap_or(&0))),
            Self::I32 => format!("{}", i32s(bytes).first().unwrap_or(&0)),
            Self::I64 => format!("{}", i64s(bytes).first().unwrap_or(&0)),
            Self::Bits32 => format!("{}", u32s(bytes).first().unwrap_or(&0)),
        }
    }
}

impl fmt::Display for Elem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
            Self::F32 => "fp32",
            Self::E4m3 => "fp8",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::Bits32 => "bits32",
        })
    }
}

fn words2(bytes: &[u8]) -> impl Iterator<Item = [u8; 2]> {
    bytes.as_chunks::<2>().0.iter().copied()
}

/// `bytes` as f32 values. Bytes behind the last whole element are ignored, here and below.
pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// `bytes` as i32 values.
pub fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// `bytes` as u32 values.
pub fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

/// `bytes` as i64 values.
pub fn i64s(bytes: &[u8]) -> Vec<i64> {
    bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
}

/// The value of an e4m3 code: sign bit, 4 exponent bits with bias 7, 3 mantissa bits.
pub const fn e4m3_value(code: u8) -> f32 {
    let exponent = (code >> 3) & 0xf;
    let mantissa = (code & 7) as f32;
    let magnitude = if code & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa / 512.0
    } else {
        (1.0 + mantissa / 8.0) * ((1u32 << exponent) as f32) / 128.0
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// `E4M3_MIDPOINTS[c]` lies half way between the values of the codes `c` and `c + 1`, up to 448
/// (code 0x7e). All midpoints are exact in f32.
const E4M3_MIDPOINTS: [f32; 0x7e] = {
    let mut midpoints = [0.0; 0x7e];
    let mut code = 0;
    while code < 0x7e {
        midpoints[code] = (e4m3_value(code as u8) + e4m3_value(code as u8 + 1)) / 2.0;
        code += 1;
    }
    midpoints
};

/// The e4m3 code nearest to `value`: ties to the even code, saturating to ±448, NaN to 0x7f with
/// the sign of the NaN.
pub fn e4m3_code(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let magnitude = value.abs();
    let code = E4M3_MIDPOINTS.partition_point(|midpoint| *midpoint < magnitude);
    let tie = E4M3_MIDPOINTS.get(code) == Some(&magnitude);
    sign | (if tie && code % 2 == 1 { code + 1 } else { code }) as u8
}
