//! The input of one rank to a step: rows of random values, uniform random routing.

use anyhow::{Context, Result};
use half::bf16;
use tokenyard_core::communicator::{
    Cast, Combine, CommunicatorOptions, Dispatch, Received, Sizes as WhoCounts, TensorMut,
    TensorRef,
};
use tokenyard_core::moe::{Layout, Shape};

use crate::job::Sizes;

/// A small generator (splitmix64): every rank can compute every other rank's routing.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// `[T, K]` distinct experts per token, uniform.
pub(crate) fn routing(sizes: &Sizes, rank: u32) -> Vec<i64> {
    let mut random = Random(0x7061_6972 + u64::from(rank));
    let mut experts: Vec<i64> = (0..i64::from(sizes.experts)).collect();
    let mut all = Vec::with_capacity(sizes.tokens as usize * sizes.topk as usize);
    for _ in 0..sizes.tokens {
        for k in 0..sizes.topk as usize {
            let left = (experts.len() - k) as u64;
            experts.swap(k, k + random.below(left) as usize);
        }
        all.extend_from_slice(&experts[..sizes.topk as usize]);
    }
    all
}

/// (token, rank) pairs of one source, by destination. A negative expert stands for none.
pub(crate) fn pairs(sizes: &Sizes, ranks: u32, routing: &[i64]) -> Vec<u64> {
    let local = i64::from(sizes.experts / ranks);
    let mut pairs = vec![0; ranks as usize];
    for token in routing.chunks(sizes.topk as usize) {
        for (rank, count) in (0_i64..).zip(&mut pairs) {
            let goes = |expert: &i64| *expert >= 0 && expert / local == rank;
            *count += u64::from(token.iter().any(goes));
        }
    }
    pairs
}

/// The tensors of one rank. All their memory has been touched.
#[derive(Debug)]
pub struct Workload {
    sizes: Sizes,
    rank: u32,
    /// Rows that this rank sends to each rank.
    sends: Vec<u64>,
    /// Rows that each rank sends to this one.
    receives: Vec<u64>,
    x: Vec<bf16>,
    topk_idx: Vec<i64>,
    topk_weights: Vec<f32>,
    out: Vec<bf16>,
}

impl Workload {
    /// The tensors of `rank` of `ranks`.
    pub fn new(sizes: &Sizes, rank: u32, ranks: u32) -> Self {
        let topk_idx = routing(sizes, rank);
        let mut random = Random(u64::from(rank));
        let elements = sizes.tokens as usize * sizes.hidden as usize;
        let mut value = || bf16::from_f32(random.below(2001) as f32 / 1000.0 - 1.0);
        let receives = (0..ranks)
            .map(|source| pairs(sizes, ranks, &routing(sizes, source))[rank as usize])
            .collect();
        Self {
            sizes: *sizes,
            rank,
            sends: pairs(sizes, ranks, &topk_idx),
            receives,
            x: (0..elements).map(|_| value()).collect(),
            topk_weights: vec![1.0 / sizes.topk as f32; topk_idx.len()],
            topk_idx,
            out: vec![bf16::ONE; elements],
        }
    }

    /// The shape of the exchange, checked.
    ///
    /// # Errors
    /// No communicator accepts these sizes.
    pub fn shape(sizes: &Sizes, ranks: u32) -> Result<Shape> {
        let Sizes { tokens: max_tokens, hidden, topk, experts } = *sizes;
        Ok(Shape { ranks, experts, topk, hidden, max_tokens }.new()?)
    }

    /// The communicator for these sizes.
    pub fn options(sizes: &Sizes) -> CommunicatorOptions {
        CommunicatorOptions::new(sizes.experts, sizes.topk, sizes.hidden, sizes.tokens)
    }

    /// The rank that owns the tensors.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The experts of this rank's tokens, `[T, K]`.
    pub fn topk_idx(&self) -> &[i64] {
        &self.topk_idx
    }

