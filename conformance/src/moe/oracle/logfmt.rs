//! LogFMT-10, the format of a combine's partial rows that are encoded: what a row is after its way.
//!
//! Only values are here. Bytes on the way are a matter of the product.

use super::case::GROUP;

/// Codes of a magnitude beside 0, less 1.
const STEPS: f32 = 510.0;

/// Powers of two below the largest magnitude that the codes of a group reach.
const DEPTH: f32 = 32.0;

/// Coefficients of `log2(1 + f) / f`, from the constant on.
const LOG2: [f32; 6] =
    [1.442_557_6, -0.718_357_26, 0.458_673_06, -0.280_458_1, 0.124_393_2, -0.026_812_049];

/// Coefficients of `2^z`, from the constant on.
const EXP2: [f32; 5] = [1.0, 0.693_124_2, 0.240_241, 0.055_906_426, 0.009_582_853];

/// ln(2) / 8
const EIGHTH_LN2: f32 = 0.086_643_4;

/// The values of a row of bf16 numbers after its way.
pub fn round_trip(row: &[f32]) -> Vec<f32> {
    let chunk = if row.len().is_multiple_of(1024) { 1024 } else { 512 };
    row.chunks(chunk)
        .flat_map(|chunk| {
            let groups: Vec<_> =
                chunk.chunks(GROUP).map(|group| (group, Codes::of(group))).collect();
            let is_coded = groups.iter().all(|(_, codes)| codes.is_some());
            groups.into_iter().flat_map(move |(group, codes)| {
                let codes = codes.filter(|_| is_coded);
                group.iter().map(move |x| codes.map_or(*x, |codes| codes.round_trip(*x)))
            })
        })
        .collect()
}

/// The codes of a group.
#[derive(Clone, Copy)]
struct Codes {
    /// Logarithms are relative to this power of two, the largest that is not above any magnitude of the group.
    unit: i32,
    bottom: f32,
    range: f32,
}

impl Codes {
    /// None where the group keeps its chunk from being encoded.
    fn of(group: &[f32]) -> Option<Self> {
        let largest = group.iter().map(|x| x.abs()).reduce(f32::max)?;
        let smallest = group.iter().map(|x| x.abs()).reduce(f32::min)?;
        let is_coded = !group.iter().any(|x| x.is_nan())
            && (2.0_f32.powi(-90)..1.0).contains(&largest)
            && smallest < largest;
        if !is_coded {
            return None;
        }
        let unit = exponent(largest);
        let top = log2(largest, unit);
        let bottom = log2(smallest, unit).max(top - DEPTH);
        Some(Self { unit, bottom, range: top - bottom })
    }

    fn round_trip(self, x: f32) -> f32 {
        let step = self.range * (1.0 / STEPS);
        let inverse = STEPS / self.range;
        let half = step.mul_add(-EIGHTH_LN2, 1.5);
        let shift = inverse.mul_add(-self.bottom, half);
        let code = inverse.mul_add(log2(x.abs(), self.unit), shift).floor();
        if code < 1.0 {
            return 0.0_f32.copysign(x);
        }
        let power = step.mul_add(code - 1.0, self.bottom);
        let whole = power.round_ties_even();
        let value = polynomial(&EXP2, power - whole) * 2.0_f32.powi(whole as i32 + self.unit);
        value.copysign(x)
    }
}

/// The exponent of the largest power of two that is not above `x`; for zero and subnormal numbers one below that of
/// the smallest normal number.
fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

/// log2 of `x` in units of 2^`unit`. It is meaningless, but below all codes, for zero and subnormal numbers.
fn log2(x: f32, unit: i32) -> f32 {
    let fraction = f32::from_bits(x.to_bits() & 0x007f_ffff | 1.0_f32.to_bits()) - 1.0;
    polynomial(&LOG2, fraction).mul_add(fraction, (exponent(x) - unit) as f32)
}

/// By Horner's rule, with one rounding for each coefficient.
fn polynomial(coefficients: &[f32], x: f32) -> f32 {
    coefficients.iter().rev().copied().reduce(|sum, c| sum.mul_add(x, c)).unwrap_or(0.0)
}
