//! The all-gather as Python sees it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use tokenyard_core::communicator::{BringUpReport, TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::ops::gather::{
    Gather as CoreGather, GatherOptions, PendingGather as CorePendingGather,
};
use tokenyard_core::{Error, Result};

use crate::argument::Argument;
use crate::array::Array;
use crate::config::Config;
use crate::dlpack::Dims;
use crate::errors::{invalid, raise};
use crate::guarded::{Guarded, methods_of_opened, open};
use crate::operations::received_before;
use crate::tensor::Tensor;
use crate::world::World;

/// All-gathers: each rank gets the shards of all ranks, such as the parameters of a layer that each rank has a part of.
///
/// `Gather(world, config, max_bytes=...)` opens it on all ranks of `world`. Collective. `config` is a Config or the
/// path of a TOML file. `max_bytes`, 1 to 2**40, is the most bytes of the shards of one rank in a call. `in_flight`, 1
/// to 32, is how many calls may be sent and not yet received. Both are equal on all ranks. Raises InvalidInputError,
/// and RefusedError on the other ranks; UnsupportedError where the kernel set has no gathers, and where losses are
/// masked.
///
/// **Calls are collective**: all ranks make the same ones in the same order, and so their halves, with as many shards
/// of the same lengths in bytes. Types and shapes do not travel.
///
/// **Tensors** may be of torch, numpy, JAX, CuPy, or anything with `__dlpack__`, of any shape, with elements that
/// follow each other: bfloat16, float16, float32, float8_e4m3fn, uint8, int32, int64. They lie in host memory with the
/// kernel set `cpu`. Synchronise work that is queued on a tensor before the call.
///
/// **Errors**: tensors that cannot be gathered raise InvalidInputError here, and RefusedError on the other ranks.
/// Lengths that differ raise MismatchError on all. Nothing is written then, and the gather goes on. DeadlineError,
/// PeerLostError, TransportError close it.
///
/// **Threads**: calls release the GIL and wait for each other. Close it on all ranks, best as a context manager; to
/// drop it is never collective. After an exception in the body of `with` it is dropped and not closed.
#[pyclass(frozen, module = "tokenyard", weakref)]
pub(crate) struct Gather {
    core: Arc<Guarded<CoreGather>>,
    options: GatherOptions,
    report: BringUpReport,
    ranks: u32,
}

/// The tensors of an argument: those of a list or a tuple, or one.
struct Tensors {
    name: &'static str,
    all: Vec<Tensor>,
    is_list: bool,
}

impl Tensors {
    fn read(name: &'static str, object: &Bound<'_, PyAny>) -> Result<Self> {
        let (items, is_list) = items(object);
        let read = |(index, item)| match Tensor::read(name, item) {
            Err(why) if is_list => Err(of_item(index, name, &why)),
            read => read,
        };
        let all = items.iter().enumerate().map(read).collect::<Result<_>>()?;
        Ok(Self { name, all, is_list })
    }

    /// The result of `give` for each tensor, for core.
    fn give<T>(&self, give: impl Fn(&Tensor) -> Result<T>) -> Result<Vec<T>> {
        let given = |(index, tensor)| match give(tensor) {
            Err(why) if self.is_list => Err(of_item(index, self.name, &why)),
            given => given,
        };
        self.all.iter().enumerate().map(given).collect()
    }
}

/// The objects of a list or a tuple, or the one; and whether it is a list.
pub(crate) fn items<'py>(object: &Bound<'py, PyAny>) -> (Vec<Bound<'py, PyAny>>, bool) {
    match (object.cast::<PyList>(), object.cast::<PyTuple>()) {
        (Ok(list), _) => (list.iter().collect(), true),
        (_, Ok(tuple)) => (tuple.iter().collect(), true),
        _ => (vec![object.clone()], false),
    }
}

/// The error of a tensor in a list, with its place.
fn of_item(index: usize, name: &str, why: &Error) -> Error {
    let text = why.message();
    let named = invalid(format!("{name}[{index}]{}", text.strip_prefix(name).unwrap_or(text)));
    match why.fix() {
        Some(fix) => named.with_fix(fix),
        None => named,
    }
}

/// The form of an output for a shard.
struct OutputForm {
    /// The shard. Its library makes the output.
    object: Py<PyAny>,
    dtype: DType,
    shape: Dims,
}

