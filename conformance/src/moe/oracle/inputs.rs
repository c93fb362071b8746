//! The inputs of every rank: generated from a case, or given from outside.

use super::case::{Case, GROUP, Input, Invalid, Routing, Values, require};
use super::number::{Elem, RowType};
use super::rng::{Rng, Stream};

/// The inputs of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// One entry per rank.
    pub ranks: Vec<RankInputs>,
}

/// The inputs of one rank. T is `case.tokens_of(rank)`.
#[derive(Clone, Debug, PartialEq)]
pub struct RankInputs {
    /// `[T, H]` elements of `case.sent_elem()`.
    pub x: Vec<u8>,
    /// `[T, S]` 4-byte scales, for opaque input only.
    pub scales: Option<Vec<u8>>,
    /// `[T, K]`; a negative entry selects nothing.
    pub topk_idx: Vec<i64>,
    /// `[T, K]`; entries where `topk_idx` is negative are ignored.
    pub topk_weights: Option<Vec<f32>>,
    /// `case.combine.biases` arrays of `[T, H]` elements of `case.combine.row`.
    pub biases: Vec<Vec<u8>>,
}

impl Inputs {
    /// The inputs of all ranks, generated. The same on every machine.
    pub fn all(case: &Case) -> Self {
        Self { ranks: (0..case.ranks).map(|rank| Self::for_rank(case, rank)).collect() }
    }

    /// The inputs without the `lost` ranks: those ranks have no tokens, and no token selects their experts.
    pub fn without(&self, case: &Case, lost: &[usize]) -> Self {
        let mut left = self.clone();
        for (rank, inputs) in left.ranks.iter_mut().enumerate() {
            for expert in &mut inputs.topk_idx {
                let hosted =
                    usize::try_from(*expert).is_ok_and(|e| lost.contains(&case.rank_of(e)));
                if hosted || lost.contains(&rank) {
                    *expert = -1;
                }
            }
        }
        left
    }

    /// The inputs of one rank, generated without those of the others.
    pub fn for_rank(case: &Case, rank: usize) -> RankInputs {
        RankInputs::with_routing(case, rank, generate_topk(case, rank))
    }

    /// Inputs from outside, for example a recorded routing. Rows and weights that were not recorded
    /// come from [`RankInputs::with_routing`].
    ///
    /// # Errors
    /// Names the rank and the mistake: a size, an expert that does not exist, or an expert that one token
    /// selects twice.
    pub fn given(case: &Case, ranks: Vec<RankInputs>) -> Result<Self, Invalid> {
        case.validate()?;
        require(ranks.len() == case.ranks, || {
            format!("found inputs of {} ranks; expected {}", ranks.len(), case.ranks)
        })?;
        for (rank, inputs) in ranks.iter().enumerate() {
            inputs.validate(case, rank)?;
        }
        Ok(Self { ranks })
    }
}

impl RankInputs {
    /// Generated rows, scales, weights and biases for this `topk_idx` (`[T, K]`).
    ///
    /// For a replay, pass the `topk_idx` of the first dispatch and a case with another seed, or
    /// another input.
    pub fn with_routing(case: &Case, rank: usize, topk_idx: Vec<i64>) -> Self {
        let tokens = topk_idx.len() / case.topk;
        let stream = |stream| Rng::new(case.seed, stream, rank);
        let mut x = match case.input {
            Input::Plain(row) | Input::Cast(row, _) => {
                let mut rng = stream(Stream::Rows);
                let mut x = values(&mut rng, tokens, case.hidden, row);
                if case.values == Values::SomeOdd {
                    put_odd_values(&mut rng, &mut x, row);
                }
                x
            }
            Input::Opaque(_) => {
                let has_nan = case.values != Values::Usual;
                e4m3_codes(&mut stream(Stream::Rows), tokens * case.hidden, has_nan)
            }
        };
        let mut scales = match case.input {
            Input::Opaque(count) => {
                let mut rng = stream(Stream::Scales);
                let mut scales = opaque_scales(&mut rng, tokens * count);
                if case.values == Values::SomeOdd {
                    put_odd_values(&mut rng, &mut scales, RowType::F32);
                }
                Some(scales)
            }
            _ => None,
        };
        if case.values == Values::Filler {
            x.fill(0xff);
            scales.iter_mut().for_each(|scales| scales.fill(0xff));
        }
        let mut rng = stream(Stream::Weights);
        let topk_weights =
            case.weights.then(|| topk_idx.iter().map(|_| unit_value(&mut rng)).collect());
        let biases = [Stream::Bias0, Stream::Bias1]
            .into_iter()
            .take(case.combine.biases)
            .map(|bias| values(&mut stream(bias), tokens, case.hidden, case.combine.row))
            .collect();
        Self { x, scales, topk_idx, topk_weights, biases }
    }

