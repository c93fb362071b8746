//! Calls in the order of a device's stream.

use std::ffi::c_void;

use super::Communicator;
use super::arguments::{Combine, Dispatch, Replay, Sizes};
use super::components::CallForm;
use super::memory::{Argument, check_memory};
use super::operations::{PendingCombine, PendingDispatch, PendingReplay};
use super::output::{Handle, Received};
use super::refusal::RefusedCall;
use super::tensor::TensorRef;
use crate::call::{CallOrder, CombineCall, DispatchCall};
use crate::kernels::Trace;
use crate::moe::{DType, Layout};
use crate::{Error, ErrorKind, Result, abi};

/// A stream of the communicator's device that belongs to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    pub(super) raw: *mut c_void,
}

// SAFETY: a name for a stream, valid on any thread for the time that `Stream::new` states.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Names a stream: on CUDA a `CUstream`, which is a `cudaStream_t`; null is the legacy default
    /// stream.
    ///
    /// # Safety
    /// The caller upholds, for this value and every call that takes it:
    /// - `raw` is a stream of the device that the communicator works on; on CUDA, a stream of its primary
    ///   context, which frameworks use, and not the per-thread default stream.
    /// - It lives until every [`Received`], [`Handle`] and [`CombineInput`](super::CombineInput) of those
    ///   calls was dropped, and then the communicator was flushed or closed without an error. Without that,
    ///   until the communicator and all its outputs were dropped.
    /// - The memory of a call's tensors stays allocated until the stream has passed the call's receive.
    ///   From the send on, no other code writes them, and no other code reads or writes the call's
    ///   outputs, except for work that is queued on the stream after the receive.
    /// - The outputs of a call are used on that stream, or on one that waits for it. Before an output is
    ///   dropped, that stream waits for every other stream that still uses the output.
    pub unsafe fn new(raw: *mut c_void) -> Self {
        Self { raw }
    }

    /// The raw stream that [`new`](Self::new) took.
    pub fn raw(self) -> *mut c_void {
        self.raw
    }
}

/// Numbers in device memory that an operation of the packed layout adds to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics<'a> {
    /// i32 `[E/R, 1]`: the rows that each local expert receives. Of a dispatch alone.
    pub expert_totals: Option<TensorRef<'a>>,
    /// i64 `[R, 1]`: the nanoseconds for which this rank has waited until each rank had entered the operation.
    pub waited_ns: Option<TensorRef<'a>>,
}

impl Statistics<'_> {
    fn is_empty(&self) -> bool {
        self.expert_totals.is_none() && self.waited_ns.is_none()
    }
}

/// An address in a tensor that the device writes, or null.
fn written<T>(tensor: Option<TensorRef<'_>>) -> *mut T {
    tensor.map_or(std::ptr::null_mut(), |t| t.raw().data.cast())
}

/// The order of a call, and whether the host waits for it. The default is that of plain calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mode<'a> {
    stream: Option<Stream>,
    no_sync: bool,
    tokens: Option<TensorRef<'a>>,
    statistics: Statistics<'a>,
    /// One call sends and receives the operation.
    is_at_once: bool,
}

