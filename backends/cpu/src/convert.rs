//! Rows of bf16, fp16 and fp32 to and from f32, and the cast of a row to FP8 e4m3 with scales.

use tokenyard_core::moe::Quant;

use crate::element::{Bf16, Element, F16, F32};
pub use crate::element::{FP8_MAX, FloatType, f32_to_fp8};
use crate::lanes::{Lanes, multiversion};

multiversion! {
    /// Decodes a row of `out.len()` elements of type `float`.
    ///
    /// # Panics
    /// In debug builds, if the lengths differ.
    pub fn decode_row, decode_row_on<L>(float: FloatType, row: &[u8], out: &mut [f32]) {
        debug_assert_eq!(row.len(), out.len() * float.bytes());
        match float {
            FloatType::Bf16 => decode::<Bf16, L>(row, out),
            FloatType::F16 => decode::<F16, L>(row, out),
            FloatType::F32 => decode::<F32, L>(row, out),
        }
    }
}

#[inline(always)]
fn decode<E: Element, L: Lanes>(row: &[u8], out: &mut [f32]) {
    let (lanes, rest) = E::split(row).as_chunks();
    let (out_lanes, out_rest) = out.as_chunks_mut();
    for (from, to) in lanes.iter().zip(out_lanes) {
        *to = E::load::<L>(from).to_array();
    }
    for (to, value) in out_rest.iter_mut().zip(load_some::<E, L>(rest).to_array()) {
        *to = value;
    }
}

multiversion! {
    /// Encodes `values` as a row of type `float`, to nearest even.
    ///
    /// # Panics
    /// In debug builds, if the lengths differ.
    pub fn encode_row, encode_row_on<L>(float: FloatType, values: &[f32], row: &mut [u8]) {
        debug_assert_eq!(row.len(), values.len() * float.bytes());
        match float {
            FloatType::Bf16 => encode::<Bf16, L>(values, row),
            FloatType::F16 => encode::<F16, L>(values, row),
            FloatType::F32 => encode::<F32, L>(values, row),
        }
    }
}

#[inline(always)]
fn encode<E: Element, L: Lanes>(values: &[f32], row: &mut [u8]) {
    let (lanes, rest) = values.as_chunks();
    let (row_lanes, row_rest) = E::split_mut(row).as_chunks_mut();
    for (from, to) in lanes.iter().zip(row_lanes) {
        E::store(L::from_array(from), to);
    }
    let mut padded = [0.0; 8];
    for (padded, &value) in padded.iter_mut().zip(rest) {
        *padded = value;
    }
    store_some::<E, L>(L::from_array(&padded), row_rest);
}

/// Loads fewer than eight elements, and zeros for the others.
#[inline(always)]
pub(crate) fn load_some<E: Element, L: Lanes>(from: &[E::Bytes]) -> L {
    let mut padded = [E::Bytes::default(); 8];
    for (padded, &bytes) in padded.iter_mut().zip(from) {
        *padded = bytes;
    }
    E::load(&padded)
}

/// Stores the first `to.len()` of the lanes, fewer than eight.
#[inline(always)]
pub(crate) fn store_some<E: Element, L: Lanes>(lanes: L, to: &mut [E::Bytes]) {
    let mut padded = [E::Bytes::default(); 8];
    E::store(lanes, &mut padded);
    for (to, &bytes) in to.iter_mut().zip(&padded) {
        *to = bytes;
    }
}

/// Channels that share one scale.
const GROUP: usize = Quant::FP8.group as usize;

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
    /// The format of the rows.
    pub const fn quant(self) -> Quant {
        match self {
            Self::F32 => Quant::FP8,
            Self::RoundedF32 => Quant::FP8_ROUND,
            Self::Ue8m0 => Quant::FP8_UE8M0,
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
    /// group of channels ([`Quant::FP8`]); the last group may be partial.
    ///
    /// The largest magnitude of a group ignores NaN and is taken as at least 1e-4. `out` takes the
    /// FP8 bytes, `scales` the [`Quant::scale_bytes`] of the format. A NaN stays one, with the sign of
    /// x.
    ///
    /// # Panics
    /// In debug builds, if the lengths do not fit together.
    pub fn cast_row, cast_row_on<L>(
        float: FloatType,
        row: &[u8],
        scaling: Scaling,
        out: &mut [u8],
        scales: &mut [u8],
    ) {
        debug_assert_eq!(row.len(), out.len() * float.bytes());
        debug_assert_eq!(scales.len(), scaling.quant().scale_bytes(out.len() as u32) as usize);
        match float {
            FloatType::Bf16 => cast::<Bf16, L>(row, scaling, out, scales),
            FloatType::F16 => cast::<F16, L>(row, scaling, out, scales),
            FloatType::F32 => cast::<F32, L>(row, scaling, out, scales),
        }
    }
}

#[inline(always)]
fn cast<E: Element, L: Lanes>(row: &[u8], scaling: Scaling, out: &mut [u8], scales: &mut [u8]) {
    let groups = E::split(row).chunks(GROUP).zip(out.chunks_mut(GROUP));
    match scaling {
        Scaling::F32 | Scaling::RoundedF32 => {
            for ((row, out), stored) in groups.zip(scales.as_chunks_mut().0) {
                *stored = cast_group::<E, L>(row, scaling, out).to_ne_bytes();
            }
        }
        Scaling::Ue8m0 => {
            // Bytes in group order are little-endian words.
            let used = groups.len();
            for ((row, out), stored) in groups.zip(&mut *scales) {
                *stored = (cast_group::<E, L>(row, scaling, out).to_bits() >> 23) as u8;
            }
            scales[used..].fill(0);
        }
    }
}

/// Casts up to [`GROUP`] channels and returns their scale.
#[inline(always)]
fn cast_group<E: Element, L: Lanes>(row: &[E::Bytes], scaling: Scaling, out: &mut [u8]) -> f32 {
    let (lanes, rest) = row.as_chunks();
    let (out_lanes, out_rest) = out.as_chunks_mut();
    // The zeros behind a partial group change no maximum.
    let rest: L = load_some::<E, L>(rest);
    let mut max = L::splat(1e-4).max_magnitude(rest);
    for from in lanes {
        max = max.max_magnitude(E::load(from));
    }
    let amax = max.to_array().into_iter().fold(0.0, f32::max);
    let (factor, scale) = scaling.factors(amax);
    let factor = L::splat(factor);
    // infinity * 0 is a NaN whose sign differs among CPUs; that of x does not.
    for (from, to) in lanes.iter().zip(out_lanes) {
        let x: L = E::load(from);
        x.mul(factor).store_fp8(x, to);
    }
    let mut padded = [0; 8];
    rest.mul(factor).store_fp8(rest, &mut padded);
    for (to, q) in out_rest.iter_mut().zip(padded) {
        *to = q;
    }
    scale
}

#[cfg(test)]
mod tests;