    /// Rows that this rank sends to each rank, itself included.
    pub fn sends(&self) -> &[u64] {
        &self.sends
    }

    /// (token, domain) pairs of this rank's tokens with other domains, among `domains` domains.
    pub fn crossings(&self, domains: u32) -> u64 {
        let ranks = self.sends.len() as u32;
        let pairs = pairs(&self.sizes, domains, &self.topk_idx);
        let mine = self.rank / (ranks / domains);
        pairs.iter().zip(0..).filter(|(_, domain)| *domain != mine).map(|(rows, _)| rows).sum()
    }

    /// Rows that each rank sends to this one.
    pub fn receives(&self) -> &[u64] {
        &self.receives
    }

    /// The bytes of the input rows of this rank.
    pub fn x_bytes(&self) -> &[u8] {
        // SAFETY: initialised plain numbers, viewed as bytes for as long as they are borrowed.
        unsafe { std::slice::from_raw_parts(self.x.as_ptr().cast(), size_of_val(&*self.x)) }
    }

    /// The bytes of the rows that combine writes.
    pub fn out_bytes_mut(&mut self) -> &mut [u8] {
        let bytes = size_of_val(&*self.out);
        // SAFETY: as in `x_bytes`, borrowed exclusively; every pattern is a bf16.
        unsafe { std::slice::from_raw_parts_mut(self.out.as_mut_ptr().cast(), bytes) }
    }

    /// The arguments of a dispatch.
    ///
    /// # Errors
    /// None for sizes that the communicator accepted.
    pub fn dispatch(&self, layout: Layout, cast: Cast) -> Result<Dispatch<'_>> {
        let (tokens, topk) = (self.sizes.tokens as usize, self.sizes.topk as usize);
        let x = TensorRef::from_slice(self.x.as_slice(), tokens, self.sizes.hidden as usize)?;
        let topk_idx = TensorRef::from_slice(self.topk_idx.as_slice(), tokens, topk)?;
        Ok(Dispatch {
            topk_weights: Some(TensorRef::from_slice(self.topk_weights.as_slice(), tokens, topk)?),
            layout,
            cast,
            sizes: WhoCounts::Exact,
            ..Dispatch::new(x, topk_idx)
        })
    }

    /// The arguments of a combine of the rows as they arrived, as for experts that work in place.
    ///
    /// # Errors
    /// None for sizes that the communicator accepted.
    pub fn combine<'a>(&'a mut self, received: &'a Received) -> Result<Combine<'a>> {
        let (tokens, hidden) = (self.sizes.tokens as usize, self.sizes.hidden as usize);
        let out = TensorMut::from_slice(self.out.as_mut_slice(), tokens, hidden)?;
        Ok(Combine::new(received.x(), out))
    }

    /// Checks that as many tokens arrived as were sent here.
    ///
    /// # Errors
    /// The counts differ: the figures would be those of another exchange.
    pub fn check(&self, received: &Received) -> Result<()> {
        let found = received.totals().and_then(|totals| totals.elements::<i64>().first().copied());
        let expected: u64 = self.receives.iter().sum();
        (found == Some(expected as i64))
            .then_some(())
            .with_context(|| format!("found {found:?} tokens received; expected {expected}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { tokens: 200, hidden: 16, topk: 4, experts: 16 };

    #[test]
    fn experts_of_a_token_are_distinct_and_in_range() {
        for token in routing(&SIZES, 3).chunks(4) {
            for (k, expert) in token.iter().enumerate() {
                assert!((0..16).contains(expert) && !token[..k].contains(expert));
            }
        }
    }

    #[test]
    fn what_is_sent_is_what_is_received() {
        let all: Vec<_> = (0..4).map(|rank| Workload::new(&SIZES, rank, 4)).collect();
        for (source, from) in all.iter().enumerate() {
            assert!(from.sends().iter().all(|rows| (1..=200).contains(rows)));
            for (owner, to) in all.iter().enumerate() {
                assert_eq!(from.sends()[owner], to.receives()[source]);
            }
        }
    }
}
