//! Combines: arguments in, core's call, results out.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use tokenyard_core::communicator::{
    Combine, Communicator, Handle as CoreHandle, LateTopk, OnStream, RefusedCall, Statistics,
    TensorRef,
};
use tokenyard_core::moe::{DType, Layout};
use tokenyard_core::{Error, Result};

use super::{
    CallStream, Counted, Inputs, KeptHandle, Maybe, Object, PendingCombine, StreamArguments,
    Waiting, optional, read_handle, refuse,
};
use crate::argument::{Argument, Word};
use crate::array::Array;
use crate::dtype;
use crate::errors::{invalid, raise};
use crate::options;
use crate::output::Handle;
use crate::shared::Shared;
use crate::tensor::Tensor;

/// How a combine sums.
pub(crate) struct Sums<'a, 'py> {
    pub(crate) weighted: Argument<bool>,
    pub(crate) topk_weights: Maybe<'a, 'py>,
    pub(crate) topk_idx: Maybe<'a, 'py>,
    pub(crate) round_once: Argument<bool>,
    pub(crate) compress: Option<Word<'a>>,
    pub(crate) sum_weights: Argument<bool>,
    pub(crate) waited_ns: Maybe<'a, 'py>,
}

/// The arguments of a combine, as Python gave them.
pub(crate) struct CombineArguments<'a, 'py> {
    pub(crate) handle: Object<'a, 'py>,
    pub(crate) x: Object<'a, 'py>,
    pub(crate) weights: Maybe<'a, 'py>,
    pub(crate) bias: Maybe<'a, 'py>,
    pub(crate) sums: Sums<'a, 'py>,
    /// `out`, `out_weights`, `missing`.
    pub(crate) outputs: [Maybe<'a, 'py>; 3],
    pub(crate) stream: StreamArguments,
}

/// The outputs of a combine: the caller's objects, or arrays that were made for it.
pub(super) struct Combined {
    out: Py<PyAny>,
    weights: Option<Py<PyAny>>,
}

impl Combined {
    pub(super) fn clone_ref(&self, py: Python<'_>) -> (Py<PyAny>, Option<Py<PyAny>>) {
        (self.out.clone_ref(py), self.weights.as_ref().map(|weights| weights.clone_ref(py)))
    }
}

/// A combine that is ready to be called.
struct ReadyCombine {
    stream: CallStream,
    handle: KeptHandle,
    call: Combine<'static>,
    counted: Statistics<'static>,
    kept: Inputs,
    outputs: Combined,
}

impl CombineArguments<'_, '_> {
    fn read(&self, shared: &Shared) -> Result<ReadyCombine> {
        let stream = self.stream.read()?;
        let handle = read_handle(self.handle)?;
        let mut kept = Inputs::default();
        let counted = Counted { expert_totals: None, waited_ns: self.sums.waited_ns };
        let counted = counted.read(stream, &mut kept)?;
        let core = handle.get()?;
        let x = Tensor::read("x", self.x)?;
        let tokens = core.tokens() as i64;
        let [out, out_weights, missing] = self.outputs;
        let hidden = i64::from(shared.shape().hidden);
        let out = match out {
            Some(object) => given_output("out", object)?,
            None => self.new_output("out", x.dtype(), [tokens, hidden], &x)?,
        };
        let out_weights = match (out_weights, self.weights) {
            (None, None) => None,
            (Some(object), _) => Some(given_output("out_weights", object)?),
            (None, Some(_)) => {
                let shape = [tokens, i64::from(shared.shape().topk)];
                Some(self.new_output("out_weights", DType::F32, shape, &x)?)
            }
        };
        let outputs = Combined {
            out: out.0,
            weights: out_weights.as_ref().map(|(object, _)| object.clone_ref(self.x.py())),
        };
        let call = Combine {
            x: kept.keep(x)?,
            weights: self.weights(core.layout(), &mut kept)?,
            bias: self.bias(&mut kept)?,
            sum_weights: self.sums.sum_weights.get("sum_weights")?,
            weighted: self.sums.weighted.get("weighted")?,
            round_once: self.sums.round_once.get("round_once")?,
            compression: options::compression(self.sums.compress.as_ref())?,
            topk: self.topk(&mut kept)?,
            out: kept.keep_mut(out.1)?,
            out_weights: out_weights.map(|(_, tensor)| kept.keep_mut(tensor)).transpose()?,
            missing: optional("missing", missing)?.map(|m| kept.keep_mut(m)).transpose()?,
        };
        Ok(ReadyCombine { stream, call, counted, kept, outputs, handle: Arc::clone(&handle) })
    }

    /// A new output, where the host can make it.
    fn new_output(
        &self,
        name: &'static str,
        dtype: DType,
        shape: [i64; 2],
        x: &Tensor,
    ) -> Result<(Py<PyAny>, Tensor)> {
        if x.is_on_device() {
            let text = format!("{name}: found none; expected a tensor on the device of x");
            return Err(invalid(text).with_fix("allocate it with the library that x is of"));
        }
        let array = Array::on_host(dtype, shape.into_iter().collect());
        let tensor = array.tensor(name);
        let object = Py::new(self.x.py(), array)
            .map_err(|raised| invalid(format!("{name}: cannot be made: {raised}")))?;
        Ok((object.into_any(), tensor))
    }

