//! Streams and events.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokenyard_core::{Error, ErrorKind, Result};

use super::times::{CallKind, timed};
use super::{Context, Device, Driver, RawEvent, RawStream};

/// Every stream of this process, with its device.
static LIVE: Mutex<Vec<(i32, RawStream)>> = Mutex::new(Vec::new());

fn live() -> MutexGuard<'static, Vec<(i32, RawStream)>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RawStream {
    /// The stream of a pointer that the ABI passes. Null is the legacy default stream.
    pub(crate) fn of(pointer: *mut c_void) -> Self {
        Self(pointer)
    }

    /// Whether work that is queued on the stream is recorded into a graph and does not run.
    pub(crate) fn is_captured(self, context: &Context) -> Result<bool> {
        timed(CallKind::AskCapture, || {
            let _entered = context.enter()?;
            // SAFETY: a stream of this crate, or one whose owner promised that it lives.
            unsafe { context.driver().stream_is_captured(self) }
        })
    }

    /// The number of the capture that records work on the stream; None where none does.
    pub(crate) fn capture(self, context: &Context) -> Result<Option<u64>> {
        timed(CallKind::AskCapture, || {
            let _entered = context.enter()?;
            // SAFETY: as in `is_captured`.
            unsafe { context.driver().stream_capture(self) }
        })
    }

    /// Copies in stream order.
    pub(crate) fn copy(self, context: &Context, to: u64, from: u64, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        timed(CallKind::Move, || {
            let _entered = context.enter()?;
            // SAFETY: the caller names memory and a stream that are valid until the stream has passed
            // the copy.
            unsafe { context.driver().copy_async(self, to, from, bytes as usize) }
        })
    }

    /// Zeroes bytes in stream order.
    pub(crate) fn zero(self, context: &Context, at: u64, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        timed(CallKind::Move, || {
            let _entered = context.enter()?;
            // SAFETY: as in `copy`.
            unsafe { context.driver().zero_async(self, at, bytes as usize) }
        })
    }

    /// The pointer that the ABI passes.
    pub(crate) fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// Work that is queued on the stream `then` from now on runs behind the present work of `first`. Null is the legacy
/// default stream. Any thread.
///
/// # Errors
/// `Unavailable` without such a device; `InvalidInput` where one of them captures a graph that the other does not;
/// errors of the driver.
///
/// # Safety
/// Both are streams of the device, or null.
pub unsafe fn order_streams(device: Device, first: *mut c_void, then: *mut c_void) -> Result<()> {
    let context = Context::retain(device)?;
    let [first, then] = [first, then].map(RawStream::of);
    if first.capture(&context)? != then.capture(&context)? {
        let text =
            "found a stream that captures a graph, and one that does not; expected both or neither";
        return Err(Error::new(ErrorKind::InvalidInput, "order streams", text));
    }
    let mark = Event::new(&context)?;
    mark.record(first)?;
    mark.hold(then)
}

/// A stream that does not wait for the default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: RawStream,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let raw = context.driver().stream_create()?;
        live().push((context.device.ordinal, raw));
        Ok(Self { context: Arc::clone(context), raw })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The handle of the stream, valid while the stream lives.
    pub(crate) fn name(&self) -> RawStream {
        self.raw
    }

    /// Whether everything in the stream has ended. Errors of kernels show here.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        timed(CallKind::AskEnd, || {
            let _entered = self.context.enter()?;
            let _relaxed = RelaxedCapture::enter(&self.context)?;
            // SAFETY: a stream that lives.
            unsafe { self.context.driver().stream_query(self.raw) }
        })
    }

    /// Waits for everything in the stream. Kernels of this crate end by themselves (INV-6).
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        let _relaxed = RelaxedCapture::enter(&self.context)?;
        // SAFETY: a stream that lives.
        unsafe { self.context.driver().stream_synchronize(self.raw) }
    }

    /// Waits for everything in every stream of a device that this crate has made.
    pub(crate) fn synchronize_all(context: &Context) -> Result<()> {
        let _entered = context.enter()?;
        let _relaxed = RelaxedCapture::enter(context)?;
        let device = context.device.ordinal;
        // The lock keeps each stream alive until it has been waited for.
        live().iter().filter(|(of, _)| *of == device).try_for_each(|(_, stream)| {
            // SAFETY: a stream that lives.
            unsafe { context.driver().stream_synchronize(*stream) }
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
        timed(CallKind::Write, || {
            let _entered = self.context.enter()?;
            // SAFETY: as in `copy`.
            unsafe { self.context.driver().stream_write(self.raw, at, value) }
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        live().retain(|(_, stream)| *stream != self.name());
        let _entered = self.context.enter();
        // SAFETY: made by `new`; the driver lets queued work finish.
        unsafe { self.context.driver().stream_destroy(self.raw) };
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    raw: RawEvent,
}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        Self::make(context, false)
    }

    /// A mark that also records a time. Recording it costs more.
    pub(crate) fn timed(context: &Arc<Context>) -> Result<Self> {
        Self::make(context, true)
    }

    fn make(context: &Arc<Context>, timed: bool) -> Result<Self> {
        let _entered = context.enter()?;
        let raw = context.driver().event_create(timed)?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Microseconds from another mark to this one; both are timed and have been passed.
    pub(crate) fn us_since(&self, earlier: &Self) -> Result<f64> {
        let _entered = self.context.enter()?;
        // SAFETY: two events that live.
        let ms = unsafe { self.context.driver().event_elapsed(earlier.raw, self.raw)? };
        Ok(f64::from(ms) * 1e3)
    }

    /// Marks the present end of the stream. The event may be recorded again at once: a stream that
    /// already waits for the event waits for the earlier mark.
    pub(crate) fn record(&self, stream: RawStream) -> Result<()> {
        timed(CallKind::Record, || {
            let _entered = self.context.enter()?;
            // SAFETY: an event that lives, and a stream of this crate or one whose owner promised so.
            unsafe { self.context.driver().event_record(self.raw, stream) }
        })
    }

    /// Makes work that is queued in the stream from now on run behind the mark.
    pub(crate) fn hold(&self, stream: RawStream) -> Result<()> {
        timed(CallKind::Wait, || {
            let _entered = self.context.enter()?;
            // SAFETY: as in `record`.
            unsafe { self.context.driver().stream_wait(stream, self.raw) }
        })
    }

    /// Whether everything before the mark has ended. Errors of kernels show here.
    pub(crate) fn is_done(&self) -> Result<bool> {
        timed(CallKind::AskEnd, || {
            let _entered = self.context.enter()?;
            let _relaxed = RelaxedCapture::enter(&self.context)?;
            // SAFETY: an event that lives.
            unsafe { self.context.driver().event_query(self.raw) }
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made by `new`.
        unsafe { self.context.driver().event_destroy(self.raw) };
    }
}

/// While this lives, this thread may ask for the end of work, wait for it, and allocate, even if a stream captures a
/// graph, of this thread or of another. Without it such a call fails, and ends that capture. A thread that touches no
/// captured stream disturbs no capture.
#[derive(Debug)]
pub(crate) struct RelaxedCapture {
    driver: &'static dyn Driver,
    before: i32,
}

impl RelaxedCapture {
    pub(crate) fn enter(context: &Context) -> Result<Self> {
        let driver = context.driver();
        driver.capture_relax().map(|before| Self { driver, before })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        self.driver.capture_restore(self.before);
    }
}
