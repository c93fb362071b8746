//! The computation of a test's experts.
//!
//! The rule: expert `e` multiplies every value by [`factor`]`(e)` in f32 and rounds to `case.combine.row`;
//! it multiplies a weight that it returns by the same factor in f32. So a row or a weight that reached the
//! wrong expert shows. [`run`] applies the rule to the arrays that a product's dispatch delivered;
//! [`super::expected_round_trip`] applies it to the expected arrays.

use super::case::{Case, Invalid, Layout, Sums, require};
use super::cast::received_values;
use super::number::{RowType, f32s, i32s};
use super::sum::{Term, sum};

/// The outputs of one rank's experts, in the layout of the rows that they received.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertOutput {
    /// As many rows as `x` had, of H elements of `case.combine.row`.
    pub rows: Vec<u8>,
    /// As many weights as were received.
    pub weights: Option<Vec<f32>>,
}

/// The arrays that a rank received, as bytes. The fields are those of [`super::Received`]; arrays may be
/// longer than needed (worst-case sizes).
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// N: the tokens received.
    pub rows: usize,
    /// The rows.
    pub x: &'a [u8],
    /// Their scales.
    pub scales: Option<&'a [u8]>,
    /// Flat and rank-major: local expert ids, i32 `[N, K]` or `[R, M, K]`.
    pub ids: Option<&'a [u8]>,
    /// f32 weights.
    pub weights: Option<&'a [u8]>,
    /// i32 `[El]`: rows of each local expert.
    pub counts: &'a [u8],
}

/// The factor of expert `expert` (its global number): from 1 to below 2, exact in f32, and different for
/// any two of 2048 experts.
pub fn factor(expert: usize) -> f32 {
    // The odd multiplier spreads neighbours far apart, so that bf16 rows distinguish them too.
    1.0 + ((expert * 1237) % 2048) as f32 / 2048.0
}

/// The output of one expert for one row.
pub fn expert_row(expert: usize, row: &[f32], out: RowType) -> Vec<f32> {
    row.iter().map(|value| out.round(value * factor(expert))).collect()
}

/// The weight that an expert returns for a row that came with `weight`.
pub fn returned_weight(expert: usize, weight: f32) -> f32 {
    weight * factor(expert)
}

/// The weight that a rank returns for a selection of another rank's expert, where weights are summed over
/// ranks. Sums of few of these weights are exact.
pub fn weight_elsewhere(rank: usize, k: usize) -> f32 {
    (1 + rank % 8) as f32 / 4.0 + (k % 4) as f32
}

/// The row that the caller returns where a token has one row on a rank: the outputs of the row's experts on this
/// rank, in k order, times their weights where there are weights, summed as combine sums.
pub fn merged_row(experts: &[(usize, Option<f32>)], row: &[f32], out: RowType) -> Vec<f32> {
    let terms: Vec<Term> = experts
        .iter()
        .map(|(expert, weight)| Term { weight: *weight, row: expert_row(*expert, row, out) })
        .collect();
    sum(&terms, row.len(), out)
}

/// Runs the experts of `rank` on the arrays that arrived.
///
/// Values that combine must not read are NaN in the output: rows that hold no token, and weights of
/// selections of other ranks' experts, unless weights are summed over ranks ([`weight_elsewhere`]).
///
/// # Errors
/// Names the array that is missing or too short, or the id or count that is out of range.
pub fn run(case: &Case, rank: usize, arrived: &Arrived<'_>) -> Result<ExpertOutput, Invalid> {
    let row_bytes = case.hidden * case.received_elem().bytes();
    let output_bytes = case.hidden * case.combine.row.bytes();
    let mut output = ExpertOutput {
        rows: vec![0xff; arrived.x.len() / row_bytes * output_bytes],
        weights: arrived.weights.map(|weights| vec![f32::NAN; weights.len() / 4]),
    };
    if let (Sums::WeightsOfAllRanks, Some(weights)) = (case.combine.sums, &mut output.weights) {
        let all = weights.iter_mut().enumerate();
        all.for_each(|(at, weight)| *weight = weight_elsewhere(rank, at % case.topk));
    }
    let weights = arrived.weights.map(f32s);
    for job in jobs(case, rank, arrived)? {
        let row = arrived_row(case, arrived, job.row)?;
        let mut experts = Vec::new();
        for (expert, at) in job.experts {
            let weight = weight_at(weights.as_deref(), at)?;
            // Only merged rows are weighted here; combine does it for the other layouts.
            experts.push((expert, weight.filter(|_| case.layout.has_a_row_per_token())));
            if let (Some(weight), Some(returned)) = (weight, &mut output.weights) {
                returned[at] = returned_weight(expert, weight);
            }
        }
        let merged = merged_row(&experts, &row, case.combine.row);
        let bytes = case.combine.row.encode(&merged);
        output.rows[job.row * output_bytes..][..output_bytes].copy_from_slice(&bytes);
    }
    Ok(output)
}

