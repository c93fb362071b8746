use super::{MAX_TOPK, Shape};

/// One rank that a token goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fan {
    /// The destination rank.
    pub rank: u32,
    /// The number of the row among those that this source sends to `rank`: an index into
    /// its part of [`SendPlan::tokens`], and the offset from the source's first row at that rank.
    pub index: u32,
}

/// The plan of a source, from its own routing: the rows that it sends to each rank, and the places
/// where combine will find the answers for a token.
///
/// A token counts once per rank, for any number of its experts there. All memory is allocated by
/// [`new`](Self::new); it is O(R + E + M * min(K, R)).
#[derive(Debug)]
pub struct SendPlan {
    shape: Shape,
    rank_counts: Vec<u32>,
    expert_counts: Vec<u32>,
    rank_offsets: Vec<u32>,
    tokens: Vec<u32>,
    fan_offsets: Vec<u32>,
    fan: Vec<Fan>,
    /// Token + 1 of the last token that was assigned to each rank; `[R]`.
    last_token: Vec<u32>,
}

impl SendPlan {
    /// An empty plan (T = 0) with room for M tokens.
    pub fn new(shape: &Shape) -> Self {
        let ranks = shape.ranks as usize;
        let most_tokens = shape.max_tokens as usize;
        let most_rows = most_tokens * shape.max_fanout() as usize;
        let mut fan_offsets = Vec::with_capacity(most_tokens + 1);
        fan_offsets.push(0);
        Self {
            shape: *shape,
            rank_counts: vec![0; ranks],
            expert_counts: vec![0; shape.experts as usize],
            rank_offsets: vec![0; ranks + 1],
            tokens: Vec::with_capacity(most_rows),
            fan_offsets,
            fan: Vec::with_capacity(most_rows),
            last_token: vec![0; ranks],
        }
    }

    /// Replaces the plan by the one for `topk_idx` (`[T, K]`, row-major), in O(T*K + R + E) and
    /// without allocation.
    ///
    /// The routing must have passed [`validate_topk`](super::validate_topk) for the same shape.
    ///
    /// # Panics
    /// May panic on a routing that was not checked.
    pub fn build(&mut self, topk_idx: &[i64]) {
        let topk = self.shape.topk as usize;
        debug_assert_eq!(topk_idx.len() % topk, 0);
        debug_assert!(topk_idx.len() / topk <= self.shape.max_tokens as usize);
        self.rank_counts.fill(0);
        self.expert_counts.fill(0);
        self.last_token.fill(0);
        self.fan.clear();
        self.fan_offsets.clear();
        self.fan_offsets.push(0);
        for (row, stamp) in topk_idx.chunks_exact(topk).zip(1..) {
            self.add_token(row, stamp);
        }
        self.sort_by_rank();
    }

    /// Counts one token and appends its fan-out. `stamp` is the token's number + 1.
    fn add_token(&mut self, row: &[i64], stamp: u32) {
        let local_experts = self.shape.local_experts();
        let mut ranks = [0; MAX_TOPK as usize];
        let mut fanout = 0;
        // From the highest k down, a rank is met first at its highest selecting k: combine order in
        // reverse.
        for &expert in row.iter().rev() {
            let Ok(expert) = u32::try_from(expert) else { continue };
            self.expert_counts[expert as usize] += 1;
            let rank = expert / local_experts;
            let last = &mut self.last_token[rank as usize];
            if *last != stamp {
                *last = stamp;
                ranks[fanout] = rank;
                fanout += 1;
            }
        }
        for &rank in ranks[..fanout].iter().rev() {
            let count = &mut self.rank_counts[rank as usize];
            self.fan.push(Fan { rank, index: *count });
            *count += 1;
        }
        self.fan_offsets.push(self.fan.len() as u32);
    }

    /// Derives offsets and token lists from the counts and the fan-out.
    fn sort_by_rank(&mut self) {
        let mut sum = 0;
        for (offset, &count) in self.rank_offsets[1..].iter_mut().zip(&self.rank_counts) {
            sum += count;
            *offset = sum;
        }
        self.tokens.resize(self.fan.len(), 0);
        for (token, ends) in (0..).zip(self.fan_offsets.windows(2)) {
            for fan in &self.fan[ends[0] as usize..ends[1] as usize] {
                self.tokens[(self.rank_offsets[fan.rank as usize] + fan.index) as usize] = token;
            }
        }
    }

    /// T: the tokens of the last build.
    pub fn num_tokens(&self) -> u32 {
        self.fan_offsets.len() as u32 - 1
    }

    /// Rows that this source sends to each rank; `[R]`.
    pub fn rank_counts(&self) -> &[u32] {
        &self.rank_counts
    }

    /// Tokens of this source that select each expert; `[E]`, so those of rank r are
    /// `[r*El, (r+1)*El)`.
    pub fn expert_counts(&self) -> &[u32] {
        &self.expert_counts
    }

    /// The start of each rank's list in [`tokens`](Self::tokens); `[R + 1]`, the last entry is the
    /// total number of rows sent.
    pub fn rank_offsets(&self) -> &[u32] {
        &self.rank_offsets
    }

    /// Source token ids by destination rank, then by token; at most M * min(K, R). Those of a rank begin at its
    /// [offset](Self::rank_offsets), in the order of the rows that this source sends there.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The ranks that `token` goes to, in combine order: ascending by their highest selecting k.
    pub fn fan(&self, token: u32) -> &[Fan] {
        let token = token as usize;
        &self.fan[self.fan_offsets[token] as usize..self.fan_offsets[token + 1] as usize]
    }

    /// Bytes that [`new`](Self::new) needs for `shape`.
    pub fn bytes_for(shape: &Shape) -> u64 {
        let [ranks, experts] = [shape.ranks, shape.experts].map(u64::from);
        let [tokens, fanout] = [shape.max_tokens, shape.max_fanout()].map(u64::from);
        // Counts, offsets and stamps per rank; counts per expert; tokens and fan per row; offsets
        // per token.
        4 * (3 * ranks + 1) + 4 * experts + (4 + 8) * tokens * fanout + 4 * (tokens + 1)
    }

    /// Bytes allocated, all of them by [`new`](Self::new).
    pub fn memory_bytes(&self) -> usize {
        let words = self.rank_counts.capacity()
            + self.expert_counts.capacity()
            + self.rank_offsets.capacity()
            + self.tokens.capacity()
            + self.fan_offsets.capacity()
            + self.last_token.capacity();
        words * size_of::<u32>() + self.fan.capacity() * size_of::<Fan>()
    }
}
