//! The all-gather as Python sees it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use tokenyard_core::communicator::{BringUpReport, Stream};
use tokenyard_core::ops::gather::{
    Gather as CoreGather, GatherOptions, PendingGather as CorePendingGather,
};
use tokenyard_core::{Error, Result};

use crate::argument::Argument;
use crate::config::Config;
use crate::dlpack::Dims;
use crate::errors::{invalid, raise};
use crate::guarded::{Guarded, methods_of_opened, open};
use crate::operations::{received_before, stream};
use crate::tensors::{CallInputs, OutputForms, Outputs};
use crate::world::World;

/// All-gathers: each rank gets the shards of all ranks, such as the parameters of a layer that each rank has a part of.
/// With `reduces=True` also sums over all ranks, such as those of gradients: `reduce_scatter` and `all_reduce`.
///
/// `Gather(world, config, max_bytes=...)` opens it on all ranks of `world`. Collective. `config` is a Config or the
/// path of a TOML file. `max_bytes`, 1 to 2**40, is the most bytes of the shards of one rank in a call. `in_flight`, 1
/// to 32, is how many calls may be sent and not yet received. `reduces` says whether it also sums. All are equal on all
/// ranks. Raises InvalidInputError, and RefusedError on the other ranks; UnsupportedError where the kernel set has no
/// gathers, and where losses are masked.
///
/// **Calls are collective**: all ranks make the same ones in the same order, and so their halves, with as many shards
/// of the same lengths in bytes. Types and shapes do not travel.
///
/// **Tensors** may be of torch, numpy, JAX, CuPy, or anything with `__dlpack__`, of any shape, with elements that
/// follow each other: bfloat16, float16, float32, float8_e4m3fn, uint8, int32, int64. They lie in host memory with the
/// kernel set `cpu`, and on the GPU with `cuda` and `rocm`.
///
/// **Streams**: without `stream`, whatever is queued on a tensor must have ended before the call, and when a call
/// returns, it has ended. With `stream` (a `cudaStream_t` as an integer, for example
/// `torch.cuda.current_stream().cuda_stream`), shards are read and outputs written in the order of that stream. It must
/// live, and so must shards and outputs, until it has passed the call that receives. A stream that captures a graph is
/// refused.
///
/// **Errors**: tensors that cannot be gathered raise InvalidInputError here, and RefusedError on the other ranks.
/// Lengths that differ raise MismatchError on all. Nothing is written then, and the gather goes on. DeadlineError,
/// PeerLostError, TransportError close it.
///
/// **Threads**: calls release the GIL and wait for each other. Close it on all ranks, best as a context manager; to
/// drop it is never collective. After an exception in the body of `with` it is dropped and not closed.
#[pyclass(frozen, module = "tokenyard", weakref)]
pub(crate) struct Gather {
    pub(crate) core: Arc<Guarded<CoreGather>>,
    options: GatherOptions,
    report: BringUpReport,
    pub(crate) ranks: u32,
}

/// The shape of an output for a shard.
fn gathered(shape: &[i64], ranks: u32) -> Dims {
    std::iter::once(ranks.into()).chain(shape.iter().copied()).collect()
}

impl Gather {
    fn read(&self, shards: &Bound<'_, PyAny>) -> Result<CallInputs> {
        CallInputs::read("shards", shards, |shape| gathered(shape, self.ranks))
    }
}

methods_of_opened!(Gather, core, report);

