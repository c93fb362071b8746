//! Laws that hold for every exchange, over a sample of cases.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::moe::oracle::compare::Origin;
use crate::moe::oracle::experts::run;
use crate::moe::oracle::number::i64s;
use crate::moe::oracle::rng::{Rng, Stream};

const CASES: u64 = 400;

fn pick<T: Clone>(rng: &mut Rng, choices: &[T]) -> T {
    choices[rng.below(choices.len())].clone()
}

fn random_case(seed: u64) -> Case {
    let rng = &mut Rng::new(seed, Stream::Shared, 99);
    let ranks = pick(rng, &[1_usize, 2, 3, 4, 8]);
    let divisors: Vec<usize> = (1..=ranks).filter(|d| ranks.is_multiple_of(*d)).collect();
    let domains = pick(rng, &divisors);
    let experts = ranks * (1 + rng.below(5));
    let topk = 1 + rng.below(experts.min(9));
    let alignment = pick(rng, &[1, 4, 7, 16]);
    let zero_padding = pick(rng, &[false, true]);
    let expert_major = Layout::ExpertMajor { alignment, zero_padding };
    let rank_major = Layout::RankMajor { zero_padding };
    let layout = pick(rng, &[Layout::Flat, expert_major, Layout::Packed, rank_major]);
    let row = pick(rng, &RowType::ALL);
    let scales = pick(rng, &[Scales::F32, Scales::RoundedF32, Scales::Ue8m0]);
    let inputs = [Input::Plain(row), Input::Cast(row, scales), Input::Opaque(1 + rng.below(3))];
    let mut routings = vec![
        Routing::Uniform,
        Routing::OneExpert,
        Routing::OwnRank,
        Routing::SomeNegative,
        Routing::SomeNothing,
        Routing::Nothing,
    ];
    if experts >= 4 * topk {
        routings.push(Routing::Skewed);
    }
    let weights = pick(rng, &[false, true]);
    let weighted = weights && !layout.has_a_row_per_token() && pick(rng, &[false, true]);
    let tokens = pick(rng, &[Tokens::Full, Tokens::Ragged, Tokens::OddRanksEmpty]);
    let packed = layout == Layout::Packed;
    let case = Case {
        ranks,
        domains,
        experts,
        topk,
        hidden: pick(rng, &[1, 16, 130, 256]),
        max_tokens: 1 + rng.below(9),
        tokens,
        input: pick(rng, &inputs),
        layout,
        scale_columns: packed && pick(rng, &[false, true]),
        source_tokens: packed && pick(rng, &[false, true]),
        worst_case: pick(rng, &[false, true]),
        max_rows: Vec::new(),
        weights,
        combine: Combine {
            row: pick(rng, &RowType::ALL),
            biases: rng.below(3),
            weighted,
            sums: Sums::ByRank,
        },
        routing: pick(rng, &routings),
        values: Values::Usual,
        seed,
    };
    case.validate().unwrap();
    case
}

/// Calls `law` with many cases and their inputs; a failure names the case.
fn for_all(law: fn(&Case, &Inputs)) {
    for seed in 0..CASES {
        let case = random_case(seed);
        let inputs = Inputs::all(&case);
        let outcome = std::panic::catch_unwind(|| law(&case, &inputs));
        assert!(outcome.is_ok(), "the law does not hold for {case}");
    }
}

fn dispatch_all(case: &Case, inputs: &Inputs) -> Vec<Received> {
    (0..case.ranks).map(|rank| expected_dispatch(case, inputs, rank)).collect()
}

/// The experts' outputs for a right dispatch, with `fill` in every unspecified byte.
fn run_all(case: &Case, received: &[Received], fill: u8) -> Vec<ExpertOutput> {
    let dense = |array: &Option<Array>| array.as_ref().map(|array| array.dense(fill));
    let run_one = |(rank, received): (usize, &Received)| {
        let (x, counts) = (received.x.dense(fill), received.counts.dense(fill));
        let [scales, ids, weights] =
            [dense(&received.scales), dense(&received.ids), dense(&received.weights)];
        let arrived = Arrived {
            rows: received.rows,
            x: &x,
            scales: scales.as_deref(),
            ids: ids.as_deref(),
            weights: weights.as_deref(),
            counts: &counts,
        };
        run(case, rank, &arrived).unwrap()
    };
    received.iter().enumerate().map(run_one).collect()
}

/// Every selection (rank, token, k) with its expert, by the plainest possible reading.
fn selections(inputs: &Inputs, case: &Case) -> Vec<(usize, usize, usize, usize)> {
    let mut all = Vec::new();
    for (rank, inputs) in inputs.ranks.iter().enumerate() {
        for (i, expert) in inputs.topk_idx.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
            all.push((rank, i / case.topk, i % case.topk, *expert as usize));
        }
    }
    all
}

