//! Calls in the order of a device's stream.

use std::ffi::c_void;
use std::sync::Arc;

use super::Communicator;
use super::arguments::{Combine, Dispatch, Replay, Sizes};
use super::components::{CallForm, Components};
use super::memory::{Argument, check_memory};
use super::operations::{PendingCombine, PendingDispatch, PendingReplay};
use super::output::{Handle, Received};
use super::tensor::{TensorMut, TensorRef};
use crate::kernels::Trace;
use crate::moe::DType;
use crate::{Error, ErrorKind, Result, abi};

/// A stream of the communicator's device that belongs to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    raw: *mut c_void,
}

// SAFETY: a name for a stream; `Stream::new` says until when it is one, on any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Names a stream: on CUDA a `CUstream`, which is a `cudaStream_t`; null is the legacy default
    /// stream.
    ///
    /// # Safety
    /// The caller upholds, for this value and every call that it is given to:
    /// - `raw` is a stream of the device that the communicator works on; on CUDA, of its primary context, which
    ///   is the one that frameworks use, and not the per-thread default stream.
    /// - It lives until every [`Received`], [`Handle`] and [`CombineInput`](super::CombineInput) of
    ///   those calls was dropped, and then the communicator was flushed or closed without an error. Without
    ///   that, until the communicator and all that it gave was dropped.
    /// - The memory of a call's tensors stays allocated until the stream has passed the call's
    ///   receive. From the send on nobody else writes them, and nobody else touches what the call
    ///   writes, but what is queued on the stream after the receive.
    /// - What a call gave back is used on that stream, or on one that waits for it; and before it is
    ///   dropped, that stream waits for every other on which it is still used.
    pub unsafe fn new(raw: *mut c_void) -> Self {
        Self { raw }
    }

    /// The stream, as [`new`](Self::new) was given it.
    pub fn raw(self) -> *mut c_void {
        self.raw
    }
}

/// In whose order a call is, and who waits for it. The default is that of plain calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mode<'a> {
    stream: Option<Stream>,
    no_sync: bool,
    tokens: Option<TensorRef<'a>>,
    /// The call is one: it receives what it sends.
    is_at_once: bool,
}

