//! The communicator as Python sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tokenyard_core::communicator::{Communicator as CoreCommunicator, CommunicatorOptions};
use tokenyard_core::moe::Shape;

use crate::argument::{Argument, Word, word};
use crate::array::Array;
use crate::config::Config;
use crate::errors::{invalid, raise};
use crate::guarded::{methods_of_opened, open};
use crate::operations::{self, CallStream, Given, Giving};
use crate::options;
use crate::output::{Handle, Received};
use crate::reader::Reader;
use crate::shared::Shared;
use crate::world::World;

/// Moves tokens to the ranks of their experts, and the experts' outputs back.
///
/// `Communicator(world, config, experts, topk, hidden, max_tokens)` opens it on all ranks of `world`. Collective.
/// `config` is a Config or the path of a TOML file. `experts` (E) is a multiple of the ranks; expert e lives on rank
/// e // (E / R). `topk` (K) is 1 to 32; `hidden` (H) counts elements; `max_tokens` (M) is the most tokens a rank may
/// bring. `in_flight` operations (1 to 16) may be sent and not yet received; `handles` (1 to 1024) may live at once.
///
/// **Operations are collective**: all ranks call the same ones in the same order, and so their halves. Where the
/// arguments of one rank are refused, all ranks raise (InvalidInputError there, RefusedError elsewhere), nothing is
/// moved, and the communicator stays usable; FullError is the same for a full arena. Other errors close it.
///
/// **Tensors** may be of torch, numpy, JAX, CuPy, or anything with `__dlpack__`. They lie in the memory that the
/// kernel set works on: the host's for `cpu`, a GPU's for `cuda`. They are not copied, and must not be written until
/// the operation was received.
///
/// **Streams**: without `stream`, whatever is queued on a tensor must have ended before the call, and when a call that
/// receives returns, the operation has ended. With `stream` (a `cudaStream_t` as an integer, for example
/// `torch.cuda.current_stream().cuda_stream`), the call is in the order of that stream, which must live until the
/// communicator is closed.
///
/// **Threads**: calls release the GIL and wait for each other. Close it on all ranks, best as a context manager; to
/// drop it is never collective. After an exception in the body of `with` it is dropped and not closed.
#[pyclass(frozen, module = "tokenyard", weakref)]
pub(crate) struct Communicator {
    pub(crate) shared: Arc<Shared>,
}

