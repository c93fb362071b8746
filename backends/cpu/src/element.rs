//! Element types and what one element is worth.
//!
//! These are the definitions; [`lanes`](crate::lanes) does eight at a time and gives the same bits.
//! Conversions round to nearest, ties to even, and avoid subnormal f32 operands, so that a caller's
//! flush-to-zero mode does not change results.

use tokenyard_core::moe::DType;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::lanes::Lanes;

/// The types that rows are computed in. [`DType`] has more, which only travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl FloatType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl TryFrom<DType> for FloatType {
    type Error = Error;

    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a type that cannot be computed with.
    fn try_from(dtype: DType) -> Result<Self> {
        match dtype {
            DType::Bf16 => Ok(Self::Bf16),
            DType::F16 => Ok(Self::F16),
            DType::F32 => Ok(Self::F32),
            DType::Fp8E4m3 | DType::U8 | DType::I32 | DType::I64 => Err(Error::new(
                ErrorKind::InvalidInput,
                "choose element type",
                format!("found {dtype}; expected bf16, fp16 or fp32"),
            )),
        }
    }
}

/// The bits of positive infinity: a larger magnitude is NaN.
pub(crate) const INFINITY: u32 = f32::INFINITY.to_bits();
/// The bits of a float but its sign.
pub(crate) const MAGNITUDE: u32 = 0x7fff_ffff;

/// One of the [`FloatType`]s at compile time. Elements are bytes in memory order, so that rows
/// need no alignment.
pub(crate) trait Element {
    type Bytes: Copy + Default;

    /// The elements of a row; bytes behind the last whole element are left out.
    fn split(row: &[u8]) -> &[Self::Bytes];
    fn split_mut(row: &mut [u8]) -> &mut [Self::Bytes];
    fn load<L: Lanes>(from: &[Self::Bytes; 8]) -> L;
    fn store<L: Lanes>(lanes: L, to: &mut [Self::Bytes; 8]);
}

pub(crate) struct Bf16;
pub(crate) struct F16;
pub(crate) struct F32;

macro_rules! element {
    ($element:ident, $bytes:literal, $load:ident, $store:ident) => {
        impl Element for $element {
            type Bytes = [u8; $bytes];

            #[inline(always)]
            fn split(row: &[u8]) -> &[Self::Bytes] {
                row.as_chunks().0
            }

            #[inline(always)]
            fn split_mut(row: &mut [u8]) -> &mut [Self::Bytes] {
                row.as_chunks_mut().0
            }

            #[inline(always)]
            fn load<L: Lanes>(from: &[Self::Bytes; 8]) -> L {
                L::$load(from)
            }

            #[inline(always)]
            fn store<L: Lanes>(lanes: L, to: &mut [Self::Bytes; 8]) {
                lanes.$store(to);
            }
        }
    };
}

element!(Bf16, 2, load_bf16, store_bf16);
element!(F16, 2, load_f16, store_f16);
element!(F32, 4, load_f32, store_f32);

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if bits & MAGNITUDE > INFINITY { quiet_nan } else { rounded }) as u16
}

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    let finite = if magnitude < 0x400 {
        // A subnormal is what stands above 2^-14 once 2^-14 is added.
        let smallest_normal = f32::from_bits(113 << 23);
        (f32::from_bits(113 << 23 | magnitude << 13) - smallest_normal).to_bits()
    } else {
        // Exponent bias 15 becomes 127.
        (magnitude << 13) + (112 << 23)
    };
    let quiet = u32::from(magnitude > 0x7c00) << 22;
    let special = magnitude << 13 | INFINITY | quiet;
    let bits = u32::from(bits & 0x8000) << 16 | if magnitude < 0x7c00 { finite } else { special };
    f32::from_bits(bits)
}

#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;
    let encoded = if magnitude > INFINITY {
        0x7e00 | (magnitude >> 13 & 0x1ff)
    } else if magnitude < 113 << 23 {
        // The last place of 0.5 is worth 2^-24, one step of a subnormal: adding rounds to it.
        (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits()
    } else {
        let rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        ((rounded - (112 << 23)) >> 13).min(0x7c00)
    };
    (encoded | bits >> 16 & 0x8000) as u16
}

/// The largest FP8 e4m3 value.
pub const FP8_MAX: f32 = 448.0;

/// 2^14: its last place is worth 2^-9, one step of an FP8 subnormal, so adding it rounds to one.
pub(crate) const FP8_STEP: f32 = 16384.0;

/// Encodes to FP8 e4m3: nearest even, saturating to ±448; NaN becomes 0x7f with its sign.
#[inline(always)]
pub fn f32_to_fp8(value: f32) -> u8 {
    let magnitude = value.to_bits() & MAGNITUDE;
    let bounded = magnitude.min(FP8_MAX.to_bits());
    let encoded = if magnitude > INFINITY {
        0x7f
    } else if bounded < 121 << 23 {
        (f32::from_bits(bounded) + FP8_STEP).to_bits() - FP8_STEP.to_bits()
    } else {
        // Exponent bias 127 becomes 7.
        ((bounded + 0x7_ffff + (bounded >> 20 & 1)) >> 20) - (120 << 3)
    };
    encoded as u8 | sign_of(value)
}

/// The sign bit, where FP8 has it.
#[inline(always)]
pub(crate) fn sign_of(value: f32) -> u8 {
    (value.to_bits() >> 24) as u8 & 0x80
}

#[cfg(test)]
mod tests;
