//! Sums of rows, for combine.
//!
//! A sum is its first term plus the others in order, in f32, rounded once to the row type. That
//! makes its bits a function of the routing alone: no CPU, thread count or vector width changes
//! them (only the payload of a NaN is left open).

use crate::convert::{load_some, store_some};
use crate::element::{Bf16, Element, F16, F32, FloatType};
use crate::lanes::{Lanes, multiversion};

/// Lanes that are summed over all terms before the next ones are looked at. They fit into
/// registers, so that memory is read and written once.
const BLOCK: usize = 8;

multiversion! {
    /// Sums `terms` into `out`: rows of type `float`, each of `out.len()` bytes.
    ///
    /// No terms give +0.0. One term is copied. Terms may lie in memory that other processes write,
    /// but only before the call: the caller that makes the slices upholds that no thread writes during it.
    ///
    /// # Panics
    /// If a term is shorter than `out`; in debug builds, if it is longer.
    pub fn sum_rows, sum_rows_on<L>(float: FloatType, out: &mut [u8], terms: &[&[u8]]) {
        match (float, terms) {
            (_, []) => out.fill(0),
            (_, [term]) => out.copy_from_slice(term),
            (FloatType::Bf16, _) => sum::<Bf16, L, false>(out, terms, &[]),
            (FloatType::F16, _) => sum::<F16, L, false>(out, terms, &[]),
            (FloatType::F32, _) => sum::<F32, L, false>(out, terms, &[]),
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
    pub fn sum_rows_weighted, sum_rows_weighted_on<L>(
        float: FloatType,
        out: &mut [u8],
        terms: &[&[u8]],
        weights: &[f32],
    ) {
        debug_assert_eq!(terms.len(), weights.len());
        match float {
            _ if terms.is_empty() => out.fill(0),
            FloatType::Bf16 => sum::<Bf16, L, true>(out, terms, weights),
            FloatType::F16 => sum::<F16, L, true>(out, terms, weights),
            FloatType::F32 => sum::<F32, L, true>(out, terms, weights),
        }
    }
}

multiversion! {
    /// Sums `terms`, rows of type `float`, into a row of f32: nothing is rounded. With weights each is multiplied by
    /// its own, as in [`sum_rows_weighted`]. No terms give +0.0.
    ///
    /// # Panics
    /// If a term is shorter than `out` or has no weight.
    pub fn sum_rows_exactly, sum_rows_exactly_on<L>(
        float: FloatType,
        out: &mut [u8],
        terms: &[&[u8]],
        weights: Option<&[f32]>,
    ) {
        match (float, weights) {
            _ if terms.is_empty() => out.fill(0),
            (FloatType::Bf16, None) => mix::<F32, Bf16, L, false>(out, &[], terms, &[]),
            (FloatType::F16, None) => mix::<F32, F16, L, false>(out, &[], terms, &[]),
            (FloatType::F32, None) => mix::<F32, F32, L, false>(out, &[], terms, &[]),
            (FloatType::Bf16, Some(w)) => mix::<F32, Bf16, L, true>(out, &[], terms, w),
            (FloatType::F16, Some(w)) => mix::<F32, F16, L, true>(out, &[], terms, w),
            (FloatType::F32, Some(w)) => mix::<F32, F32, L, true>(out, &[], terms, w),
        }
    }
}

multiversion! {
    /// Sums `biases`, rows of type `float`, and `terms`, rows of f32, into a row of type `float`: rounded once. Nothing
    /// to sum gives +0.0.
    ///
    /// # Panics
    /// If a term is shorter than `out`.
    pub fn sum_exact_rows, sum_exact_rows_on<L>(
        float: FloatType,
        out: &mut [u8],
        biases: &[&[u8]],
        terms: &[&[u8]],
    ) {
        match float {
            _ if biases.is_empty() && terms.is_empty() => out.fill(0),
            FloatType::Bf16 => mix::<Bf16, F32, L, false>(out, biases, terms, &[]),
            FloatType::F16 => mix::<F16, F32, L, false>(out, biases, terms, &[]),
            FloatType::F32 => mix::<F32, F32, L, false>(out, biases, terms, &[]),
        }
    }
}

/// Sums rows of two types into one of the first, in f32.
#[inline(always)]
fn mix<Out: Element, Term: Element, L: Lanes, const WEIGHTED: bool>(
    out: &mut [u8],
    firsts: &[&[u8]],
    terms: &[&[u8]],
    weights: &[f32],
) {
    let (lanes, rest) = Out::split_mut(out).as_chunks_mut::<8>();
    let done = lanes.len() * 8;
    for (i, to) in lanes.iter_mut().enumerate() {
        let mut sum = None;
        for first in firsts {
            let x = Out::load::<L>(&Out::split(first).as_chunks::<8>().0[i]);
            sum = Some(sum.map_or(x, |sum: L| sum.add(x)));
        }
        for (index, term) in terms.iter().enumerate() {
            let x = Term::load::<L>(&Term::split(term).as_chunks::<8>().0[i]);
            sum = Some(add_to::<L, WEIGHTED>(sum, x, index, weights));
        }
        Out::store(sum.unwrap_or(L::splat(0.0)), to);
    }
    if !rest.is_empty() {
        let mut sum = None;
        for first in firsts {
            let x = load_some::<Out, L>(&Out::split(first)[done..]);
            sum = Some(sum.map_or(x, |sum: L| sum.add(x)));
        }
        for (index, term) in terms.iter().enumerate() {
            let x = load_some::<Term, L>(&Term::split(term)[done..]);
            sum = Some(add_to::<L, WEIGHTED>(sum, x, index, weights));
        }
        store_some::<Out, L>(sum.unwrap_or(L::splat(0.0)), rest);
    }
}

/// The sum with term `i`, which is x; the first one replaces nothing.
#[inline(always)]
fn add_to<L: Lanes, const WEIGHTED: bool>(sum: Option<L>, x: L, i: usize, weights: &[f32]) -> L {
    match (sum, WEIGHTED) {
        (None, false) => x,
        (None, true) => x.mul(L::splat(weights[i])),
        (Some(sum), false) => sum.add(x),
        (Some(sum), true) => x.mul_add(L::splat(weights[i]), sum),
    }
}

/// Sums at least one term.
#[inline(always)]
fn sum<E: Element, L: Lanes, const WEIGHTED: bool>(
    out: &mut [u8],
    terms: &[&[u8]],
    weights: &[f32],
) {
    debug_assert!(terms.iter().all(|term| term.len() == out.len()));
    let (lanes, rest) = E::split_mut(out).as_chunks_mut::<8>();
    let done = lanes.len() * 8;
    let (blocks, singles) = lanes.as_chunks_mut::<BLOCK>();
    for (i, block) in blocks.iter_mut().enumerate() {
        sum_block::<E, L, WEIGHTED, BLOCK>(block, i * BLOCK, terms, weights);
    }
    let start = blocks.len() * BLOCK;
    for (i, single) in singles.as_chunks_mut().0.iter_mut().enumerate() {
        sum_block::<E, L, WEIGHTED, 1>(single, start + i, terms, weights);
    }
    if !rest.is_empty() {
        let mut sum = L::splat(0.0);
        for (i, term) in terms.iter().enumerate() {
            let x = load_some::<E, L>(&E::split(term)[done..]);
            sum = add_term::<L, WEIGHTED>(sum, x, i, weights);
        }
        store_some::<E, L>(sum, rest);
    }
}

/// Sums the `N` lanes of eight channels from lane `start` on.
#[inline(always)]
fn sum_block<E: Element, L: Lanes, const WEIGHTED: bool, const N: usize>(
    out: &mut [[E::Bytes; 8]; N],
    start: usize,
    terms: &[&[u8]],
    weights: &[f32],
) {
    let mut sums = [L::splat(0.0); N];
    for (i, term) in terms.iter().enumerate() {
        let term = &E::split(term).as_chunks::<8>().0[start..start + N];
        for (sum, from) in sums.iter_mut().zip(term) {
            *sum = add_term::<L, WEIGHTED>(*sum, E::load(from), i, weights);
        }
    }
    for (&sum, to) in sums.iter().zip(out) {
        E::store(sum, to);
    }
}

/// The sum with term `i`, which is x; the first term replaces it.
#[inline(always)]
fn add_term<L: Lanes, const WEIGHTED: bool>(sum: L, x: L, i: usize, weights: &[f32]) -> L {
    match (i == 0, WEIGHTED) {
        (true, false) => x,
        (true, true) => x.mul(L::splat(weights[i])),
        (false, false) => sum.add(x),
        (false, true) => x.mul_add(L::splat(weights[i]), sum),
    }
}

#[cfg(test)]
mod tests;