impl OutputForm {
    /// New memory for the shards of all ranks: a tensor of torch or numpy, else an array of this package.
    fn make(&self, py: Python<'_>, ranks: u32) -> PyResult<Py<PyAny>> {
        let object = self.object.bind(py);
        let shape: Dims = std::iter::once(ranks.into()).chain(self.shape.iter().copied()).collect();
        let is_of_numpy = || {
            let module = object.get_type().getattr(intern!(py, "__module__"));
            module.and_then(|name| name.extract::<String>()).is_ok_and(|name| name == "numpy")
        };
        if let Ok(new_empty) = object.getattr(intern!(py, "new_empty")) {
            return Ok(new_empty.call1((PyTuple::new(py, shape)?,))?.unbind());
        }
        if is_of_numpy() {
            let (shape, dtype) = (PyTuple::new(py, shape)?, object.getattr(intern!(py, "dtype"))?);
            return Ok(py.import("numpy")?.call_method1("empty", (shape, dtype))?.unbind());
        }
        Ok(Py::new(py, Array::on_host(self.dtype, shape))?.into_any())
    }
}

/// The shards of a call.
struct Shards {
    /// Held while core uses `given`.
    _kept: Tensors,
    given: Vec<TensorRef<'static>>,
    forms: OutputForms,
}

/// The forms of the outputs of a call.
struct OutputForms {
    all: Vec<OutputForm>,
    is_list: bool,
    ranks: u32,
}

impl Shards {
    fn read(object: &Bound<'_, PyAny>, ranks: u32) -> Result<Self> {
        let kept = Tensors::read("shards", object)?;
        // SAFETY: the tensors are held during the call. That no thread writes their memory until then is asked of the
        // caller.
        let given = kept.give(|tensor| unsafe { tensor.get_message() })?;
        let is_list = kept.is_list;
        let form = |(index, tensor): (usize, &Tensor)| {
            let item = if is_list { object.get_item(index) } else { Ok(object.clone()) };
            let object = item.map_err(|error| invalid(format!("shards: {error}")))?.unbind();
            Ok(OutputForm {
                object,
                dtype: tensor.dtype(),
                shape: Dims::from_slice(tensor.shape()),
            })
        };
        let all = kept.all.iter().enumerate().map(form).collect::<Result<_>>()?;
        Ok(Self { _kept: kept, given, forms: OutputForms { all, is_list, ranks } })
    }
}

/// The outputs of a call.
struct Outs {
    /// Held while core uses `given`.
    _kept: Tensors,
    given: Vec<TensorMut<'static>>,
    /// For the caller.
    object: Py<PyAny>,
}

impl Outs {
    /// The caller's, or new ones.
    fn read(
        object: Option<&Bound<'_, PyAny>>,
        forms: &OutputForms,
        py: Python<'_>,
    ) -> Result<Self> {
        let made = match object {
            Some(object) => Ok(object.clone()),
            None => forms.make(py),
        };
        let object = made.map_err(|error| invalid(format!("outs: cannot be made: {error}")))?;
        let kept = Tensors::read("outs", &object)?;
        // SAFETY: the tensors are held during the call. That no thread uses their memory until then is asked of the
        // caller.
        let given = kept.give(|tensor| unsafe { tensor.get_message_mut() })?;
        Ok(Self { _kept: kept, given, object: object.unbind() })
    }
}

impl OutputForms {
    fn make<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut made = Vec::new();
        for form in &self.all {
            made.push(form.make(py, self.ranks)?.into_bound(py));
        }
        match made.pop() {
            Some(one) if !self.is_list => Ok(one),
            last => {
                made.extend(last);
                Ok(PyList::new(py, made)?.into_any())
            }
        }
    }
}

methods_of_opened!(Gather, core, report);

