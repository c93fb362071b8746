//! The stream order of a call, and whether the host waits for it.

use tokenyard_core::Result;
use tokenyard_core::call::CallOrder;

use crate::driver::{Context, RawStream, RelaxedCapture};

/// The stream order of a call, and whether the host waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    /// The caller's stream. Without one the call is in the order of the host.
    pub(crate) stream: Option<RawStream>,
    /// The host does not wait for the outcome.
    pub(crate) no_host_sync: bool,
    /// Its stream captures a graph.
    pub(crate) captured: bool,
    /// Send and receive are one call. Kernels themselves wait for the data that arrives, and are queued on the
    /// caller's stream itself. That saves the time that streams take to wait for each other.
    pub(crate) at_once: bool,
    /// Another exchange of the operation is queued behind this one before the host waits for its outcome.
    pub(crate) deferred: bool,
    /// The multiprocessors that the call names, or 0.
    pub(crate) sms: u32,
}

impl Mode {
    /// The mode that a call asks for.
    pub(crate) fn of(order: CallOrder, context: &Context) -> Result<Self> {
        let stream = order.stream.map(RawStream::of);
        let captured = stream.map_or(Ok(false), |stream| stream.is_captured(context))?;
        Ok(Self {
            stream,
            no_host_sync: order.no_sync,
            captured,
            at_once: order.at_once,
            deferred: false,
            sms: order.sms,
        })
    }

    /// While the result lives, the driver answers queries about streams that capture no graph.
    pub(crate) fn relax(&self, context: &Context) -> Result<Option<RelaxedCapture>> {
        self.captured.then(|| RelaxedCapture::enter(context)).transpose()
    }

    /// Whether the call that sends waits for the outcome.
    pub(crate) fn waits(&self) -> bool {
        !self.no_host_sync && !self.deferred
    }

    /// Whether the call is recorded, and does not run.
    pub(crate) fn is_recorded(&self) -> bool {
        self.captured && self.no_host_sync
    }

    /// The caller's stream, where kernels are queued there.
    pub(crate) fn direct(&self) -> Option<RawStream> {
        self.stream.filter(|_| self.at_once)
    }
}

/// The reason why calls that wait are refused on a stream that captures a graph.
pub(crate) const CAPTURED: &str = "stream: found one that captures a graph; expected one that runs, or a \
                                   call without synchronisation";

/// The reason why the first half of an operation is refused while another capture has halves.
pub(crate) const ELSEWHERE: &str = "stream: found the first half of an operation in a second capture; expected the \
                                    first capture to have ended, which has halves of operations, too, or the \
                                    operation in one call";
