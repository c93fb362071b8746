//! Hand-computed examples and conservation laws. Expected values are literals.

// Literals are written out in full where f32 holds them exactly.
#![allow(clippy::excessive_precision)]

mod case;
mod cast;
mod combine;
mod compare;
mod dispatch;
mod experts;
mod inputs;
mod logfmt;
mod number;
mod properties;

use super::number::{f32s, i32s};
use super::*;

/// The worked example of these tests: two ranks with two experts each, rows of two f32.
///
/// | token | row | selects | weights |
/// |---|---|---|---|
/// | rank 0, token 0 | 10 11 | 0 3 | 0.5 0.25 |
/// | rank 0, token 1 | 12 13 | 2 - | 0.75 9 |
/// | rank 0, token 2 | 14 15 | 1 0 | 0.125 0.0625 |
/// | rank 1, token 0 | 20 21 | 3 2 | 1 2 |
/// | rank 1, token 1 | 22 23 | - - | 7 7 |
fn example(layout: Layout) -> (Case, Inputs) {
    let case = Case {
        ranks: 2,
        experts: 4,
        topk: 2,
        hidden: 2,
        max_tokens: 3,
        tokens: Tokens::Exactly(vec![3, 2]),
        input: Input::Plain(RowType::F32),
        layout,
        combine: Combine { row: RowType::F32, biases: 0, weighted: false, sums: Sums::ByRank },
        routing: Routing::Given(1),
        ..Case::default()
    };
    let rank0 = RankInputs {
        x: f32_bytes(&[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]),
        scales: None,
        topk_idx: vec![0, 3, 2, -1, 1, 0],
        topk_weights: Some(vec![0.5, 0.25, 0.75, 9.0, 0.125, 0.0625]),
        biases: Vec::new(),
    };
    let rank1 = RankInputs {
        x: f32_bytes(&[20.0, 21.0, 22.0, 23.0]),
        scales: None,
        topk_idx: vec![3, 2, -1, -5],
        topk_weights: Some(vec![1.0, 2.0, 7.0, 7.0]),
        biases: Vec::new(),
    };
    let inputs = Inputs::given(&case, vec![rank0, rank1]).unwrap();
    (case, inputs)
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The specified rows of an f32 array.
fn f32_rows(array: &Array) -> Vec<(usize, Vec<f32>)> {
    assert_eq!(array.elem, Elem::F32);
    array.specified().map(|(row, _, bytes)| (row, f32s(bytes))).collect()
}

/// The specified rows of an i32 array.
fn i32_rows(array: &Array) -> Vec<(usize, Vec<i32>)> {
    assert_eq!(array.elem, Elem::I32);
    array.specified().map(|(row, _, bytes)| (row, i32s(bytes))).collect()
}