#[pymethods]
impl Gather {
    #[new]
    #[pyo3(signature = (world, config, *, max_bytes, in_flight=Argument::Fits(2)),
           text_signature = "(world, config, *, max_bytes, in_flight=2)")]
    fn new(
        py: Python<'_>,
        world: &World,
        config: &Bound<'_, PyAny>,
        max_bytes: Argument<u64>,
        in_flight: Argument<u32>,
    ) -> PyResult<Self> {
        let read = || {
            let max_bytes = max_bytes.get("max_bytes")?;
            let options = GatherOptions { max_bytes, in_flight: in_flight.get("in_flight")? };
            Ok((Config::read_to_open(config)?, options))
        };
        let (gather, world) = open::<CoreGather>(py, world, read)?;
        let ranks = world.get().map_err(|error| raise(py, &error))?.ranks();
        let (options, report) = (gather.options(), gather.report().clone());
        Ok(Self { core: Guarded::new(gather, world), options, report, ranks })
    }

    /// Gives each rank the shards of all ranks. `shards` is a tensor, or a list or tuple of tensors: small ones share a
    /// round. Output i is contiguous, and gets shard i of rank 0, then that of rank 1, and so on. Collective.
    ///
    /// `outs` is a tensor, or a list or tuple of as many tensors as `shards`, each with R times the bytes of its shard,
    /// in any shape. It is returned. Without it, outputs are new, `[R, *shape of the shard]`: tensors of torch and
    /// numpy for those of torch and numpy, else tokenyard's arrays.
    ///
    /// Raises InvalidInputError, RefusedError: tensors of this rank, or of another, cannot be gathered. MismatchError:
    /// ranks gave shards of other lengths. Nothing is written then.
    #[pyo3(signature = (shards, outs=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        shards: &Bound<'_, PyAny>,
        outs: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let read = Shards::read(shards, self.ranks)
            .and_then(|shards| Ok((Outs::read(outs, &shards.forms, py)?, shards)));
        let (mut outs, shards) = read.map_err(|why| self.refuse(py, why))?;
        let (given, room) = (&shards.given, &mut outs.given);
        self.core.call(py, |gather| gather.all_gather(given, room))?;
        Ok(outs.object)
    }

    /// The first half of `all_gather`: sends the shards, which may be changed afterwards. `recv()` of its result is the
    /// second half. Collective.
    ///
    /// Raises InvalidInputError: shards of this rank cannot be gathered, and the other ranks get RefusedError by
    /// `recv()`. Where `in_flight` calls are not received, it is raised on this rank alone: all ranks make the same
    /// calls, so all get it.
    fn all_gather_send(
        &self,
        py: Python<'_>,
        shards: &Bound<'_, PyAny>,
    ) -> PyResult<PendingGather> {
        let shards = Shards::read(shards, self.ranks).map_err(|why| self.refuse(py, why))?;
        let given = &shards.given;
        let pending = self.core.call(py, |gather| gather.all_gather_send(given))?;
        let core = Arc::clone(&self.core);
        Ok(PendingGather { core, pending: Mutex::new(Some(pending)), forms: shards.forms })
    }

    /// The most bytes of the shards of one rank in a call.
    #[getter]
    fn max_bytes(&self) -> u64 {
        self.options.max_bytes
    }

    /// Calls that may be sent and not yet received.
    #[getter]
    fn in_flight(&self) -> u32 {
        self.options.in_flight
    }

    /// Closes it on all ranks together. Collective; again is no error.
    ///
    /// Raises InvalidInputError for a call that was sent and not received, and what ended it before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.core.close(py)
    }

    fn __repr__(&self) -> String {
        let GatherOptions { max_bytes, in_flight } = self.options;
        format!("tokenyard.Gather(max_bytes={max_bytes}, in_flight={in_flight})")
    }
}

impl Gather {
    /// Takes part in the others' call with a refusal, and returns what to raise.
    fn refuse(&self, py: Python<'_>, why: Error) -> PyErr {
        let refused = self.core.call::<()>(py, |gather| Err(gather.refuse_all_gather(why)));
        refused.err().unwrap_or_else(|| raise(py, &invalid("the call was refused")))
    }
}

/// An all-gather that was sent. `recv()` finishes it; until then it counts as open. It keeps the objects of the shards,
/// which may be changed.
#[pyclass(frozen, module = "tokenyard")]
pub(crate) struct PendingGather {
    core: Arc<Guarded<CoreGather>>,
    pending: Mutex<Option<CorePendingGather>>,
    forms: OutputForms,
}

#[pymethods]
impl PendingGather {
    /// The second half of `all_gather`: waits for the shards of all ranks, and returns what it returns. Once.
    /// Collective. `outs` is as there.
    ///
    /// Raises RefusedError, MismatchError as there. InvalidInputError: an output of this rank cannot be written. The
    /// other ranks do not learn of that; the call has ended then, and its shards are lost here.
    #[pyo3(signature = (outs=None))]
    fn recv(&self, py: Python<'_>, outs: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let outs = Outs::read(outs, &self.forms, py);
        let (room, kept) = match outs {
            Ok(Outs { given, object, _kept }) => (Ok(given), Some((object, _kept))),
            Err(why) => (Err(why), None),
        };
        self.core.call(py, |gather| {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
            let pending = pending.ok_or_else(|| received_before("receive gather"))?;
            match room {
                Ok(mut room) => gather.all_gather_recv(pending, &mut room),
                Err(why) => {
                    let ended = gather.all_gather_recv(pending, &mut []);
                    if gather.is_closed() { ended } else { Err(why) }
                }
            }
        })?;
        Ok(kept.map_or_else(|| py.None(), |(object, _)| object))
    }
}