impl Mode<'_> {
    /// The mode of a call that sends and receives an operation.
    pub(super) fn at_once(self) -> Self {
        Self { is_at_once: true, ..self }
    }

    pub(super) fn order(&self) -> CallOrder {
        let stream = self.stream.map(Stream::raw);
        let no_sync = self.no_sync && stream.is_some();
        CallOrder { stream, no_sync, at_once: self.is_at_once }
    }

    pub(super) fn mark_dispatch(&self, call: &mut DispatchCall<'_>, sizes: Sizes) -> Result<()> {
        if self.no_sync && sizes == Sizes::Exact {
            return refuse(
                "sizes: found exact; expected worst-case, because the host does not wait for counts",
            );
        }
        call.tokens = self.tokens.map_or(std::ptr::null(), |t| t.raw().data.cast_const().cast());
        call.expert_totals = written(self.statistics.expert_totals);
        call.waited_ns = written(self.statistics.waited_ns);
        self.check_packed(call.layout == Layout::Packed)
    }

    fn check_packed(&self, is_packed: bool) -> Result<()> {
        if is_packed || self.statistics.is_empty() {
            return Ok(());
        }
        refuse("statistics: found some; expected none but in the packed layout")
    }

    pub(super) fn check_replay(&self) -> Result<()> {
        if !self.statistics.is_empty() {
            return refuse("statistics: found some; expected none in a replay");
        }
        self.check_no_tokens()
    }

    pub(super) fn mark_combine(&self, call: &mut CombineCall<'_>, layout: Layout) -> Result<()> {
        call.order = self.order();
        call.waited_ns = written(self.statistics.waited_ns);
        self.check_packed(layout == Layout::Packed)?;
        self.check_no_tokens()
    }

    fn check_no_tokens(&self) -> Result<()> {
        match self.tokens {
            None => Ok(()),
            Some(_) => refuse("tokens: found some; expected none, because T is that of the handle"),
        }
    }
}

fn refuse(text: &str) -> Result<()> {
    Err(Error::new(ErrorKind::InvalidInput, "check arguments", text))
}

/// A communicator whose calls are in the order of a stream. See [`Communicator::on`].
#[derive(Debug)]
pub struct OnStream<'y> {
    pub(super) comm: &'y mut Communicator,
    pub(super) mode: Mode<'y>,
}

