//! The defined results of one exchange while ranks are lost and the others go on.

use anyhow::{Context, Result, ensure};
use tokenyard_core::communicator::Received;

use super::{Got, check_combined_without, check_received, compare_received};
use crate::moe::oracle::{self, Case, Inputs};

/// The most losses in one half of an exchange that the check takes: it tries every subset of them, and more
/// take too long.
const MOST_AT_ONCE: usize = 16;

/// The ranks that are lost to a rank around one half of an exchange: a dispatch, or a combine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Losses<'a> {
    /// Lost before any rank could begin this half: none of their rows arrive.
    pub before: &'a [usize],
    /// Lost when this half has ended, including those of `before`: rows of the later ones arrive, or do
    /// not.
    pub after: &'a [usize],
}

/// Whether the rows of `source` reach `rank` and come back, where these ranks are lost. Between domains,
/// rows pass the rank of the other domain that is on the source's rail.
fn reaches(case: &Case, source: usize, rank: usize, lost: &[usize]) -> bool {
    let size = case.ranks / case.domains;
    let forwarder = case.domain_of(rank) * size + source % size;
    let passes = if case.domain_of(source) == case.domain_of(rank) { rank } else { forwarder };
    [source, rank, passes].iter().all(|needed| !lost.contains(needed))
}

/// Ranks whose experts are left out of what `rank` gets back, where these are lost.
pub fn left_out(case: &Case, rank: usize, lost: &[usize]) -> Vec<usize> {
    (0..case.ranks).filter(|other| !reaches(case, rank, *other, lost)).collect()
}

/// Sources whose rows do not reach `rank`, where these ranks are lost.
pub fn absent_sources(case: &Case, rank: usize, lost: &[usize]) -> Vec<usize> {
    (0..case.ranks).filter(|source| !reaches(case, *source, rank, lost)).collect()
}

/// Sources that an output flags as left out.
fn flagged(received: &Received) -> Vec<usize> {
    received.lost_ranks().into_iter().map(|rank| rank as usize).collect()
}

/// Compares the rows that arrived on a rank with the oracle's, where rows of the sources that it flags are
/// left out: they have no places, or their places hold zeros. Returns whether there are such places.
///
/// # Errors
/// The first difference.
pub fn check_received_flagged(
    case: &Case,
    inputs: &Inputs,
    rank: usize,
    received: &Received,
) -> Result<bool> {
    let lost = flagged(received);
    if lost.is_empty() {
        return check_received(case, inputs, rank, received).map(|()| false);
    }
    let counts = received.source_counts().context("the output has no counts of its sources")?;
    let counts = counts.to_vec()?;
    let has_places =
        |rank: &usize| counts.get(4 * rank..4 * (rank + 1)).is_some_and(|count| count != [0; 4]);
    let (torn, absent): (Vec<_>, Vec<_>) = lost.into_iter().partition(has_places);
    let mut expected = oracle::expected_dispatch(case, &inputs.without(case, &absent), rank);
    expected.clear_rows_of(&torn);
    compare_received(case, &expected, received)
        .with_context(|| format!("{torn:?} torn and {absent:?} left out"))?;
    Ok(!torn.is_empty())
}

/// As [`check_received_flagged`]. Also checks that every flagged source has a loss as its reason, and that
/// every source whose rows cannot arrive is flagged.
///
/// # Errors
/// A source that is flagged without a reason, or is not flagged with one; the first difference.
pub fn check_received_around(
    case: &Case,
    inputs: &Inputs,
    losses: Losses<'_>,
    rank: usize,
    received: &Received,
) -> Result<()> {
    let found = flagged(received);
    let (least, most) =
        (absent_sources(case, rank, losses.before), absent_sources(case, rank, losses.after));
    ensure!(
        least.iter().all(|source| found.contains(source)),
        "sources {found:?} are flagged as left out; expected at least {least:?} with {:?} lost before",
        losses.before
    );
    ensure!(
        found.iter().all(|source| most.contains(source)),
        "sources {found:?} are flagged as left out; expected at most {most:?} with {:?} lost",
        losses.after
    );
    check_received_flagged(case, inputs, rank, received).map(drop)
}