/// One row of x to work on.
struct Job {
    row: usize,
    /// The global expert, and the place of its weight in the weights array.
    experts: Vec<(usize, usize)>,
}

fn jobs(case: &Case, rank: usize, arrived: &Arrived<'_>) -> Result<Vec<Job>, Invalid> {
    let first_expert = rank * case.local_experts();
    if case.layout.has_a_row_per_token() {
        return jobs_by_token(case, first_expert, arrived);
    }
    let counts = i32s(arrived.counts);
    require(counts.len() == case.local_experts(), || {
        format!("found {} expert counts; expected {}", counts.len(), case.local_experts())
    })?;
    let room = case.ranks * case.max_tokens;
    let mut jobs = Vec::new();
    let mut start = 0;
    for (local, count) in counts.into_iter().enumerate() {
        let count =
            usize::try_from(count).ok().filter(|count| *count <= room).ok_or_else(|| {
                Invalid(format!("local expert {local}: found count {count}; expected 0 to {room}"))
            })?;
        let rows = start..start + count;
        jobs.extend(rows.map(|row| Job { row, experts: vec![(first_expert + local, row)] }));
        start += match case.layout {
            Layout::ExpertMajor { alignment, .. } => count.next_multiple_of(alignment),
            _ => room,
        };
    }
    Ok(jobs)
}

fn jobs_by_token(
    case: &Case,
    first_expert: usize,
    arrived: &Arrived<'_>,
) -> Result<Vec<Job>, Invalid> {
    let ids = i32s(arrived.ids.ok_or_else(|| Invalid("found no ids; expected [rows, K]".into()))?);
    // Among rank-major rows is padding, whose ids name no expert.
    let rows = match case.layout {
        Layout::RankMajor { .. } => case.ranks * case.max_tokens,
        _ => arrived.rows,
    };
    require(ids.len() >= rows * case.topk, || {
        format!("found {} ids; expected at least {}", ids.len(), rows * case.topk)
    })?;
    let mut jobs = Vec::new();
    for (row, ids) in ids.chunks(case.topk).take(rows).enumerate() {
        let mut experts = Vec::new();
        for (k, id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            let local = *id as usize;
            require(local < case.local_experts(), || {
                let limit = case.local_experts();
                format!("row {row}, k {k}: found local expert {id}; expected below {limit}")
            })?;
            experts.push((first_expert + local, row * case.topk + k));
        }
        if !experts.is_empty() {
            jobs.push(Job { row, experts });
        }
    }
    Ok(jobs)
}

fn arrived_row(case: &Case, arrived: &Arrived<'_>, row: usize) -> Result<Vec<f32>, Invalid> {
    let x_bytes = case.hidden * case.received_elem().bytes();
    let scale_bytes = case.scales().map_or(0, |(elem, count)| elem.bytes() * count);
    let x = slice_of("x", arrived.x, row, x_bytes)?;
    let scales = slice_of("scales", arrived.scales.unwrap_or(&[]), row, scale_bytes)?;
    Ok(received_values(case, x, scales))
}

fn slice_of<'a>(
    name: &str,
    array: &'a [u8],
    row: usize,
    bytes: usize,
) -> Result<&'a [u8], Invalid> {
    array.get(row * bytes..(row + 1) * bytes).ok_or_else(|| {
        let rows = array.len() / bytes.max(1);
        Invalid(format!("{name}: found {rows} rows; expected at least {}", row + 1))
    })
}

fn weight_at(weights: Option<&[f32]>, at: usize) -> Result<Option<f32>, Invalid> {
    let Some(weights) = weights else { return Ok(None) };
    weights.get(at).copied().map(Some).ok_or_else(|| {
        Invalid(format!("found {} weights; expected at least {}", weights.len(), at + 1))
    })
}
