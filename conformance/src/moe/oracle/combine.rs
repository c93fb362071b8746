//! The rows that a rank must get back.

use super::case::{Case, Combine, Invalid, Layout, Sums, require};
use super::cast::{received_row, received_values};
use super::compare::{Array, Origin};
use super::experts::{ExpertOutput, expert_row, merged_row, returned_weight, weight_elsewhere};
use super::inputs::{Inputs, RankInputs};
use super::logfmt::round_trip;
use super::number::{Elem, RowType};
use super::routing::{Destination, Placement, Token, destinations};
use super::sum::{Term, sum};

/// The results of a combine on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Combined {
    /// `[T, H]` elements of `case.combine.row`.
    pub x: Array,
    /// f32 `[T, K]`, where experts return weights: for each selection the weight that came back for its
    /// copy, 0 where nothing is selected.
    pub weights: Option<Array>,
}

/// The results that `rank` must get for these expert outputs of all ranks.
///
/// # Errors
/// Names the rank whose output is too short, or the only rank that returns weights or does not.
pub fn expected_combine(
    case: &Case,
    inputs: &Inputs,
    outputs: &[ExpertOutput],
    rank: usize,
) -> Result<Combined, Invalid> {
    let returned = Returned::new(case, inputs, outputs)?;
    let mine = &inputs.ranks[rank];
    let x = combined_rows(case, mine, rank, |token, destination| {
        returned.partial(Token { rank, token }, destination)
    });
    let weights = returned.has_weights().then(|| {
        combined_weights(case, mine, rank, |token, k, host| {
            returned.weight(Token { rank, token }, k, host)
        })
    });
    Ok(Combined { x, weights })
}

/// The results that `rank` must get if dispatch is right and all experts obey the rule of
/// [`super::experts`], where no rank drops rows.
/// Needs the inputs of `rank` alone.
pub fn expected_round_trip(case: &Case, mine: &RankInputs, rank: usize) -> Combined {
    round_trip_without(case, mine, rank, |_, _, _| false)
}

/// As [`expected_round_trip`], where ranks drop rows. It needs the inputs of all ranks.
pub fn expected_capped_round_trip(case: &Case, inputs: &Inputs, rank: usize) -> Combined {
    let placements: Vec<Placement> =
        (0..case.ranks).map(|rank| Placement::new(case, inputs, rank)).collect();
    round_trip_without(case, &inputs.ranks[rank], rank, |token, k, host| {
        let (token, placement) = (Token { rank, token }, &placements[host]);
        match case.layout.has_a_row_per_token() {
            true => !placement.token_rows.contains_key(&token),
            false => !placement.copy_rows.contains_key(&(token, k)),
        }
    })
}

/// `is_dropped(token, k, host)`: the copy of a selection, or the token's only row on its host, is dropped there.
fn round_trip_without(
    case: &Case,
    mine: &RankInputs,
    rank: usize,
    is_dropped: impl Fn(usize, usize, usize) -> bool,
) -> Combined {
    let expert = |token, k: usize| mine.selections(case, token)[k] as usize;
    let x = combined_rows(case, mine, rank, |token, destination| {
        let received = received_row(case, mine, token);
        let values = received_values(case, &received.x, &received.scales);
        let left = |k: &&usize| !is_dropped(token, **k, destination.rank);
        let ks: Vec<usize> = destination.ks.iter().filter(left).copied().collect();
        match case.layout {
            Layout::Flat | Layout::RankMajor { .. } if ks.is_empty() => None,
            Layout::Flat | Layout::RankMajor { .. } => {
                let weighted = |k: &usize| (expert(token, *k), mine.weight(case, token, *k));
                let experts: Vec<_> = ks.iter().map(weighted).collect();
                Some(merged_row(&experts, &values, case.combine.row))
            }
            Layout::ExpertMajor { .. } | Layout::Packed => {
                Some(sum_of_copies(case, mine, token, &ks, |k| {
                    expert_row(expert(token, k), &values, case.combine.row)
                }))
            }
        }
    });
    let weights = case.weights.then(|| {
        combined_weights(case, mine, rank, |token, k, host| {
            let selected = usize::try_from(mine.selections(case, token)[k]).ok();
            (!is_dropped(token, k, host)).then(|| {
                match selected.filter(|expert| case.rank_of(*expert) == host) {
                    Some(expert) => {
                        returned_weight(expert, mine.weight(case, token, k).unwrap_or(0.0))
                    }
                    None => weight_elsewhere(host, k),
                }
            })
        })
    });
    Combined { x, weights }
}