impl Mode<'_> {
    /// Of a call that receives what it sends.
    pub(super) fn at_once(self) -> Self {
        Self { is_at_once: true, ..self }
    }

    /// The flags, and the pointer that crosses the ABI.
    fn flags(&self, [on_stream, no_sync, at_once]: [u32; 3]) -> (u32, *mut c_void) {
        let at_once = if self.is_at_once { at_once } else { 0 };
        let Some(stream) = self.stream else { return (at_once, std::ptr::null_mut()) };
        (at_once | on_stream | if self.no_sync { no_sync } else { 0 }, stream.raw())
    }

    fn mark(&self, call: &mut abi::TyDispatch) {
        let (flags, stream) = self.flags([
            abi::TY_DISPATCH_ON_STREAM,
            abi::TY_DISPATCH_NO_SYNC,
            abi::TY_DISPATCH_AT_ONCE,
        ]);
        (call.flags, call.stream) = (call.flags | flags, stream);
    }

    pub(super) fn mark_dispatch(&self, call: &mut abi::TyDispatch, sizes: Sizes) -> Result<()> {
        self.mark(call);
        if self.no_sync && sizes == Sizes::Exact {
            return refuse(
                "sizes: found exact; expected worst-case, because nobody waits for counts",
            );
        }
        call.tokens = self.tokens.map_or(std::ptr::null(), |t| t.raw().data.cast_const().cast());
        Ok(())
    }

    pub(super) fn mark_replay(&self, call: &mut abi::TyDispatch) -> Result<()> {
        self.mark(call);
        self.check_no_tokens()
    }

    pub(super) fn mark_combine(&self, call: &mut abi::TyCombine) -> Result<()> {
        let (flags, stream) = self.flags([
            abi::TY_COMBINE_ON_STREAM,
            abi::TY_COMBINE_NO_SYNC,
            abi::TY_COMBINE_AT_ONCE,
        ]);
        (call.flags, call.stream) = (call.flags | flags, stream);
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
    /// - Inputs are read behind everything that was queued on the stream before the call that sends.
    ///   That call returns when the sizes are known, while rows still move; so it waits until the
    ///   stream has come that far.
    /// - The call that receives ([`dispatch_recv`](Self::dispatch_recv) and its like) returns without
    ///   waiting for rows. What is queued on the stream after it runs behind the operation.
    /// - Outputs and handles may be dropped while the stream still uses them: their place is used
    ///   again once the stream has passed what was queued there by the communicator's next call.
    ///
    /// An operation that fails after the call that receives has returned closes the communicator. The next
    /// call on it says why, and so do [`flush`](Self::flush) and [`close`](Self::close); until then the
    /// stream goes on over outputs that are not whole.
    ///
    /// The bounds of waits (`deadline_ms`, `late_ms`) hold as ever, and count from the call that sends:
    /// work that is queued before it, and takes longer than that, ends the communicator.
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
    /// // Experts that are queued on the stream now run behind the rows.
    /// # drop((received, handle));
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(&mut self, stream: Stream) -> OnStream<'_> {
        OnStream { comm: self, mode: Mode { stream: Some(stream), ..Mode::default() } }
    }

    /// Whether the kernel set takes a form of calls that not every one does.
    pub fn takes(&self, form: CallForm) -> bool {
        self.components.takes(form.bit())
    }

    /// Whether the kernel set takes calls in the order of a stream.
    pub fn has_streams(&self) -> bool {
        self.components.takes(abi::TY_NEEDS_STREAMS)
    }

    /// Whether the kernel set takes calls [without synchronisation](OnStream::without_sync), which graphs
    /// can capture.
    pub fn has_graphs(&self) -> bool {
        self.components.takes(abi::TY_NEEDS_NO_SYNC)
    }

    /// Outputs, handles and expert inputs that were dropped before are free once `streams`, too, have passed what is
    /// queued there now: for those that were used on other streams than that of their operation. Drop them, then
    /// call this, and then operations. Local: no other rank takes part.
    ///
    /// # Errors
    /// `InvalidInput` where the kernel set has no streams, and for a stream that is captured; what the device refuses.
    pub fn release_after(&mut self, streams: &[Stream]) -> Result<()> {
        self.check_open()?;
        self.take_back_regions();
        for stream in streams {
            self.check_stream(Some(*stream))?;
            // SAFETY: a stream of the device, by the contract of `Stream::new`.
            unsafe { self.components.kernels().release_after(stream.raw())? };
        }
        Ok(())
    }

    /// Waits until everything that was received in the order of a stream has ended, and the streams
    /// have passed all outputs that were dropped. Local: no other rank takes part.
    ///
    /// # Errors
    /// What ended an operation after it was received, or closed the communicator before; an operation that was
    /// sent and not received.
    pub fn flush(&mut self) -> Result<()> {
        self.check_open()?;
        if self.open_slots != 0 {
            let text = "an operation was sent and not received; expected none";
            return Err(Error::new(ErrorKind::InvalidInput, "flush communicator", text)
                .with_fix("receive every operation first"));
        }
        self.take_back_regions();
        let flushed = self.components.kernels().flush();
        flushed.map_err(|error| self.end_failed(self.next_operation, error))
    }

    /// Waits as [`flush`](Self::flush) does, and says when things happened on this rank in the last
    /// operation (`back` = 0), or in one before it: at most `in_flight` of them are remembered. For tools.
    ///
    /// # Errors
    /// As `flush`; `Unsupported` where the kernel set notes no times; an operation of too long ago.
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

    pub(super) fn check_mode(&self, mode: &Mode<'_>) -> Result<()> {
        self.check_stream(mode.stream).and_then(|()| self.check_no_sync(mode))
    }

    pub(super) fn check_stream(&self, stream: Option<Stream>) -> Result<()> {
        if stream.is_none() || self.components.takes(abi::TY_NEEDS_STREAMS) {
            return Ok(());
        }
        let text = format!(
            "stream: found one; expected none, because kernel set `{}` has no streams",
            self.report.kernels
        );
        Err(Error::new(ErrorKind::InvalidInput, "check arguments", text)
            .with_fix("call the communicator itself, or use a kernel set of a device"))
    }

    fn check_no_sync(&self, mode: &Mode<'_>) -> Result<()> {
        if mode.no_sync && !self.components.takes(abi::TY_NEEDS_NO_SYNC) {
            let text = format!(
                "without_sync: found it; expected a call that waits: kernel set `{}` has no others here",
                self.report.kernels
            );
            let fix = "leave it out; GPUs of one domain over a transport that loads and stores, such as nvlink, \
                       take such calls";
            return Err(Error::new(ErrorKind::InvalidInput, "check arguments", text).with_fix(fix));
        }
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
    /// The same, with calls that nobody waits for: the host queues them and goes on at once, so they
    /// can also be captured in a CUDA graph.
    ///
    /// - A dispatch has worst-case [`Sizes`]; the true ones stay on the device
    ///   ([`Received::totals`](super::Received::totals)).
    /// - What goes wrong on any rank (a refusal, a full arena, calls that do not match, a lost rank) is
    ///   told by a later call, [`Communicator::flush`] or [`Communicator::close`], and closes the communicator, because ranks
    ///   may be further by then. Until then the stream goes on, over outputs that hold anything.
    /// - Ranks need not agree on it. But a refusal closes the communicator on the ranks that call so, and by that ends
    ///   it on those that wait, too.
    ///
    /// **In a capture** (`cudaStreamBeginCapture` on the stream) nothing runs: what this rank's own
    /// arguments lack is an error of the call, and is told to no other rank. Then, for as long as the
    /// graph may be launched:
    ///
    /// - The [`Received`](super::Received), the [`Handle`](super::Handle), each
    ///   [`CombineInput`](super::CombineInput) and all tensors of its calls live. A handle also keeps
    ///   what its captured operations stage.
    /// - Send and receive of an operation are in one capture.
    /// - All ranks launch the same graphs, in the same order with all other operations, and never while
    ///   an operation is open. Each launch is on the device behind all operations before it: on the
    ///   same stream, or on one that waits for it; calls without a stream come after the host has
    ///   waited for the graph.
    /// - Whoever closes or drops the communicator has waited for the last launch.
    ///
    /// A wait in a graph has an end as any other, and is told by the next call. As hosts do not count
    /// launches, a rank may be late by `late_ms`, also where a link carries nothing.
    #[must_use]
    pub fn without_sync(mut self) -> Self {
        self.mode.no_sync = true;
        self
    }

    /// For a dispatch [without synchronisation](Self::without_sync): T is read from one i32 on the
    /// device, behind what was queued on the stream; at most as many as `topk_idx` has rows. Rows of
    /// inputs behind T are not read, and those of a combine's output are left as they are.
    #[must_use]
    pub fn with_tokens(mut self, tokens: TensorRef<'y>) -> Self {
        self.mode.tokens = Some(tokens);
        self
    }
}

