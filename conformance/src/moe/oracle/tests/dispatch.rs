use super::*;
use crate::moe::oracle::number::{i64s, u32s};

const PADDED: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: true };
const UNPADDED: Layout = Layout::ExpertMajor { alignment: 4, zero_padding: false };

fn column<T: Clone>(rows: Vec<(usize, Vec<T>)>) -> Vec<T> {
    rows.into_iter().flat_map(|(_, row)| row).collect()
}

#[test]
fn a_token_goes_once_to_every_rank_that_hosts_one_of_its_experts() {
    let (case, inputs) = example(Layout::Flat);
    let rank0 = expected_dispatch(&case, &inputs, 0);
    assert_eq!(rank0.rows, 2);
    assert_eq!(f32_rows(&rank0.x), [(0, vec![10.0, 11.0]), (1, vec![14.0, 15.0])]);
    assert_eq!(i32_rows(&rank0.ids.unwrap()), [(0, vec![0, -1]), (1, vec![1, 0])]);
}

#[test]
fn rank_major_rows_are_the_first_of_the_block_of_their_source() {
    for zero_padding in [false, true] {
        let (case, inputs) = example(Layout::RankMajor { zero_padding });
        let got = expected_dispatch(&case, &inputs, 1);
        assert_eq!((got.rows, got.x.rows), (3, 6));
        let mut rows = vec![(0, vec![10.0, 11.0]), (1, vec![12.0, 13.0]), (3, vec![20.0, 21.0])];
        if zero_padding {
            rows.extend([2, 4, 5].map(|row| (row, vec![0.0, 0.0])));
            rows.sort_by_key(|(row, _)| *row);
        }
        assert_eq!(f32_rows(&got.x), rows);
        let none = vec![-1, -1];
        let ids = [vec![-1, 1], vec![0, -1], none.clone(), vec![1, 0], none.clone(), none];
        assert_eq!(i32_rows(got.ids.as_ref().unwrap()), (0..).zip(ids).collect::<Vec<_>>());
        assert_eq!(column(i32_rows(&got.source)), [0, 1, -1, 3, -1, -1]);
        assert_eq!(column(i32_rows(got.rank_rows.as_ref().unwrap())), [2, 1]);
    }
}

#[test]
fn flat_rows_are_ordered_by_source_rank_then_token() {
    let (case, inputs) = example(Layout::Flat);
    let got = expected_dispatch(&case, &inputs, 1);
    assert_eq!((got.rows, got.x.rows), (3, 3));
    assert_eq!(column(f32_rows(&got.x)), [10.0, 11.0, 12.0, 13.0, 20.0, 21.0]);
    assert_eq!(column(i32_rows(got.ids.as_ref().unwrap())), [-1, 1, 0, -1, 1, 0]);
    // The weight of a selection that lives elsewhere, or that selects nothing, is 0.
    let weights = column(f32_rows(got.weights.as_ref().unwrap()));
    assert_eq!(weights, [0.0, 0.25, 0.75, 0.0, 1.0, 2.0]);
    assert!(weights.iter().all(|weight| weight.is_sign_positive()), "zeros are +0.0");
    assert_eq!(column(i32_rows(&got.source)), [0, 1, 3]);
    assert_eq!(column(i32_rows(&got.counts)), [2, 2]);
    assert_eq!(column(i32_rows(got.rank_rows.as_ref().unwrap())), [2, 1]);
    assert!(got.slots.is_none() && got.ranges.is_none() && got.scales.is_none());
}

#[test]
fn expert_groups_start_aligned_and_padding_is_zero_on_request() {
    let (case, inputs) = example(PADDED);
    let got = expected_dispatch(&case, &inputs, 1);
    assert_eq!((got.rows, got.x.rows), (3, 8));
    let expected = [12.0, 13.0, 20.0, 21.0, 0.0, 0.0, 0.0, 0.0, 10.0, 11.0, 20.0, 21.0];
    assert_eq!(column(f32_rows(&got.x))[..12], expected);
    assert_eq!(column(f32_rows(&got.x))[12..], [0.0; 4]);
    let weights = column(f32_rows(got.weights.as_ref().unwrap()));
    assert_eq!(weights, [0.75, 2.0, 0.0, 0.0, 0.25, 1.0, 0.0, 0.0]);
    assert_eq!(column(i32_rows(&got.counts)), [2, 2]);
}

