//! The only way in which rows are summed.

use super::number::RowType;

/// A row in a sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Term {
    /// The factor of the row; `None` adds it as it is.
    pub weight: Option<f32>,
    /// The values.
    pub row: Vec<f32>,
}

/// The first term plus the others in order, all in f32, rounded once to `out`.
///
/// A weighted term is added with a fused multiply-add (one rounding), except the first, which is a
/// product. The sum of no terms is +0.0 (`width` times).
pub fn sum(terms: &[Term], width: usize, out: RowType) -> Vec<f32> {
    let Some((first, others)) = terms.split_first() else { return vec![0.0; width] };
    let mut sum: Vec<f32> = match first.weight {
        None => first.row.clone(),
        Some(weight) => first.row.iter().map(|value| weight * value).collect(),
    };
    for term in others {
        for (sum, value) in sum.iter_mut().zip(&term.row) {
            *sum = match term.weight {
                None => *sum + value,
                Some(weight) => weight.mul_add(*value, *sum),
            };
        }
    }
    sum.iter().map(|value| out.round(*value)).collect()
}