    /// The K selections of `token`.
    pub fn selections(&self, case: &Case, token: usize) -> &[i64] {
        &self.topk_idx[token * case.topk..][..case.topk]
    }

    /// The weight of selection `k` of `token`, if tokens have weights.
    pub fn weight(&self, case: &Case, token: usize, k: usize) -> Option<f32> {
        self.topk_weights.as_ref().map(|weights| weights[token * case.topk + k])
    }

    /// The weight that a combine has for selection `k` of `token`; `None` where it leaves the expert out.
    /// The weights differ from the dispatch's: they are in the opposite order.
    pub fn late_weight(&self, case: &Case, token: usize, k: usize) -> Option<f32> {
        let is_left_out = (token + k).is_multiple_of(3);
        let weight = self.weight(case, token, case.topk - 1 - k);
        weight.filter(|_| !is_left_out)
    }

    fn validate(&self, case: &Case, rank: usize) -> Result<(), Invalid> {
        let tokens = case.tokens_of(rank);
        let size = |name: &str, found: Option<usize>, expected: Option<usize>| {
            require(found == expected, || {
                format!("rank {rank}, {name}: found length {found:?}; expected {expected:?}")
            })
        };
        size("topk_idx", Some(self.topk_idx.len()), Some(tokens * case.topk))?;
        size("x", Some(self.x.len()), Some(tokens * case.hidden * case.sent_elem().bytes()))?;
        let scales = match case.input {
            Input::Opaque(count) => Some(tokens * count * Elem::Bits32.bytes()),
            _ => None,
        };
        size("scales", self.scales.as_ref().map(Vec::len), scales)?;
        let weights = case.weights.then_some(tokens * case.topk);
        size("topk_weights", self.topk_weights.as_ref().map(Vec::len), weights)?;
        size("biases", Some(self.biases.len()), Some(case.combine.biases))?;
        for bias in &self.biases {
            let expected = tokens * case.hidden * case.combine.row.bytes();
            size("bias", Some(bias.len()), Some(expected))?;
        }
        (0..tokens).try_for_each(|token| self.validate_selections(case, rank, token))
    }

    fn validate_selections(&self, case: &Case, rank: usize, token: usize) -> Result<(), Invalid> {
        let selections = self.selections(case, token);
        for (k, expert) in selections.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
            require(*expert < case.experts as i64, || {
                format!(
                    "rank {rank}, token {token}, k {k}: found expert {expert}; expected below {}",
                    case.experts
                )
            })?;
            require(!selections[..k].contains(expert), || {
                format!("rank {rank}, token {token}: found expert {expert} twice; expected once")
            })?;
        }
        Ok(())
    }
}

/// The generated `topk_idx` of one rank, `[T, K]`. [`Routing::Given`] generates as `Uniform`.
fn generate_topk(case: &Case, rank: usize) -> Vec<i64> {
    let mut rng = Rng::new(case.seed, Stream::Routing, rank);
    let busiest = Rng::new(case.seed, Stream::Shared, 0).below(case.experts);
    (0..case.tokens_of(rank)).flat_map(|_| generate_row(case, rank, busiest, &mut rng)).collect()
}

