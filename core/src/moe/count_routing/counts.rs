//! The counts of a routing, before any row is sent.

use crate::moe::Shape;

/// The number of a rank's tokens for each rank and expert. DeepEP calls it a dispatch layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingCounts {
    /// `[R]`: tokens that go to each rank, each once.
    pub rank_tokens: Vec<u32>,
    /// `[E]`: tokens that select each expert.
    pub expert_tokens: Vec<u32>,
    /// `[T, R]`: true if a token goes to a rank.
    pub is_token_in_rank: Vec<bool>,
}

impl RoutingCounts {
    /// Counts `topk_idx`, `[T, K]`, which has passed [`validate_topk`](crate::moe::validate_topk).
    pub fn new(shape: &Shape, topk_idx: &[i64]) -> Self {
        let (ranks, topk) = (shape.ranks as usize, shape.topk as usize);
        let mut counts = Self {
            rank_tokens: vec![0; ranks],
            expert_tokens: vec![0; shape.experts as usize],
            is_token_in_rank: vec![false; topk_idx.len() / topk * ranks],
        };
        for (token, row) in topk_idx.chunks_exact(topk).enumerate() {
            for expert in row.iter().filter_map(|expert| u32::try_from(*expert).ok()) {
                let rank = shape.rank_of(expert) as usize;
                counts.expert_tokens[expert as usize] += 1;
                let is_in = &mut counts.is_token_in_rank[token * ranks + rank];
                counts.rank_tokens[rank] += u32::from(!*is_in);
                *is_in = true;
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_counts_once_for_each_rank_and_for_each_expert() {
        let shape = Shape { ranks: 2, experts: 4, topk: 3, hidden: 16, max_tokens: 4 };
        let counts = RoutingCounts::new(&shape, &[0, 1, 3, -1, 2, -1, -1, -1, -1]);
        assert_eq!(counts.rank_tokens, [1, 2]);
        assert_eq!(counts.expert_tokens, [1, 1, 1, 1]);
        assert_eq!(counts.is_token_in_rank, [true, true, false, true, false, false]);
    }
}
