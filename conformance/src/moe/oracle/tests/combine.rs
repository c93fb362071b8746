use super::*;
use crate::moe::oracle::sum::{Term, sum};

const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: false };

/// Expert-major without padding: the row of a local expert's only copy is its number.
const ADJACENT: Layout = Layout::ExpertMajor { alignment: 1, zero_padding: false };

/// Expert outputs of `rows` rows `[v, -v]` for the rows given, NaN elsewhere.
fn output(rows: usize, given: &[(usize, f32)]) -> ExpertOutput {
    let mut values = vec![f32::NAN; rows * 2];
    for (row, value) in given {
        (values[row * 2], values[row * 2 + 1]) = (*value, -value);
    }
    ExpertOutput { rows: f32_bytes(&values), weights: None }
}

/// The first column of the combined rows of both ranks; checks that the second is its negative.
fn combined(case: &Case, inputs: &Inputs, outputs: &[ExpertOutput]) -> [Vec<f32>; 2] {
    [0, 1].map(|rank| {
        let rows = f32_rows(&expected_combine(case, inputs, outputs, rank).unwrap().x);
        assert!(rows.iter().all(|(_, row)| row[1] == -row[0]));
        rows.into_iter().map(|(_, row)| row[0]).collect()
    })
}

/// `case` with one token, on rank 0, that selects `topk_idx`. Rows have one element.
fn one_token(case: Case, topk_idx: &[i64]) -> (Case, Inputs) {
    let mut tokens = vec![0; case.ranks];
    tokens[0] = 1;
    let tokens = Tokens::Exactly(tokens);
    let case = Case { topk: topk_idx.len(), hidden: 1, max_tokens: 1, tokens, ..case };
    let rank = |rank| {
        let topk_idx = if rank == 0 { topk_idx.to_vec() } else { Vec::new() };
        RankInputs::with_routing(&case, rank, topk_idx)
    };
    let inputs = (0..case.ranks).map(rank).collect();
    let inputs = Inputs::given(&case, inputs).unwrap();
    (case, inputs)
}

/// An unweighted exchange of `experts` experts on `ranks` ranks.
fn unweighted(ranks: usize, experts: usize, layout: Layout, row: RowType) -> Case {
    let combine = Combine { row, biases: 0, weighted: false, sums: Sums::ByRank };
    Case { ranks, experts, layout, combine, weights: false, ..Case::default() }
}

/// The combined value of rank 0's only token, where rank r gave back `values[r]` (in expert-major
/// layouts one value per local expert).
fn combine_one(case: &Case, inputs: &Inputs, values: &[&[f32]]) -> f32 {
    let encode = |values: &&[f32]| case.combine.row.encode(values);
    let outputs: Vec<ExpertOutput> =
        values.iter().map(|v| ExpertOutput { rows: encode(v), weights: None }).collect();
    let combined = expected_combine(case, inputs, &outputs, 0).unwrap().x;
    case.combine.row.decode(&combined.dense(0))[0]
}

#[test]
fn flat_rows_of_a_token_are_summed_over_its_ranks() {
    let (case, inputs) = example(Layout::Flat);
    let outputs =
        [output(2, &[(0, 1.0), (1, 3.0)]), output(3, &[(0, 100.0), (1, 300.0), (2, 500.0)])];
    let expected = [vec![101.0, 300.0, 3.0], vec![500.0, 0.0]];
    assert_eq!(combined(&case, &inputs, &outputs), expected);
}

#[test]
fn expert_major_copies_of_a_token_are_summed() {
    let (case, inputs) = example(EXPERT_MAJOR);
    let outputs = [
        output(8, &[(0, 1.0), (1, 2.0), (4, 3.0)]),
        output(8, &[(0, 10.0), (1, 20.0), (4, 30.0), (5, 40.0)]),
    ];
    let expected = [vec![31.0, 10.0, 5.0], vec![60.0, 0.0]];
    assert_eq!(combined(&case, &inputs, &outputs), expected);
}

#[test]
fn packed_copies_of_a_token_are_summed() {
    let (case, inputs) = example(Layout::Packed);
    let outputs = [
        output(12, &[(0, 1.0), (1, 2.0), (6, 3.0)]),
        output(12, &[(0, 10.0), (1, 20.0), (6, 30.0), (7, 40.0)]),
    ];
    let expected = [vec![31.0, 10.0, 5.0], vec![60.0, 0.0]];
    assert_eq!(combined(&case, &inputs, &outputs), expected);
}

