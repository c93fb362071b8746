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
use crate::errors::{invalid, raise, to_python};
use crate::exit;
use crate::operations::{
    self, CallStream, CombineArguments, Counted, DispatchArguments, Forms, Given, Giving, Order,
    PendingCombine, PendingDispatch, PendingReplay, ReplayArguments, StreamArguments, Sums,
};
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
    shared: Arc<Shared>,
}

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
        let world = world.core().map_err(|error| raise(py, &error))?;
        let read = || {
            let options = CommunicatorOptions {
                experts: experts.get("experts")?,
                topk: topk.get("topk")?,
                hidden: hidden.get("hidden")?,
                max_tokens: max_tokens.get("max_tokens")?,
                in_flight: in_flight.get("in_flight")?,
                handles: handles.get("handles")?,
            };
            let config = Config::read_to_open(config)?;
            Ok((config, options))
        };
        let read = read();
        let opened = py.detach(|| {
            let world = world.get()?;
            match read {
                Ok((config, options)) => CoreCommunicator::open(world, &config, options),
                Err(why) => Err(CoreCommunicator::refuse_open(world, why)),
            }
        });
        let comm = opened.map_err(|error| raise(py, &error))?;
        let shared = Arc::new(Shared::new(comm, world));
        exit::remember(Arc::downgrade(&shared));
        Ok(Self { shared })
    }

    /// Sends tokens to the ranks of their experts, and returns what arrived here, and a handle for `combine`.
    ///
    /// - `x`: `[T, H]`, rows contiguous; bfloat16, float16, float32, or FP8 with `scales`. T may be 0 to M.
    /// - `topk_idx`: `[T, K]` int64, or int32 on the host: experts; a negative entry selects nothing.
    /// - `topk_weights`: `[T, K]` float32. `scales`: `[T, S]` of 4-byte elements, any strides; they pass untouched.
    /// - `layout`: `"flat"`, one row per token and rank; `"expert_major"`, grouped by local expert, with starts at
    ///   multiples of `alignment`; `"packed"`, a block per local expert. Where `forms` has it also `"rank_major"`, one
    ///   row per token and rank in a block of M rows per source rank. `zero_padding` zeroes the rows without a token
    ///   of the second and of the last one.
    /// - `cast`: None, or `"fp8"`, `"fp8_round"`, `"fp8_ue8m0"`: FP8 e4m3 with one scale per 128 channels.
    /// - `worst_case`: outputs have room for the worst case; the true sizes are in `Received.totals`.
    /// - `max_tokens`: M of this call, 1 to the communicator's: it bounds worst-case sizes and packed blocks, and
    ///   `Received.source` counts by it. On the CPU backend, and on GPUs within one domain.
    ///
    /// - `without_sync`: with a stream and `worst_case`, the host waits for nothing, and the call can be captured in a
    ///   CUDA graph. A failure is raised by a later call, and closes the communicator. It need not be equal on all
    ///   ranks.
    /// - `sms`: with a stream, the number of multiprocessors that kernels of the call occupy, up to 1024; 0 means those
    ///   of the config. It need not be equal on all ranks, nor in all calls. Low latency takes `decode_sms` instead.
    /// - `expert_totals`, int32 `[E / R]`, and `waited_ns`, int64 `[R]`, on the device, with a stream and the packed
    ///   layout: the kernels add the rows of each local expert, and the nanoseconds of waiting for each rank. Where
    ///   `forms` has `"statistics"`.
    /// - `scale_layout`: `"row_major"`, or `"column_major"`: the scales of each block lie by columns, as
    ///   `Received.scales` says. `source_index`: `"rank_and_token"`, or `"token"`: `Received.source` has tokens alone.
    ///   Of packed rows, where `forms` has `"packed_forms"`. They need not be equal on all ranks.
    ///
    /// `layout`, `cast`, `worst_case` and `max_tokens` are equal on all ranks. Raises InvalidInputError,
    /// RefusedError, FullError: nothing was moved. DeadlineError, PeerLostError, TransportError: the
    /// communicator is closed.
    #[pyo3(signature = (x, topk_idx, topk_weights=None, *, scales=None, layout=word("flat"),
                        alignment=Argument::Fits(1), zero_padding=Argument::Fits(false), cast=None,
                        worst_case=Argument::Fits(false), max_tokens=None, stream=None,
                        without_sync=Argument::Fits(false), sms=Argument::Fits(0), expert_totals=None, waited_ns=None,
                        scale_layout=word("row_major"), source_index=word("rank_and_token")),
           text_signature = "($self, x, topk_idx, topk_weights=None, *, scales=None, layout='flat', alignment=1, \
                             zero_padding=False, cast=None, worst_case=False, max_tokens=None, stream=None, \
                             without_sync=False, sms=0, expert_totals=None, waited_ns=None, scale_layout='row_major', \
                             source_index='rank_and_token')")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        layout: Word<'_>,
        alignment: Argument<u32>,
        zero_padding: Argument<bool>,
        cast: Option<Word<'_>>,
        worst_case: Argument<bool>,
        max_tokens: Option<Argument<u32>>,
        stream: Option<Argument<usize>>,
        without_sync: Argument<bool>,
        sms: Argument<u32>,
        expert_totals: Option<&Bound<'_, PyAny>>,
        waited_ns: Option<&Bound<'_, PyAny>>,
        scale_layout: Word<'_>,
        source_index: Word<'_>,
    ) -> PyResult<(Received, Handle)> {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let order = Order { alignment, zero_padding, worst_case, max_tokens };
        let counted = Counted { expert_totals, waited_ns };
        let forms = Forms { scale_layout, source_index };
        let arguments = DispatchArguments {
            x,
            topk_idx,
            topk_weights,
            scales,
            layout,
            cast,
            order,
            forms,
            stream,
            counted,
        };
        operations::dispatch(py, &self.shared, &arguments)
    }

    /// The first half of `dispatch`, with its arguments: compute, then call `recv()` of the result.
    #[pyo3(signature = (x, topk_idx, topk_weights=None, *, scales=None, layout=word("flat"),
                        alignment=Argument::Fits(1), zero_padding=Argument::Fits(false), cast=None,
                        worst_case=Argument::Fits(false), max_tokens=None, stream=None,
                        without_sync=Argument::Fits(false), sms=Argument::Fits(0), expert_totals=None, waited_ns=None,
                        scale_layout=word("row_major"), source_index=word("rank_and_token")),
           text_signature = "($self, x, topk_idx, topk_weights=None, *, scales=None, layout='flat', alignment=1, \
                             zero_padding=False, cast=None, worst_case=False, max_tokens=None, stream=None, \
                             without_sync=False, sms=0, expert_totals=None, waited_ns=None, scale_layout='row_major', \
                             source_index='rank_and_token')")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn dispatch_send(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_idx: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        layout: Word<'_>,
        alignment: Argument<u32>,
        zero_padding: Argument<bool>,
        cast: Option<Word<'_>>,
        worst_case: Argument<bool>,
        max_tokens: Option<Argument<u32>>,
        stream: Option<Argument<usize>>,
        without_sync: Argument<bool>,
        sms: Argument<u32>,
        expert_totals: Option<&Bound<'_, PyAny>>,
        waited_ns: Option<&Bound<'_, PyAny>>,
        scale_layout: Word<'_>,
        source_index: Word<'_>,
    ) -> PyResult<PendingDispatch> {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let order = Order { alignment, zero_padding, worst_case, max_tokens };
        let counted = Counted { expert_totals, waited_ns };
        let forms = Forms { scale_layout, source_index };
        let arguments = DispatchArguments {
            x,
            topk_idx,
            topk_weights,
            scales,
            layout,
            cast,
            order,
            forms,
            stream,
            counted,
        };
        operations::dispatch_send(py, &self.shared, &arguments)
    }

    /// Sends new rows with the routing of `handle`: nothing is counted, and rows arrive in the places of the first
    /// dispatch, in memory of their own. Arguments and errors are those of `dispatch`; T is that of the handle.
    #[pyo3(signature = (handle, x, topk_weights=None, *, scales=None, cast=None, stream=None,
                        without_sync=Argument::Fits(false), sms=Argument::Fits(0), scale_layout=word("row_major"),
                        source_index=word("rank_and_token")),
           text_signature = "($self, handle, x, topk_weights=None, *, scales=None, cast=None, stream=None, \
                             without_sync=False, sms=0, scale_layout='row_major', source_index='rank_and_token')")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn replay(
        &self,
        py: Python<'_>,
        handle: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        cast: Option<Word<'_>>,
        stream: Option<Argument<usize>>,
        without_sync: Argument<bool>,
        sms: Argument<u32>,
        scale_layout: Word<'_>,
        source_index: Word<'_>,
    ) -> PyResult<Received> {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let forms = Forms { scale_layout, source_index };
        let arguments = ReplayArguments { handle, x, topk_weights, scales, cast, forms, stream };
        operations::replay(py, &self.shared, &arguments)
    }

    /// The first half of `replay`, with its arguments: compute, then call `recv()` of the result.
    #[pyo3(signature = (handle, x, topk_weights=None, *, scales=None, cast=None, stream=None,
                        without_sync=Argument::Fits(false), sms=Argument::Fits(0), scale_layout=word("row_major"),
                        source_index=word("rank_and_token")),
           text_signature = "($self, handle, x, topk_weights=None, *, scales=None, cast=None, stream=None, \
                             without_sync=False, sms=0, scale_layout='row_major', source_index='rank_and_token')")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn replay_send(
        &self,
        py: Python<'_>,
        handle: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        scales: Option<&Bound<'_, PyAny>>,
        cast: Option<Word<'_>>,
        stream: Option<Argument<usize>>,
        without_sync: Argument<bool>,
        sms: Argument<u32>,
        scale_layout: Word<'_>,
        source_index: Word<'_>,
    ) -> PyResult<PendingReplay> {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let forms = Forms { scale_layout, source_index };
        let arguments = ReplayArguments { handle, x, topk_weights, scales, cast, forms, stream };
        operations::replay_send(py, &self.shared, &arguments)
    }

    /// Returns the experts' outputs to their tokens and sums them: `(out, out_weights)`.
    ///
    /// - `x`: the experts' outputs, of the shape of `Received.x`; bfloat16, float16 or float32.
    /// - `weights`: float32, of the shape of `Received.weights`: they travel back to their tokens.
    /// - `bias`: `[T, H]` of the type of `x`, or two of them; added first.
    /// - `weighted`: multiply each expert's row by its weight (not for flat and rank-major rows): that of
    ///   `topk_weights`, `[T, K]` float32, or else the one of its dispatch. With `topk_weights`, `topk_idx` may be
    ///   given: the ids of the dispatch, where a negative one leaves its expert's row out, whatever that holds. Such a
    ///   combine is two operations on the CPU backend, so `in_flight` counts it twice. Given on all ranks or on none;
    ///   on GPUs for packed rows with `decode = "low_latency"`.
    /// - `round_once`: round each sum once, at its token, and not that of each rank's experts too (not for flat and
    ///   rank-major rows).
    ///   On the CPU backend, and on GPUs for packed rows with `decode = "low_latency"`.
    /// - `compress`: `"logfmt10"` sends each rank's sum for a token in ten bits a value, where its values allow it
    ///   (packed rows of bfloat16, H a multiple of 512, without `round_once`). In one domain, on the CPU backend, and
    ///   on GPUs with `decode = "low_latency"` and H up to 8192. Equal on all ranks.
    /// - `sum_weights`: each of `out_weights` is the sum of the weights of all ranks that got the token (flat and
    ///   rank-major rows). On GPUs within one domain.
    /// - `out`: `[T, H]` of the type of `x`; `out_weights`: `[T, K]` float32; `missing`: `[T]` uint8, how many of a
    ///   token's experts are left out because their rank was lost. They are written. On the host `out` and
    ///   `out_weights` are made where they are not given.
    /// - `sms`, `waited_ns`: as in `dispatch`.
    ///
    /// Sums are made in float32, in an order that depends on the routing alone. Errors are those of `dispatch`.
    #[pyo3(signature = (handle, x, weights=None, *, bias=None, weighted=Argument::Fits(false), topk_weights=None,
                        topk_idx=None, round_once=Argument::Fits(false), sum_weights=Argument::Fits(false),
                        compress=None, out=None, out_weights=None, missing=None, stream=None,
                        without_sync=Argument::Fits(false), sms=Argument::Fits(0), waited_ns=None),
           text_signature = "($self, handle, x, weights=None, *, bias=None, weighted=False, topk_weights=None, \
                             topk_idx=None, round_once=False, sum_weights=False, compress=None, out=None, \
                             out_weights=None, missing=None, stream=None, without_sync=False, sms=0, waited_ns=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn combine(
        &self,
        py: Python<'_>,
        handle: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        weighted: Argument<bool>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        topk_idx: Option<&Bound<'_, PyAny>>,
        round_once: Argument<bool>,
        sum_weights: Argument<bool>,
        compress: Option<Word<'_>>,
        out: Option<&Bound<'_, PyAny>>,
        out_weights: Option<&Bound<'_, PyAny>>,
        missing: Option<&Bound<'_, PyAny>>,
        stream: Option<Argument<usize>>,
        without_sync: Argument<bool>,
        sms: Argument<u32>,
        waited_ns: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(Py<PyAny>, Option<Py<PyAny>>)> {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let outputs = [out, out_weights, missing];
        let sums =
            Sums { weighted, topk_weights, topk_idx, round_once, compress, sum_weights, waited_ns };
        let arguments = CombineArguments { handle, x, weights, bias, sums, outputs, stream };
        operations::combine(py, &self.shared, &arguments)
    }

    /// The first half of `combine`, with its arguments: compute, then call `recv()` of the result.
    #[pyo3(signature = (handle, x, weights=None, *, bias=None, weighted=Argument::Fits(false), topk_weights=None,
                        topk_idx=None, round_once=Argument::Fits(false), sum_weights=Argument::Fits(false),
                        compress=None, out=None, out_weights=None, missing=None, stream=None,
                        without_sync=Argument::Fits(false), sms=Argument::Fits(0), waited_ns=None),
           text_signature = "($self, handle, x, weights=None, *, bias=None, weighted=False, topk_weights=None, \
                             topk_idx=None, round_once=False, sum_weights=False, compress=None, out=None, \
                             out_weights=None, missing=None, stream=None, without_sync=False, sms=0, waited_ns=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn combine_send(
        &self,
        py: Python<'_>,
        handle: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        weighted: Argument<bool>,
        topk_weights: Option<&Bound<'_, PyAny>>,
        topk_idx: Option<&Bound<'_, PyAny>>,
        round_once: Argument<bool>,
        sum_weights: Argument<bool>,
        compress: Option<Word<'_>>,
        out: Option<&Bound<'_, PyAny>>,
        out_weights: Option<&Bound<'_, PyAny>>,
        missing: Option<&Bound<'_, PyAny>>,
        stream: Option<Argument<usize>>,
        without_sync: Argument<bool>,
        sms: Argument<u32>,
        waited_ns: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PendingCombine> {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let outputs = [out, out_weights, missing];
        let sums =
            Sums { weighted, topk_weights, topk_idx, round_once, compress, sum_weights, waited_ns };
        let arguments = CombineArguments { handle, x, weights, bias, sums, outputs, stream };
        operations::combine_send(py, &self.shared, &arguments)
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
        self.shared.call(py, CoreCommunicator::flush)
    }

    /// The choices and their reasons, as a dictionary: kernel set, transports, domains, places of all ranks,
    /// window bytes.
    fn report(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        to_python(py, &self.shared.report)
    }

    /// Ranks that this communicator goes on without, in order. Empty where a loss stops it.
    fn lost_ranks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.shared.call(py, |comm| Ok(comm.lost_ranks()))
    }

    /// Ranks that low-latency operations of this rank leave out now, in order: lost, too late, or masked by hand.
    fn masked_ranks(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.shared.call(py, |comm| comm.masks().ranks())
    }

    /// Leaves a rank out of this rank's operations. Local.
    fn mask_rank(&self, py: Python<'_>, rank: Argument<u32>) -> PyResult<()> {
        self.shared.call(py, |comm| comm.masks().mask(rank.get("rank")?))
    }

    /// Takes a rank back. Collective.
    fn unmask_rank(&self, py: Python<'_>, rank: Argument<u32>) -> PyResult<()> {
        self.shared.call(py, |comm| match rank.get("rank") {
            Ok(rank) => comm.masks().unmask(rank),
            Err(why) => Err(comm.masks().refuse_unmask(why)),
        })
    }

    /// Takes all ranks back that are not lost. Collective.
    fn clear_masks(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.call(py, |comm| comm.masks().clear())
    }

    /// Nanoseconds, by rank, that calls of this communicator have waited for each rank. They are the waits of the host:
    /// kernels of a GPU wait by themselves.
    fn waited_ns(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let waited = self.shared.call(py, |comm| Ok(comm.waited()))?;
        Ok(waited.into_iter().map(|time| time.as_nanos() as u64).collect())
    }

    /// The calls that it takes of those that not every kernel set takes: `"streams"`, `"without_sync"`, `"max_tokens"`,
    /// `"round_once"` (with it `topk_weights` of a combine), `"sum_weights"`, `"statistics"`,
    /// `"packed_forms"`, `"logfmt10"` of `compress`, `"rank_major"` of `layout`.
    #[getter]
    fn forms(&self) -> Vec<&'static str> {
        self.shared.forms.clone()
    }

    /// Bytes of outputs of this communicator that live.
    #[getter]
    fn held_bytes(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed)
    }

    /// This rank.
    #[getter]
    fn rank(&self, py: Python<'_>) -> PyResult<u32> {
        let world = self.shared.world.get().map_err(|error| raise(py, &error))?;
        Ok(world.rank())
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

    /// Whether it was closed on this rank: by `close`, or by an error, which every later call then raises.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Closes it on all ranks together. Collective; again is no error. Outputs stay readable.
    ///
    /// Raises InvalidInputError for an operation that was sent and not received, and what ended it before.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let ended = py.detach(|| match self.shared.take()? {
            Some(comm) => comm.close(),
            None => Ok(()),
        });
        ended.map_err(|error| raise(py, &error))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind=None, value=None, traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (kind, traceback);
        if value.is_none() {
            return self.close(py);
        }
        // The others may be elsewhere: to close is collective, to drop is not.
        py.detach(|| self.shared.take().map(drop)).map_err(|error| raise(py, &error))
    }

    fn __repr__(&self) -> String {
        let Shape { experts, topk, hidden, max_tokens, .. } = self.shared.shape;
        format!(
            "tokenyard.Communicator(experts={experts}, topk={topk}, hidden={hidden}, max_tokens={max_tokens})"
        )
    }
}