/// The combined rows: biases, then one partial per destination rank, summed in that order; among
/// several domains, one row per domain instead, which is the sum of its ranks' partials.
/// `partial(token, destination)` is the row that comes back for a token from a rank; none where the rank has dropped
/// its row. A rank that has dropped all copies of a token has a sum of nothing: +0.0.
fn combined_rows(
    case: &Case,
    mine: &RankInputs,
    rank: usize,
    partial: impl Fn(usize, &Destination) -> Option<Vec<f32>>,
) -> Array {
    let row_type = case.combine.row;
    let row_bytes = case.hidden * row_type.bytes();
    let tokens = case.tokens_of(rank);
    let mut rows = Array::new("combined_x", row_type.into(), case.hidden, tokens);
    rows.any_nan = true;
    for token in 0..tokens {
        let biases =
            mine.biases.iter().map(|bias| row_type.decode(&bias[token * row_bytes..][..row_bytes]));
        let destinations = destinations(case, mine.selections(case, token));
        let (destinations, partials): (Vec<_>, Vec<_>) = destinations
            .into_iter()
            .filter_map(|to| partial(token, &to).map(|partial| (to, partial)))
            .unzip();
        let partials =
            if case.domains > 1 { domain_rows(case, &destinations, partials) } else { partials };
        let terms: Vec<Term> =
            biases.chain(partials).map(|row| Term { weight: None, row }).collect();
        let sum = sum(&terms, case.hidden, row_type);
        rows.push(token, Origin::Token { rank, token }, &row_type.encode(&sum));
    }
    rows
}

/// One row per domain: the partials of its ranks, summed in their order and rounded. Domains come in the
/// order of their highest selecting k.
fn domain_rows(
    case: &Case,
    destinations: &[Destination],
    partials: Vec<Vec<f32>>,
) -> Vec<Vec<f32>> {
    let mut domains: Vec<(usize, Option<usize>, Vec<Term>)> = Vec::new();
    for (destination, row) in destinations.iter().zip(partials) {
        let domain = case.domain_of(destination.rank);
        let highest = destination.ks.last().copied();
        let term = Term { weight: None, row };
        match domains.iter_mut().find(|(known, ..)| *known == domain) {
            Some((_, last, terms)) => {
                *last = highest.max(*last);
                terms.push(term);
            }
            None => domains.push((domain, highest, vec![term])),
        }
    }
    domains.sort_by_key(|(_, highest, _)| *highest);
    domains.iter().map(|(.., terms)| sum(terms, case.hidden, partial_type(case))).collect()
}

/// The partial of a rank in a layout with one row per expert: the rows of the selections `ks`, in
/// that order, weighted on request. `row(k)` is the output of the expert of selection `k`.
fn sum_of_copies(
    case: &Case,
    mine: &RankInputs,
    token: usize,
    ks: &[usize],
    row: impl Fn(usize) -> Vec<f32>,
) -> Vec<f32> {
    let term = |k: &usize| {
        let weight = match (case.combine.weighted, case.combine.sums.is_late()) {
            (false, _) => None,
            (true, false) => mine.weight(case, token, *k),
            (true, true) => Some(mine.late_weight(case, token, *k)?),
        };
        Some(Term { weight, row: row(*k) })
    };
    let terms: Vec<Term> = ks.iter().filter_map(term).collect();
    let partial = sum(&terms, case.hidden, partial_type(case));
    if case.combine.sums.is_coded() { round_trip(&partial) } else { partial }
}

/// The type to which the sums of ranks and of domains are rounded.
fn partial_type(case: &Case) -> RowType {
    if case.combine.sums.rounds_by_rank() { case.combine.row } else { RowType::F32 }
}

/// The combined weights; `weight(token, k, rank)` is the weight that a rank returns for a selection; none where it has
/// dropped the row.
fn combined_weights(
    case: &Case,
    mine: &RankInputs,
    rank: usize,
    weight: impl Fn(usize, usize, usize) -> Option<f32>,
) -> Array {
    let tokens = case.tokens_of(rank);
    let mut weights = Array::new("combined_weights", Elem::F32, case.topk, tokens);
    for token in 0..tokens {
        let selections = mine.selections(case, token);
        let destinations = destinations(case, selections);
        let row = selections.iter().enumerate().map(|(k, expert)| {
            if case.combine.sums == Sums::WeightsOfAllRanks {
                let returned = |destination: &Destination| weight(token, k, destination.rank);
                return sum_of_weights(case, &destinations, returned);
            }
            let returned = |expert| weight(token, k, case.rank_of(expert));
            usize::try_from(*expert).ok().and_then(returned).unwrap_or(0.0)
        });
        let bytes: Vec<u8> = row.flat_map(f32::to_le_bytes).collect();
        weights.push(token, Origin::Token { rank, token }, &bytes);
    }
    weights
}

