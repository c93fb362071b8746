//! Element types: bf16, fp16 and fp32 rows to and from f32, and the cast to FP8 e4m3.
//!
//! Every conversion rounds to nearest, ties to even, without branches, so that it vectorises, and
//! without subnormal f32 operands, so that a caller's flush-to-zero mode does not change results.

use tokenyard_core::moe::DType;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::multiversion::multiversion;

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

/// One of the [`FloatType`]s at compile time. Elements are bytes in memory order, so that rows need
/// no alignment.
pub(crate) trait Element {
    type Bytes: Copy;

    /// The elements of a row; bytes behind the last whole element are left out.
    fn split(row: &[u8]) -> &[Self::Bytes];
    fn split_mut(row: &mut [u8]) -> &mut [Self::Bytes];
    fn decode(bytes: Self::Bytes) -> f32;
    fn encode(value: f32) -> Self::Bytes;
}

pub(crate) struct Bf16;
pub(crate) struct F16;
pub(crate) struct F32;

impl Element for Bf16 {
    type Bytes = [u8; 2];

    #[inline(always)]
    fn split(row: &[u8]) -> &[[u8; 2]] {
        row.as_chunks().0
    }

    #[inline(always)]
    fn split_mut(row: &mut [u8]) -> &mut [[u8; 2]] {
        row.as_chunks_mut().0
    }

    #[inline(always)]
    fn decode(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        let encoded = if bits & 0x7fff_ffff > INFINITY { quiet_nan } else { rounded };
        (encoded as u16).to_ne_bytes()
    }
}

impl Element for F16 {
    type Bytes = [u8; 2];

    #[inline(always)]
    fn split(row: &[u8]) -> &[[u8; 2]] {
        row.as_chunks().0
    }

    #[inline(always)]
    fn split_mut(row: &mut [u8]) -> &mut [[u8; 2]] {
        row.as_chunks_mut().0
    }

    #[inline(always)]
    fn decode(bytes: [u8; 2]) -> f32 {
        let half = u32::from(u16::from_ne_bytes(bytes));
        let magnitude = half & 0x7fff;
        // Exponent bias 15 becomes 127. A subnormal is what stands above 2^-14 once 2^-14 is added.
        let normal = (magnitude << 13) + (112 << 23);
        let subnormal =
            (f32::from_bits((113 << 23) | magnitude << 13) - f32::from_bits(113 << 23)).to_bits();
        let quiet = u32::from(magnitude > 0x7c00) << 22;
        let special = magnitude << 13 | INFINITY | quiet;
        let finite = if magnitude < 0x400 { subnormal } else { normal };
        let bits = if magnitude >= 0x7c00 { special } else { finite };
        f32::from_bits(bits | (half & 0x8000) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let rounded = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1));
        let normal = (rounded.wrapping_sub(112 << 23) >> 13).min(0x7c00);
        // The last place of 0.5 is worth 2^-24, one step of a subnormal: adding rounds to it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let quiet_nan = 0x7e00 | (magnitude >> 13 & 0x1ff);
        let finite = if magnitude < 113 << 23 { subnormal } else { normal };
        let encoded = if magnitude > INFINITY { quiet_nan } else { finite };
        ((encoded | bits >> 16 & 0x8000) as u16).to_ne_bytes()
    }
}

impl Element for F32 {
    type Bytes = [u8; 4];

    #[inline(always)]
    fn split(row: &[u8]) -> &[[u8; 4]] {
        row.as_chunks().0
    }

    #[inline(always)]
    fn split_mut(row: &mut [u8]) -> &mut [[u8; 4]] {
        row.as_chunks_mut().0
    }

    #[inline(always)]
    fn decode(bytes: [u8; 4]) -> f32 {
        f32::from_ne_bytes(bytes)
    }

    #[inline(always)]
    fn encode(value: f32) -> [u8; 4] {
        value.to_ne_bytes()
    }
}

/// The bits of positive infinity: a larger magnitude is NaN.
const INFINITY: u32 = f32::INFINITY.to_bits();

