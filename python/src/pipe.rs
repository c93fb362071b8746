//! The pipe as Python sees it.

use std::sync::Arc;

use pyo3::prelude::*;
use tokenyard_core::communicator::BringUpReport;
use tokenyard_core::ops::pipe::{Pipe as CorePipe, PipeOptions};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::argument::Argument;
use crate::config::Config;
use crate::guarded::{Guarded, methods_of_opened, open};
use crate::tensor::Tensor;
use crate::world::World;

/// Messages between pairs of ranks, such as the activations of one pipeline stage for the next.
///
/// `Pipe(world, config, max_bytes=...)` opens it on all ranks of `world`. Collective. `config` is a Config or the path
/// of a TOML file. `max_bytes`, 1 to 2**40, is the most bytes of a message. `in_flight`, 1 to 16, is how many messages
/// of one rank to another may be sent and not yet received. Both are equal on all ranks. Raises InvalidInputError, and
/// RefusedError on the other ranks; UnsupportedError where the kernel set has no pipes, and where losses are masked.
///
/// **A message** is the bytes of one tensor. Messages from one rank to another arrive in the order in which they were
/// sent. Only the two ranks of a message take part, so ranks may call in any order. Types and shapes do not travel: the
/// receiver gives a tensor of as many bytes.
///
/// **Tensors** may be of torch, numpy, JAX, CuPy, or anything with `__dlpack__`, of any shape, with elements that
/// follow each other: bfloat16, float16, float32, float8_e4m3fn, uint8, int32, int64. They lie in host memory with the
/// kernel set `cpu`, and on the GPU with `cuda` and `rocm`. Synchronise work that is queued on a tensor before the
/// call.
///
/// **Errors**: a tensor that cannot be passed raises InvalidInputError here, and RefusedError on the other rank. A
/// length that both sides do not share raises MismatchError on both. A sender gets these of a receiver at the `send` to
/// that rank that is `in_flight` messages later, or at `flush`. The pipe goes on after these. A wrong rank raises
/// InvalidInputError on this rank alone. DeadlineError, PeerLostError, TransportError close the pipe.
///
/// **Threads**: calls release the GIL and run one after the other: a `send` waits for the `recv` of another thread. So
/// a pipe belongs to one thread. Close it on all ranks, best as a context manager; to drop it is never collective.
/// After an exception in the body of `with` it is dropped and not closed.
#[pyclass(frozen, module = "tokenyard", weakref)]
pub(crate) struct Pipe {
    core: Arc<Guarded<CorePipe>>,
    options: PipeOptions,
    device: Option<i32>,
    report: BringUpReport,
}

/// A tensor that was read and what it is for core, or why it cannot be read. The first is held while core uses the
/// second, and dropped with the GIL.
fn read<T>(
    object: &Bound<'_, PyAny>,
    given: impl FnOnce(&Tensor) -> Result<T>,
) -> (Option<Tensor>, Result<T>) {
    match Tensor::read("tensor", object) {
        Ok(tensor) => {
            let given = given(&tensor);
            (Some(tensor), given)
        }
        Err(why) => (None, Err(why)),
    }
}

methods_of_opened!(Pipe, core, report);

#[pymethods]
impl Pipe {
    #[new]
    #[pyo3(signature = (world, config, *, max_bytes, in_flight=Argument::Fits(4)),
           text_signature = "(world, config, *, max_bytes, in_flight=4)")]
    fn new(
        py: Python<'_>,
        world: &World,
        config: &Bound<'_, PyAny>,
        max_bytes: Argument<u64>,
        in_flight: Argument<u32>,
    ) -> PyResult<Self> {
        let read = || {
            let max_bytes = max_bytes.get("max_bytes")?;
            let options = PipeOptions { max_bytes, in_flight: in_flight.get("in_flight")? };
            Ok((Config::read_to_open(config)?, options))
        };
        let (pipe, world) = open::<CorePipe>(py, world, read)?;
        let (options, device, report) = (pipe.options(), pipe.device(), pipe.report().clone());
        Ok(Self { core: Guarded::new(pipe, world), options, device, report })
    }

    /// Sends the bytes of `tensor` to the rank `to`: another than this one. The tensor may be changed afterwards. Waits
    /// while `in_flight` messages to that rank are not taken; so two ranks that send more to each other before either
    /// receives wait until `late_ms`.
    ///
    /// Raises InvalidInputError. RefusedError, MismatchError: an earlier message was not taken as it was sent, and
    /// nothing is sent now. UnsupportedError: no link leads to that rank.
    fn send(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>, to: Argument<u32>) -> PyResult<()> {
        // SAFETY: the tensor is held during the call. That no thread writes its memory until then is asked of the
        // caller.
        let (_kept, given) = read(tensor, |tensor| unsafe { tensor.get_message() });
        self.core.call(py, |pipe| {
            let to = to.get("to")?;
            match given {
                Ok(tensor) => pipe.send(tensor, to),
                Err(why) => Err(pipe.refuse_send(to, why)),
            }
        })
    }

    /// Waits for the next message of the rank `source`, and writes it to `tensor`, which has as many bytes. After an
    /// error that leaves the pipe open the message is dropped.
    ///
    /// Raises InvalidInputError. RefusedError: the sender's tensor was refused. MismatchError: the message has another
    /// length. UnsupportedError: no link leads to that rank.
    fn recv(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        source: Argument<u32>,
    ) -> PyResult<()> {
        // SAFETY: the tensor is held during the call. That no thread uses its memory until then is asked of the caller.
        let (_kept, given) = read(tensor, |tensor| unsafe { tensor.get_message_mut() });
        self.core.call(py, |pipe| {
            let source = source.get("source")?;
            match given {
                Ok(tensor) => pipe.recv(tensor, source),
                Err(why) => Err(pipe.refuse_recv(source, why)),
            }
        })
    }

    /// Waits until all messages of this rank are taken: their receivers call `recv`.
    ///
    /// Raises RefusedError, MismatchError: one of them was not taken as it was sent. Each is raised once: call again.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.core.call(py, CorePipe::flush)
    }

    /// Nanoseconds, by rank, that calls of this pipe have waited for each rank.
    fn waited_ns(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let waited = self.core.call(py, |pipe| Ok(pipe.waited()))?;
        Ok(waited.into_iter().map(|time| time.as_nanos() as u64).collect())
    }

    /// Closes it on this rank, and gives the other ranks the reason, where messages that they wait for do not come.
    fn _fail(&self, py: Python<'_>, why: String) -> PyResult<()> {
        self.core.call(py, |pipe| {
            // The report on it is all that is of use: the caller has the error.
            let _reported = pipe.fail(Error::new(ErrorKind::Internal, "pass messages", why));
            Ok(())
        })
    }

    /// The ordinal of the GPU in whose memory tensors lie; None for host memory.
    #[getter]
    fn device(&self) -> Option<i32> {
        self.device
    }

    /// The most bytes of a message.
    #[getter]
    fn max_bytes(&self) -> u64 {
        self.options.max_bytes
    }

    /// Messages from one rank to another that may be sent and not yet received.
    #[getter]
    fn in_flight(&self) -> u32 {
        self.options.in_flight
    }

    /// Closes it on all ranks together, once all messages of this rank are taken. Collective; again is no error.
    ///
    /// Raises the errors of `flush`; then the other ranks learn that this one did not close its pipe. So call `flush`
    /// before where a receiver may refuse.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.core.close(py)
    }

    fn __repr__(&self) -> String {
        let PipeOptions { max_bytes, in_flight } = self.options;
        format!("tokenyard.Pipe(max_bytes={max_bytes}, in_flight={in_flight})")
    }
}
