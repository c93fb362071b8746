//! The communicator itself: its state, its queries, and its end.

use std::sync::Arc;
use std::time::Duration;

use super::bring_up::CommunicatorOptions;
use super::buffer::Buffer;
use super::components::CallForm;
use super::course::Course;
use super::masks::Masks;
use super::order::Mode;
use super::stream::{OnStream, Stream};
use super::tool_stream::ToolStream;
use crate::config::Config;
use crate::kernels::Trace;
use crate::moe::combine::late_weights::LateWeights;
use crate::moe::{Shape, TopkScratch};
use crate::session::BringUpReport;
use crate::session::reporter::Reporter;
use crate::{Error, ErrorKind, Result, abi};

/// A communicator. See the [module](super) for its rules.
pub struct Communicator {
    pub(super) course: Course,
    /// The config for the next communicator, by [`renew`](Self::renew).
    pub(super) config: Config,
    pub(super) options: CommunicatorOptions,
    pub(super) report: BringUpReport,
    pub(super) scratch: TopkScratch,
    pub(super) late_weights: LateWeights,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("shape", self.shape())
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.course.rank()
    }

    /// The shape that all ranks agreed on.
    pub fn shape(&self) -> &Shape {
        &self.course.components.shape
    }

    /// The chosen components and the reasons, for display and for JSON.
    pub fn report(&self) -> &BringUpReport {
        &self.report
    }

    /// Gives a reporter of this communicator's state, for any thread, also while the communicator waits: for
    /// a framework with a signal handler, or a watchdog, of its own. See `docs/reports.md`.
    pub fn reporter(&self) -> Reporter {
        Reporter::new(&self.course.standing.recorder.0)
    }

    /// Closes the communicator on all ranks together. Collective. No transport is closed before every rank
    /// has nothing left to send: on a network, dropping a communicator without this call may end in an error
    /// on a slower rank. Outputs and handles stay usable; they hold the windows. The drop of the last of them
    /// waits at most 10 s for a transport that is inside a call. After that it leaks the memory that the
    /// transport uses, and the log reports this.
    ///
    /// # Errors
    /// An operation that was sent and not received; the error that closed the communicator before, or
    /// that ended an operation after it was received in the order of a stream; a lost rank.
    pub fn close(mut self) -> Result<()> {
        self.course.check_open()?;
        if self.course.has_open() {
            // The other ranks may not wait for a rank that leaves.
            return Err(self.course.standing.end(
                Error::new(
                    ErrorKind::InvalidInput,
                    "close communicator",
                    "an operation was sent and not received; expected none",
                )
                .with_fix("receive every operation before the communicator is closed"),
            ));
        }
        // Where this fails, the other ranks are in the barrier, or will be: they receive the reason why
        // it never completes.
        self.flush()?;
        self.course.standing.world.barrier("close communicator")
    }

    /// Closes this communicator and opens another with the same config and options. Collective. Where losses
    /// are masked, ranks that wait to come back are in the new one, and this is the only time that they come
    /// back. Outputs and handles of this communicator stay readable; the new communicator does not accept
    /// them.
    ///
    /// A process that comes back joins the world and opens a communicator, as at the start, while the others
    /// renew theirs.
    ///
    /// # Errors
    /// As [`close`](Self::close) and [`open`](Self::open).
    pub fn renew(self) -> Result<Self> {
        let (world, config, options) =
            (Arc::clone(&self.course.standing.world), self.config.clone(), self.options);
        self.close()?;
        Self::open(&world, &config, options)
    }

    /// Whether an error has closed this communicator. Every call of it then returns that error, and the other
    /// ranks learn of it. A loss that no call has met yet does not count.
    pub fn is_closed(&self) -> bool {
        self.course.is_closed()
    }

    /// Ranks that this communicator continues without, in order: lost since it was opened, or absent then.
    /// Each stays lost for the life of the communicator. Empty where a loss stops the communicator.
    pub fn lost_ranks(&self) -> Vec<u32> {
        self.course.lost_ranks()
    }

    /// The total time, by rank, that calls of this communicator have waited for each rank. It holds the waits of the
    /// host: kernels of a device wait by themselves.
    pub fn waited(&self) -> Vec<Duration> {
        let watched = self.course.components.user.watchdog().watched();
        (0..self.shape().ranks).map(|rank| watched.waited(rank)).collect()
    }

    /// Lost ranks whose processes wait to come back: [`renew`](Self::renew) lets them in. A hint: ranks
    /// may see a change at different times.
    pub fn returning_ranks(&self) -> Vec<u32> {
        let liveness = self.course.standing.world.liveness();
        (0..self.shape().ranks).filter(|rank| liveness.waits_to_return(*rank)).collect()
    }

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
        OnStream { comm: self, mode: Mode::on(stream) }
    }

    /// True if the kernel set takes an optional form of calls.
    pub fn takes(&self, form: CallForm) -> bool {
        self.course.components.user.takes(form.bits())
    }

    /// True if the kernel set takes calls in the order of a stream.
    pub fn has_streams(&self) -> bool {
        self.course.components.user.takes(abi::TY_KERNELS_CAP_STREAMS)
    }

    /// True if the kernel set takes calls [without synchronisation](OnStream::without_sync), which graphs
    /// can capture.
    pub fn has_graphs(&self) -> bool {
        self.course.components.user.takes(abi::TY_KERNELS_CAP_NO_SYNC)
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
        self.course.release_after(streams)
    }

    /// Waits until all operations that were received in the order of a stream have ended, and the
    /// streams have passed all outputs that were dropped. Local: no other rank takes part.
    ///
    /// # Errors
    /// The error that ended an operation after it was received, or that closed the communicator before; an
    /// operation that was sent and not received.
    pub fn flush(&mut self) -> Result<()> {
        self.course.flush()
    }

    /// Waits as [`flush`](Self::flush) does, and returns the times of the steps on this rank in the last
    /// operation (`back` = 0), or in one before it: at most `in_flight` of them are remembered. For tools.
    ///
    /// # Errors
    /// As `flush`; `Unsupported` where the kernel set records no times; an operation too far back.
    pub fn trace(&mut self, back: u64) -> Result<Trace> {
        self.course.trace(back)
    }

    /// The words of the transport between domains about its link, as of now; none where there is no such transport.
    /// A stand-in that measures itself says there how late it was. For tools.
    pub fn rail_link(&self) -> Option<String> {
        self.course.components.user.rail_link()
    }

    /// True if tensors must lie in the memory of this communicator's device; else they must lie in host
    /// memory.
    pub fn works_on_device(&self) -> bool {
        self.course.components.user.device.is_some()
    }

    /// Device memory with a copy of `bytes`.
    ///
    /// # Errors
    /// `Unsupported` where the communicator works on host memory; errors of the device.
    pub fn buffer(&self, bytes: &[u8]) -> Result<Buffer> {
        Buffer::new(&self.course.components, bytes)
    }

    /// A stream of the communicator's device.
    ///
    /// # Errors
    /// `Unsupported` where the kernel set has no streams; errors of the device.
    pub fn tool_stream(&self) -> Result<ToolStream> {
        ToolStream::new(&self.course.components)
    }

    /// The ranks that operations leave out.
    pub fn masks(&mut self) -> Masks<'_> {
        Masks { course: &mut self.course }
    }
}
