//! The arrays that a rank must receive.

use super::case::{Case, Layout};
use super::cast::{ReceivedRow, received_row};
use super::compare::{Array, Mismatch, Origin};
use super::inputs::Inputs;
use super::number::Elem;
use super::routing::{Copy, Placement, Token};

/// The arrays that one rank receives. Arrays that its layout does not have are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// N: tokens received, each counted once.
    pub rows: usize,
    /// The true number of rows: N where a token has one, X with its padding (expert-major), or those of all
    /// experts (packed).
    pub true_rows: usize,
    /// `[N, H]` flat, `[X, H]` expert-major, `[El, R*M, H]` packed, `[R, M, H]` rank-major.
    pub x: Array,
    /// As `x`, with the scales of a row instead of its elements. Where they lie by columns, these are the same
    /// after [`scales_by_row`].
    pub scales: Option<Array>,
    /// Flat `[N, K]` and rank-major `[R, M, K]`: i32, the local expert of each selection, or -1 if it lives
    /// elsewhere.
    pub ids: Option<Array>,
    /// f32 as `ids` where there are some (0 where the id is -1), `[X]` expert-major, `[El, R*M]` packed.
    pub weights: Option<Array>,
    /// i32 `[N]` (flat and expert-major), `[El, R*M]` (packed) or `[R, M]` (rank-major): source rank * M + source
    /// token, or the token alone.
    pub source: Array,
    /// Expert-major: i32 `[N, K]`, the row of each selection's copy, or -1 if it is elsewhere.
    pub slots: Option<Array>,
    /// i32 `[El]`: rows of each local expert, padding not counted.
    pub counts: Array,
    /// All but packed: i32 `[R]`, tokens from each source rank.
    pub rank_rows: Option<Array>,
    /// All but packed: i32 `[R]`, tokens from each source rank and from all before it.
    pub rank_ends: Option<Array>,
    /// Expert-major: i32 `[El]`, the row after the last row of each local expert.
    pub expert_ends: Option<Array>,
    /// Packed: i64 `[El, R]`, `count | begin << 32` of the rows of each source rank.
    pub ranges: Option<Array>,
    /// Where rows are capped: i32 `[El]`, the dropped rows of each local expert.
    pub dropped: Option<Array>,
    /// As `dropped`: i32 `[1]`, 1 where any row was dropped.
    pub overflow: Option<Array>,
}

impl Received {
    /// The arrays that this layout has.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let Self { x, scales, ids, weights, source, slots, counts, ranges, .. } = self;
        let Self { rank_rows, rank_ends, expert_ends, dropped, overflow, .. } = self;
        let optional = [scales, ids, weights, slots, rank_rows, rank_ends, expert_ends, ranges];
        let capped = [dropped, overflow];
        [x, source, counts].into_iter().chain(optional.into_iter().chain(capped).flatten())
    }

    /// Expects the rows of lost sources as they are if they had places and did not arrive: zeros, whose
    /// source, ids and slots are -1. Counts do not change.
    pub fn clear_rows_of(&mut self, lost: &[usize]) {
        let Self { x, scales, ids, weights, source, slots, .. } = self;
        let zeros = [Some(x), scales.as_mut(), weights.as_mut()];
        zeros.into_iter().flatten().for_each(|array| array.clear_rows_of(lost, 0));
        let none = [Some(source), ids.as_mut(), slots.as_mut()];
        none.into_iter().flatten().for_each(|array| array.clear_rows_of(lost, 0xff));
    }

    /// Compares every array with the one that `found` has under its name.
    ///
    /// # Errors
    /// The first array that is missing or differs.
    pub fn compare<'a>(
        &self,
        found: impl Fn(&'static str) -> Option<&'a [u8]>,
    ) -> Result<(), Mismatch> {
        self.arrays().try_for_each(|array| {
            let bytes = found(array.name).ok_or(Mismatch::Missing { array: array.name })?;
            array.compare(bytes)
        })
    }
}