methods_of_opened!(Communicator, shared.comm, shared.report);

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (world, config, experts, topk, hidden, max_tokens, *, in_flight=Argument::Fits(2),
                        handles=Argument::Fits(8)),
           text_signature = "(world, config, experts, topk, hidden, max_tokens, *, in_flight=2, handles=8)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn new(
        py: Python<'_>,
        world: &World,
        config: &Bound<'_, PyAny>,
        experts: Argument<u32>,
        topk: Argument<u32>,
        hidden: Argument<u32>,
        max_tokens: Argument<u32>,
        in_flight: Argument<u32>,
        handles: Argument<u32>,
    ) -> PyResult<Self> {
        let read = || {
            let options = CommunicatorOptions {
                experts: experts.get("experts")?,
                topk: topk.get("topk")?,
                hidden: hidden.get("hidden")?,
                max_tokens: max_tokens.get("max_tokens")?,
                in_flight: in_flight.get("in_flight")?,
                handles: handles.get("handles")?,
            };
            Ok((Config::read_to_open(config)?, options))
        };
        let (comm, world) = open::<CoreCommunicator>(py, world, read)?;
        Ok(Self { shared: Arc::new(Shared::new(comm, world)) })
    }

    /// Takes part in the operation that the other ranks call now, with a refusal: raises InvalidInputError with `why`
    /// here, and RefusedError there. Nothing is moved, and the communicator stays usable. For libraries that judge
    /// arguments before they call: without this the others would wait for this rank.
    ///
    /// `operation` is `"dispatch"`, `"replay"` or `"combine"`; for a combine with `topk_weights` it is `"replay"`.
    /// `layout` is that of the other ranks' dispatch, or of the dispatch of the handle. In the capture of a graph raise
    /// instead: no other rank waits there.
    #[pyo3(signature = (operation, why, *, layout=word("flat"), alignment=Argument::Fits(1),
                        zero_padding=Argument::Fits(false)),
           text_signature = "($self, operation, why, *, layout='flat', alignment=1, zero_padding=False)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn refuse(
        &self,
        py: Python<'_>,
        operation: Word<'_>,
        why: Word<'_>,
        layout: Word<'_>,
        alignment: Argument<u32>,
        zero_padding: Argument<bool>,
    ) -> PyResult<()> {
        let read = || -> tokenyard_core::Result<_> {
            let layout = options::layout(&layout, &alignment, &zero_padding)?;
            let call = options::refused_call(&operation.get("operation")?, layout)?;
            Ok((call, invalid(why.get("why")?)))
        };
        let (call, why) = read().map_err(|error| raise(py, &error))?;
        let stream = CallStream::NONE;
        Err(operations::refuse(py, &self.shared, stream, call, why))
    }

    /// Memory for the experts' outputs of `handle`, `[rows, H]`: `combine` needs no copy of what is written there.
    /// `dtype` is bfloat16, float16 or float32, by name or as a type of numpy or torch. Local: no other rank takes
    /// part. Raises FullError, InvalidInputError.
    fn combine_input(
        &self,
        py: Python<'_>,
        handle: &Handle,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Array> {
        operations::combine_input(py, &self.shared, handle, dtype)
    }

    /// Copies arrays of `received` to tensors of the caller, so that its memory can be freed. Each has the name, the
    /// type and the columns of one of them, and as many rows or more; `ids` may be int64. `wide_ids` are the ids again,
    /// int64, `source_tokens` the source tokens without their ranks, and `scale_columns`, `[S, rows or more]`,
    /// row-major `scales` column by column. For flat rows, behind the rows that arrived
    /// ids and source tokens become -1, and weights 0. Local: no other rank takes part.
    ///
    /// Raises InvalidInputError: then nothing is copied.
    #[pyo3(signature = (received, *, stream=None, **outputs))]
    fn copy_out(
        &self,
        py: Python<'_>,
        received: &Received,
        stream: Option<Argument<usize>>,
        outputs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        operations::copy_out(py, &self.shared, received, stream, outputs)
    }

    /// For the drop-in: copies as `copy_out`, and makes tensors by `reader`. Returns those over the arrays of `names`;
    /// with a record those over `parts`; and `expert_counts`, if `counts`.
    ///
    /// `block`, a list of int32, gets copies of the arrays of `parts`, one behind the other; the first has what the
    /// others leave of it. `record` is found by the address of the last part; with `columns` each of its elements is a
    /// row of as many. `copied` is two tensors of ids, of which the second becomes a copy of the first. Local.
    #[pyo3(signature = (reader, received, block, parts, *, names, record=None, keeps_fp8=false, columns=None,
                        counts=false, copied=None, stream=None, **outputs))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn _give<'py>(
        &self,
        reader: &Bound<'py, Reader>,
        received: &Bound<'py, Received>,
        block: &Bound<'py, PyAny>,
        parts: &Bound<'py, PyTuple>,
        names: &Bound<'py, PyTuple>,
        record: Option<Py<PyAny>>,
        keeps_fp8: bool,
        columns: Option<i64>,
        counts: bool,
        copied: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
        stream: Option<usize>,
        outputs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Given<'py>> {
        let (reader, has_counts) = (reader.get(), counts);
        let giving = Giving {
            reader,
            received,
            names,
            keeps_fp8,
            block,
            parts,
            record,
            columns,
            copied,
            has_counts,
            stream,
            outputs,
        };
        operations::give(&self.shared, giving)
    }

    /// The rows of each local expert of `received`, without padding, for the host. On GPUs they come before the rows,
    /// where the host waits for counts and the call is one of the last `in_flight`; else they are waited for. Local.
    fn expert_counts(&self, py: Python<'_>, received: &Received) -> PyResult<Vec<u32>> {
        operations::expert_counts(py, &self.shared, received)
    }

    /// Counts a routing in the order of a stream, before anything is sent, as `routing_counts` does in host memory.
    /// Writes `[R]` int32, each token once for each rank; `[E]` int32; `[T, R]` uint8, 1 where a token goes to the
    /// rank. Experts and ranks are as many as there is room for; ids that are no experts count nowhere. On GPUs. Local.
    ///
    /// False while another thread is inside of a call, which may wait for all ranks: then nothing is counted.
    #[pyo3(signature = (topk_idx, rank_tokens, expert_tokens, is_token_in_rank, *, stream))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn count_routing(
        &self,
        py: Python<'_>,
        topk_idx: &Bound<'_, PyAny>,
        rank_tokens: &Bound<'_, PyAny>,
        expert_tokens: &Bound<'_, PyAny>,
        is_token_in_rank: &Bound<'_, PyAny>,
        stream: Argument<usize>,
    ) -> PyResult<bool> {
        let tensors = [topk_idx, rank_tokens, expert_tokens, is_token_in_rank];
        operations::count_routing(py, &self.shared, tensors, stream)
    }

    /// For outputs that were used on other streams than that of their operation: drop them, then name these streams
    /// here. The memory of what was dropped is used again once they, too, have passed what they have now. Local.
    ///
    /// Raises InvalidInputError where the communicator has no streams, and for a stream that is captured.
    fn release_after(&self, py: Python<'_>, streams: Vec<Argument<usize>>) -> PyResult<()> {
        operations::release_after(py, &self.shared, &streams)
    }

    /// Waits until everything that was received in the order of a stream has ended. Local.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.comm.call(py, CoreCommunicator::flush)
    }

    /// Ranks that this communicator goes on without, in order. Empty where a loss stops it.
    fn lost_ranks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.shared.comm.call(py, |comm| Ok(comm.lost_ranks()))
    }

    /// Ranks that low-latency operations of this rank leave out now, in order: lost, too late, or masked by hand.
    fn masked_ranks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.shared.comm.call(py, |comm| comm.masks().ranks())
    }

    /// Leaves a rank out of this rank's operations. Local.
    fn mask_rank(&self, py: Python<'_>, rank: Argument<u32>) -> PyResult<()> {
        self.shared.comm.call(py, |comm| comm.masks().mask(rank.get("rank")?))
    }

    /// Takes a rank back. Collective.
    fn unmask_rank(&self, py: Python<'_>, rank: Argument<u32>) -> PyResult<()> {
        self.shared.comm.call(py, |comm| match rank.get("rank") {
            Ok(rank) => comm.masks().unmask(rank),
            Err(why) => Err(comm.masks().refuse_unmask(why)),
        })
    }

    /// Takes all ranks back that are not lost. Collective.
    fn clear_masks(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.comm.call(py, |comm| comm.masks().clear())
    }

    /// Nanoseconds, by rank, that calls of this communicator have waited for each rank. They are the waits of the host:
    /// kernels of a GPU wait by themselves.
    fn waited_ns(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let waited = self.shared.comm.call(py, |comm| Ok(comm.waited()))?;
        Ok(waited.into_iter().map(|time| time.as_nanos() as u64).collect())
    }

    /// The calls that it takes of those that not every kernel set takes: `"streams"`, `"without_sync"`, `"max_tokens"`,
    /// `"round_once"` (with it `topk_weights` of a combine), `"sum_weights"`, `"statistics"`,
    /// `"packed_forms"`, `"logfmt10"` of `compress`, `"rank_major"` of `layout`, `"max_rows"`.
    #[getter]
    fn forms(&self) -> Vec<&'static str> {
        self.shared.forms.clone()
    }

    /// Bytes of outputs of this communicator that live.
    #[getter]
    fn held_bytes(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed)
    }

    /// R: ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.shared.shape.ranks
    }

    /// E: experts on all ranks.
    #[getter]
    fn experts(&self) -> u32 {
        self.shared.shape.experts
    }

    /// K: experts per token.
    #[getter]
    fn topk(&self) -> u32 {
        self.shared.shape.topk
    }

    /// H: elements of a row.
    #[getter]
    fn hidden(&self) -> u32 {
        self.shared.shape.hidden
    }

    /// M: the most tokens that a rank may bring.
    #[getter]
    fn max_tokens(&self) -> u32 {
        self.shared.shape.max_tokens
    }

    /// Whether tensors must lie in the memory of a GPU; else in the host's.
    #[getter]
    fn works_on_device(&self) -> bool {
        self.shared.works_on_device
    }

    /// Closes it on all ranks together. Collective; again is no error. Outputs stay readable.
    ///
    /// Raises InvalidInputError for an operation that was sent and not received, and what ended it before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.comm.close(py)
    }

    fn __repr__(&self) -> String {
        let Shape { experts, topk, hidden, max_tokens, .. } = self.shared.shape;
        format!(
            "tokenyard.Communicator(experts={experts}, topk={topk}, hidden={hidden}, max_tokens={max_tokens})"
        )
    }
}
