//! Sums over all ranks as Python sees them: methods of a gather.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tokenyard_core::ops::gather::Gather as CoreGather;
use tokenyard_core::ops::gather::reduce::{PendingReduce as CorePendingReduce, Spread, Sum};
use tokenyard_core::{Error, Result};

use crate::all_gather::Gather;
use crate::argument::{Argument, Word, word};
use crate::dlpack::Dims;
use crate::errors::{invalid, raise};
use crate::guarded::Guarded;
use crate::operations::received_before;
use crate::options::precision;
use crate::tensors::{CallInputs, OutputForms, Outputs};

/// The options of a sum, as they were given.
struct Given<'a> {
    precision: Word<'a>,
    scale: Argument<f64>,
}

impl Given<'_> {
    fn read(&self) -> Result<Sum> {
        Ok(Sum { precision: precision(&self.precision)?, scale: self.scale.get("scale")? as f32 })
    }
}

/// The shape of an output: that of the tensor, or of its part for a rank.
fn summed(spread: Spread, shape: &[i64], ranks: u32) -> Dims {
    let ranks = i64::from(ranks);
    match (spread, shape) {
        (Spread::All, shape) => shape.iter().copied().collect(),
        (Spread::Scatter, [first, rest @ ..]) if first % ranks == 0 => {
            std::iter::once(first / ranks).chain(rest.iter().copied()).collect()
        }
        (Spread::Scatter, shape) => {
            std::iter::once(shape.iter().product::<i64>() / ranks).collect()
        }
    }
}

#[pymethods]
impl Gather {
    /// Sums tensors over all ranks, and gives each rank its part: of R parts of equal length, in order of ranks.
    /// `tensors` is a tensor, or a list or tuple of tensors of one round, of bfloat16 or float32, in any shape. R
    /// divides the number of their elements. Collective, and only with `reduces=True`.
    ///
    /// An element is the sum of those of all ranks, added in float32 in the order of ranks, multiplied by `scale`, and
    /// rounded once to the type of the tensor. So it has the same bits in every run and over every transport.
    /// `precision` is "fp32", or "bf16": then parts of float32 travel as bfloat16, half as many bytes, with stochastic
    /// rounding by a hash of elements and places, not of ranks. A finite number above the largest bfloat16 may become
    /// infinite. It and `scale`, a finite number, are equal on all ranks.
    ///
    /// `outs` is a tensor, or a list or tuple of as many as `tensors`, each of the type of its tensor with 1/R of its
    /// elements. It may be a part of the tensors. It is returned. Without it, outputs are new, as those of
    /// `all_gather`: `[n / R, ...]` for `[n, ...]` where R divides n, else flat.
    ///
    /// Raises InvalidInputError, RefusedError: tensors of this rank, or of another, cannot be summed. MismatchError:
    /// ranks gave other lengths, types, `precision` or `scale`, or make different calls. Nothing is written then.
    #[pyo3(signature = (tensors, outs=None, *, precision=word("fp32"), scale=Argument::Fits(1.0)),
           text_signature = "($self, tensors, outs=None, *, precision='fp32', scale=1.0)")]
    fn reduce_scatter(
        &self,
        tensors: &Bound<'_, PyAny>,
        outs: Option<&Bound<'_, PyAny>>,
        precision: Word<'_>,
        scale: Argument<f64>,
    ) -> PyResult<Py<PyAny>> {
        self.reduce(Spread::Scatter, tensors, outs, &Given { precision, scale })
    }

    /// The first half of `reduce_scatter`: sends the parts of the tensors, which may be changed afterwards. `recv()` of
    /// its result is the second half. Collective.
    ///
    /// Raises as there, and as `all_gather_send`.
    #[pyo3(signature = (tensors, *, precision=word("fp32"), scale=Argument::Fits(1.0)),
           text_signature = "($self, tensors, *, precision='fp32', scale=1.0)")]
    fn reduce_scatter_send(
        &self,
        tensors: &Bound<'_, PyAny>,
        precision: Word<'_>,
        scale: Argument<f64>,
    ) -> PyResult<PendingReduce> {
        self.send(Spread::Scatter, tensors, &Given { precision, scale })
    }

    /// Sums tensors over all ranks, and gives all ranks the sums, with the same bits. As `reduce_scatter`, and a gather
    /// of the parts. Outputs have as many elements as their tensors, and their shape where they are new. `outs=tensors`
    /// sums in place. Collective, and only with `reduces=True`.
    ///
    /// Raises as `reduce_scatter`, with one exception. Where another rank makes the call by its halves, and its outputs
    /// cannot be written, RefusedError comes when this rank's own part of `outs` has its sum. The rest is as it was.
    #[pyo3(signature = (tensors, outs=None, *, precision=word("fp32"), scale=Argument::Fits(1.0)),
           text_signature = "($self, tensors, outs=None, *, precision='fp32', scale=1.0)")]
    fn all_reduce(
        &self,
        tensors: &Bound<'_, PyAny>,
        outs: Option<&Bound<'_, PyAny>>,
        precision: Word<'_>,
        scale: Argument<f64>,
    ) -> PyResult<Py<PyAny>> {
        self.reduce(Spread::All, tensors, outs, &Given { precision, scale })
    }

    /// The first half of `all_reduce`, as `reduce_scatter_send`.
    #[pyo3(signature = (tensors, *, precision=word("fp32"), scale=Argument::Fits(1.0)),
           text_signature = "($self, tensors, *, precision='fp32', scale=1.0)")]
    fn all_reduce_send(
        &self,
        tensors: &Bound<'_, PyAny>,
        precision: Word<'_>,
        scale: Argument<f64>,
    ) -> PyResult<PendingReduce> {
        self.send(Spread::All, tensors, &Given { precision, scale })
    }
}