/// The arrays that `rank` must receive.
pub fn expected_dispatch(case: &Case, inputs: &Inputs, rank: usize) -> Received {
    let placement = Placement::new(case, inputs, rank);
    let receiver = Receiver { case, inputs, rank, placement: &placement };
    match case.layout {
        Layout::Flat => receiver.by_token(false),
        Layout::RankMajor { zero_padding } => receiver.by_token(zero_padding),
        Layout::ExpertMajor { zero_padding, .. } => receiver.expert_major(zero_padding),
        Layout::Packed => receiver.packed(),
    }
}

/// The scales `[El, R*M, S]` of a packed output that has them as `[El, S, R*M]`.
pub fn scales_by_row(case: &Case, by_column: &[u8]) -> Vec<u8> {
    let (room, columns) = (case.ranks * case.max_tokens, case.scales().map_or(0, |(_, n)| n));
    let words: Vec<&[u8]> = by_column.chunks(4).collect();
    let mut by_row = Vec::with_capacity(by_column.len());
    for expert in words.chunks(room * columns) {
        for row in 0..room {
            let of_row = expert.chunks(room).filter_map(|column| column.get(row));
            by_row.extend(of_row.flat_map(|word| word.iter().copied()));
        }
    }
    by_row
}

struct Receiver<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    rank: usize,
    placement: &'a Placement,
}

