//! HIP behind [`Driver`], loaded at run time. Nothing of ROCm is linked.
//!
//! HIP has no contexts of its own: a thread has a device, which is what this driver's contexts are.

mod card;
mod device;
mod library;
mod memory;
mod status;

use std::ffi::{CStr, c_void};
use std::path::Path;

use tokenyard_core::Result;
use tokenyard_gpu::driver::{
    Driver, Launch, RawContext, RawDevice, RawEvent, RawFunction, RawGraph, RawModule, RawStream,
};
use tokenyard_sys_hip::consts;

pub(crate) use library::load_compiler;
use library::{loaded, version_text};
use status::{check, is_done};

/// The driver of AMD GPUs.
#[derive(Debug)]
pub struct HipDriver;

/// Calls a function of HIP; a status that is no success becomes an error that names the operation.
macro_rules! call {
    ($operation:literal, $name:ident($($argument:expr),* $(,)?)) => {{
        let loaded = loaded()?;
        // SAFETY: `Driver::load` has succeeded, and handles, addresses and pointers are valid, by the
        // contract of `Driver`. Out parameters are locals.
        check(loaded, $operation, unsafe { (loaded.hip.$name)($($argument),*) })
    }};
}

/// Calls a function of HIP that ends something. Its status changes nothing.
macro_rules! end {
    ($name:ident($($argument:expr),* $(,)?)) => {
        if let Ok(loaded) = loaded() {
            // SAFETY: as of `call`.
            let _ = check(loaded, "end", unsafe { (loaded.hip.$name)($($argument),*) });
        }
    };
}

use {call, end};

/// A device as a context. Null stands for none.
fn context_of(device: i32) -> RawContext {
    RawContext((device as usize + 1) as *mut c_void)
}

fn device_of(context: RawContext) -> Option<i32> {
    (context.0 as usize).checked_sub(1).map(|device| device as i32)
}

impl Driver for HipDriver {
    fn load(&self, folder: Option<&Path>) -> Result<()> {
        library::load(folder).map(drop)
    }

    fn version(&self) -> Result<String> {
        library::load(None).map(|loaded| version_text(loaded.version))
    }

    fn context_retain(&self, device: RawDevice) -> Result<RawContext> {
        Ok(context_of(device.0))
    }

    unsafe fn context_release(&self, _: RawDevice) {}

    unsafe fn context_push(&self, context: RawContext) -> Result<RawContext> {
        let previous = device::present()?;
        if let Some(device) = device_of(context).filter(|device| *device != previous) {
            device::select(device)?;
        }
        Ok(context_of(previous))
    }

    unsafe fn context_pop(&self, previous: RawContext) {
        if let (Some(previous), Ok(present)) = (device_of(previous), device::present())
            && previous != present
        {
            let _ = device::select(previous);
        }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let (to, from) = (to as *mut c_void, from as *const c_void);
        call!("copy memory", memcpy(to, from, bytes, consts::MEMCPY_DEFAULT))
    }