#[test]
fn a_weighted_combine_multiplies_copies_by_the_weights_of_the_token() {
    let (mut case, inputs) = example(EXPERT_MAJOR);
    case.combine.weighted = true;
    let outputs = [
        output(8, &[(0, 1.0), (1, 2.0), (4, 3.0)]),
        output(8, &[(0, 10.0), (1, 20.0), (4, 30.0), (5, 40.0)]),
    ];
    let expected = [vec![8.0, 7.5, 0.5], vec![80.0, 0.0]];
    assert_eq!(combined(&case, &inputs, &outputs), expected);
}

#[test]
fn ranks_are_added_in_the_order_of_their_highest_selecting_k() {
    // Ranks 2, 0, 1: (1e8 - 1e8) + 1. By number it would be (-1e8 + 1) + 1e8 = 0.
    let case = unweighted(3, 3, Layout::Flat, RowType::F32);
    let (case, inputs) = one_token(case, &[2, 0, 1]);
    assert_eq!(combine_one(&case, &inputs, &[&[-1e8], &[1.0], &[1e8]]), 1.0);
    // Ranks 0, 2, 1, 0: rank 0 counts as k = 3, so (1e8 - 1e8) + 1. As k = 0 it would be 0.
    let case = unweighted(3, 6, Layout::Flat, RowType::F32);
    let (case, inputs) = one_token(case, &[0, 4, 2, 1]);
    assert_eq!(combine_one(&case, &inputs, &[&[1.0], &[-1e8], &[1e8]]), 1.0);
}

#[test]
fn experts_of_a_rank_are_added_in_k_order() {
    // Experts 2, 0, 1: (1e8 - 1e8) + 1. By number it would be 0.
    let (case, inputs) = one_token(unweighted(1, 3, ADJACENT, RowType::F32), &[2, 0, 1]);
    assert_eq!(combine_one(&case, &inputs, &[&[-1e8, 1.0, 1e8]]), 1.0);
}

#[test]
fn a_rank_rounds_its_partial_to_the_row_type() {
    // bf16 has steps of 2 at 256. Rank 0: 256 + 1 rounds to 256; with rank 1 again. Unrounded
    // partials would give 258.
    let (case, inputs) = one_token(unweighted(2, 4, ADJACENT, RowType::Bf16), &[0, 1, 2]);
    assert_eq!(combine_one(&case, &inputs, &[&[256.0, 1.0], &[1.0, 0.0]]), 256.0);
}

#[test]
fn the_total_is_rounded_once() {
    // 256 + 1 + 1 = 258 in f32, exact in bf16. Rounded after each step it would be 256.
    let (case, inputs) = one_token(unweighted(3, 3, Layout::Flat, RowType::Bf16), &[0, 1, 2]);
    assert_eq!(combine_one(&case, &inputs, &[&[256.0], &[1.0], &[1.0]]), 258.0);
    // fp16 has steps of 2 at 2048, and 2049 is a tie.
    let (case, inputs) = one_token(unweighted(2, 2, Layout::Flat, RowType::F16), &[0, 1]);
    assert_eq!(combine_one(&case, &inputs, &[&[2048.0], &[1.0]]), 2048.0);
}

#[test]
fn a_domain_rounds_the_sum_of_its_ranks() {
    // Ranks 0, 1 | 2, 3. bf16 has steps of 2 at 256: 1 + 1 is 2 in the second domain, 256 + 1 is 256
    // in the first. In one domain the sum would be 259, which rounds to 260.
    let case = unweighted(4, 4, Layout::Flat, RowType::Bf16);
    let (one, inputs) = one_token(case.clone(), &[0, 1, 2, 3]);
    let values: [&[f32]; 4] = [&[256.0], &[1.0], &[1.0], &[1.0]];
    assert_eq!(combine_one(&one, &inputs, &values), 260.0);
    let (two, inputs) = one_token(Case { domains: 2, ..case }, &[0, 1, 2, 3]);
    assert_eq!(combine_one(&two, &inputs, &values), 258.0);
}

#[test]
fn domains_are_added_in_the_order_of_their_highest_selecting_k() {
    // Ranks 0, 1 | 2, 3 | 4, 5. By number of the domain: (1 + 1e8) - 1e8 = 0. By highest k: domain 2
    // (k 1), domain 1 (k 2), domain 0 (k 3): (-1e8 + 1e8) + 1.
    let case = Case { domains: 3, ..unweighted(6, 6, Layout::Flat, RowType::F32) };
    let (case, inputs) = one_token(case, &[0, 4, 2, 1]);
    let values: [&[f32]; 6] = [&[0.25], &[0.75], &[1e8], &[], &[-1e8], &[]];
    assert_eq!(combine_one(&case, &inputs, &values), 1.0);
}