#[pymethods]
impl Gather {
    #[new]
    #[pyo3(signature = (world, config, *, max_bytes, in_flight=Argument::Fits(2),
                        reduces=Argument::Fits(false)),
           text_signature = "(world, config, *, max_bytes, in_flight=2, reduces=False)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn new(
        py: Python<'_>,
        world: &World,
        config: &Bound<'_, PyAny>,
        max_bytes: Argument<u64>,
        in_flight: Argument<u32>,
        reduces: Argument<bool>,
    ) -> PyResult<Self> {
        let read = || {
            let (max_bytes, in_flight) = (max_bytes.get("max_bytes")?, in_flight.get("in_flight")?);
            let options = GatherOptions { max_bytes, in_flight, reduces: reduces.get("reduces")? };
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
    /// in any shape. It is returned. Without it, outputs in host memory are new, `[R, *shape of the shard]`: tensors of
    /// torch and numpy for those of torch and numpy, else tokenyard's arrays. Those on a device are the caller's.
    ///
    /// Raises InvalidInputError, RefusedError: tensors of this rank, or of another, cannot be gathered. MismatchError:
    /// ranks gave shards of other lengths. Nothing is written then.
    #[pyo3(signature = (shards, outs=None, *, stream=None))]
    fn all_gather(
        &self,
        py: Python<'_>,
        shards: &Bound<'_, PyAny>,
        outs: Option<&Bound<'_, PyAny>>,
        stream: Option<Argument<usize>>,
    ) -> PyResult<Py<PyAny>> {
        let read = || {
            let (stream, shards) = (named(stream)?, self.read(shards)?);
            Ok((Outputs::read(outs, &shards.forms, py)?, shards, stream))
        };
        let (mut outs, shards, stream) = read().map_err(|why| self.refuse(py, why))?;
        let (given, room) = (&shards.given, &mut outs.given);
        self.core.call(py, |gather| match stream {
            Some(stream) => gather.on(stream).all_gather(given, room),
            None => gather.all_gather(given, room),
        })?;
        Ok(outs.object)
    }

    /// The first half of `all_gather`: sends the shards, which may be changed afterwards. `recv()` of its result is the
    /// second half. Collective.
    ///
    /// Raises InvalidInputError: shards of this rank cannot be gathered, and the other ranks get RefusedError by
    /// `recv()`. Where `in_flight` calls are not received, it is raised on this rank alone: all ranks make the same
    /// calls, so all get it.
    #[pyo3(signature = (shards, *, stream=None))]
    fn all_gather_send(
        &self,
        py: Python<'_>,
        shards: &Bound<'_, PyAny>,
        stream: Option<Argument<usize>>,
    ) -> PyResult<PendingGather> {
        let read = || Ok((named(stream)?, self.read(shards)?));
        let (stream, shards) = read().map_err(|why| self.refuse(py, why))?;
        let given = &shards.given;
        let pending = self.core.call(py, |gather| match stream {
            Some(stream) => gather.on(stream).all_gather_send(given),
            None => gather.all_gather_send(given),
        })?;
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

    /// Whether it takes reduce-scatters and all-reduces.
    #[getter]
    fn reduces(&self) -> bool {
        self.options.reduces
    }

    fn __repr__(&self) -> String {
        let GatherOptions { max_bytes, in_flight, reduces } = self.options;
        let reduces = if reduces { ", reduces=True" } else { "" };
        format!("tokenyard.Gather(max_bytes={max_bytes}, in_flight={in_flight}{reduces})")
    }
}

impl Gather {
    /// Takes part in the others' call with a refusal, and returns what to raise.
    fn refuse(&self, py: Python<'_>, why: Error) -> PyErr {
        let refused = self.core.call::<()>(py, |gather| Err(gather.refuse_all_gather(why)));
        refused.err().unwrap_or_else(|| raise(py, &invalid("the call was refused")))
    }
}

/// The stream of a call.
fn named(raw: Option<Argument<usize>>) -> Result<Option<Stream>> {
    Ok(stream(raw.map(|raw| raw.get("stream")).transpose()?))
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
    /// Collective. `outs` is as there. In the order of the stream of the first half, where that had one.
    ///
    /// Raises RefusedError, MismatchError as there. InvalidInputError: an output of this rank cannot be written. The
    /// other ranks do not learn of that; the call has ended then, and its shards are lost here.
    #[pyo3(signature = (outs=None))]
    fn recv(&self, py: Python<'_>, outs: Option<&Bound<'_, PyAny>>) -> PyResult<Py<PyAny>> {
        let (room, kept) = Outputs::read(outs, &self.forms, py).map_or_else(
            |why| (Err(why), None),
            |outs| (Ok(outs.given), Some((outs.object, outs.kept))),
        );
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