    unsafe fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        call!("zero memory", memset(at as *mut c_void, 0, bytes))
    }

    unsafe fn copy_async(&self, stream: RawStream, to: u64, from: u64, bytes: usize) -> Result<()> {
        let (to, from) = (to as *mut c_void, from as *const c_void);
        call!("copy memory", memcpy_async(to, from, bytes, consts::MEMCPY_DEFAULT, stream.0))
    }

    unsafe fn zero_async(&self, stream: RawStream, at: u64, bytes: usize) -> Result<()> {
        call!("zero memory", memset_async(at as *mut c_void, 0, bytes, stream.0))
    }

    fn stream_create(&self) -> Result<RawStream> {
        let mut raw = std::ptr::null_mut();
        call!("make stream", stream_create_with_flags(&mut raw, consts::STREAM_NON_BLOCKING))?;
        Ok(RawStream(raw))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) {
        end!(stream_destroy(stream.0));
    }

    unsafe fn stream_query(&self, stream: RawStream) -> Result<bool> {
        let loaded = loaded()?;
        // SAFETY: as of `call`.
        is_done(loaded, unsafe { (loaded.hip.stream_query)(stream.0) })
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        call!("synchronize stream", stream_synchronize(stream.0))
    }

    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        call!("wait for event", stream_wait_event(stream.0, event.0, 0))
    }

    unsafe fn stream_write(&self, stream: RawStream, at: u64, value: u64) -> Result<()> {
        call!("write value", stream_write_value_64(stream.0, at as *mut c_void, value, 0))
    }

    unsafe fn stream_is_captured(&self, stream: RawStream) -> Result<bool> {
        let mut status = consts::CAPTURE_STATUS_NONE;
        call!("ask for capture", stream_is_capturing(stream.0, &mut status))?;
        Ok(status != consts::CAPTURE_STATUS_NONE)
    }

    unsafe fn stream_capture(&self, stream: RawStream) -> Result<Option<u64>> {
        let (mut status, mut id) = (consts::CAPTURE_STATUS_NONE, 0);
        call!("ask for capture", stream_get_capture_info(stream.0, &mut status, &mut id))?;
        Ok((status != consts::CAPTURE_STATUS_NONE).then_some(id))
    }

    fn capture_relax(&self) -> Result<i32> {
        let mut mode = consts::CAPTURE_RELAXED;
        call!("relax capture", thread_exchange_stream_capture_mode(&mut mode))?;
        Ok(mode as i32)
    }

    fn capture_restore(&self, mode: i32) {
        let mut mode = mode as u32;
        end!(thread_exchange_stream_capture_mode(&mut mode));
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        let flags = if timed { consts::EVENT_TIMED } else { consts::EVENT_UNTIMED };
        let mut raw = std::ptr::null_mut();
        call!("make event", event_create_with_flags(&mut raw, flags))?;
        Ok(RawEvent(raw))
    }

    unsafe fn event_destroy(&self, event: RawEvent) {
        end!(event_destroy(event.0));
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        call!("record event", event_record(event.0, stream.0))
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        let loaded = loaded()?;
        // SAFETY: as of `call`.
        is_done(loaded, unsafe { (loaded.hip.event_query)(event.0) })
    }

    unsafe fn event_elapsed(&self, earlier: RawEvent, later: RawEvent) -> Result<f32> {
        let mut ms = 0.0;
        call!("ask event", event_elapsed_time(&mut ms, earlier.0, later.0))?;
        Ok(ms)
    }

    unsafe fn graph_begin(&self, stream: RawStream) -> Result<()> {
        call!("begin capture", stream_begin_capture(stream.0, consts::CAPTURE_THREAD_LOCAL))
    }

    unsafe fn graph_end(&self, stream: RawStream) -> Result<RawGraph> {
        let (mut graph, mut raw) = (std::ptr::null_mut(), std::ptr::null_mut());
        let null = std::ptr::null_mut::<*mut c_void>();
        call!("end capture", stream_end_capture(stream.0, &mut graph))?;
        let no_log = std::ptr::null_mut();
        let made = call!("make graph", graph_instantiate(&mut raw, graph, null, no_log, 0));
        // The graph of the recording has done its service.
        end!(graph_destroy(graph));
        made.map(|()| RawGraph(raw))
    }

    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        call!("launch graph", graph_launch(graph.0, stream.0))
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) {
        end!(graph_exec_destroy(graph.0));
    }

    unsafe fn module_load(&self, image: &[u8]) -> Result<RawModule> {
        let mut raw = std::ptr::null_mut();
        // The image carries its own length, and HIP checks it.
        call!("load kernels", module_load_data(&mut raw, image.as_ptr().cast()))?;
        Ok(RawModule(raw))
    }

    unsafe fn module_unload(&self, module: RawModule) {
        end!(module_unload(module.0));
    }

    unsafe fn module_function(&self, module: RawModule, name: &CStr) -> Result<RawFunction> {
        let mut raw = std::ptr::null_mut();
        call!("find kernel", module_get_function(&mut raw, module.0, name.as_ptr()))?;
        Ok(RawFunction { raw, cooperative: false, early: false })
    }

    unsafe fn module_word(&self, module: RawModule, name: &CStr) -> Result<u64> {
        let (mut address, mut bytes) = (std::ptr::null_mut(), 0);
        call!(
            "find constant",
            module_get_global(&mut address, &mut bytes, module.0, name.as_ptr())
        )?;
        debug_assert_eq!(bytes, 4, "a constant of 4 bytes");
        Ok(address as u64)
    }

    unsafe fn function_allow_shared(&self, _: RawFunction, _: u32) -> Result<()> {
        // A kernel may have all that a block of the device has.
        Ok(())
    }

    unsafe fn function_launch(
        &self,
        function: RawFunction,
        launch: Launch,
        stream: RawStream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let Launch { blocks, threads, shared } = launch;
        let (kernel, arguments) = (function.raw, arguments.as_mut_ptr());
        let launched = if function.cooperative {
            call!(
                "launch kernel",
                module_launch_cooperative_kernel(
                    kernel, blocks, 1, 1, threads, 1, 1, shared, stream.0, arguments,
                )
            )
        } else {
            let none = std::ptr::null_mut();
            call!(
                "launch kernel",
                module_launch_kernel(
                    kernel, blocks, 1, 1, threads, 1, 1, shared, stream.0, arguments, none,
                )
            )
        };
        launched.map_err(|e| e.with_context("blocks", blocks).with_context("shared memory", shared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_devices_and_none_is_null() {
        for device in [0, 1, 63] {
            let context = context_of(device);
            assert!(!context.0.is_null());
            assert_eq!(device_of(context), Some(device));
        }
        assert_eq!(device_of(RawContext(std::ptr::null_mut())), None);
    }
}
