//! Sums of rows, for combine.
//!
//! A sum is its first term plus the others in order, in f32, rounded once to the row type. That
//! makes its bits a function of the routing alone: no CPU, thread count or vector width changes
//! them (only the payload of a NaN is left open).

use crate::convert::{Bf16, Element, F16, F32, FloatType};
use crate::multiversion::multiversion;

/// Channels that are summed over all terms before the next ones are looked at. Their f32 sums fit
/// into registers, so that memory is read and written once.
const BLOCK: usize = 64;

multiversion! {
    /// Sums `terms` into `out`: rows of type `float`, each of `out.len()` bytes.
    ///
    /// No terms give +0.0. One term is copied.
    ///
    /// # Panics
    /// If a term is shorter than `out`; in debug builds, if it is longer.
    pub fn sum_rows, sum_rows_portable(float: FloatType, out: &mut [u8], terms: &[&[u8]]) {
        match (float, terms) {
            (_, []) => out.fill(0),
            (_, [term]) => out.copy_from_slice(term),
            (FloatType::Bf16, _) => sum::<Bf16, false>(out, terms, &[]),
            (FloatType::F16, _) => sum::<F16, false>(out, terms, &[]),
            (FloatType::F32, _) => sum::<F32, false>(out, terms, &[]),
        }
    }
}

multiversion! {
    /// Sums `terms` into `out`, each times its weight: the first product is rounded to f32, every
    /// further one is a fused multiply-add.
    ///
    /// Otherwise as [`sum_rows`].
    ///
    /// # Panics
    /// If a term is shorter than `out` or has no weight; in debug builds, if there is too much of
    /// either.
    pub fn sum_rows_weighted, sum_rows_weighted_portable(
        float: FloatType,
        out: &mut [u8],
        terms: &[&[u8]],
        weights: &[f32],
    ) {
        debug_assert_eq!(terms.len(), weights.len());
        match float {
            _ if terms.is_empty() => out.fill(0),
            FloatType::Bf16 => sum::<Bf16, true>(out, terms, weights),
            FloatType::F16 => sum::<F16, true>(out, terms, weights),
            FloatType::F32 => sum::<F32, true>(out, terms, weights),
        }
    }
}

/// Sums at least one term.
#[inline(always)]
fn sum<E: Element, const WEIGHTED: bool>(out: &mut [u8], terms: &[&[u8]], weights: &[f32]) {
    debug_assert!(terms.iter().all(|term| term.len() == out.len()));
    let (blocks, rest) = E::split_mut(out).as_chunks_mut::<BLOCK>();
    for (i, block) in blocks.iter_mut().enumerate() {
        sum_block::<E, WEIGHTED, BLOCK>(block, i * BLOCK, terms, weights);
    }
    let done = blocks.len() * BLOCK;
    for (i, element) in rest.as_chunks_mut::<1>().0.iter_mut().enumerate() {
        sum_block::<E, WEIGHTED, 1>(element, done + i, terms, weights);
    }
}

/// Sums the `N` channels from `start` on.
#[inline(always)]
fn sum_block<E: Element, const WEIGHTED: bool, const N: usize>(
    out: &mut [E::Bytes; N],
    start: usize,
    terms: &[&[u8]],
    weights: &[f32],
) {
    let mut sums = [0f32; N];
    for (i, term) in terms.iter().enumerate() {
        let term = &E::split(term)[start..start + N];
        for (sum, &bytes) in sums.iter_mut().zip(term) {
            let x = E::decode(bytes);
            *sum = match (i == 0, WEIGHTED) {
                (true, false) => x,
                (true, true) => weights[i] * x,
                (false, false) => *sum + x,
                (false, true) => x.mul_add(weights[i], *sum),
            };
        }
    }
    for (out, &sum) in out.iter_mut().zip(&sums) {
        *out = E::encode(sum);
    }
}

#[cfg(test)]
mod tests;
