//! Calls in the order of a device's stream.

use std::ffi::c_void;

use super::Communicator;
use super::arguments::{Combine, Dispatch, Replay};
use super::course::Course;
use super::order::Mode;
use super::output::{Handle, Received};
use super::pending::{PendingCombine, PendingDispatch, PendingReplay};
use super::refusal::RefusedCall;
use super::tensor::TensorRef;
use crate::{Error, Result};

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
    pub(super) fn is_empty(&self) -> bool {
        self.expert_totals.is_none() && self.waited_ns.is_none()
    }
}

/// A communicator whose calls are in the order of a stream. See [`Communicator::on`].
#[derive(Debug)]
pub struct OnStream<'y> {
    pub(super) comm: &'y mut Communicator,
    pub(super) mode: Mode<'y>,
}

impl<'y> OnStream<'y> {
    /// This stream, with calls that the host does not wait for: it queues them and continues at once, so
    /// they can also be captured in a CUDA graph.
    ///
    /// - A dispatch has worst-case [`Sizes`](super::Sizes); the true sizes stay on the device
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

    /// The number of multiprocessors that kernels of the call occupy: 1 to 1024, and no more than the device has. 0
    /// means those of the config, where `auto` chooses for each call. It opens nothing, so it may change with every
    /// call; ranks may pass different ones, and both halves of an operation use that of the first. Low-latency
    /// operations take `decode_sms` of the config instead.
    #[must_use]
    pub fn with_sms(mut self, sms: u32) -> Self {
        self.mode.sms = sms;
        self
    }
}

impl OnStream<'_> {
    pub(crate) fn course(&mut self) -> (&mut Course, Option<Stream>) {
        (&mut self.comm.course, self.mode.stream)
    }

    /// As [`Communicator::refuse`], for a call in the order of the stream. In a capture this rank alone gets the
    /// error: nothing of a graph runs there, so no other rank waits.
    pub fn refuse(&mut self, call: RefusedCall, why: Error) -> Error {
        self.comm.course.refuse_in(call, why, &self.mode)
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
