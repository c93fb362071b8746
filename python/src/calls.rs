//! The operations of a communicator, each whole and in two halves.

use pyo3::prelude::*;

use crate::argument::{Argument, Word, word};
use crate::communicator::Communicator;
use crate::operations::{
    self, CombineArguments, Counted, DispatchArguments, Forms, Order, PendingCombine,
    PendingDispatch, PendingReplay, ReplayArguments, StreamArguments, Sums,
};
use crate::output::{Handle, Received};

/// An operation, and its first half with the same arguments.
macro_rules! both_halves {
    (
        $(#[doc = $doc:literal])*
        fn $whole:ident -> $returned:ty;
        $(#[doc = $doc_of_send:literal])*
        fn $send:ident -> $pending:ty;
        signature = $signature:tt, text_signature = $text:literal;
        |$($argument:ident: $kind:ty,)*| $arguments:expr
    ) => {
        #[pymethods]
        impl Communicator {
            $(#[doc = $doc])*
            #[pyo3(signature = $signature, text_signature = $text)]
            #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
            fn $whole(&self, py: Python<'_>, $($argument: $kind),*) -> PyResult<$returned> {
                operations::$whole(py, &self.shared, &$arguments)
            }

            $(#[doc = $doc_of_send])*
            #[pyo3(signature = $signature, text_signature = $text)]
            #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
            fn $send(&self, py: Python<'_>, $($argument: $kind),*) -> PyResult<$pending> {
                operations::$send(py, &self.shared, &$arguments)
            }
        }
    };
}

both_halves! {
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
    /// - `max_rows`: the most rows of `Received.x`, at least 1, of flat and expert-major rows, where `forms` has
    ///   `"max_rows"`; None for no cap. Ranks may give different ones. `overflow` says what happens to more rows:
    ///   `"error"` raises FullError on all ranks before a row moves, and `"drop"` leaves out the rows from `max_rows`
    ///   on, as `Received.dropped` says. Worst-case sizes take `"drop"` alone.
    ///
    /// `layout`, `cast`, `worst_case` and `max_tokens` are equal on all ranks. Raises InvalidInputError,
    /// RefusedError, FullError: nothing was moved. DeadlineError, PeerLostError, TransportError: the
    /// communicator is closed.
    fn dispatch -> (Received, Handle);
    /// The first half of `dispatch`, with its arguments: compute, then call `recv()` of the result.
    fn dispatch_send -> PendingDispatch;
    signature = (x, topk_idx, topk_weights=None, *, scales=None, layout=word("flat"),
                 alignment=Argument::Fits(1), zero_padding=Argument::Fits(false), cast=None,
                 worst_case=Argument::Fits(false), max_tokens=None, stream=None,
                 without_sync=Argument::Fits(false), sms=Argument::Fits(0), expert_totals=None, waited_ns=None,
                 scale_layout=word("row_major"), source_index=word("rank_and_token"), max_rows=None,
                 overflow=word("error")),
    text_signature = "($self, x, topk_idx, topk_weights=None, *, scales=None, layout='flat', alignment=1, \
                      zero_padding=False, cast=None, worst_case=False, max_tokens=None, stream=None, \
                      without_sync=False, sms=0, expert_totals=None, waited_ns=None, scale_layout='row_major', \
                      source_index='rank_and_token', max_rows=None, overflow='error')";
    |x: &Bound<'_, PyAny>,
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
     max_rows: Option<Argument<u64>>,
     overflow: Word<'_>,| {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let order = Order { alignment, zero_padding, worst_case, max_tokens, max_rows, overflow };
        let counted = Counted { expert_totals, waited_ns };
        let forms = Forms { scale_layout, source_index };
        DispatchArguments {
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
        }
    }
}

both_halves! {
    /// Sends new rows with the routing of `handle`: nothing is counted, and rows arrive in the places of the first
    /// dispatch, in memory of their own. Arguments and errors are those of `dispatch`; T is that of the handle.
    fn replay -> Received;
    /// The first half of `replay`, with its arguments: compute, then call `recv()` of the result.
    fn replay_send -> PendingReplay;
    signature = (handle, x, topk_weights=None, *, scales=None, cast=None, stream=None,
                 without_sync=Argument::Fits(false), sms=Argument::Fits(0), scale_layout=word("row_major"),
                 source_index=word("rank_and_token")),
    text_signature = "($self, handle, x, topk_weights=None, *, scales=None, cast=None, stream=None, \
                      without_sync=False, sms=0, scale_layout='row_major', source_index='rank_and_token')";
    |handle: &Bound<'_, PyAny>,
     x: &Bound<'_, PyAny>,
     topk_weights: Option<&Bound<'_, PyAny>>,
     scales: Option<&Bound<'_, PyAny>>,
     cast: Option<Word<'_>>,
     stream: Option<Argument<usize>>,
     without_sync: Argument<bool>,
     sms: Argument<u32>,
     scale_layout: Word<'_>,
     source_index: Word<'_>,| {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let forms = Forms { scale_layout, source_index };
        ReplayArguments { handle, x, topk_weights, scales, cast, forms, stream }
    }
}

both_halves! {
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
    fn combine -> (Py<PyAny>, Option<Py<PyAny>>);
    /// The first half of `combine`, with its arguments: compute, then call `recv()` of the result.
    fn combine_send -> PendingCombine;
    signature = (handle, x, weights=None, *, bias=None, weighted=Argument::Fits(false), topk_weights=None,
                 topk_idx=None, round_once=Argument::Fits(false), sum_weights=Argument::Fits(false),
                 compress=None, out=None, out_weights=None, missing=None, stream=None,
                 without_sync=Argument::Fits(false), sms=Argument::Fits(0), waited_ns=None),
    text_signature = "($self, handle, x, weights=None, *, bias=None, weighted=False, topk_weights=None, \
                      topk_idx=None, round_once=False, sum_weights=False, compress=None, out=None, \
                      out_weights=None, missing=None, stream=None, without_sync=False, sms=0, waited_ns=None)";
    |handle: &Bound<'_, PyAny>,
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
     waited_ns: Option<&Bound<'_, PyAny>>,| {
        let stream = StreamArguments { raw: stream, without_sync, sms };
        let outputs = [out, out_weights, missing];
        let sums =
            Sums { weighted, topk_weights, topk_idx, round_once, compress, sum_weights, waited_ns };
        CombineArguments { handle, x, weights, bias, sums, outputs, stream }
    }
}
