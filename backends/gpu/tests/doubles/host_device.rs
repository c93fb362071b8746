//! A double of a driver whose device is this machine's memory, for tests without a GPU that look at bytes. A stream
//! runs each copy and each store when it is queued. The `stream_model` is for tests of what streams wait for.

use std::ffi::{CStr, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::{Error, ErrorKind, Result};

use super::{
    Context, Device, DeviceFacts, Driver, DriverDevices, DriverMemory, Launch, RawContext,
    RawDevice, RawEvent, RawFunction, RawGraph, RawMemory, RawModule, RawStream, Reach, Uuid,
};
use crate::platform::Platform;
use crate::platform::tests::platform_of;

#[derive(Debug)]
struct HostDevice;

static PLATFORM: Platform = platform_of(&HostDevice);

/// The context of the device.
pub(crate) fn context() -> Arc<Context> {
    let device = Device::choose(&PLATFORM, Some(0)).expect("the double has a device");
    Context::retain(device).expect("the double has a context")
}

/// The number that a stream has which captures a graph.
const CAPTURED: usize = 8;

/// A caller's stream; one that captures a graph, or one that runs.
pub(crate) fn stream(is_captured: bool) -> *mut c_void {
    std::ptr::without_provenance_mut(if is_captured { CAPTURED } else { 2 * CAPTURED })
}

/// Functions of the driver that the double has not.
macro_rules! lacks {
    ($([$($unsafe:tt)?] $name:ident($($type:ty),*) -> $result:ty;)*) => {$(
        $($unsafe)? fn $name(&self, $(_: $type),*) -> Result<$result> {
            let text = "the double has no such function";
            Err(Error::new(ErrorKind::Internal, stringify!($name), text))
        }
    )*};
}

impl DriverDevices for HostDevice {
    lacks! {
        [] facts(RawDevice) -> DeviceFacts;
        [] uuid(RawDevice) -> Uuid;
        [] reach(RawDevice, RawDevice) -> Reach;
    }

    fn device_count(&self) -> Result<i32> {
        Ok(1)
    }

    fn device(&self, ordinal: i32) -> Result<RawDevice> {
        Ok(RawDevice(ordinal))
    }

    fn current_device(&self) -> Option<RawDevice> {
        None
    }

    fn name(&self, _: RawDevice) -> Result<String> {
        Ok("host".to_owned())
    }
}

/// A length in 64-byte lines, as memory is aligned.
fn lines(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes.max(1), 64).expect("a length that fits")
}

