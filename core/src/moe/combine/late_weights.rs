//! Weights that a combine passes itself. They go to the experts' ranks first, on the routes of the rows: a
//! replay carries them.

use crate::Result;
use crate::communicator::{LateTopk, TensorRef};
use crate::moe::Shape;

/// Fills [rows of weights](Shape::weights_row), one for each token. Experts whose id is negative do not count.
fn fill(rows: &mut Vec<f32>, shape: &Shape, weights: &[f32], ids: Option<&[i64]>) {
    let (topk, width) = (shape.topk as usize, shape.weights_row() as usize);
    rows.clear();
    rows.resize(weights.len() / topk * width, 0.0);
    for (token, row) in rows.chunks_exact_mut(width).enumerate() {
        let mine = token * topk..(token + 1) * topk;
        row[..topk].copy_from_slice(&weights[mine.clone()]);
        let counts = |k: usize| ids.is_none_or(|ids| ids[mine.start + k] >= 0);
        let bits = (0..topk).fold(0_u32, |bits, k| bits | u32::from(counts(k)) << k);
        row[topk] = f32::from_bits(bits);
    }
}

/// Rows for the weights that a combine passes itself, which are used again by the next combine.
#[derive(Debug, Default)]
pub(crate) struct LateWeights {
    rows: Vec<f32>,
}

impl LateWeights {
    /// Fills the rows for a combine, `tokens` of them.
    pub(crate) fn fill(
        &mut self,
        shape: &Shape,
        tokens: usize,
        topk: &LateTopk<'_>,
    ) -> Result<TensorRef<'_>> {
        let ids = topk.ids.as_ref().map(|ids| ids.elements::<i64>());
        fill(&mut self.rows, shape, topk.weights.elements::<f32>(), ids);
        TensorRef::from_slice(&self.rows, tokens, shape.weights_row() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_the_weights_and_a_bit_for_each_expert_that_counts() {
        let shape = |topk| Shape { ranks: 1, experts: 9, topk, hidden: 4, max_tokens: 2 };
        let mut rows = vec![7.0; 3];
        fill(&mut rows, &shape(3), &[0.5, 1.0, 2.0, 3.0, 4.0, 5.0], Some(&[9, -1, 0, -1, -1, 8]));
        let bits: Vec<u32> = rows.iter().skip(3).step_by(4).map(|word| word.to_bits()).collect();
        assert_eq!(
            (rows.len(), &rows[..3], &rows[4..7]),
            (8, &[0.5, 1.0, 2.0][..], &[3.0, 4.0, 5.0][..])
        );
        assert_eq!(bits, [0b101, 0b100]);
        fill(&mut rows, &shape(4), &[1.0; 4], None);
        assert_eq!((rows.len(), rows[4].to_bits()), (8, 0b1111));
    }
}