#[test]
fn padding_is_unspecified_unless_requested() {
    let (case, inputs) = example(UNPADDED);
    let got = expected_dispatch(&case, &inputs, 1);
    assert_eq!(got.x.rows, 8);
    let rows: Vec<usize> = got.x.specified().map(|(row, ..)| row).collect();
    assert_eq!(rows, [0, 1, 4, 5]);
    let expected = [(0, vec![0.75]), (1, vec![2.0]), (4, vec![0.25]), (5, vec![1.0])];
    assert_eq!(f32_rows(got.weights.as_ref().unwrap()), expected);
}

#[test]
fn expert_major_slots_name_the_row_of_every_copy() {
    let (case, inputs) = example(UNPADDED);
    let got = expected_dispatch(&case, &inputs, 1);
    assert_eq!(column(i32_rows(got.slots.as_ref().unwrap())), [-1, 4, 0, -1, 5, 1]);
    assert_eq!(column(i32_rows(&got.source)), [0, 1, 3]);
    assert_eq!(column(i32_rows(got.rank_rows.as_ref().unwrap())), [2, 1]);
    assert!(got.ids.is_none() && got.ranges.is_none());
}

#[test]
fn packed_rows_lie_from_zero_in_the_room_of_their_expert() {
    let (case, inputs) = example(Layout::Packed);
    let got = expected_dispatch(&case, &inputs, 1);
    // Two experts with room for R*M = 6 rows each.
    assert_eq!(got.x.rows, 12);
    let expected = [(0, vec![12.0, 13.0]), (1, vec![20.0, 21.0])];
    assert_eq!(f32_rows(&got.x)[..2], expected);
    let expected = [(6, vec![10.0, 11.0]), (7, vec![20.0, 21.0])];
    assert_eq!(f32_rows(&got.x)[2..], expected);
    assert_eq!(column(i32_rows(&got.counts)), [2, 2]);
    let expected = [(0, vec![0.75]), (1, vec![2.0]), (6, vec![0.25]), (7, vec![1.0])];
    assert_eq!(f32_rows(got.weights.as_ref().unwrap()), expected);
    let expected = [(0, vec![1]), (1, vec![3]), (6, vec![0]), (7, vec![3])];
    assert_eq!(i32_rows(&got.source), expected);
}

#[test]
fn packed_sources_are_tokens_alone_on_request() {
    let (case, inputs) = example(Layout::Packed);
    let case = Case { source_tokens: true, ..case };
    let got = expected_dispatch(&case, &inputs, 1);
    // Token 1 of rank 0 and token 0 of rank 1, then token 0 of either.
    assert_eq!(i32_rows(&got.source), [(0, vec![1]), (1, vec![0]), (6, vec![0]), (7, vec![0])]);
}

