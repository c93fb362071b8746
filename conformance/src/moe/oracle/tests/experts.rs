use super::*;
use crate::moe::oracle::experts::{expert_row, factor, merged_row, returned_weight, run};

#[test]
fn factors_tell_2048_experts_apart() {
    assert_eq!(factor(0), 1.0);
    // 1 + 1237/2048 and 1 + (2474 - 2048)/2048.
    assert_eq!((factor(1), factor(2)), (1.60400390625, 1.2080078125));
    let mut bits: Vec<u32> = (0..2048).map(|expert| factor(expert).to_bits()).collect();
    bits.sort_unstable();
    bits.dedup();
    assert_eq!(bits.len(), 2048);
}

#[test]
fn an_expert_multiplies_in_f32_and_rounds_to_the_row_type() {
    assert_eq!(expert_row(1, &[2.0, -1.0], RowType::F32), [3.2080078125, -1.60400390625]);
    // bf16 steps by 2^-7 between 1 and 2: 1.604 lies nearest to 1.6015625.
    assert_eq!(expert_row(1, &[2.0, -1.0], RowType::Bf16), [3.203125, -1.6015625]);
    assert_eq!(returned_weight(1, 2.0), 3.2080078125);
}

#[test]
fn a_merged_row_is_the_weighted_sum_of_rounded_expert_rows_in_k_order() {
    // Expert 1 gives 1.6015625, expert 0 gives 1: the sum lies half way between two bf16.
    assert_eq!(merged_row(&[(1, None), (0, None)], &[1.0], RowType::Bf16), [2.59375]);
    let weighted = merged_row(&[(1, Some(2.0)), (0, Some(0.5))], &[1.0], RowType::F32);
    assert_eq!(weighted, [3.7080078125]);
    assert_eq!(merged_row(&[], &[1.0, 2.0], RowType::Bf16), [0.0, 0.0]);
}

/// The experts' outputs for a right dispatch.
fn run_expected(case: &Case, inputs: &Inputs, rank: usize) -> ExpertOutput {
    let received = expected_dispatch(case, inputs, rank);
    let dense = |array: &Option<Array>| array.as_ref().map(|array| array.dense(0xff));
    let (x, counts) = (received.x.dense(0xff), received.counts.dense(0));
    let [ids, weights] = [dense(&received.ids), dense(&received.weights)];
    let arrived = Arrived {
        rows: received.rows,
        x: &x,
        scales: None,
        ids: ids.as_deref(),
        weights: weights.as_deref(),
        counts: &counts,
    };
    run(case, rank, &arrived).unwrap()
}

#[test]
fn flat_rows_are_merged_over_their_local_experts_with_weights() {
    let (case, inputs) = example(Layout::Flat);
    // Rank 1 hosts experts 2 and 3, with factors 1.2080078125 and 1.81201171875.
    let output = run_expected(&case, &inputs, 1);
    let rows = f32s(&output.rows);
    assert_eq!(rows[0], 10.0 * 1.81201171875 * 0.25);
    assert_eq!(rows[2], 12.0 * 1.2080078125 * 0.75);
    assert_eq!(rows[4], 20.0 * 1.81201171875 + 20.0 * 1.2080078125 * 2.0);
    let weights = output.weights.unwrap();
    assert!(weights[0].is_nan() && weights[3].is_nan());
    assert_eq!(weights[1..3], [0.25 * 1.81201171875, 0.75 * 1.2080078125]);
    assert_eq!(weights[4..], [1.81201171875, 2.0 * 1.2080078125]);
}

#[test]
fn expert_rows_are_unweighted_and_what_combine_must_not_read_is_nan() {
    let (case, inputs) = example(Layout::ExpertMajor { alignment: 4, zero_padding: true });
    let output = run_expected(&case, &inputs, 1);
    let rows = f32s(&output.rows);
    assert_eq!(rows[..2], [12.0 * 1.2080078125, 13.0 * 1.2080078125]);
    assert_eq!(rows[10], 20.0 * 1.81201171875);
    assert!(rows[4..8].iter().chain(&rows[12..]).all(|value| value.is_nan()));
    let weights = output.weights.unwrap();
    assert_eq!(weights[0], 0.75 * 1.2080078125);
    assert!(weights[2].is_nan() && weights[7].is_nan());
}

#[test]
fn packed_rows_are_found_by_count() {
    let (case, inputs) = example(Layout::Packed);
    let output = run_expected(&case, &inputs, 1);
    let rows = f32s(&output.rows);
    assert_eq!((rows[0], rows[2]), (12.0 * 1.2080078125, 20.0 * 1.2080078125));
    assert_eq!((rows[12], rows[14]), (10.0 * 1.81201171875, 20.0 * 1.81201171875));
    assert!(rows[4..12].iter().chain(&rows[16..]).all(|value| value.is_nan()));
}

#[test]
fn wrong_sizes_ids_and_counts_are_errors_and_not_panics() {
    let (case, _) = example(Layout::Flat);
    let ids = |ids: [i32; 2]| ids.map(i32::to_le_bytes).concat();
    let good = ids([0, -1]);
    let arrived = Arrived {
        rows: 1,
        x: &[0; 8],
        scales: None,
        ids: Some(&good),
        weights: Some(&[0; 8]),
        counts: &[0; 8],
    };
    assert!(run(&case, 0, &arrived).is_ok());
    let message = |arrived: &Arrived<'_>| run(&case, 0, arrived).unwrap_err().to_string();
    assert!(message(&Arrived { ids: None, ..arrived }).contains("found no ids"));
    assert!(message(&Arrived { rows: 2, ..arrived }).contains("found 2 ids; expected at least 4"));
    let wrong = ids([0, 2]);
    let wrong = message(&Arrived { ids: Some(&wrong), ..arrived });
    assert!(wrong.contains("row 0, k 1: found local expert 2; expected below 2"), "{wrong}");
    assert!(message(&Arrived { x: &[0; 4], ..arrived }).contains("x: found 0 rows"));
    assert!(message(&Arrived { weights: Some(&[]), ..arrived }).contains("found 0 weights"));

    let (case, _) = example(Layout::Packed);
    let message = |arrived: &Arrived<'_>| run(&case, 0, arrived).unwrap_err().to_string();
    assert!(message(&Arrived { counts: &[0; 4], ..arrived }).contains("found 1 expert counts"));
    let counts = ids([0, 7]);
    let wrong = message(&Arrived { counts: &counts, ..arrived });
    assert!(wrong.contains("local expert 1: found count 7; expected 0 to 6"), "{wrong}");
    let counts = ids([-1, 0]);
    assert!(message(&Arrived { counts: &counts, ..arrived }).contains("found count -1"));
}
