//! Streams and events.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokenyard_core::Result;

use super::{Context, check, sys};

/// Every stream of this process, with its device.
static LIVE: Mutex<Vec<(i32, RawStream)>> = Mutex::new(Vec::new());

fn live() -> MutexGuard<'static, Vec<(i32, RawStream)>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of a stream, which may be a caller's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(sys::CUstream);

// SAFETY: a stream may be used from any thread; the driver locks for itself.
unsafe impl Send for RawStream {}

impl RawStream {
    /// As the ABI passes it. Null is the legacy default stream.
    pub(crate) fn of(pointer: *mut c_void) -> Self {
        Self(pointer.cast())
    }

    /// Whether what is queued on it is recorded into a graph and does not run.
    pub(crate) fn is_captured(self, context: &Context) -> Result<bool> {
        use sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE as NONE;
        let _entered = context.enter()?;
        let mut status = NONE;
        // SAFETY: a stream of this crate, or one whose owner promised that it lives.
        let asked = unsafe { sys::cuStreamIsCapturing(self.0, &mut status) };
        check("ask for capture", asked).map(|()| status != NONE)
    }

    pub(super) fn raw(self) -> sys::CUstream {
        self.0
    }

    /// Copies in stream order.
    pub(crate) fn copy(self, context: &Context, to: u64, from: u64, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = context.enter()?;
        // SAFETY: the caller names memory and a stream that are valid until it has passed the copy.
        check("copy memory", unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.0) })
    }

    /// Zeroes bytes in stream order.
    pub(crate) fn zero(self, context: &Context, at: u64, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _entered = context.enter()?;
        // SAFETY: as in `copy`.
        check("zero memory", unsafe { sys::cuMemsetD8Async(at, 0, bytes as usize, self.0) })
    }

    /// As the ABI passes it.
    pub(crate) fn pointer(self) -> *mut c_void {
        self.0.cast()
    }
}

/// A stream that does not wait for the default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
}

// SAFETY: a stream may be used from any thread; the driver locks for itself.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: destroyed on drop.
        check("make stream", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        live().push((context.device.ordinal, RawStream(raw)));
        Ok(Self { context: Arc::clone(context), raw })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Names it while it lives.
    pub(crate) fn name(&self) -> RawStream {
        RawStream(self.raw)
    }

    /// Whether everything in the stream has ended. Errors of kernels show here.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: a stream that lives.
        is_done(unsafe { sys::cuStreamQuery(self.raw) })
    }

    /// Waits for everything in the stream. Kernels of this crate end by themselves (INV-6).
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: a stream that lives.
        check("synchronize stream", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Waits for everything in every stream of a device that this crate has made.
    pub(crate) fn synchronize_all(context: &Context) -> Result<()> {
        let _entered = context.enter()?;
        let device = context.device.ordinal;
        // The lock keeps each stream alive until it has been waited for.
        live().iter().filter(|(of, _)| *of == device).try_for_each(|(_, stream)| {
            // SAFETY: a stream that lives.
            check("synchronize stream", unsafe { sys::cuStreamSynchronize(stream.0) })
        })
    }

    /// Copies in stream order between places of device memory.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        self.name().copy(&self.context, to, from, bytes)
    }

    /// Zeroes bytes in stream order.
    pub(crate) fn zero(&self, at: u64, bytes: u64) -> Result<()> {
        self.name().zero(&self.context, at, bytes)
    }

    /// Stores 8 bytes, whole, after everything before it in the stream.
    pub(crate) fn write(&self, at: u64, value: u64) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as in `copy`.
        check("write value", unsafe { sys::cuStreamWriteValue64_v2(self.raw, at, value, 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        live().retain(|(_, stream)| *stream != self.name());
        let _entered = self.context.enter();
        // SAFETY: made by `new`; the driver lets what is queued finish.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        Self::make(context, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    /// One that also says when. Recording it costs more.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Self> {
        Self::make(context, sys::CUevent_flags_enum::CU_EVENT_DEFAULT)
    }

    fn make(context: &Arc<Context>, flags: sys::CUevent_flags_enum) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: destroyed on drop.
        check("make event", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Microseconds from another mark to this one; both are timed and have been passed.
    pub(crate) fn us_since(&self, earlier: &Self) -> Result<f64> {
        let _entered = self.context.enter()?;
        let mut ms = 0.0;
        // SAFETY: two events that live.
        check("ask event", unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw) })?;
        Ok(f64::from(ms) * 1e3)
    }

    /// Marks what is in the stream by now. May be done again at once: whoever waits for the event
    /// already waits for the mark of that time.
    pub(crate) fn record(&self, stream: RawStream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: an event that lives, and a stream of this crate or one whose owner promised so.
        check("record event", unsafe { sys::cuEventRecord(self.raw, stream.0) })
    }

    /// What is queued in the stream from now on runs behind the mark.
    pub(crate) fn hold(&self, stream: RawStream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as in `record`.
        check("wait for event", unsafe { sys::cuStreamWaitEvent(stream.0, self.raw, 0) })
    }

    /// Whether everything before the mark has ended. Errors of kernels show here.
    pub(crate) fn is_done(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: an event that lives.
        is_done(unsafe { sys::cuEventQuery(self.raw) })
    }
}

fn is_done(status: sys::CUresult) -> Result<bool> {
    match status {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        status => check("run kernel", status).map(|()| true),
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made by `new`.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// While it lives, this thread may ask how streams are while another stream captures a graph, be it this
/// thread's. Who touches no stream that is captured disturbs nobody.
#[derive(Debug)]
pub(crate) struct RelaxedCapture {
    before: sys::CUstreamCaptureMode,
}

impl RelaxedCapture {
    pub(crate) fn enter() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver writes the mode of before.
        let status = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("relax capture", status).map(|()| Self { before: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}
