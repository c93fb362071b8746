//! The cast of a row by dispatch, and the values that experts read.

use super::case::{Case, GROUP, Input, Scales};
use super::inputs::RankInputs;
use super::number::{Elem, RowType, e4m3_code, e4m3_value, f32s};

/// The largest e4m3 value.
const E4M3_MAX: f32 = 448.0;

/// The smallest largest magnitude of a group.
const SMALLEST_AMAX: f32 = 1e-4;

/// A row as it is received, and its scales (empty where rows have none).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedRow {
    /// H elements of `case.received_elem()`.
    pub x: Vec<u8>,
    /// The scales, in the type and number of `case.scales()`.
    pub scales: Vec<u8>,
}

/// The row that every rank with a copy of `token` receives.
pub fn received_row(case: &Case, inputs: &RankInputs, token: usize) -> ReceivedRow {
    let row_bytes = case.hidden * case.sent_elem().bytes();
    let sent = &inputs.x[token * row_bytes..][..row_bytes];
    match case.input {
        Input::Plain(_) => ReceivedRow { x: sent.to_vec(), scales: Vec::new() },
        Input::Cast(row, scales) => cast(&row.decode(sent), scales),
        Input::Opaque(count) => {
            let bytes = count * Elem::Bits32.bytes();
            let scales = inputs.scales.as_ref().map(|s| s[token * bytes..][..bytes].to_vec());
            ReceivedRow { x: sent.to_vec(), scales: scales.unwrap_or_default() }
        }
    }
}

/// `row` cast to e4m3, one scale per group of 128 channels; the last group may be partial.
pub fn cast(row: &[f32], scales: Scales) -> ReceivedRow {
    let mut x = Vec::with_capacity(row.len());
    let mut inverses = Vec::new();
    for group in row.chunks(GROUP) {
        let (scale, inverse) = group_scale(group, scales);
        // A NaN product has the sign of the input: for NaN, and for infinity times 0, machines differ in
        // the sign.
        let scaled = group.iter().map(|v| match v * scale {
            product if product.is_nan() => f32::NAN.copysign(*v),
            product => product,
        });
        x.extend(scaled.map(e4m3_code));
        inverses.push(inverse);
    }
    let scales = match scales {
        Scales::F32 | Scales::RoundedF32 => RowType::F32.encode(&inverses),
        Scales::Ue8m0 => {
            let mut bytes: Vec<u8> = inverses.iter().map(|s| (s.to_bits() >> 23) as u8).collect();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        }
    };
    ReceivedRow { x, scales }
}

/// The factor for the values of a group, and the scale that undoes it. All in f32.
fn group_scale(group: &[f32], scales: Scales) -> (f32, f32) {
    // f32::max ignores NaN.
    let amax = group.iter().fold(SMALLEST_AMAX, |amax, value| amax.max(value.abs()));
    let inverse = amax * (1.0 / E4M3_MAX);
    match scales {
        Scales::F32 => (E4M3_MAX / amax, inverse),
        Scales::RoundedF32 | Scales::Ue8m0 => {
            let exponent = (inverse.to_bits() >> 23) as i32 - 127;
            let has_mantissa = inverse.to_bits() & 0x007f_ffff != 0;
            let exponent = exponent + i32::from(has_mantissa);
            (power_of_two(-exponent), power_of_two(exponent))
        }
    }
}

fn power_of_two(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

/// The values of a received row: each element times the scale of its group, in f32.
///
/// Opaque scales count as f32 if there is one per group; else they are ignored and the elements stand for
/// themselves.
pub fn received_values(case: &Case, x: &[u8], scales: &[u8]) -> Vec<f32> {
    let scales = match case.input {
        Input::Plain(row) => return row.decode(x),
        Input::Cast(_, Scales::F32 | Scales::RoundedF32) => f32s(scales),
        Input::Cast(_, Scales::Ue8m0) => {
            scales.iter().map(|byte| f32::from_bits(u32::from(*byte) << 23)).collect()
        }
        Input::Opaque(count) if count == case.groups() => f32s(scales),
        Input::Opaque(_) => vec![1.0; case.groups()],
    };
    x.chunks(GROUP)
        .zip(scales)
        .flat_map(|(group, scale)| group.iter().map(move |code| e4m3_value(*code) * scale))
        .collect()
}