impl Communicator {
    /// This communicator, with calls that are in the order of `stream`:
    ///
    /// - Inputs are read after all work that was queued on the stream before the call that sends. That
    ///   call returns when the sizes are known, while rows still move; so it waits until the stream has
    ///   reached that point.
    /// - The call that receives ([`dispatch_recv`](Self::dispatch_recv) and the like) returns without
    ///   waiting for rows. Work that is queued on the stream after it runs after the operation.
    /// - Outputs and handles may be dropped while the stream still uses them. Their place is reused once the
    ///   stream has passed the work that was queued on it before the communicator's next call.
    ///
    /// An operation that fails after the call that receives has returned closes the communicator. The next
    /// call on it reports the reason, and so do [`flush`](Self::flush) and [`close`](Self::close); until
    /// then the stream continues with incomplete outputs.
    ///
    /// The bounds of waits (`deadline_ms`, `late_ms`) hold as always, and count from the call that
    /// sends: work that is queued before it, and takes longer than a bound, ends the communicator.
    ///
    /// A kernel set without streams refuses the call on all ranks. Plain calls and calls on several
    /// streams may be mixed.
    ///
    /// ```no_run
    /// # use tokenyard_core::{Result, communicator::{Dispatch, Stream, Communicator}};
    /// # fn layer(communicator: &mut Communicator, dispatch: &Dispatch<'_>, raw: *mut std::ffi::c_void) -> Result<()> {
    /// // SAFETY: a stream of the framework's pool, which lives as long as the process; the tensors of
    /// // `dispatch` are used on this stream only.
    /// let stream = unsafe { Stream::new(raw) };
    /// let (received, handle) = communicator.on(stream).dispatch(dispatch)?;
    /// // Experts that are queued on the stream now run after the rows have arrived.
    /// # drop((received, handle));
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(&mut self, stream: Stream) -> OnStream<'_> {
        OnStream { comm: self, mode: Mode { stream: Some(stream), ..Mode::default() } }
    }

    /// True if the kernel set takes an optional form of calls.
    pub fn takes(&self, form: CallForm) -> bool {
        self.components.takes(form.bits())
    }

    /// True if the kernel set takes calls in the order of a stream.
    pub fn has_streams(&self) -> bool {
        self.components.takes(abi::TY_KERNELS_CAP_STREAMS)
    }

    /// True if the kernel set takes calls [without synchronisation](OnStream::without_sync), which graphs
    /// can capture.
    pub fn has_graphs(&self) -> bool {
        self.components.takes(abi::TY_KERNELS_CAP_NO_SYNC)
    }

    /// Frees outputs, handles and expert inputs that were dropped since the last call only once `streams`,
    /// too, have passed the work that is queued on them now. It is for values that were used on other streams
    /// than the one of their operation. Drop them, then call this, and then operations. Nothing waits if none
    /// was dropped since the last time. Local: no other rank takes part.
    ///
    /// In a capture it orders the work of the graph in the same way: name each stream that reads what the graph's
    /// operations gave, before the next operation is captured.
    ///
    /// # Errors
    /// `InvalidInput` where the kernel set has no streams; errors of the device.
    pub fn release_after(&mut self, streams: &[Stream]) -> Result<()> {
        self.check_open()?;
        streams.iter().try_for_each(|stream| self.check_stream(Some(*stream)))?;
        let any = self.take_back_regions() | std::mem::take(&mut self.took_back);
        if !any {
            return Ok(());
        }
        for stream in streams {
            // SAFETY: a stream of the device, by the contract of `Stream::new`.
            unsafe { self.components.kernels().release_after(stream.raw())? };
        }
        Ok(())
    }

    /// Waits until all operations that were received in the order of a stream have ended, and the
    /// streams have passed all outputs that were dropped. Local: no other rank takes part.
    ///
    /// # Errors
    /// The error that ended an operation after it was received, or that closed the communicator before; an
    /// operation that was sent and not received.
    pub fn flush(&mut self) -> Result<()> {
        self.check_open()?;
        if self.open_slots != 0 {
            let text = "an operation was sent and not received; expected none";
            return Err(Error::new(ErrorKind::InvalidInput, "flush communicator", text)
                .with_fix("receive every operation first"));
        }
        self.took_back |= self.take_back_regions();
        let flushed = self.components.kernels().flush();
        flushed.map_err(|error| self.end_failed(self.next_operation, error))
    }

    /// Waits as [`flush`](Self::flush) does, and returns the times of the steps on this rank in the last
    /// operation (`back` = 0), or in one before it: at most `in_flight` of them are remembered. For tools.
    ///
    /// # Errors
    /// As `flush`; `Unsupported` where the kernel set records no times; an operation too far back.
    pub fn trace(&mut self, back: u64) -> Result<Trace> {
        self.flush()?;
        let in_flight = u64::from(self.options.in_flight);
        match self.next_operation.checked_sub(1 + back) {
            Some(operation) if back < in_flight => self.components.kernels().trace(operation),
            _ => {
                let text = format!(
                    "found {} operations back of {}; expected one of the last {in_flight}",
                    back, self.next_operation
                );
                Err(Error::new(ErrorKind::InvalidInput, "trace operation", text))
            }
        }
    }

    /// Puts a call in its order before anything else is checked: a refusal goes in the same order.
    pub(super) fn order(&self, call: &mut DispatchCall<'_>, mode: &Mode<'_>) -> Result<()> {
        self.check_order(mode)?;
        call.order = mode.order();
        self.check_mode(mode)
    }

    /// Whether the kernel set takes calls in this order.
    pub(super) fn check_order(&self, mode: &Mode<'_>) -> Result<()> {
        self.check_stream(mode.stream).and_then(|()| self.check_no_sync(mode.no_sync))
    }

    /// Checks the tensors of a mode.
    pub(super) fn check_mode(&self, mode: &Mode<'_>) -> Result<()> {
        self.check_tokens(mode).and_then(|()| self.check_statistics(&mode.statistics))
    }

    fn check_statistics(&self, statistics: &Statistics<'_>) -> Result<()> {
        if statistics.is_empty() {
            return Ok(());
        }
        if !self.components.takes(abi::TY_KERNELS_CAP_STATISTICS) {
            return refuse("statistics: found some; expected none: the kernel set writes none");
        }
        let Statistics { expert_totals, waited_ns } = *statistics;
        let arguments = [("expert_totals", expert_totals), ("waited_ns", waited_ns)];
        check_memory(&arguments.map(|(name, t)| Argument::other(name, t)), self.components.device)?;
        let is = |tensor: Option<TensorRef<'_>>, rows: u32, dtype: DType| {
            let fits = |t: TensorRef<'_>| {
                [t.rows(), t.cols()] == [rows as usize, 1]
                    && t.dtype() == Some(dtype)
                    && t.is_contiguous()
            };
            tensor.is_none_or(fits)
        };
        if !is(expert_totals, self.shape.local_experts(), DType::I32) {
            return refuse(
                "expert_totals: found another tensor; expected i32 [E/R, 1], contiguous",
            );
        }
        if !is(waited_ns, self.shape.ranks, DType::I64) {
            return refuse("waited_ns: found another tensor; expected i64 [R, 1], contiguous");
        }
        Ok(())
    }

    pub(super) fn check_stream(&self, stream: Option<Stream>) -> Result<()> {
        if stream.is_none() || self.components.takes(abi::TY_KERNELS_CAP_STREAMS) {
            return Ok(());
        }
        let text = format!(
            "stream: found one; expected none, because kernel set `{}` has no streams",
            self.report.choices.kernels
        );
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text)
            .with_fix("call the communicator itself, or use a kernel set of a device"))
    }

    fn check_no_sync(&self, no_sync: bool) -> Result<()> {
        if !no_sync || self.components.takes(abi::TY_KERNELS_CAP_NO_SYNC) {
            return Ok(());
        }
        let text = format!(
            "without_sync: found it; expected a call that waits: kernel set `{}` has no others over {}",
            self.report.choices.kernels,
            self.report.transports()
        );
        let fix = "leave it out; GPUs of one domain over a transport that loads and stores, such as nvlink, \
                   take such calls";
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text).with_fix(fix))
    }

    fn check_tokens(&self, mode: &Mode<'_>) -> Result<()> {
        let Some(tokens) = &mode.tokens else { return Ok(()) };
        if !mode.no_sync {
            return refuse("tokens: found some; expected none but without synchronisation");
        }
        check_memory(&[Argument::other("tokens", Some(*tokens))], self.components.device)?;
        let one = [tokens.rows(), tokens.cols()] == [1, 1] && tokens.dtype() == Some(DType::I32);
        if one { Ok(()) } else { refuse("tokens: found another tensor; expected one i32") }
    }
}