impl DriverMemory for HostDevice {
    lacks! {
        [] alloc(usize) -> u64;
        [] alloc_pooled(RawDevice, usize) -> u64;
        [unsafe] register_host(*mut c_void, usize) -> u64;
        [unsafe] register_io(*mut c_void, usize) -> u64;
        [] granularity(RawDevice) -> u64;
        [] memory_create(RawDevice, usize) -> RawMemory;
        [unsafe] memory_export(RawMemory) -> OwnedFd;
        [unsafe] range_dmabuf(u64, usize) -> OwnedFd;
        [] memory_import(BorrowedFd<'_>) -> RawMemory;
        [unsafe] memory_map(RawMemory, usize, RawDevice) -> u64;
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<*mut c_void> {
        // SAFETY: the length is not 0. Tests are short: what they pin is not freed.
        Ok(unsafe { std::alloc::alloc_zeroed(lines(bytes)) }.cast())
    }

    unsafe fn free(&self, _: u64) {}
    unsafe fn free_pooled(&self, _: u64) {}
    unsafe fn free_pinned(&self, _: *mut c_void) {}
    unsafe fn unregister_host(&self, _: *mut c_void) {}
    unsafe fn memory_release(&self, _: RawMemory) {}
    unsafe fn memory_unmap(&self, _: RawMemory, _: u64, _: usize) {}
}

impl Driver for HostDevice {
    lacks! {
        [unsafe] copy(u64, u64, usize) -> ();
        [unsafe] zero(u64, usize) -> ();
        [unsafe] zero_async(RawStream, u64, usize) -> ();
        [unsafe] event_elapsed(RawEvent, RawEvent) -> f32;
        [unsafe] graph_begin(RawStream) -> ();
        [unsafe] graph_end(RawStream) -> RawGraph;
        [unsafe] graph_launch(RawGraph, RawStream) -> ();
        [unsafe] module_load(&[u8]) -> RawModule;
        [unsafe] module_function(RawModule, &CStr) -> RawFunction;
        [unsafe] module_word(RawModule, &CStr) -> u64;
        [unsafe] function_allow_shared(RawFunction, u32) -> ();
        [unsafe] function_launch(RawFunction, Launch, RawStream, &mut [*mut c_void]) -> ();
    }

    unsafe fn copy_async(&self, _: RawStream, to: u64, from: u64, bytes: usize) -> Result<()> {
        let (to, from) = (to as *mut u8, from as *const u8);
        if bytes == 8 {
            // SAFETY: by this function's contract; a word is whole (INV-3).
            let word = unsafe { AtomicU64::from_ptr(from.cast_mut().cast()) };
            let value = word.load(Ordering::Acquire);
            // SAFETY: as above.
            unsafe { to.cast::<u64>().write(value) };
            return Ok(());
        }
        std::sync::atomic::fence(Ordering::Acquire);
        // SAFETY: by this function's contract.
        unsafe { std::ptr::copy(from, to, bytes) };
        std::sync::atomic::fence(Ordering::Acquire);
        Ok(())
    }

    unsafe fn stream_write(&self, _: RawStream, at: u64, value: u64) -> Result<()> {
        // SAFETY: by this function's contract, an aligned word.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }.store(value, Ordering::Release);
        Ok(())
    }

    fn stream_create(&self) -> Result<RawStream> {
        Ok(RawStream(std::ptr::null_mut()))
    }

    unsafe fn stream_is_captured(&self, stream: RawStream) -> Result<bool> {
        Ok(stream.0.addr() == CAPTURED)
    }

    unsafe fn stream_capture(&self, stream: RawStream) -> Result<Option<u64>> {
        Ok((stream.0.addr() == CAPTURED).then_some(1))
    }

    unsafe fn stream_query(&self, _: RawStream) -> Result<bool> {
        Ok(true)
    }

    unsafe fn stream_synchronize(&self, _: RawStream) -> Result<()> {
        Ok(())
    }

    unsafe fn stream_wait(&self, stream: RawStream, _: RawEvent) -> Result<()> {
        not_captured("wait for event", stream)
    }

    unsafe fn event_record(&self, _: RawEvent, stream: RawStream) -> Result<()> {
        not_captured("record event", stream)
    }

    fn event_create(&self, _: bool) -> Result<RawEvent> {
        Ok(RawEvent(std::ptr::null_mut()))
    }

    unsafe fn event_query(&self, _: RawEvent) -> Result<bool> {
        Ok(true)
    }

    unsafe fn stream_destroy(&self, _: RawStream) {}
    unsafe fn event_destroy(&self, _: RawEvent) {}
    unsafe fn graph_destroy(&self, _: RawGraph) {}
    unsafe fn module_unload(&self, _: RawModule) {}

    fn load(&self, _: Option<&Path>) -> Result<()> {
        Ok(())
    }

    fn version(&self) -> Result<String> {
        Ok("host".to_owned())
    }

    fn context_retain(&self, _: RawDevice) -> Result<RawContext> {
        Ok(RawContext(std::ptr::null_mut()))
    }

    unsafe fn context_release(&self, _: RawDevice) {}

    unsafe fn context_push(&self, context: RawContext) -> Result<RawContext> {
        Ok(context)
    }

    unsafe fn context_pop(&self, _: RawContext) {}

    fn capture_relax(&self) -> Result<i32> {
        Ok(0)
    }

    fn capture_restore(&self, _: i32) {}
}

/// Work on a stream that captures a graph would be recorded, and not run.
fn not_captured(operation: &'static str, stream: RawStream) -> Result<()> {
    match stream.0.addr() {
        CAPTURED => Err(Error::new(ErrorKind::Internal, operation, "the stream is captured")),
        _ => Ok(()),
    }
}