#[test]
fn scales_by_columns_are_those_of_each_expert_transposed() {
    let input = Input::Opaque(3);
    let case = Case { ranks: 2, experts: 4, max_tokens: 1, input, ..Case::default() };
    // Two experts, each with three columns of two rows.
    let by_column: Vec<u8> = [0_u32, 10, 1, 11, 2, 12, 20, 30, 21, 31, 22, 32]
        .into_iter()
        .flat_map(u32::to_le_bytes)
        .collect();
    assert_eq!(
        u32s(&scales_by_row(&case, &by_column)),
        [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
    );
}

#[test]
fn packed_ranges_hold_count_and_begin_of_every_source() {
    let (case, inputs) = example(Layout::Packed);
    let ranges = expected_dispatch(&case, &inputs, 1).ranges.unwrap();
    // One row from rank 0 at 0; one row from rank 1 at 1.
    let expected = [1, 1 | 1 << 32, 1, 1 | 1 << 32];
    assert_eq!(i64s(&ranges.dense(0)), expected);
    let ranges = expected_dispatch(&case, &inputs, 0).ranges.unwrap();
    // Expert 0: two rows from rank 0; expert 1: one. Rank 1 begins where rank 0 ends.
    assert_eq!(i64s(&ranges.dense(0)), [2, 2 << 32, 1, 1 << 32]);
}

#[test]
fn alignment_one_leaves_no_padding() {
    let (case, inputs) = example(Layout::ExpertMajor { alignment: 1, zero_padding: true });
    let got = expected_dispatch(&case, &inputs, 0);
    // Expert 0: rank 0's tokens 0 and 2; expert 1: token 2.
    assert_eq!(column(f32_rows(&got.x)), [10.0, 11.0, 14.0, 15.0, 14.0, 15.0]);
    assert_eq!(column(i32_rows(got.slots.as_ref().unwrap())), [0, -1, 2, 1]);
}

#[test]
fn an_expert_without_rows_has_no_padding() {
    let (mut case, inputs) = example(PADDED);
    case.experts = 8;
    // Four experts per rank: rank 0 hosts all that is selected, 0 to 3.
    let got = expected_dispatch(&case, &inputs, 0);
    assert_eq!(column(i32_rows(&got.counts)), [2, 1, 2, 2]);
    assert_eq!(got.x.rows, 16);
    let nothing = expected_dispatch(&case, &inputs, 1);
    assert_eq!((nothing.rows, nothing.x.rows), (0, 0));
    assert_eq!(column(i32_rows(&nothing.counts)), [0, 0, 0, 0]);
}

#[test]
fn worst_case_sizes_leave_the_content_and_open_the_end() {
    for layout in [Layout::Flat, UNPADDED] {
        let (case, inputs) = example(layout);
        let exact = expected_dispatch(&case, &inputs, 1);
        let worst = expected_dispatch(&Case { worst_case: true, ..case }, &inputs, 1);
        for (exact, worst) in exact.arrays().zip(worst.arrays()) {
            let mut longer = exact.dense(0);
            longer.resize(longer.len() + exact.row_bytes(), 0xee);
            assert!(exact.compare(&longer).is_err(), "{}", exact.name);
            let table = ["counts", "rank_rows", "rank_ends", "expert_ends"].contains(&exact.name);
            assert_eq!(worst.compare(&longer).is_err(), table, "{}", exact.name);
            assert_eq!(worst.dense(7), exact.dense(7));
        }
    }
}

#[test]
fn scales_follow_their_rows() {
    let (case, mut inputs) = example(UNPADDED);
    let case = Case { input: Input::Opaque(1), ..case };
    for (rank, inputs) in inputs.ranks.iter_mut().enumerate() {
        let tokens = case.tokens_of(rank);
        inputs.x = vec![0; tokens * 2];
        let words = (0..tokens).map(|token| (100 * rank + token) as u32);
        inputs.scales = Some(words.flat_map(u32::to_le_bytes).collect());
    }
    let scales = expected_dispatch(&case, &inputs, 1).scales.unwrap();
    let words: Vec<_> = scales.specified().map(|(row, _, b)| (row, u32s(b)[0])).collect();
    assert_eq!(words, [(0, 1), (1, 100), (4, 0), (5, 100)]);
}

#[test]
fn a_replay_with_new_rows_has_the_same_placement() {
    let (case, inputs) = example(UNPADDED);
    let replay = Case { seed: 9, ..case.clone() };
    let again: Vec<RankInputs> = inputs
        .ranks
        .iter()
        .enumerate()
        .map(|(rank, inputs)| RankInputs::with_routing(&replay, rank, inputs.topk_idx.clone()))
        .collect();
    let again = Inputs::given(&replay, again).unwrap();
    for rank in 0..2 {
        let first = expected_dispatch(&case, &inputs, rank);
        let second = expected_dispatch(&replay, &again, rank);
        assert_ne!(first.x, second.x);
        assert_eq!((first.source, first.slots), (second.source, second.slots));
    }
}