impl<'y> OnStream<'y> {
    /// This stream, with calls that the host does not wait for: it queues them and continues at once, so
    /// they can also be captured in a CUDA graph.
    ///
    /// - A dispatch has worst-case [`Sizes`]; the true sizes stay on the device
    ///   ([`Received::totals`](super::Received::totals)).
    /// - A later call, [`Communicator::flush`] or [`Communicator::close`], reports a failure on any rank: a
    ///   refusal, a full arena, calls that do not match, a lost rank. The failure closes the communicator,
    ///   because ranks may have moved on by then. Until then the stream continues, with outputs of undefined
    ///   contents.
    /// - Ranks need not agree on it. But a refusal closes the communicator on the ranks that call without
    ///   synchronisation, and that ends it on the ranks that wait, too.
    ///
    /// **In a capture** (`cudaStreamBeginCapture` on the stream) nothing runs: a fault of this rank's own
    /// arguments is an error of the call, and is reported to no other rank. Outputs, handles and expert
    /// inputs of captured calls may be dropped at any time, also inside the capture. Until the communicator
    /// is dropped, only captured operations use their memory again. A later captured operation overwrites in
    /// each launch the memory that it got again: an output that is read after the launch must live. Then, for
    /// as long as the graph may be launched:
    ///
    /// - All other tensors of its calls live, and handles and outputs of calls outside the capture.
    /// - Send and receive of an operation are in one capture.
    /// - All ranks launch the same graphs, in the same order with all other operations, and never while an
    ///   operation is open. On the device, each launch comes after all operations before it, on the same
    ///   stream or on one that waits for it. Calls without a stream come after the host has waited for the
    ///   graph.
    /// - The communicator is closed or dropped only after the last launch has ended.
    ///
    /// A wait in a graph has a bound as any other, and its failure is reported by the next call. Hosts
    /// do not count launches, so the bound of a late rank is `late_ms`, even where a link carries
    /// nothing.
    #[must_use]
    pub fn without_sync(mut self) -> Self {
        self.mode.no_sync = true;
        self
    }