multiversion! {
    /// Decodes a row of `out.len()` elements of type `float`.
    ///
    /// # Panics
    /// In debug builds, if the lengths differ.
    pub fn decode_row, decode_row_portable(float: FloatType, row: &[u8], out: &mut [f32]) {
        debug_assert_eq!(row.len(), out.len() * float.bytes());
        match float {
            FloatType::Bf16 => decode_elements::<Bf16>(row, out),
            FloatType::F16 => decode_elements::<F16>(row, out),
            FloatType::F32 => decode_elements::<F32>(row, out),
        }
    }
}

#[inline(always)]
fn decode_elements<E: Element>(row: &[u8], out: &mut [f32]) {
    for (out, &bytes) in out.iter_mut().zip(E::split(row)) {
        *out = E::decode(bytes);
    }
}

multiversion! {
    /// Encodes `values` as a row of type `float`, to nearest even.
    ///
    /// # Panics
    /// In debug builds, if the lengths differ.
    pub fn encode_row, encode_row_portable(float: FloatType, values: &[f32], row: &mut [u8]) {
        debug_assert_eq!(row.len(), values.len() * float.bytes());
        match float {
            FloatType::Bf16 => encode_elements::<Bf16>(values, row),
            FloatType::F16 => encode_elements::<F16>(values, row),
            FloatType::F32 => encode_elements::<F32>(values, row),
        }
    }
}

#[inline(always)]
fn encode_elements<E: Element>(values: &[f32], row: &mut [u8]) {
    for (bytes, &value) in E::split_mut(row).iter_mut().zip(values) {
        *bytes = E::encode(value);
    }
}

/// Channels that share one scale.
pub const GROUP: usize = 128;

/// The largest FP8 e4m3 value.
pub const FP8_MAX: f32 = 448.0;

/// Encodes to FP8 e4m3: nearest even, saturating to ±448; NaN becomes 0x7f with its sign.
#[inline(always)]
pub fn encode_fp8(value: f32) -> u8 {
    encode_fp8_magnitude(value) | sign_of(value)
}

/// Decodes FP8 e4m3.
#[inline(always)]
pub fn decode_fp8(byte: u8) -> f32 {
    let magnitude = u32::from(byte & 0x7f);
    // Exponent bias 7 becomes 127; subnormals as in fp16.
    let normal = (magnitude << 20) + (120 << 23);
    let subnormal =
        (f32::from_bits((121 << 23) | magnitude << 20) - f32::from_bits(121 << 23)).to_bits();
    let finite = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == 0x7f { f32::NAN.to_bits() } else { finite };
    f32::from_bits(bits | u32::from(byte & 0x80) << 24)
}

#[inline(always)]
fn encode_fp8_magnitude(value: f32) -> u8 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let bounded = magnitude.min(FP8_MAX.to_bits());
    let rounded = bounded + 0x7_ffff + (bounded >> 20 & 1);
    let normal = (rounded >> 20).wrapping_sub(120 << 3);
    // The last place of 2^14 is worth 2^-9, one step of a subnormal: adding rounds to it.
    const STEP: f32 = 16384.0;
    let subnormal = (f32::from_bits(bounded) + STEP).to_bits().wrapping_sub(STEP.to_bits());
    let finite = if bounded < 121 << 23 { subnormal } else { normal };
    (if magnitude > INFINITY { 0x7f } else { finite }) as u8
}

#[inline(always)]
fn sign_of(value: f32) -> u8 {
    (value.to_bits() >> 24) as u8 & 0x80
}

/// How the scales of an FP8 row are made and stored. Scales are for dequantising: x = q * scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// f32, `amax / 448`.
    F32,
    /// f32, rounded up to a power of two.
    RoundedF32,
    /// The rounded scale's exponent byte, four per little-endian 32-bit word, zero-padded.
    Ue8m0,
}

impl Scaling {
    /// Bytes of the scales of one row of `hidden` channels.
    pub const fn bytes(self, hidden: usize) -> usize {
        let groups = hidden.div_ceil(GROUP);
        match self {
            Self::F32 | Self::RoundedF32 => groups * 4,
            Self::Ue8m0 => groups.next_multiple_of(4),
        }
    }