#[test]
fn every_selection_is_counted_once_and_every_token_once_per_rank() {
    for_all(|case, inputs| {
        let received = dispatch_all(case, inputs);
        let all = selections(inputs, case);
        let per_rank: BTreeSet<_> =
            all.iter().map(|(rank, token, _, e)| (*rank, *token, case.rank_of(*e))).collect();
        assert_eq!(received.iter().map(|r| r.rows).sum::<usize>(), per_rank.len());
        let mut expert = 0;
        for received in &received {
            for count in i32s(&received.counts.dense(0)) {
                assert_eq!(count as usize, all.iter().filter(|s| s.3 == expert).count());
                expert += 1;
            }
        }
    });
}

#[test]
fn every_selection_has_a_place_of_its_own() {
    for_all(|case, inputs| {
        if case.layout.has_a_row_per_token() {
            return;
        }
        let mut copies = BTreeMap::new();
        for received in dispatch_all(case, inputs) {
            for (_, origin, _) in received.x.specified() {
                if let Origin::Copy { rank, token, expert } = origin {
                    *copies.entry((rank, token, expert)).or_insert(0) += 1;
                }
            }
        }
        let all = selections(inputs, case);
        let expected: BTreeMap<_, _> =
            all.into_iter().map(|(rank, token, _, expert)| ((rank, token, expert), 1)).collect();
        assert_eq!(copies, expected);
    });
}

#[test]
fn slots_point_at_rows_that_equal_the_flat_row() {
    for_all(|case, inputs| {
        let expert_major = Case {
            layout: Layout::ExpertMajor { alignment: 4, zero_padding: false },
            ..case.clone()
        };
        let flat_case = Case { layout: Layout::Flat, ..case.clone() };
        for rank in 0..case.ranks {
            let flat = expected_dispatch(&flat_case, inputs, rank);
            let expert = expected_dispatch(&expert_major, inputs, rank);
            assert_eq!(flat.source, expert.source);
            let slots = i32s(&expert.slots.unwrap().dense(0));
            let (flat_x, expert_x) = (flat.x.dense(0xaa), expert.x.dense(0xbb));
            let bytes = flat.x.row_bytes();
            for (i, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let row = &flat_x[i / case.topk * bytes..][..bytes];
                assert_eq!(row, &expert_x[*slot as usize * bytes..][..bytes]);
            }
            let ids = i32s(&flat.ids.unwrap().dense(0));
            let present = |v: &i32| *v >= 0;
            assert!(ids.iter().map(present).eq(slots.iter().map(present)));
        }
    });
}

#[test]
fn packed_ranges_partition_the_rows_of_every_expert() {
    for_all(|case, inputs| {
        if case.layout != Layout::Packed {
            return;
        }
        for received in dispatch_all(case, inputs) {
            let ranges = i64s(&received.ranges.unwrap().dense(0));
            let source: BTreeMap<usize, i32> =
                received.source.specified().map(|(row, _, bytes)| (row, i32s(bytes)[0])).collect();
            let counts = i32s(&received.counts.dense(0));
            for (expert, ranges) in ranges.chunks(case.ranks).enumerate() {
                let mut next = 0;
                for (rank, range) in ranges.iter().enumerate() {
                    let (count, begin) = ((range & 0xffff_ffff) as usize, (range >> 32) as usize);
                    assert_eq!(begin, next);
                    next += count;
                    for row in begin..next {
                        let source = source[&(expert * case.ranks * case.max_tokens + row)];
                        let expected = if case.source_tokens { 0 } else { rank };
                        assert_eq!(source as usize / case.max_tokens, expected);
                    }
                }
                assert_eq!(next, counts[expert] as usize);
            }
        }
    });
}

#[test]
fn every_scale_has_one_place_in_its_column_and_all_bytes_have_one() {
    for_all(|case, inputs| {
        if case.layout != Layout::Packed {
            return;
        }
        let (room, local) = (case.ranks * case.max_tokens, case.local_experts());
        for scales in dispatch_all(case, inputs).into_iter().filter_map(|got| got.scales) {
            let by_row = scales.dense(0x5a);
            let mut by_column = vec![0; by_row.len()];
            for place in 0..local * room * scales.width {
                let (row, column) = (place / scales.width, place % scales.width);
                let to = (row / room * scales.width + column) * room + row % room;
                by_column[4 * to..][..4].copy_from_slice(&by_row[4 * place..][..4]);
            }
            assert_eq!(scales_by_row(case, &by_column), by_row);
        }
    });
}