impl Gather {
    fn read_tensors(&self, spread: Spread, tensors: &Bound<'_, PyAny>) -> Result<CallInputs> {
        CallInputs::read("tensors", tensors, |shape| summed(spread, shape, self.ranks))
    }

    fn reduce(
        &self,
        spread: Spread,
        tensors: &Bound<'_, PyAny>,
        outs: Option<&Bound<'_, PyAny>>,
        given: &Given<'_>,
    ) -> PyResult<Py<PyAny>> {
        let py = tensors.py();
        let read = given.read().and_then(|sum| {
            let tensors = self.read_tensors(spread, tensors)?;
            Ok((Outputs::read(outs, &tensors.forms, py)?, tensors, sum))
        });
        let (mut outs, tensors, sum) = read.map_err(|why| self.refuse_reduce(py, spread, why))?;
        let (given, room) = (&tensors.given, &mut outs.given);
        self.core.call(py, |gather| match spread {
            Spread::Scatter => gather.reduce_scatter(given, room, sum),
            Spread::All => gather.all_reduce(given, room, sum),
        })?;
        Ok(outs.object)
    }

    fn send(
        &self,
        spread: Spread,
        tensors: &Bound<'_, PyAny>,
        given: &Given<'_>,
    ) -> PyResult<PendingReduce> {
        let py = tensors.py();
        let read = given.read().and_then(|sum| Ok((self.read_tensors(spread, tensors)?, sum)));
        let (tensors, sum) = read.map_err(|why| self.refuse_reduce(py, spread, why))?;
        let given = &tensors.given;
        let pending = self.core.call(py, |gather| gather.reduce_send(spread, given, sum))?;
        let core = Arc::clone(&self.core);
        Ok(PendingReduce { core, pending: Mutex::new(Some(pending)), forms: tensors.forms })
    }

    /// Takes part in the others' call with a refusal, and returns what to raise.
    fn refuse_reduce(&self, py: Python<'_>, spread: Spread, why: Error) -> PyErr {
        let refused = self.core.call::<()>(py, |gather| Err(gather.refuse_reduce(spread, why)));
        refused.err().unwrap_or_else(|| raise(py, &invalid("the call was refused")))
    }
}

/// A sum that was sent. `recv()` finishes it; until then it counts as open. It keeps the objects of the tensors, which
/// may be changed.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct PendingReduce {
    core: Arc<Guarded<CoreGather>>,
    pending: Mutex<Option<CorePendingReduce>>,
    forms: OutputForms,
}

#[pymethods]
impl PendingReduce {
    /// The second half of `reduce_scatter` or `all_reduce`: waits for the parts of all ranks, and returns what that
    /// returns. Once. Collective, in any order of calls that all ranks share. `outs` is as there. That of an all-reduce
    /// then waits for the second halves of all ranks, and counts `deadline_ms` anew.
    ///
    /// Raises RefusedError, MismatchError as there. InvalidInputError: an output of this rank cannot be written. The
    /// call has ended then, and its sums are lost here. The other ranks do not learn of that where they get parts;
    /// those of an all-reduce get RefusedError, because the part of this rank is lacking. In their outputs their own
    /// part has its sum by then, and the rest is as it was.
    #[pyo3(signature = (outs=None))]
    fn recv(&self, py: Python<'_>, outs: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let (room, kept) = Outputs::read(outs, &self.forms, py).map_or_else(
            |why| (Err(why), None),
            |outs| (Ok(outs.given), Some((outs.object, outs.kept))),
        );
        self.core.call(py, |gather| {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
            let pending = pending.ok_or_else(|| received_before("receive sum"))?;
            match room {
                Ok(mut room) => gather.reduce_recv(pending, &mut room),
                Err(why) => gather.reduce_lost(pending, why),
            }
        })?;
        Ok(kept.map_or_else(|| py.None(), |(object, _)| object))
    }
}
