//! The rows that arrived at a rank, and its experts' outputs for them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow};
use tokenyard_core::communicator::{Received, TensorRef};
use tokenyard_core::moe::ScaleLayout;

use crate::moe::oracle::{self, Arrived, Case, ExpertOutput, Inputs};

/// The arrays of an output, by the oracle's names.
pub(crate) const ARRAYS: [&str; 13] = [
    "x",
    "scales",
    "ids",
    "weights",
    "source",
    "slots",
    "counts",
    "rank_rows",
    "rank_ends",
    "expert_ends",
    "ranges",
    "dropped",
    "overflow",
];

/// The array of an output that the oracle calls `name`.
pub(crate) fn array<'a>(received: &'a Received, name: &str) -> Option<TensorRef<'a>> {
    match name {
        "x" => Some(received.x()),
        "scales" => received.scales(),
        "ids" => received.ids(),
        "weights" => received.weights(),
        "source" => received.source(),
        "slots" => received.slots(),
        "counts" => received.expert_counts(),
        "rank_rows" => received.source_counts(),
        "rank_ends" => received.source_ends(),
        "expert_ends" => received.expert_ends(),
        "ranges" => received.ranges(),
        "dropped" => received.dropped(),
        "overflow" => received.overflow(),
        _ => None,
    }
}

/// Compares the rows that arrived on `rank` with the oracle's.
///
/// # Errors
/// The first difference.
pub fn check_received(
    case: &Case,
    inputs: &Inputs,
    rank: usize,
    received: &Received,
) -> Result<()> {
    compare_received(case, &oracle::expected_dispatch(case, inputs, rank), received)
}

/// Compares the rows that arrived with the expected ones.
///
/// # Errors
/// The first difference.
pub fn compare_received(
    case: &Case,
    expected: &oracle::Received,
    received: &Received,
) -> Result<()> {
    let (found, wanted) = (totals(received)?, [expected.rows, expected.true_rows]);
    if found != wanted.map(|total| total as i64) {
        return Err(anyhow!("totals: found N and rows {found:?}, expected {wanted:?}"));
    }
    if !case.worst_case && received.tokens() != expected.rows {
        return Err(anyhow!("found {} tokens, expected {}", received.tokens(), expected.rows));
    }
    check_capped(case, received)?;
    let mut arrays = BTreeMap::new();
    for name in ARRAYS {
        if let Some(tensor) = array(received, name) {
            arrays.insert(name, by_row(case, name, tensor.to_vec()?));
        }
    }
    check_scale_shape(case, received)?;
    expected.compare(|name| arrays.get(name).map(Vec::as_slice)).map_err(|e| anyhow!("{e}"))
}

/// Rows of a cap bound what an output takes, and its flags come with a cap alone.
fn check_capped(case: &Case, received: &Received) -> Result<()> {
    let cap = received.overflow().is_some();
    let most = case.max_rows.iter().copied().filter(|rows| *rows > 0).max();
    if let (true, Some(most)) = (cap, most) {
        let found = [received.rows(), received.x().rows()];
        if found.iter().any(|rows| *rows > most) {
            return Err(anyhow!("found {found:?} rows of an output; expected at most {most}"));
        }
    }
    if (cap || received.dropped().is_some()) && most.is_none() {
        return Err(anyhow!("found dropped rows or an overflow; expected none without a cap"));
    }
    Ok(())
}

/// An array of an output with the values of each row together, as the oracle has them.
pub(crate) fn by_row(case: &Case, name: &str, bytes: Vec<u8>) -> Vec<u8> {
    match name {
        "scales" if case.scale_columns => oracle::scales_by_row(case, &bytes),
        _ => bytes,
    }
}

/// Whether scales have the shape of their layout.
fn check_scale_shape(case: &Case, received: &Received) -> Result<()> {
    let Some((scales, (_, columns))) = received.scales().zip(case.scales()) else { return Ok(()) };
    let (layout, expected) = match case.scale_columns {
        true => {
            let shape = [case.local_experts() * columns, case.ranks * case.max_tokens];
            (ScaleLayout::ColumnMajor, shape)
        }
        false => (ScaleLayout::RowMajor, [received.rows(), columns]),
    };
    let (found, strides) = ([scales.rows(), scales.cols()], scales.strides());
    if found != expected || strides != [expected[1], 1] || received.scale_layout() != layout {
        return Err(anyhow!(
            "found {:?} scales of shape {found:?} and strides {strides:?}; expected {layout:?} of {expected:?}",
            received.scale_layout()
        ));
    }
    Ok(())
}

/// The true N, and the true number of rows.
fn totals(received: &Received) -> Result<[i64; 2]> {
    let totals = received.totals().context("the output has no totals")?.to_vec()?;
    let totals = oracle::number::i64s(&totals);
    totals.try_into().map_err(|found| anyhow!("totals: found {found:?}, expected 2 numbers"))
}

/// Runs this rank's experts on the rows that arrived.
///
/// # Errors
/// Arrays that contradict each other.
pub fn run_experts(case: &Case, rank: usize, received: &Received) -> Result<ExpertOutput> {
    let fetch = |tensor: Option<TensorRef<'_>>| tensor.map(|t| t.to_vec()).transpose();
    let scales = fetch(received.scales())?.map(|scales| by_row(case, "scales", scales));
    let x = received.x().to_vec()?;
    let (ids, weights) = (fetch(received.ids())?, fetch(received.weights())?);
    let counts = fetch(received.expert_counts())?.unwrap_or_default();
    let arrived = Arrived {
        rows: totals(received)?[0] as usize,
        x: &x,
        scales: scales.as_deref(),
        ids: ids.as_deref(),
        weights: weights.as_deref(),
        counts: &counts,
    };
    oracle::experts::run(case, rank, &arrived).map_err(|e| anyhow!("{e}"))
}