#[test]
fn ranks_of_a_domain_are_added_in_the_order_of_their_highest_selecting_k() {
    // Ranks 0, 1, 2 | 3, 4, 5. Ranks 2, 0, 1 of the first: (1e8 - 1e8) + 1.
    let case = Case { domains: 2, ..unweighted(6, 6, Layout::Flat, RowType::F32) };
    let (case, inputs) = one_token(case, &[2, 3, 0, 1]);
    let values: [&[f32]; 6] = [&[-1e8], &[1.0], &[1e8], &[2.0], &[], &[]];
    assert_eq!(combine_one(&case, &inputs, &values), 3.0);
}

#[test]
fn domains_of_one_rank_are_as_one_domain() {
    let case = unweighted(3, 3, Layout::Flat, RowType::Bf16);
    for domains in [1, 3] {
        let (case, inputs) = one_token(Case { domains, ..case.clone() }, &[0, 1, 2]);
        assert_eq!(combine_one(&case, &inputs, &[&[256.0], &[1.0], &[1.0]]), 258.0);
    }
}

#[test]
fn a_bias_is_no_part_of_a_domain() {
    // 256 + (1 + 1); as a part of the domain it would be rounded away.
    let mut case = Case { domains: 2, ..unweighted(4, 4, Layout::Flat, RowType::Bf16) };
    case.combine.biases = 1;
    let (case, mut inputs) = one_token(case, &[2, 3]);
    inputs.ranks[0].biases = vec![RowType::Bf16.encode(&[256.0])];
    assert_eq!(combine_one(&case, &inputs, &[&[], &[], &[1.0], &[1.0]]), 258.0);
}

#[test]
fn biases_come_first_and_do_not_round_on_their_own() {
    let mut case = unweighted(1, 1, Layout::Flat, RowType::Bf16);
    case.combine.biases = 2;
    let (case, mut inputs) = one_token(case, &[0]);
    let bias = |value: f32| RowType::Bf16.encode(&[value]);
    inputs.ranks[0].biases = vec![bias(256.0), bias(1.0)];
    assert_eq!(combine_one(&case, &inputs, &[&[1.0]]), 258.0);

    let mut case = unweighted(1, 1, Layout::Flat, RowType::F32);
    case.combine.biases = 2;
    let (case, mut inputs) = one_token(case, &[0]);
    inputs.ranks[0].biases = vec![f32_bytes(&[1e8]), f32_bytes(&[-1e8])];
    // (1e8 - 1e8) + 1; had the bias come last, 0.
    assert_eq!(combine_one(&case, &inputs, &[&[1.0]]), 1.0);
}

#[test]
fn a_token_that_selects_nothing_combines_to_its_bias_or_zero() {
    let mut case = unweighted(1, 1, Layout::Flat, RowType::F32);
    let (none, inputs) = one_token(case.clone(), &[-1]);
    assert_eq!(combine_one(&none, &inputs, &[&[]]).to_bits(), 0);
    case.combine.biases = 1;
    let (biased, mut inputs) = one_token(case, &[-1]);
    inputs.ranks[0].biases = vec![f32_bytes(&[-0.0])];
    assert_eq!(combine_one(&biased, &inputs, &[&[]]).to_bits(), 0x8000_0000);
}

#[test]
fn a_single_row_comes_back_as_it_is_with_the_sign_of_its_zero() {
    for layout in [Layout::Flat, ADJACENT, Layout::Packed] {
        let (case, inputs) = one_token(unweighted(1, 1, layout, RowType::Bf16), &[0]);
        assert_eq!(combine_one(&case, &inputs, &[&[-0.0]]).to_bits(), 0x8000_0000);
    }
}

#[test]
fn weighted_terms_are_fused_and_the_partial_is_rounded_once() {
    let mut case = unweighted(1, 2, ADJACENT, RowType::F32);
    (case.weights, case.combine.weighted) = (true, true);
    let (case, mut inputs) = one_token(case, &[0, 1]);
    // (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24. With a rounded product it would be 0.
    inputs.ranks[0].topk_weights = Some(vec![1.0, 1.000244140625]);
    let rows: &[f32] = &[-1.00048828125, 1.000244140625];
    assert_eq!(combine_one(&case, &inputs, &[rows]), 5.9604645e-8);

    let mut case = unweighted(1, 2, ADJACENT, RowType::Bf16);
    (case.weights, case.combine.weighted) = (true, true);
    let (case, mut inputs) = one_token(case, &[0, 1]);
    inputs.ranks[0].topk_weights = Some(vec![1.0078125, 0.9921875]);
    // 255 * 1.0078125 = 256.992, plus 1.0078125 * 0.9921875 = 0.99994, is 257.992: rounds to 258.
    // With the first product rounded to bf16 (256) it would be 256.99994, so 256.
    assert_eq!(combine_one(&case, &inputs, &[&[255.0, 1.0078125]]), 258.0);
}