    fn weights(&self, layout: Layout, kept: &mut Inputs) -> Result<Option<TensorRef<'static>>> {
        let Some(weights) = optional("weights", self.weights)? else { return Ok(None) };
        match layout.has_a_row_per_token() {
            true => kept.keep(weights).map(Some),
            false => kept.keep_column(weights).map(Some),
        }
    }

    fn topk(&self, kept: &mut Inputs) -> Result<Option<LateTopk<'static>>> {
        let Some(weights) = optional("topk_weights", self.sums.topk_weights)? else {
            let ids = self.sums.topk_idx.is_some_and(|ids| !ids.is_none());
            return match ids {
                true => Err(invalid(
                    "topk_idx: found some without topk_weights; expected both or neither",
                )),
                false => Ok(None),
            };
        };
        let ids = optional("topk_idx", self.sums.topk_idx)?.map(Tensor::into_ids).transpose()?;
        Ok(Some(LateTopk { weights: kept.keep(weights)?, ids: kept.optional(ids)? }))
    }

    /// As that of a dispatch.
    fn refuse(&self, py: Python<'_>, shared: &Shared, why: Error) -> PyErr {
        refuse(py, shared, self.stream.of_refusal(), self.refused(shared), why)
    }

    fn refused(&self, shared: &Shared) -> RefusedCall {
        if self.sums.topk_weights.is_none_or(|weights| weights.is_none()) {
            return RefusedCall::Combine;
        }
        let handle = read_handle(self.handle).ok();
        let layout = handle.and_then(|handle| handle.get().ok().map(CoreHandle::layout));
        match layout.unwrap_or(Layout::Flat) {
            Layout::Packed if shared.takes_packed_sums() => RefusedCall::Combine,
            // Weights come first, by a replay.
            layout => RefusedCall::Replay(layout),
        }
    }

    fn bias(&self, kept: &mut Inputs) -> Result<[Option<TensorRef<'static>>; 2]> {
        let Some(bias) = self.bias else { return Ok([None, None]) };
        if !bias.is_instance_of::<PyTuple>() && !bias.is_instance_of::<PyList>() {
            return Ok([kept.optional(Tensor::optional("bias", bias)?)?, None]);
        }
        let all: Vec<Bound<'_, PyAny>> = bias
            .extract()
            .map_err(|raised: PyErr| invalid(format!("bias: cannot be read: {raised}")))?;
        let mut two = [None, None];
        if all.len() > two.len() {
            return Err(invalid(format!("bias: found {} tensors; expected at most 2", all.len())));
        }
        for (place, object) in two.iter_mut().zip(&all) {
            *place = kept.optional(Tensor::optional("bias", object)?)?;
        }
        Ok(two)
    }
}

pub(crate) fn combine(
    py: Python<'_>,
    shared: &Arc<Shared>,
    arguments: &CombineArguments<'_, '_>,
) -> PyResult<(Py<PyAny>, Option<Py<PyAny>>)> {
    let ReadyCombine { stream, handle, call, counted, kept: _kept, outputs } =
        arguments.read(shared).map_err(|why| arguments.refuse(py, shared, why))?;
    shared.comm.call(py, |comm| in_order!(comm, stream, counted, combine(handle.get()?, call)))?;
    Ok(outputs.clone_ref(py))
}

pub(crate) fn combine_send(
    py: Python<'_>,
    shared: &Arc<Shared>,
    arguments: &CombineArguments<'_, '_>,
) -> PyResult<PendingCombine> {
    let ReadyCombine { stream, handle, call, counted, kept, outputs } =
        arguments.read(shared).map_err(|why| arguments.refuse(py, shared, why))?;
    let pending = shared
        .comm
        .call(py, |comm| in_order!(comm, stream, counted, combine_send(handle.get()?, call)))?;
    Ok(PendingCombine { waiting: Waiting::new(shared, stream, pending.keeping(kept)), outputs })
}

/// Memory for the experts' outputs.
pub(crate) fn combine_input(
    py: Python<'_>,
    shared: &Shared,
    handle: &Handle,
    dtype: Object<'_, '_>,
) -> PyResult<Array> {
    let name = dtype.getattr("name").unwrap_or_else(|_| dtype.clone()).str()?.to_string();
    let dtype = dtype::parse(&name).ok_or_else(|| {
        raise(py, &invalid(format!("dtype: found {name}; expected one of {}", dtype::names())))
    })?;
    let handle = handle.core();
    let input = shared.comm.call(py, |comm| comm.combine_input(handle.get()?, dtype))?;
    Array::of_input(input).ok_or_else(|| raise(py, &invalid("dtype: found an unknown one")))
}

/// An output that the caller gave.
fn given_output(name: &'static str, object: Object<'_, '_>) -> Result<(Py<PyAny>, Tensor)> {
    Ok((object.clone().unbind(), Tensor::read(name, object)?))
}
