//! The ranks that get each token, and its row there.

use std::collections::BTreeMap;

use super::case::{Case, Layout};
use super::inputs::Inputs;

/// One rank that a token goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The rank.
    pub rank: usize,
    /// The selections that are hosted there, ascending.
    pub ks: Vec<usize>,
}

/// The ranks that a token with these K selections goes to, ascending by their highest selecting k:
/// the order in which combine adds them.
pub fn destinations(case: &Case, selections: &[i64]) -> Vec<Destination> {
    let mut by_rank: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (k, expert) in selections.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
        by_rank.entry(case.rank_of(*expert as usize)).or_default().push(k);
    }
    let mut destinations: Vec<Destination> =
        by_rank.into_iter().map(|(rank, ks)| Destination { rank, ks }).collect();
    destinations.sort_by_key(|destination| destination.ks.last().copied());
    destinations
}

/// A token of a source rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Token {
    /// s: the source rank.
    pub rank: usize,
    /// t: its number there.
    pub token: usize,
}

impl Token {
    /// The number that the source array holds for this token: s*M + t.
    pub fn source(&self, case: &Case) -> i32 {
        (self.rank * case.max_tokens + self.token) as i32
    }
}

/// The copy of a received token for one of its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The token.
    pub token: Token,
    /// The selection that asked for the expert.
    pub k: usize,
    /// The token's place among the N tokens received.
    pub flat_row: usize,
}

/// The place of every row on one receiving rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The N tokens received, by source rank, then token: the rows of the flat layout.
    pub tokens: Vec<Token>,
    /// Per local expert, its rows in the same order.
    pub experts: Vec<Vec<Copy>>,
    /// Per local expert, its first row in the expert-major or packed layout; all 0 in the others.
    pub starts: Vec<usize>,
    /// All rows of x: N, X, El*R*M or R*M.
    pub rows: usize,
    /// The row of each token that comes here: its flat row, or in the rank-major layout that in its source's block.
    pub token_rows: BTreeMap<Token, usize>,
    /// The row of each selection (token, k) whose expert lives here, in the expert-major or packed
    /// layout; empty in the others.
    pub copy_rows: BTreeMap<(Token, usize), usize>,
    /// Per local expert, the copies that a cap drops. They are in no other field.
    pub dropped: Vec<usize>,
}

impl Placement {
    /// The tokens that come here, by their row in `token_rows`.
    pub fn tokens_by_row(&self) -> BTreeMap<usize, Token> {
        self.token_rows.iter().map(|(token, row)| (*row, *token)).collect()
    }

    /// The tokens that `rank` receives, and their rows.
    pub fn new(case: &Case, inputs: &Inputs, rank: usize) -> Self {
        let mut tokens = Vec::new();
        let mut experts = vec![Vec::new(); case.local_experts()];
        for (source, inputs) in inputs.ranks.iter().enumerate() {
            for token in 0..case.tokens_of(source) {
                let selections = inputs.selections(case, token);
                let here = destinations(case, selections).into_iter().find(|d| d.rank == rank);
                let Some(here) = here else { continue };
                let token = Token { rank: source, token };
                for k in here.ks {
                    let local = selections[k] as usize - rank * case.local_experts();
                    experts[local].push(Copy { token, k, flat_row: tokens.len() });
                }
                tokens.push(token);
            }
        }
        match case.cap_of(rank) {
            None => Self::lay_out(case, tokens, experts),
            Some(most) if case.layout == Layout::Flat => {
                // Of flat rows the first P stay, and the copies of their tokens.
                let copies = experts.clone();
                tokens.truncate(most);
                experts.iter_mut().for_each(|copies| copies.retain(|copy| copy.flat_row < most));
                Self::lay_out(case, tokens, experts).with_dropped_of(&copies)
            }
            Some(most) => {
                let copies = experts.clone();
                Self::lay_out(case, tokens, experts).cut(most).with_dropped_of(&copies)
            }
        }
    }

    fn lay_out(case: &Case, tokens: Vec<Token>, experts: Vec<Vec<Copy>>) -> Self {
        let token_rows = match case.layout {
            Layout::RankMajor { .. } => rows_by_rank(case, &tokens),
            _ => tokens.iter().zip(0..).map(|(token, row)| (*token, row)).collect(),
        };
        let (mut starts, mut copy_rows, mut rows) = (Vec::new(), BTreeMap::new(), 0);
        for copies in &experts {
            starts.push(rows);
            let room = match case.layout {
                Layout::Flat | Layout::RankMajor { .. } => continue,
                Layout::ExpertMajor { alignment, .. } => copies.len().next_multiple_of(alignment),
                Layout::Packed => case.ranks * case.max_tokens,
            };
            let placed = copies.iter().zip(rows..).map(|(copy, row)| ((copy.token, copy.k), row));
            copy_rows.extend(placed);
            rows += room;
        }
        match case.layout {
            Layout::Flat => rows = tokens.len(),
            Layout::RankMajor { .. } => rows = case.ranks * case.max_tokens,
            Layout::ExpertMajor { .. } | Layout::Packed => {}
        }
        let dropped = vec![0; experts.len()];
        Self { tokens, experts, starts, rows, token_rows, copy_rows, dropped }
    }

    /// Without the expert-major rows from `most` on.
    fn cut(mut self, most: usize) -> Self {
        self.copy_rows.retain(|_, row| *row < most);
        for (copies, start) in self.experts.iter_mut().zip(&mut self.starts) {
            copies.truncate(most.saturating_sub(*start));
            *start = most.min(*start);
        }
        Self { rows: most.min(self.rows), ..self }
    }

    /// Counts the rows of `copies` that are left out.
    fn with_dropped_of(self, copies: &[Vec<Copy>]) -> Self {
        let left = self.experts.iter().map(Vec::len);
        let dropped = copies.iter().zip(left).map(|(all, left)| all.len() - left).collect();
        Self { dropped, ..self }
    }
}

/// The place of each token in the block of its source.
fn rows_by_rank(case: &Case, tokens: &[Token]) -> BTreeMap<Token, usize> {
    let mut next: Vec<usize> = (0..case.ranks).map(|rank| rank * case.max_tokens).collect();
    let mut place = |token: &Token| {
        next[token.rank] += 1;
        (*token, next[token.rank] - 1)
    };
    tokens.iter().map(&mut place).collect()
}
