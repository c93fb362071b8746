//! The model as a driver.

use std::ffi::{CStr, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use tokenyard_core::Result;

use super::state::{ModelState, RELAXED};
use super::{StreamModel, with};
use crate::driver::{
    DeviceFacts, Driver, DriverDevices, DriverMemory, Launch, RawContext, RawDevice, RawEvent,
    RawFunction, RawGraph, RawMemory, RawModule, RawStream, Reach, Uuid,
};

/// Functions of the driver that the model has not.
macro_rules! lacks {
    ($([$($unsafe:tt)?] $name:ident($($type:ty),*) -> $result:ty;)*) => {$(
        $($unsafe)? fn $name(&self, $(_: $type),*) -> Result<$result> {
            with(|state| state.fail(stringify!($name), "the model has no such function"))
        }
    )*};
}

impl DriverDevices for StreamModel {
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
        Ok("model".to_owned())
    }
}

impl DriverMemory for StreamModel {
    lacks! {
        [] alloc_pooled(RawDevice, usize) -> u64;
        [] alloc_pinned(usize) -> *mut c_void;
        [unsafe] register_host(*mut c_void, usize) -> u64;
        [unsafe] register_io(*mut c_void, usize) -> u64;
        [] granularity(RawDevice) -> u64;
        [] memory_create(RawDevice, usize) -> RawMemory;
        [unsafe] memory_export(RawMemory) -> OwnedFd;
        [unsafe] range_dmabuf(u64, usize) -> OwnedFd;
        [] memory_import(BorrowedFd<'_>) -> RawMemory;
        [unsafe] memory_map(RawMemory, usize, RawDevice) -> u64;
    }

    unsafe fn free(&self, _: u64) {}
    unsafe fn free_pooled(&self, _: u64) {}
    unsafe fn free_pinned(&self, _: *mut c_void) {}
    unsafe fn unregister_host(&self, _: *mut c_void) {}
    unsafe fn memory_release(&self, _: RawMemory) {}
    unsafe fn memory_unmap(&self, _: RawMemory, _: u64, _: usize) {}
    fn alloc(&self, _: usize) -> Result<u64> {
        with(|state| state.check_mode("allocate").map(|()| 0))
    }
}

impl Driver for StreamModel {
    lacks! {
        [unsafe] copy(u64, u64, usize) -> ();
        [unsafe] zero(u64, usize) -> ();
        [unsafe] copy_async(RawStream, u64, u64, usize) -> ();
        [unsafe] zero_async(RawStream, u64, usize) -> ();
        [unsafe] stream_write(RawStream, u64, u64) -> ();
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

    unsafe fn graph_destroy(&self, _: RawGraph) {}
    unsafe fn module_unload(&self, _: RawModule) {}
    fn load(&self, _: Option<&Path>) -> Result<()> {
        Ok(())
    }

    fn version(&self) -> Result<String> {
        Ok("model".to_owned())
    }

    fn context_retain(&self, _: RawDevice) -> Result<RawContext> {
        Ok(RawContext(std::ptr::null_mut()))
    }

    unsafe fn context_release(&self, _: RawDevice) {}
    unsafe fn context_push(&self, context: RawContext) -> Result<RawContext> {
        Ok(context)
    }

    unsafe fn context_pop(&self, _: RawContext) {}
    fn stream_create(&self) -> Result<RawStream> {
        Ok(with(ModelState::create_stream))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) {
        with(|state| state.destroy_stream(stream));
    }

    unsafe fn stream_query(&self, stream: RawStream) -> Result<bool> {
        with(|state| state.query_stream(stream))
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        // The query lets pending work pass.
        with(|state| state.query_stream(stream)).map(drop)
    }

    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        with(|state| state.wait(stream, event))
    }

    unsafe fn stream_is_captured(&self, stream: RawStream) -> Result<bool> {
        Ok(with(|state| state.capture_of(stream)).is_some())
    }

    unsafe fn stream_capture(&self, stream: RawStream) -> Result<Option<u64>> {
        Ok(with(|state| state.capture_of(stream)))
    }

    fn capture_relax(&self) -> Result<i32> {
        Ok(with(|state| std::mem::replace(&mut state.mode, RELAXED)))
    }

    fn capture_restore(&self, mode: i32) {
        with(|state| state.mode = mode);
    }

    fn event_create(&self, _: bool) -> Result<RawEvent> {
        Ok(with(ModelState::create_event))
    }

    unsafe fn event_destroy(&self, event: RawEvent) {
        with(|state| state.destroy_event(event));
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        with(|state| state.record(event, stream));
        Ok(())
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        with(|state| state.query_event(event))
    }
}