#[test]
fn the_lazy_round_trip_equals_dispatch_experts_and_combine_one_after_the_other() {
    for_all(|case, inputs| {
        let outputs = run_all(case, &dispatch_all(case, inputs), 0xff);
        for rank in 0..case.ranks {
            let whole = expected_combine(case, inputs, &outputs, rank).unwrap();
            let lazy = expected_round_trip(case, &inputs.ranks[rank], rank);
            lazy.x.compare(&whole.x.dense(0)).unwrap();
            assert_eq!(whole, lazy);
        }
    });
}

/// The case with a cap on some ranks, where its layout takes one.
fn capped(case: &Case) -> Option<Case> {
    let rng = &mut Rng::new(case.seed, Stream::Tokens, case.ranks);
    let caps: Vec<usize> = (0..case.ranks).map(|_| rng.below(20)).collect();
    let case = Case { max_rows: caps, ..case.clone() };
    (!case.layout.has_fixed_places()).then_some(case)
}

#[test]
fn the_lazy_round_trip_of_capped_rows_equals_that_of_the_steps() {
    for_all(|case, inputs| {
        let Some(case) = capped(case) else { return };
        case.validate().unwrap();
        let outputs = run_all(&case, &dispatch_all(&case, inputs), 0xff);
        for rank in 0..case.ranks {
            let whole = expected_combine(&case, inputs, &outputs, rank).unwrap();
            assert_eq!(whole, expected_capped_round_trip(&case, inputs, rank));
        }
    });
}

#[test]
fn capped_rows_are_the_first_ones_of_those_without_a_cap_and_the_rest_is_counted() {
    for_all(|case, inputs| {
        let Some(capped) = capped(case) else { return };
        for rank in 0..case.ranks {
            let (all, left) =
                (expected_dispatch(case, inputs, rank), expected_dispatch(&capped, inputs, rank));
            let most = capped.cap_of(rank).unwrap_or(usize::MAX);
            assert_eq!(left.true_rows, all.true_rows.min(most));
            let width = all.x.row_bytes();
            let (x, first) = (all.x.dense(1), left.x.dense(1));
            assert_eq!(first, x[..first.len()]);
            assert_eq!(first.len(), x.len().min(most.saturating_mul(width)));
            let sum = |array: &Array| i32s(&array.dense(0)).iter().sum::<i32>();
            let dropped = left.dropped.as_ref().map_or(0, sum);
            assert_eq!(sum(&left.counts) + dropped, sum(&all.counts));
            let overflow = left.overflow.as_ref().map_or(0, sum);
            assert_eq!(overflow, i32::from(dropped > 0));
        }
    });
}

#[test]
fn no_result_depends_on_an_unspecified_byte() {
    for_all(|case, inputs| {
        let received = dispatch_all(case, inputs);
        let (zeros, ones) = (run_all(case, &received, 0), run_all(case, &received, 0x7e));
        for rank in 0..case.ranks {
            let with_zeros = expected_combine(case, inputs, &zeros, rank).unwrap();
            assert_eq!(with_zeros, expected_combine(case, inputs, &ones, rank).unwrap());
        }
    });
}

#[test]
fn layouts_agree_on_the_combined_rows() {
    for_all(|case, inputs| {
        // The caller applies the weights to merged rows where there are weights; combine does it for the
        // other layouts.
        let combined = |layout: Layout| {
            let weighted = case.weights && !layout.has_a_row_per_token();
            let combine = Combine { weighted, ..case.combine };
            let case = Case { layout, combine, ..case.clone() };
            let rank = |rank| expected_round_trip(&case, &inputs.ranks[rank], rank);
            (0..case.ranks).map(rank).collect::<Vec<_>>()
        };
        let flat = combined(Layout::Flat);
        assert_eq!(flat, combined(Layout::ExpertMajor { alignment: 8, zero_padding: true }));
        assert_eq!(flat, combined(Layout::RankMajor { zero_padding: false }));
        assert_eq!(flat, combined(Layout::Packed));
    });
}

#[test]
fn a_single_wrong_bit_in_a_specified_row_is_found_and_no_other() {
    for_all(|case, inputs| {
        let rng = &mut Rng::new(case.seed, Stream::Shared, 7);
        for received in dispatch_all(case, inputs) {
            for array in received.arrays() {
                let specified: BTreeSet<usize> = array.specified().map(|(row, ..)| row).collect();
                let mut found = array.dense(0x5a);
                for _ in 0..found.len().min(8) {
                    let at = rng.below(found.len());
                    found[at] ^= 1 << rng.below(8);
                    let matters = specified.contains(&(at / array.row_bytes()));
                    assert_eq!(array.compare(&found).is_err(), matters, "{} at {at}", array.name);
                    found = array.dense(0x5a);
                }
            }
        }
    });
}