impl OnStream<'_> {
    pub(super) fn components(&mut self) -> (&mut Communicator, Option<Stream>) {
        (self.comm, self.mode.stream)
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

/// A stream for callers that have none of their own: tools and tests. It waits for no other stream;
/// [`TensorRef::to_vec`] and [`Communicator::buffer`] wait for it. It keeps the communicator's components alive, and is
/// destroyed after everything in it.
#[derive(Debug)]
pub struct ToolStream {
    pub(super) components: Arc<Components>,
    pub(super) stream: Stream,
}

impl Communicator {
    /// A stream of the communicator's device.
    ///
    /// # Errors
    /// `Unsupported` where the kernel set has no streams; what the device refuses.
    pub fn tool_stream(&self) -> Result<ToolStream> {
        let raw = self.components.kernels().stream_create()?;
        Ok(ToolStream { components: Arc::clone(&self.components), stream: Stream { raw } })
    }
}

impl ToolStream {
    /// Its name.
    ///
    /// # Safety
    /// As [`Stream::new`]; `self` outlives the calls that the name is given to, and what they give.
    pub unsafe fn stream(&self) -> Stream {
        self.stream
    }

    /// Queues a copy of a contiguous tensor over the front of another, both on the device.
    ///
    /// # Errors
    /// Host memory, gaps, or more bytes than there is room for; what the device refuses.
    ///
    /// # Safety
    /// The memory of both stays allocated until the stream has passed the copy; what else uses it is
    /// in the order of this stream.
    pub unsafe fn copy(&self, to: &TensorMut<'_>, from: &TensorRef<'_>) -> Result<()> {
        let bytes = |tensor: &TensorRef<'_>| {
            let whole = tensor.is_on_device() && tensor.is_contiguous();
            whole
                .then_some(tensor.rows() * tensor.cols())
                .zip(tensor.dtype())
                .map(|(n, d)| n * d.bytes())
        };
        let (room, wanted) = (bytes(&to.as_ref()), bytes(from));
        let (Some(bytes), true) = (wanted, wanted.is_some() && wanted <= room) else {
            let text = format!(
                "found {wanted:?} contiguous bytes on the device for room of {room:?}; expected no more \
                 than fit"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "queue copy", text));
        };
        let (to, from) = (to.raw().data, from.raw().data);
        // SAFETY: a stream of this kernel set, and ranges of this length; the rest by this function's
        // contract.
        unsafe { self.components.kernels().copy_on(self.stream.raw(), to, from, bytes as u64) }
    }
}

impl Drop for ToolStream {
    fn drop(&mut self) {
        // SAFETY: made by `tool_stream`; who took its name promised that no call has it any more.
        unsafe { self.components.kernels().stream_destroy(self.stream.raw()) }
    }
}