    /// For a dispatch [without synchronisation](Self::without_sync): T is read from one i32 on the
    /// device, after the work that was queued on the stream; at most the rows of `topk_idx`. Input rows
    /// from T on are not read, and output rows of a combine from T on are not written.
    #[must_use]
    pub fn with_tokens(mut self, tokens: TensorRef<'y>) -> Self {
        self.mode.tokens = Some(tokens);
        self
    }

    /// For dispatches to the packed layout, and their combines: numbers that the device adds to. No other code
    /// reads or writes them from the send on until the stream has passed the receive.
    #[must_use]
    pub fn with_statistics(mut self, statistics: Statistics<'y>) -> Self {
        self.mode.statistics = statistics;
        self
    }
}

impl OnStream<'_> {
    pub(super) fn components(&mut self) -> (&mut Communicator, Option<Stream>) {
        (self.comm, self.mode.stream)
    }

    /// As [`Communicator::refuse`], for a call in the order of the stream. In a capture this rank alone gets the
    /// error: nothing of a graph runs there, so no other rank waits.
    pub fn refuse(&mut self, call: RefusedCall, why: Error) -> Error {
        self.comm.refuse_in(call, why, &self.mode)
    }

    /// As [`Communicator::dispatch`], in the order of the stream.
    ///
    /// # Errors
    /// As there.
    pub fn dispatch(&mut self, dispatch: &Dispatch<'_>) -> Result<(Received, Handle)> {
        let pending = self.comm.send_dispatch(dispatch, self.mode.at_once())?;
        self.comm.dispatch_recv(pending)
    }

    /// As [`Communicator::dispatch_send`]; finish it with [`Communicator::dispatch_recv`].
    ///
    /// # Errors
    /// As there.
    pub fn dispatch_send<'a>(&mut self, dispatch: &Dispatch<'a>) -> Result<PendingDispatch<'a>> {
        self.comm.send_dispatch(dispatch, self.mode)
    }

    /// As [`Communicator::replay`], in the order of the stream.
    ///
    /// # Errors
    /// As there.
    pub fn replay(&mut self, handle: &Handle, replay: &Replay<'_>) -> Result<Received> {
        let pending = self.comm.send_replay(handle, replay, self.mode.at_once())?;
        self.comm.replay_recv(pending)
    }

    /// As [`Communicator::replay_send`]; finish it with [`Communicator::replay_recv`].
    ///
    /// # Errors
    /// As there.
    pub fn replay_send<'a>(
        &mut self,
        handle: &Handle,
        replay: &Replay<'a>,
    ) -> Result<PendingReplay<'a>> {
        self.comm.send_replay(handle, replay, self.mode)
    }

    /// As [`Communicator::combine`], in the order of the stream.
    ///
    /// # Errors
    /// As there.
    pub fn combine(&mut self, handle: &Handle, combine: Combine<'_>) -> Result<()> {
        let pending = self.comm.send_combine(handle, combine, self.mode.at_once())?;
        self.comm.combine_recv(pending)
    }

    /// As [`Communicator::combine_send`]; finish it with [`Communicator::combine_recv`].
    ///
    /// # Errors
    /// As there.
    pub fn combine_send<'a>(
        &mut self,
        handle: &Handle,
        combine: Combine<'a>,
    ) -> Result<PendingCombine<'a>> {
        self.comm.send_combine(handle, combine, self.mode)
    }
}