/// The weights that the ranks return for one selection, summed as rows are.
fn sum_of_weights(
    case: &Case,
    destinations: &[Destination],
    weight: impl Fn(&Destination) -> Option<f32>,
) -> f32 {
    let one =
        Case { hidden: 1, combine: Combine { row: RowType::F32, ..case.combine }, ..case.clone() };
    let returned =
        |destination: &Destination| Some((destination.clone(), vec![weight(destination)?]));
    let (destinations, weights): (Vec<_>, Vec<_>) =
        destinations.iter().filter_map(returned).unzip();
    let rows = if case.domains > 1 { domain_rows(&one, &destinations, weights) } else { weights };
    let terms: Vec<Term> = rows.into_iter().map(|row| Term { weight: None, row }).collect();
    sum(&terms, 1, RowType::F32)[0]
}

/// The expert outputs of all ranks, and the places of rows and weights in them.
struct Returned<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    outputs: &'a [ExpertOutput],
    placements: Vec<Placement>,
}

impl<'a> Returned<'a> {
    fn new(
        case: &'a Case,
        inputs: &'a Inputs,
        outputs: &'a [ExpertOutput],
    ) -> Result<Self, Invalid> {
        let expected = case.ranks;
        require(outputs.len() == expected, || {
            format!("found expert outputs of {} ranks; expected {expected}", outputs.len())
        })?;
        let placements: Vec<Placement> =
            (0..case.ranks).map(|rank| Placement::new(case, inputs, rank)).collect();
        let returned = Self { case, inputs, outputs, placements };
        (0..case.ranks).try_for_each(|rank| returned.validate(rank))?;
        Ok(returned)
    }

    fn validate(&self, rank: usize) -> Result<(), Invalid> {
        let Self { case, outputs, placements, .. } = self;
        let rows = placements[rank].rows;
        let (found, expected) = (outputs[rank].rows.len(), rows * self.row_bytes());
        require(found >= expected, || {
            format!("rank {rank}: found {found} bytes of expert rows; expected at least {expected}")
        })?;
        let found = outputs[rank].weights.as_ref().map(Vec::len);
        require(found.is_some() == self.has_weights(), || {
            format!("rank {rank}: found weights: {}; expected as on rank 0", found.is_some())
        })?;
        let columns = if case.layout.has_a_row_per_token() { case.topk } else { 1 };
        let expected = rows * columns;
        let found = found.unwrap_or(expected);
        require(found >= expected, || {
            format!("rank {rank}: found {found} weights; expected at least {expected}")
        })
    }

    fn row_bytes(&self) -> usize {
        self.case.hidden * self.case.combine.row.bytes()
    }

    fn has_weights(&self) -> bool {
        self.outputs[0].weights.is_some()
    }

    fn row(&self, rank: usize, row: usize) -> Vec<f32> {
        let bytes = &self.outputs[rank].rows[row * self.row_bytes()..][..self.row_bytes()];
        self.case.combine.row.decode(bytes)
    }

    fn partial(&self, token: Token, destination: &Destination) -> Option<Vec<f32>> {
        let host = destination.rank;
        let placement = &self.placements[host];
        match self.case.layout {
            Layout::Flat | Layout::RankMajor { .. } => {
                placement.token_rows.get(&token).map(|row| self.row(host, *row))
            }
            Layout::ExpertMajor { .. } | Layout::Packed => {
                let mine = &self.inputs.ranks[token.rank];
                let left = |k: &&usize| placement.copy_rows.contains_key(&(token, **k));
                let ks: Vec<usize> = destination.ks.iter().filter(left).copied().collect();
                Some(sum_of_copies(self.case, mine, token.token, &ks, |k| {
                    self.row(host, placement.copy_rows[&(token, k)])
                }))
            }
        }
    }

    fn weight(&self, token: Token, k: usize, host: usize) -> Option<f32> {
        let placement = &self.placements[host];
        let at = match self.case.layout {
            Layout::Flat | Layout::RankMajor { .. } => {
                placement.token_rows.get(&token)? * self.case.topk + k
            }
            Layout::ExpertMajor { .. } | Layout::Packed => *placement.copy_rows.get(&(token, k))?,
        };
        self.outputs[host].weights.as_ref().map(|weights| weights[at])
    }
}