impl Receiver<'_> {
    /// A row for each token that came; with `zero_padding` zeros where there is none.
    fn by_token(&self, zero_padding: bool) -> Received {
        let Self { case, placement, .. } = *self;
        let mut rows = self.row_arrays();
        let mut ids = self.array("ids", Elem::I32, case.topk, placement.rows);
        let mut weights =
            case.weights.then(|| self.array("weights", Elem::F32, case.topk, placement.rows));
        let tokens = placement.tokens_by_row();
        for row in 0..placement.rows {
            let Some(token) = tokens.get(&row).copied() else {
                let behind = Origin::Behind(row / case.max_tokens);
                ids.fill(row, behind, 0xff);
                let arrays = [Some(&mut rows.x), rows.scales.as_mut(), weights.as_mut()];
                let arrays = arrays.into_iter().flatten().filter(|_| zero_padding);
                arrays.for_each(|array| array.fill(row, behind, 0));
                continue;
            };
            let origin = Origin::Token { rank: token.rank, token: token.token };
            rows.push(row, origin, &self.received_row(token));
            let local: Vec<i32> = (0..case.topk).map(|k| self.local_expert(token, k)).collect();
            ids.push(row, origin, &i32_bytes(&local));
            if let Some(weights) = &mut weights {
                let row_weights =
                    (0..case.topk).map(|k| if local[k] < 0 { 0.0 } else { self.weight(token, k) });
                let bytes: Vec<u8> = row_weights.flat_map(f32::to_le_bytes).collect();
                weights.push(row, origin, &bytes);
            }
        }
        let (source, rank_rows) = (self.token_sources(), Some(self.rank_rows()));
        let rank_ends = Some(self.rank_ends());
        Received { ids: Some(ids), weights, rank_rows, rank_ends, ..self.received(rows, source) }
    }

    fn expert_major(&self, zero_padding: bool) -> Received {
        let Self { case, placement, .. } = *self;
        let mut rows = self.row_arrays();
        let mut weights = case.weights.then(|| self.array("weights", Elem::F32, 1, placement.rows));
        self.push_copies(&mut rows, weights.as_mut(), zero_padding);
        let mut slots = self.array("slots", Elem::I32, case.topk, placement.tokens.len());
        for (row, token) in placement.tokens.iter().enumerate() {
            let copy_row = |k| placement.copy_rows.get(&(*token, k)).map_or(-1, |row| *row as i32);
            let row_slots: Vec<i32> = (0..case.topk).map(copy_row).collect();
            let origin = Origin::Token { rank: token.rank, token: token.token };
            slots.push(row, origin, &i32_bytes(&row_slots));
        }
        let (source, rank_rows) = (self.token_sources(), Some(self.rank_rows()));
        Received {
            slots: Some(slots),
            weights,
            rank_rows,
            rank_ends: Some(self.rank_ends()),
            expert_ends: Some(self.expert_ends()),
            ..self.received(rows, source)
        }
    }

    fn packed(&self) -> Received {
        let Self { case, placement, .. } = *self;
        let mut rows = self.row_arrays();
        let mut weights = case.weights.then(|| self.array("weights", Elem::F32, 1, placement.rows));
        self.push_copies(&mut rows, weights.as_mut(), false);
        let mut source = self.array("source", Elem::I32, 1, placement.rows);
        for (local, copies) in placement.experts.iter().enumerate() {
            for (j, copy) in copies.iter().enumerate() {
                let number = match case.source_tokens {
                    true => copy.token.token as i32,
                    false => copy.token.source(case),
                };
                let bytes = number.to_le_bytes();
                source.push(placement.starts[local] + j, self.copy_origin(copy, local), &bytes);
            }
        }
        Received { weights, ranges: Some(self.ranges()), ..self.received(rows, source) }
    }

    /// Fills the rows of every local expert; then, on request, its padding with zeros.
    fn push_copies(&self, rows: &mut RowArrays, mut weights: Option<&mut Array>, padding: bool) {
        let zero = ReceivedRow {
            x: vec![0; rows.x.row_bytes()],
            scales: vec![0; rows.scales.as_ref().map_or(0, Array::row_bytes)],
        };
        let received: Vec<ReceivedRow> =
            self.placement.tokens.iter().map(|token| self.received_row(*token)).collect();
        for (local, copies) in self.placement.experts.iter().enumerate() {
            let start = self.placement.starts[local];
            for (j, copy) in copies.iter().enumerate() {
                let origin = self.copy_origin(copy, local);
                rows.push(start + j, origin, &received[copy.flat_row]);
                if let Some(weights) = &mut weights {
                    let bytes = self.weight(copy.token, copy.k).to_le_bytes();
                    weights.push(start + j, origin, &bytes);
                }
            }
            if !padding {
                continue;
            }
            let end = self.placement.starts.get(local + 1).unwrap_or(&self.placement.rows);
            for row in start + copies.len()..*end {
                let origin = Origin::Padding(self.rank * self.case.local_experts() + local);
                rows.push(row, origin, &zero);
                if let Some(weights) = &mut weights {
                    weights.push(row, origin, &0f32.to_le_bytes());
                }
            }
        }
    }

    /// The arrays that all layouts have.
    fn received(&self, rows: RowArrays, source: Array) -> Received {
        let Placement { tokens, experts, .. } = self.placement;
        let counts: Vec<i32> = experts.iter().map(|copies| copies.len() as i32).collect();
        let dropped: Vec<i32> = self.placement.dropped.iter().map(|rows| *rows as i32).collect();
        let overflow = i32::from(dropped.iter().any(|rows| *rows > 0));
        let capped = |name, values: &[i32]| {
            let is_capped = self.case.cap_of(self.rank).is_some();
            is_capped.then(|| Array::table(name, Elem::I32, 1, i32_bytes(values)))
        };
        Received {
            rows: tokens.len(),
            true_rows: match self.case.layout {
                Layout::Flat | Layout::RankMajor { .. } => tokens.len(),
                Layout::ExpertMajor { .. } => self.placement.rows,
                Layout::Packed => experts.iter().map(Vec::len).sum(),
            },
            x: rows.x,
            scales: rows.scales,
            ids: None,
            weights: None,
            source,
            slots: None,
            counts: Array::table("counts", Elem::I32, 1, i32_bytes(&counts)),
            rank_rows: None,
            rank_ends: None,
            expert_ends: None,
            ranges: None,
            dropped: capped("dropped", &dropped),
            overflow: capped("overflow", &[overflow]),
        }
    }

    fn row_arrays(&self) -> RowArrays {
        let Self { case, placement, .. } = *self;
        RowArrays {
            x: self.array("x", case.received_elem(), case.hidden, placement.rows),
            scales: case
                .scales()
                .map(|(elem, width)| self.array("scales", elem, width, placement.rows)),
        }
    }

    /// Outputs with fixed places always have their worst-case sizes, so no unspecified rows follow.
    fn array(&self, name: &'static str, elem: Elem, width: usize, rows: usize) -> Array {
        let mut array = Array::new(name, elem, width, rows);
        array.open_ended = self.case.worst_case && !self.case.layout.has_fixed_places();
        array
    }

    /// s*M + t of the N tokens, and -1 for padding.
    fn token_sources(&self) -> Array {
        let tokens = self.placement.tokens_by_row();
        let is_rank_major = matches!(self.case.layout, Layout::RankMajor { .. });
        let room = if is_rank_major { self.placement.rows } else { tokens.len() };
        let mut source = self.array("source", Elem::I32, 1, room);
        for row in 0..room {
            match tokens.get(&row) {
                Some(token) => {
                    let origin = Origin::Token { rank: token.rank, token: token.token };
                    source.push(row, origin, &token.source(self.case).to_le_bytes());
                }
                None => source.fill(row, Origin::Behind(row / self.case.max_tokens), 0xff),
            }
        }
        source
    }

    fn rank_rows(&self) -> Array {
        let tokens_from = |rank| self.placement.tokens.iter().filter(|t| t.rank == rank).count();
        let counts: Vec<i32> = (0..self.case.ranks).map(|rank| tokens_from(rank) as i32).collect();
        Array::table("rank_rows", Elem::I32, 1, i32_bytes(&counts))
    }

    fn rank_ends(&self) -> Array {
        let tokens_up_to = |rank| self.placement.tokens.iter().filter(|t| t.rank <= rank).count();
        let ends: Vec<i32> = (0..self.case.ranks).map(|rank| tokens_up_to(rank) as i32).collect();
        Array::table("rank_ends", Elem::I32, 1, i32_bytes(&ends))
    }

    fn expert_ends(&self) -> Array {
        let Placement { starts, experts, .. } = self.placement;
        let ends: Vec<i32> =
            starts.iter().zip(experts).map(|(start, rows)| (start + rows.len()) as i32).collect();
        Array::table("expert_ends", Elem::I32, 1, i32_bytes(&ends))
    }

    fn ranges(&self) -> Array {
        let mut ranges = Vec::new();
        for copies in &self.placement.experts {
            for rank in 0..self.case.ranks {
                let count = copies.iter().filter(|copy| copy.token.rank == rank).count() as i64;
                let begin = copies.iter().filter(|copy| copy.token.rank < rank).count() as i64;
                ranges.extend((count | begin << 32).to_le_bytes());
            }
        }
        Array::table("ranges", Elem::I64, self.case.ranks, ranges)
    }

    fn received_row(&self, token: Token) -> ReceivedRow {
        received_row(self.case, &self.inputs.ranks[token.rank], token.token)
    }

    /// The local number of the expert that `token` selected with `k`, or -1 if it lives elsewhere.
    fn local_expert(&self, token: Token, k: usize) -> i32 {
        let expert = self.inputs.ranks[token.rank].selections(self.case, token.token)[k];
        match usize::try_from(expert) {
            Ok(expert) if self.case.rank_of(expert) == self.rank => {
                (expert % self.case.local_experts()) as i32
            }
            _ => -1,
        }
    }

    fn weight(&self, token: Token, k: usize) -> f32 {
        self.inputs.ranks[token.rank].weight(self.case, token.token, k).unwrap_or(0.0)
    }

    fn copy_origin(&self, copy: &Copy, local: usize) -> Origin {
        let expert = self.rank * self.case.local_experts() + local;
        Origin::Copy { rank: copy.token.rank, token: copy.token.token, expert }
    }
}

/// `x` and `scales`, which are always filled together.
struct RowArrays {
    x: Array,
    scales: Option<Array>,
}

impl RowArrays {
    fn push(&mut self, row: usize, origin: Origin, received: &ReceivedRow) {
        self.x.push(row, origin, &received.x);
        if let Some(scales) = &mut self.scales {
            scales.push(row, origin, &received.scales);
        }
    }
}

fn i32_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
