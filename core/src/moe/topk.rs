use super::Shape;
use crate::{Error, ErrorKind, Result};

const OPERATION: &str = "check topk_idx";

/// The working memory of [`validate_topk`]: one word per expert. Make one per communicator and reuse it.
#[derive(Debug)]
pub struct TopkScratch {
    /// Row + 1 of the last row that selected each expert; `[E]`.
    last_row: Vec<u32>,
}

impl TopkScratch {
    /// Allocates for `shape`.
    pub fn new(shape: &Shape) -> Self {
        Self { last_row: vec![0; shape.experts as usize] }
    }
}

/// Checks the routing of a caller: `topk_idx` is `[T, K]`, row-major.
///
/// A negative entry selects nothing. O(T*K + E), no allocation unless it fails.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if the length is not a multiple of K, T exceeds M, an index is E or
/// more, or a row selects an expert twice. The message names row, column, value and limit.
pub fn validate_topk(shape: &Shape, topk_idx: &[i64], scratch: &mut TopkScratch) -> Result<()> {
    let topk = shape.topk as usize;
    if !topk_idx.len().is_multiple_of(topk) {
        return Err(ragged(shape, topk_idx.len()));
    }
    let tokens = topk_idx.len() / topk;
    if tokens > shape.max_tokens as usize {
        return Err(too_many_tokens(shape, tokens));
    }
    debug_assert_eq!(scratch.last_row.len(), shape.experts as usize);
    scratch.last_row.fill(0);
    for (row, stamp) in topk_idx.chunks_exact(topk).zip(1..) {
        for (column, &expert) in row.iter().enumerate() {
            if expert < 0 {
                continue;
            }
            let last = usize::try_from(expert).ok().and_then(|e| scratch.last_row.get_mut(e));
            match last {
                None => return Err(no_such_expert(shape, stamp - 1, column, expert)),
                Some(last) if *last == stamp => return Err(twice(row, stamp - 1, column)),
                Some(last) => *last = stamp,
            }
        }
    }
    Ok(())
}

/// The experts of one token that live on `rank`, in k order: pairs of (k, local expert index).
///
/// `row` is one row of a checked `topk_idx`; local indices are in `[0, E/R)`.
#[inline]
pub fn local_experts<'a>(
    shape: &Shape,
    row: &'a [i64],
    rank: u32,
) -> impl Iterator<Item = (u32, u32)> + use<'a> {
    let first = i64::from(rank) * i64::from(shape.local_experts());
    let here = first..first + i64::from(shape.local_experts());
    (0..)
        .zip(row)
        .filter(move |(_, expert)| here.contains(expert))
        .map(move |(k, &expert)| (k, (expert - first) as u32))
}

#[cold]
fn ragged(shape: &Shape, found: usize) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!("found {found} entries; expected whole rows, a multiple of topk = {}", shape.topk),
    )
    .with_fix("pass topk_idx as [tokens, topk], contiguous")
}

#[cold]
fn too_many_tokens(shape: &Shape, found: usize) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!("found {found} tokens; expected at most max_tokens = {}", shape.max_tokens),
    )
    .with_fix("pass fewer tokens, or make the communicator with a larger max_tokens on every rank")
}

#[cold]
fn no_such_expert(shape: &Shape, row: u32, column: usize, found: i64) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!(
            "found expert {found} in row {row}, column {column}; expected less than experts = {}",
            shape.experts
        ),
    )
    .with_fix("select experts in [0, experts), or a negative value to select nothing")
}

#[cold]
fn twice(row_values: &[i64], row: u32, column: usize) -> Error {
    let expert = row_values[column];
    let first = row_values.iter().position(|&e| e == expert).unwrap_or(column);
    Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!(
            "found expert {expert} in row {row}, column {column} and in column {first}; \
             expected distinct experts within a row"
        ),
    )
    .with_fix("select each expert at most once per token")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { ranks: 2, experts: 6, topk: 3, hidden: 16, max_tokens: 2 };

    fn check(topk_idx: &[i64]) -> Result<()> {
        validate_topk(&SHAPE, topk_idx, &mut TopkScratch::new(&SHAPE))
    }

    fn message(topk_idx: &[i64]) -> String {
        let error = check(topk_idx).expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        error.message().to_owned()
    }

    #[test]
    fn negative_entries_select_nothing_and_may_repeat() {
        check(&[]).unwrap();
        check(&[-1, -1, -1]).unwrap();
        check(&[5, -7, 0, 0, 5, i64::MIN]).unwrap();
    }

    #[test]
    fn errors_name_row_column_value_and_limit() {
        assert_eq!(
            message(&[0, 1, 2, 3, 6, 4]),
            "found expert 6 in row 1, column 1; expected less than experts = 6"
        );
        assert!(
            message(&[i64::MAX, 0, 1]).starts_with("found expert 9223372036854775807 in row 0")
        );
        assert_eq!(
            message(&[0, 1, 2, 4, -1, 4]),
            "found expert 4 in row 1, column 2 and in column 0; expected distinct experts within a \
             row"
        );
        assert_eq!(message(&[0; 9]), "found 3 tokens; expected at most max_tokens = 2");
        assert_eq!(
            message(&[0, 1]),
            "found 2 entries; expected whole rows, a multiple of topk = 3"
        );
    }

    #[test]
    fn a_scratch_can_be_used_again() {
        let mut scratch = TopkScratch::new(&SHAPE);
        for _ in 0..3 {
            validate_topk(&SHAPE, &[0, 1, 2], &mut scratch).unwrap();
        }
        validate_topk(&SHAPE, &[0, 1, 1], &mut scratch).expect_err("twice");
        validate_topk(&SHAPE, &[1, 0, 2], &mut scratch).unwrap();
    }

    #[test]
    fn local_experts_come_in_k_order_with_local_indices() {
        let row = [5, -1, 0, 3, i64::MIN, 4];
        assert_eq!(local_experts(&SHAPE, &row, 1).collect::<Vec<_>>(), [(0, 2), (3, 0), (5, 1)]);
        assert_eq!(local_experts(&SHAPE, &row, 0).collect::<Vec<_>>(), [(2, 0)]);
    }
}
