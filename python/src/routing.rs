//! The tensors of a dispatch, read in one call where all are as most callers give them.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};
use tokenyard_core::moe::DType;

use crate::dlpack::{DataType, Description, contiguous};
use crate::exchange::Exchange;
use crate::tensor::is_negated;

/// A tensor that a dispatch takes as it is: of the first one's type, without gaps, without a gradient to record, and
/// whose values are those in memory.
fn read(
    tensor: &Bound<'_, PyAny>,
    kind: &Bound<'_, PyType>,
    exchange: Exchange,
) -> Option<Description> {
    if !tensor.get_type().is(kind) {
        return None;
    }
    let py = tensor.py();
    let records = tensor.getattr(intern!(py, "requires_grad")).ok()?;
    if records.is_truthy().ok()? || is_negated(tensor) {
        return None;
    }
    let found = exchange.describe(tensor).ok()?;
    (found.has_memory() && found.strides == contiguous(&found.shape)).then_some(found)
}

/// T, H, K and E of a dispatch, a `DispatchCall`, whose tensors have the types and shapes that it takes, lie on one
/// device and have no gaps. None for any others: those are looked at one by one, which says what is wrong, if anything
/// is.
#[pyfunction]
pub(crate) fn _routing(call: &Bound<'_, PyAny>, ranks: i64) -> Option<(i64, i64, i64, i64)> {
    let py = call.py();
    let x = call.getattr(intern!(py, "x")).ok()?;
    let kind = x.get_type();
    let exchange = Exchange::of(&kind)?;
    let named = |name: &Bound<'_, PyString>| read(&call.getattr(name).ok()?, &kind, exchange);
    let rows = read(&x, &kind, exchange)?;
    let ids = named(intern!(py, "topk_idx"))?;
    let weights = named(intern!(py, "topk_weights"))?;
    let map = named(intern!(py, "is_token_in_rank"))?;
    let counts = named(intern!(py, "num_tokens_per_expert"))?;
    let is_summed = matches!(rows.dtype?, DType::Bf16 | DType::F16 | DType::F32);
    let types = [ids.dtype, weights.dtype, counts.dtype];
    let have_types = types == [Some(DType::I64), Some(DType::F32), Some(DType::I32)];
    let is_together = [&ids, &weights, &map, &counts].iter().all(|one| one.device == rows.device);
    if !(is_summed && have_types && is_together && map.code == DataType::BOOL) {
        return None;
    }
    let (&[tokens, hidden], &[_, topk], &[experts]) =
        (&rows.shape[..], &ids.shape[..], &counts.shape[..])
    else {
        return None;
    };
    let shapes = [&ids.shape[..], &weights.shape[..], &map.shape[..]];
    let fits = shapes == [&[tokens, topk][..], &[tokens, topk], &[tokens, ranks]];
    (fits && experts > 0 && experts % ranks.max(1) == 0).then_some((tokens, hidden, topk, experts))
}