#[test]
fn weights_come_back_to_their_selection_and_the_others_are_zero() {
    let (case, inputs) = example(Layout::Flat);
    let nan = f32::NAN;
    let mut outputs = [output(2, &[]), output(3, &[])];
    outputs[0].weights = Some(vec![11.0, nan, 12.0, 13.0]);
    outputs[1].weights = Some(vec![nan, 21.0, 22.0, nan, 23.0, 24.0]);
    assert_eq!(returned_weights(&case, &inputs, &outputs), WEIGHTS);

    let (case, inputs) = example(EXPERT_MAJOR);
    let mut outputs = [output(8, &[]), output(8, &[])];
    outputs[0].weights = Some(vec![11.0, 13.0, nan, nan, 12.0, nan, nan, nan]);
    outputs[1].weights = Some(vec![22.0, 24.0, nan, nan, 21.0, 23.0, nan, nan]);
    assert_eq!(returned_weights(&case, &inputs, &outputs), WEIGHTS);

    let (case, inputs) = example(Layout::Packed);
    let mut outputs = [output(12, &[]), output(12, &[])];
    let mut weights = [[nan; 12]; 2];
    (weights[0][0], weights[0][1], weights[0][6]) = (11.0, 13.0, 12.0);
    (weights[1][0], weights[1][1], weights[1][6], weights[1][7]) = (22.0, 24.0, 21.0, 23.0);
    outputs[0].weights = Some(weights[0].to_vec());
    outputs[1].weights = Some(weights[1].to_vec());
    assert_eq!(returned_weights(&case, &inputs, &outputs), WEIGHTS);
}

/// The combined weights of both ranks: 1x came from rank 0, 2x from rank 1.
const WEIGHTS: [&[f32]; 2] = [&[11.0, 21.0, 22.0, 0.0, 12.0, 13.0], &[23.0, 24.0, 0.0, 0.0]];

fn returned_weights(case: &Case, inputs: &Inputs, outputs: &[ExpertOutput]) -> [Vec<f32>; 2] {
    [0, 1].map(|rank| {
        let combined = expected_combine(case, inputs, outputs, rank).unwrap();
        let weights = f32s(&combined.weights.unwrap().dense(0));
        assert!(weights.iter().all(|weight| weight.is_sign_positive()), "zeros are +0.0");
        weights
    })
}

#[test]
fn outputs_that_do_not_fit_are_refused_by_rank() {
    let (case, inputs) = example(Layout::Flat);
    let whole = [output(2, &[]), output(3, &[])];
    let message = |outputs: &[ExpertOutput]| {
        expected_combine(&case, &inputs, outputs, 0).unwrap_err().to_string()
    };
    assert!(message(&whole[..1]).contains("of 1 ranks; expected 2"));
    let short = [output(2, &[]), output(2, &[])];
    assert!(
        message(&short).contains("rank 1: found 16 bytes of expert rows; expected at least 24")
    );
    let mut weights = whole.clone();
    weights[1].weights = Some(vec![0.0; 6]);
    assert!(message(&weights).contains("rank 1: found weights: true"));
    weights[0].weights = Some(vec![0.0; 3]);
    assert!(message(&weights).contains("rank 0: found 3 weights; expected at least 4"));
}

#[test]
fn backward_of_dispatch_is_the_combine_of_gradients() {
    // dispatch copies a row to each rank, so its gradient is the sum of the copies' gradients, and
    // the gradient of a weight comes back to the weight.
    let (case, inputs) = example(Layout::Flat);
    let mut gradients =
        [output(2, &[(0, 0.5), (1, 2.0)]), output(3, &[(0, 0.25), (1, 4.0), (2, 8.0)])];
    gradients[0].weights = Some(vec![11.0, 0.0, 12.0, 13.0]);
    gradients[1].weights = Some(vec![0.0, 21.0, 22.0, 0.0, 23.0, 24.0]);
    let expected = [vec![0.75, 4.0, 2.0], vec![8.0, 0.0]];
    assert_eq!(combined(&case, &inputs, &gradients), expected);
    assert_eq!(returned_weights(&case, &inputs, &gradients), WEIGHTS);
}

#[test]
fn the_sum_of_nothing_is_positive_zero() {
    assert_eq!(sum(&[], 2, RowType::F32).iter().map(|v| v.to_bits()).collect::<Vec<_>>(), [0, 0]);
    let minus = Term { weight: None, row: vec![-0.0] };
    assert_eq!(sum(&[minus], 1, RowType::F32)[0].to_bits(), 0x8000_0000);
}
