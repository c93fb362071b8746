//! The tensors of a dispatch, read in one call where all are as most callers give them.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tokenyard_core::moe::DType;

use crate::dlpack::{DataType, Description, contiguous};
use crate::exchange::Exchange;

/// A tensor that a dispatch takes as it is: without gaps, and without a gradient to record.
fn read(tensor: &Bound<'_, PyAny>, exchange: Exchange) -> Option<Description> {
    let records = tensor.getattr(intern!(tensor.py(), "requires_grad")).ok()?;
    if records.is_truthy().ok()? {
        return None;
    }
    let found = exchange.describe(tensor).ok()?;
    // A wrapper of another tensor has no memory of its own.
    let is_there = !found.data.is_null() || found.shape.contains(&0);
    (is_there && found.strides == contiguous(&found.shape)).then_some(found)
}

/// T, H, K and E of a dispatch whose tensors have the types and shapes that it takes, lie on one device and have no
/// gaps: x, ids, weights, the map of ranks, and the counts of experts. None for any others: those are looked at one by
/// one, which says what is wrong, if anything is.
#[pyfunction]
pub(crate) fn _routing(tensors: &Bound<'_, PyTuple>, ranks: i64) -> Option<(i64, i64, i64, i64)> {
    let kind = tensors.iter_borrowed().next()?.get_type();
    let exchange = Exchange::of(&kind)?;
    let mut found = tensors.iter_borrowed().map(|tensor| match tensor.get_type().is(&kind) {
        true => read(&tensor, exchange),
        false => None,
    });
    let mut next = || found.next().flatten();
    let (rows, ids, weights, map, counts) = (next()?, next()?, next()?, next()?, next()?);
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
