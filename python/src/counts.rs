//! Counts of a routing, for a caller that wants them before it sends anything.

use pyo3::prelude::*;
use smallvec::smallvec;
use tokenyard_core::Result;
use tokenyard_core::moe::{DType, RoutingCounts, Shape, TopkScratch, validate_topk};

use crate::argument::Argument;
use crate::array::Array;
use crate::errors::{invalid, raise};
use crate::tensor::Tensor;

/// How many of these tokens go where: `(rank_tokens, expert_tokens, is_token_in_rank)`, which DeepEP calls a dispatch
/// layout.
///
/// - `topk_idx`: `[T, K]` int64 or int32 in host memory, contiguous: experts; a negative entry selects nothing.
/// - `experts`: E, a multiple of `ranks`.
///
/// Returns `[R]` int32, each token once for each rank; `[E]` int32; `[T, R]` uint8, 1 where a token goes to the rank.
/// Local: nothing is sent. Raises InvalidInputError.
#[pyfunction]
pub(crate) fn routing_counts(
    py: Python<'_>,
    topk_idx: &Bound<'_, PyAny>,
    experts: Argument<u32>,
    ranks: Argument<u32>,
) -> PyResult<(Array, Array, Array)> {
    let read = || count(topk_idx, experts.get("experts")?, ranks.get("ranks")?);
    read().map_err(|error| raise(py, &error))
}

fn count(topk_idx: &Bound<'_, PyAny>, experts: u32, ranks: u32) -> Result<(Array, Array, Array)> {
    let ids = Tensor::read("topk_idx", topk_idx)?.into_ids()?;
    // SAFETY: `ids` keeps the memory until the end of this function; the GIL keeps Python from writing it meanwhile.
    let ids = unsafe { ids.get()? };
    if ids.is_on_device() || !ids.is_contiguous() {
        return Err(invalid(
            "topk_idx: found another tensor; expected a contiguous one in host memory",
        ));
    }
    let (tokens, topk) = (ids.rows() as u32, ids.cols() as u32);
    let shape = Shape { ranks, experts, topk, hidden: 16, max_tokens: tokens.max(1) }.new()?;
    let all = ids.elements::<i64>();
    validate_topk(&shape, all, &mut TopkScratch::new(&shape))?;
    let counts = RoutingCounts::new(&shape, all);
    let list = |counts: &[u32]| {
        let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_ne_bytes()).collect();
        Array::of_bytes(DType::I32, smallvec![counts.len() as i64], &bytes)
    };
    let is_in: Vec<u8> = counts.is_token_in_rank.iter().map(|is_in| u8::from(*is_in)).collect();
    let is_in = Array::of_bytes(DType::U8, smallvec![i64::from(tokens), i64::from(ranks)], &is_in);
    Ok((list(&counts.rank_tokens), list(&counts.expert_tokens), is_in))
}