fn generate_row(case: &Case, rank: usize, busiest: usize, rng: &mut Rng) -> Vec<i64> {
    let Case { experts, topk, .. } = *case;
    let mut row: Vec<i64> =
        rng.distinct_below(experts, topk).into_iter().map(|expert| expert as i64).collect();
    match case.routing {
        Routing::Uniform | Routing::Given(_) => {}
        Routing::Skewed => {
            if !row.contains(&(busiest as i64)) {
                row[rng.below(topk)] = busiest as i64;
            }
        }
        Routing::OneExpert => {
            row.fill(-1);
            row[rng.below(topk)] = busiest as i64;
        }
        Routing::OwnRank => {
            let local = case.local_experts();
            row.fill(-1);
            for (k, expert) in rng.distinct_below(local, topk.min(local)).into_iter().enumerate() {
                row[k] = (rank * local + expert) as i64;
            }
        }
        Routing::SomeNegative => {
            for entry in &mut row {
                if rng.below(4) == 0 {
                    *entry = [-1, -1, -2, i64::MIN][rng.below(4)];
                }
            }
        }
        Routing::SomeNothing => {
            if rng.below(3) == 0 {
                row.fill(-1);
            }
        }
        Routing::Nothing => row.fill(-1),
    }
    row
}

/// `rows` rows of values in which a wrong row, a wrong scale or a wrong order of a sum shows.
///
/// Signs are random and mantissas full. Magnitudes spread over 2^8 within a group of 128 channels
/// and groups over 2^16; the smallest groups lie below the 1e-4 at which a cast stops. One element
/// in 32 is zero, and so is one group in 32 (never the first).
fn values(rng: &mut Rng, rows: usize, hidden: usize, row_type: RowType) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows * hidden * row_type.bytes());
    let mut row = Vec::with_capacity(hidden);
    for _ in 0..rows {
        row.clear();
        for group in 0..hidden.div_ceil(GROUP) {
            let exponent = 1 - rng.below(16) as i32;
            let zero = group > 0 && rng.below(32) == 0;
            let width = GROUP.min(hidden - group * GROUP);
            row.extend((0..width).map(|_| if zero { 0.0 } else { value(rng, exponent) }));
        }
        bytes.extend(row_type.encode(&row));
    }
    bytes
}

/// A random value of magnitude 2^(exponent - 7) to 2^(exponent + 1), or zero.
fn value(rng: &mut Rng, exponent: i32) -> f32 {
    let bits = (rng.bits() >> 32) as u32;
    let (sign, step, mantissa) = (bits & 0x8000_0000, (bits >> 23) & 7, bits & 0x007f_ffff);
    if (bits >> 26) & 0x1f == 0 {
        return 0.0;
    }
    let biased = (127 + exponent) as u32 - step;
    f32::from_bits(sign | biased << 23 | mantissa)
}

/// Replaces about one element in 100, so that some groups have several odd values and others have none.
fn put_odd_values(rng: &mut Rng, x: &mut [u8], row_type: RowType) {
    const ODD: [f32; 7] =
        [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, f32::MAX, -0.0];
    for element in x.chunks_mut(row_type.bytes()) {
        if rng.below(100) == 0 {
            element.copy_from_slice(&row_type.encode(&[ODD[rng.below(ODD.len())]]));
        }
    }
}

/// A random weight in (0, 1].
fn unit_value(rng: &mut Rng) -> f32 {
    ((rng.bits() >> 40) + 1) as f32 / (1 << 24) as f32
}

/// Random e4m3 codes; without `has_nan` none of them is NaN.
fn e4m3_codes(rng: &mut Rng, count: usize, has_nan: bool) -> Vec<u8> {
    let code = |rng: &mut Rng| {
        let bits = rng.bits() as u8;
        if bits & 0x7f == 0x7f && !has_nan { 0 } else { bits }
    };
    (0..count).map(|_| code(rng)).collect()
}

/// Random scales: positive f32 from 2^-8 to 2, so that experts may use them as such.
fn opaque_scales(rng: &mut Rng, count: usize) -> Vec<u8> {
    (0..count).flat_map(|_| (value(rng, 0).abs() + 1.0 / 256.0).to_le_bytes()).collect()
}