/// Compares the results of a combine with the oracle's, where ranks were lost. For each rank that was lost
/// meanwhile, the result includes its part or says that it lacks it. Returns the ranks whose experts it
/// lacks.
///
/// # Errors
/// The first difference, with all losses left out; more than 16 losses at once, which the check does not
/// try.
pub fn check_combined_around(
    case: &Case,
    inputs: &Inputs,
    losses: Losses<'_>,
    rank: usize,
    got: &Got,
) -> Result<Vec<usize>> {
    let Losses { before, after } = losses;
    let new: Vec<usize> = after.iter().copied().filter(|rank| !before.contains(rank)).collect();
    ensure!(
        new.len() <= MOST_AT_ONCE,
        "cannot check: {} ranks were lost at once; expected at most {MOST_AT_ONCE}",
        new.len()
    );
    let mut last = Ok(Vec::new());
    for chosen in 0..1_u32 << new.len() {
        let chosen = new.iter().enumerate().filter(|(i, _)| chosen >> i & 1 != 0);
        let lost: Vec<usize> =
            before.iter().copied().chain(chosen.map(|(_, rank)| *rank)).collect();
        let lacks = left_out(case, rank, &lost);
        last = check_combined_without(case, inputs, &lacks, rank, got)
            .with_context(|| format!("{lacks:?} left out, {after:?} lost"))
            .map(|()| lacks);
        if last.is_ok() {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::exchange::Aligned;
    use crate::moe::oracle::{Combine, RowType, Sums};

    fn case(ranks: usize, domains: usize) -> Case {
        Case { ranks, domains, experts: 2 * ranks, topk: 2, ..Case::default() }
    }

    #[test]
    fn between_domains_the_rank_on_the_source_s_rail_is_passed() {
        let case = case(4, 2);
        assert_eq!(left_out(&case, 0, &[2]), [2, 3], "all of the other domain");
        assert_eq!(left_out(&case, 1, &[2]), [2]);
        assert_eq!(absent_sources(&case, 3, &[2]), [0, 2]);
        assert_eq!(absent_sources(&case, 1, &[2]), [2]);
    }

    /// The results of rank 0 without the experts of these ranks.
    fn got(case: &Case, inputs: &Inputs, lacks: &[usize]) -> Got {
        let left = inputs.without(case, lacks);
        let combined = oracle::expected_round_trip(case, &left.ranks[0], 0);
        let missing = inputs.ranks[0].topk_idx.chunks(case.topk).map(|row| {
            let is_lost = |e: &&i64| **e >= 0 && lacks.contains(&case.rank_of(**e as usize));
            row.iter().filter(is_lost).count() as u8
        });
        Got {
            missing: missing.collect(),
            x: Aligned::copy_of(&combined.x.dense(0)),
            weights: combined.weights.map(|w| oracle::number::f32s(&w.dense(0))),
        }
    }

    #[test]
    fn the_part_of_a_rank_lost_meanwhile_is_there_or_missing_and_one_lost_before_is_missing() {
        let combine = Combine { row: RowType::F32, biases: 0, weighted: false, sums: Sums::ByRank };
        let case = Case { combine, ..case(4, 1) };
        let inputs = Inputs::all(&case);
        let check = |lacks: &[usize], before, after| {
            let got = got(&case, &inputs, lacks);
            check_combined_around(&case, &inputs, Losses { before, after }, 0, &got)
        };
        assert_eq!(check(&[], &[], &[1, 3]).unwrap(), [0; 0]);
        assert_eq!(check(&[3], &[], &[1, 3]).unwrap(), [3]);
        assert_eq!(check(&[1, 3], &[1], &[1, 3]).unwrap(), [1, 3]);
        assert!(check(&[], &[3], &[3]).is_err(), "its part cannot have come");
        assert!(check(&[1], &[], &[3]).is_err(), "no rank reports that rank 1 is lost");
    }
}