    /// The factor that is applied to x, and the scale that is stored.
    #[inline(always)]
    fn factors(self, amax: f32) -> (f32, f32) {
        let scale = amax * (1.0 / FP8_MAX);
        match self {
            Self::F32 => (FP8_MAX / amax, scale),
            Self::RoundedF32 | Self::Ue8m0 => {
                let bits = scale.to_bits();
                let exponent = (bits >> 23) as i32 - 127 + i32::from(bits & 0x7f_ffff != 0);
                (power_of_two(-exponent), power_of_two(exponent))
            }
        }
    }
}

/// 2^exponent, for -149 to 128; 128 gives infinity. An amax of infinity makes the ±128.
#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(if exponent >= -126 {
        ((exponent + 127) as u32) << 23
    } else {
        1 << (exponent + 149)
    })
}

multiversion! {
    /// Casts one row of `out.len()` channels of type `float` to FP8, with one scale per
    /// [`GROUP`] channels; the last group may be partial.
    ///
    /// The largest magnitude of a group ignores NaN and is taken as at least 1e-4. `out` takes the
    /// FP8 bytes, `scales` the [`Scaling::bytes`] of the scales. A NaN stays one, with the sign of
    /// x.
    ///
    /// # Panics
    /// In debug builds, if the lengths do not fit together.
    pub fn cast_row, cast_row_portable(
        float: FloatType,
        row: &[u8],
        scaling: Scaling,
        out: &mut [u8],
        scales: &mut [u8],
    ) {
        debug_assert_eq!(row.len(), out.len() * float.bytes());
        debug_assert_eq!(scales.len(), scaling.bytes(out.len()));
        match float {
            FloatType::Bf16 => cast_elements::<Bf16>(row, scaling, out, scales),
            FloatType::F16 => cast_elements::<F16>(row, scaling, out, scales),
            FloatType::F32 => cast_elements::<F32>(row, scaling, out, scales),
        }
    }
}

#[inline(always)]
fn cast_elements<E: Element>(row: &[u8], scaling: Scaling, out: &mut [u8], scales: &mut [u8]) {
    let groups = E::split(row).chunks(GROUP).zip(out.chunks_mut(GROUP));
    match scaling {
        Scaling::F32 | Scaling::RoundedF32 => {
            for ((row, out), stored) in groups.zip(scales.as_chunks_mut().0) {
                *stored = cast_group::<E>(row, scaling, out).to_ne_bytes();
            }
        }
        Scaling::Ue8m0 => {
            // Bytes in group order are little-endian words.
            let used = groups.len();
            for ((row, out), stored) in groups.zip(&mut *scales) {
                *stored = (cast_group::<E>(row, scaling, out).to_bits() >> 23) as u8;
            }
            scales[used..].fill(0);
        }
    }
}

/// Casts up to [`GROUP`] channels and returns their scale.
#[inline(always)]
fn cast_group<E: Element>(row: &[E::Bytes], scaling: Scaling, out: &mut [u8]) -> f32 {
    // A partial group is filled up with zeros, which change no maximum.
    let mut x = [0f32; GROUP];
    for (x, &bytes) in x.iter_mut().zip(row) {
        *x = E::decode(bytes);
    }
    // Magnitudes order as their bits do.
    let mut amax = 1e-4f32.to_bits();
    for x in &x {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        amax = amax.max(if magnitude > INFINITY { 0 } else { magnitude });
    }
    let (factor, scale) = scaling.factors(f32::from_bits(amax));
    let mut q = [0u8; GROUP];
    for (q, &x) in q.iter_mut().zip(&x) {
        // infinity * 0 is a NaN whose sign differs among CPUs; that of x does not.
        *q = encode_fp8_magnitude(x * factor) | sign_of(x);
    }
    out.copy_from_slice(&q[..out.len()]);
    scale
}

#[cfg(test)]
mod tests;
