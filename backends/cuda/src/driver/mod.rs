//! CUDA's driver behind [`Driver`], loaded at run time. Nothing of CUDA is linked.

mod device;
mod memory;

use std::ffi::{CStr, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::driver::sys;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::driver::{
    Driver, Launch, RawContext, RawDevice, RawEvent, RawFunction, RawGraph, RawModule, RawStream,
};

/// The oldest driver whose calls the bindings know: CUDA 13.0.
const OLDEST: i32 = 13_000;

/// The driver of NVIDIA GPUs. The bindings panic where the library is missing; `load` is the one place
/// that makes sure it is not.
#[derive(Debug)]
pub struct CudaDriver;

/// CUDA's libraries are where the loader finds them.
pub(crate) fn refuse_folder(folder: Option<&Path>) -> Result<()> {
    let Some(folder) = folder else { return Ok(()) };
    let message = format!(
        "`libraries`: found {}; expected none: the loader finds the libraries of CUDA",
        folder.display()
    );
    Err(Error::new(ErrorKind::Config, "load driver", message)
        .with_fix("put the folder into LD_LIBRARY_PATH")
        .with_key("libraries"))
}

fn load(folder: Option<&Path>) -> Result<()> {
    refuse_folder(folder)?;
    static LOADED: OnceLock<std::result::Result<(), (String, &'static str)>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        // SAFETY: opening the driver's library runs its constructors only.
        if !unsafe { sys::is_culib_present() } {
            return Err((
                "found no libcuda.so; expected NVIDIA's driver".to_owned(),
                "install the driver, or give the container its libraries (NVIDIA container toolkit)",
            ));
        }
        let mut version = 0;
        // SAFETY: the library is loaded; the version may be asked before initialisation.
        let status = unsafe { sys::cuDriverGetVersion(&mut version) };
        if status != sys::CUresult::CUDA_SUCCESS || version < OLDEST {
            return Err((
                format!("found a driver for CUDA {}; expected 13.0", version_text(version)),
                "install driver 580 or later",
            ));
        }
        // SAFETY: the library is loaded.
        match unsafe { sys::cuInit(0) } {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            other => Err((
                format!("cuInit failed: {other:?}"),
                "see what nvidia-smi says; give the container its devices",
            )),
        }
    });
    loaded.clone().map_err(|(message, fix)| {
        Error::new(ErrorKind::Unavailable, "load driver", message).with_fix(fix)
    })
}

/// The version in words, as CUDA numbers it.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Turns a status into an error that names the call.
fn check(operation: &'static str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(failed(operation, status))
}

#[cold]
fn failed(operation: &'static str, status: sys::CUresult) -> Error {
    // Never `Full`: that kind means that all ranks agreed and may continue. Here the other ranks do
    // not know of the failure.
    let error =
        Error::new(ErrorKind::System, operation, format!("the CUDA driver says {status:?}"));
    match status {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => error.with_fix(
            "let other users of the device leave it more memory, or lower [kernels.cuda] arena_mib",
        ),
        _ => error,
    }
}

/// Whether the work that a status asks about has ended.
fn is_done(status: sys::CUresult) -> Result<bool> {
    match status {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        status => check("run kernel", status).map(|()| true),
    }
}

// SAFETY of the blocks below: `load` has succeeded, and handles, addresses and pointers are valid, by
// the contract of `Driver`. Out parameters are locals. A block names anything else that it relies on.
impl Driver for CudaDriver {
    fn load(&self, folder: Option<&Path>) -> Result<()> {
        load(folder)
    }

    fn version(&self) -> Result<String> {
        load(None)?;
        let mut version = 0;
        // SAFETY: see above.
        check("ask driver", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        Ok(version_text(version))
    }

    fn context_retain(&self, device: RawDevice) -> Result<RawContext> {
        let mut raw = null_mut();
        // SAFETY: see above.
        check("retain context", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device.0) })?;
        Ok(RawContext(raw.cast()))
    }

    unsafe fn context_release(&self, device: RawDevice) {
        // SAFETY: retained as often, by this function's contract.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device.0) };
    }

    unsafe fn context_push(&self, context: RawContext) -> Result<RawContext> {
        // SAFETY: see above.
        check("enter context", unsafe { sys::cuCtxPushCurrent_v2(context.0.cast()) })?;
        // The driver has a stack of contexts itself.
        Ok(RawContext(null_mut()))
    }

    unsafe fn context_pop(&self, _: RawContext) {
        let mut raw = null_mut();
        // SAFETY: pushed on this thread, by this function's contract.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut raw) };
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: see above; the driver finds out of which kind each place is, and refuses addresses
        // that it does not know.
        check("copy memory", unsafe { sys::cuMemcpy(to, from, bytes) })
    }

    unsafe fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: see above.
        check("zero memory", unsafe { sys::cuMemsetD8_v2(at, 0, bytes) })
    }

    unsafe fn copy_async(&self, stream: RawStream, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: see above.
        check("copy memory", unsafe { sys::cuMemcpyAsync(to, from, bytes, stream.0.cast()) })
    }

    unsafe fn zero_async(&self, stream: RawStream, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: see above.
        check("zero memory", unsafe { sys::cuMemsetD8Async(at, 0, bytes, stream.0.cast()) })
    }

    fn stream_create(&self) -> Result<RawStream> {
        let mut raw = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: see above.
        check("make stream", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        Ok(RawStream(raw.cast()))
    }

    unsafe fn stream_destroy(&self, stream: RawStream) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuStreamDestroy_v2(stream.0.cast()) };
    }

    unsafe fn stream_query(&self, stream: RawStream) -> Result<bool> {
        // SAFETY: see above.
        is_done(unsafe { sys::cuStreamQuery(stream.0.cast()) })
    }

    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        // SAFETY: see above.
        check("synchronize stream", unsafe { sys::cuStreamSynchronize(stream.0.cast()) })
    }

    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: see above.
        check("wait for event", unsafe {
            sys::cuStreamWaitEvent(stream.0.cast(), event.0.cast(), 0)
        })
    }

    unsafe fn stream_write(&self, stream: RawStream, at: u64, value: u64) -> Result<()> {
        // SAFETY: see above.
        check("write value", unsafe { sys::cuStreamWriteValue64_v2(stream.0.cast(), at, value, 0) })
    }

    unsafe fn stream_is_captured(&self, stream: RawStream) -> Result<bool> {
        use sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE as NONE;
        let mut status = NONE;
        // SAFETY: see above.
        let asked = unsafe { sys::cuStreamIsCapturing(stream.0.cast(), &mut status) };
        check("ask for capture", asked).map(|()| status != NONE)
    }

    unsafe fn stream_capture(&self, stream: RawStream) -> Result<Option<u64>> {
        use sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE as NONE;
        let (mut status, mut id) = (NONE, 0);
        // SAFETY: see above. Null is allowed for each of what is not asked for.
        let asked = unsafe {
            let (graph, nodes, edges, count) = (null_mut(), null_mut(), null_mut(), null_mut());
            let stream = stream.0.cast();
            sys::cuStreamGetCaptureInfo_v3(stream, &mut status, &mut id, graph, nodes, edges, count)
        };
        check("ask for capture", asked).map(|()| (status != NONE).then_some(id))
    }

    fn capture_relax(&self) -> Result<i32> {
        let mut mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver writes the previous mode.
        let status = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("relax capture", status).map(|()| mode as i32)
    }

    fn capture_restore(&self, mode: i32) {
        use sys::CUstreamCaptureMode_enum as M;
        let modes = [
            M::CU_STREAM_CAPTURE_MODE_GLOBAL,
            M::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            M::CU_STREAM_CAPTURE_MODE_RELAXED,
        ];
        if let Some(mut mode) = modes.into_iter().find(|known| *known as i32 == mode) {
            // SAFETY: as in `capture_relax`.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        }
    }

    fn event_create(&self, timed: bool) -> Result<RawEvent> {
        use sys::CUevent_flags_enum as F;
        let flags = if timed { F::CU_EVENT_DEFAULT } else { F::CU_EVENT_DISABLE_TIMING };
        let mut raw = null_mut();
        // SAFETY: see above.
        check("make event", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(RawEvent(raw.cast()))
    }

    unsafe fn event_destroy(&self, event: RawEvent) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuEventDestroy_v2(event.0.cast()) };
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: see above.
        check("record event", unsafe { sys::cuEventRecord(event.0.cast(), stream.0.cast()) })
    }

    unsafe fn event_query(&self, event: RawEvent) -> Result<bool> {
        // SAFETY: see above.
        is_done(unsafe { sys::cuEventQuery(event.0.cast()) })
    }

    unsafe fn event_elapsed(&self, earlier: RawEvent, later: RawEvent) -> Result<f32> {
        let mut ms = 0.0;
        // SAFETY: see above.
        let status =
            unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.0.cast(), later.0.cast()) };
        check("ask event", status).map(|()| ms)
    }

    unsafe fn graph_begin(&self, stream: RawStream) -> Result<()> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: see above.
        check("begin capture", unsafe { sys::cuStreamBeginCapture_v2(stream.0.cast(), mode) })
    }

    unsafe fn graph_end(&self, stream: RawStream) -> Result<RawGraph> {
        let (mut graph, mut raw) = (null_mut(), null_mut());
        // SAFETY: see above; the graph of the recording is destroyed below.
        check("end capture", unsafe { sys::cuStreamEndCapture(stream.0.cast(), &mut graph) })?;
        // SAFETY: the graph was recorded just above.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0) };
        // SAFETY: as above.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        check("make graph", made).map(|()| RawGraph(raw.cast()))
    }

    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        // SAFETY: see above.
        check("launch graph", unsafe { sys::cuGraphLaunch(graph.0.cast(), stream.0.cast()) })
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuGraphExecDestroy(graph.0.cast()) };
    }

    unsafe fn module_load(&self, image: &[u8]) -> Result<RawModule> {
        let mut raw = null_mut();
        // SAFETY: see above; the image carries its own length, and the driver checks it.
        check("load kernels", unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) })?;
        Ok(RawModule(raw.cast()))
    }

    unsafe fn module_unload(&self, module: RawModule) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuModuleUnload(module.0.cast()) };
    }

    unsafe fn module_function(&self, module: RawModule, name: &CStr) -> Result<RawFunction> {
        let mut raw = null_mut();
        // SAFETY: see above.
        let found = unsafe { sys::cuModuleGetFunction(&mut raw, module.0.cast(), name.as_ptr()) };
        check("find kernel", found)?;
        // SAFETY: the kernel was found just above.
        check("load kernel", unsafe { sys::cuFuncLoad(raw) })?;
        Ok(RawFunction { raw: raw.cast(), cooperative: false, early: false })
    }

    unsafe fn module_word(&self, module: RawModule, name: &CStr) -> Result<u64> {
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: see above; both numbers are ours.
        let found = unsafe {
            sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, module.0.cast(), name.as_ptr())
        };
        check("find constant", found)?;
        debug_assert_eq!(bytes, 4, "a constant of 4 bytes");
        Ok(address)
    }

    unsafe fn function_allow_shared(&self, function: RawFunction, bytes: u32) -> Result<()> {
        let which = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: see above.
        check("allow shared memory", unsafe {
            sys::cuFuncSetAttribute(function.raw.cast(), which, bytes as i32)
        })
    }

    unsafe fn function_launch(
        &self,
        function: RawFunction,
        launch: Launch,
        stream: RawStream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let Launch { blocks, threads, shared } = launch;
        let (kernel, stream) = (function.raw.cast(), stream.0.cast());
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream,
            attrs: &raw mut early,
            numAttrs: 1,
        };
        let (arguments, none) = (arguments.as_mut_ptr(), null_mut());
        // SAFETY: by this function's contract; the driver refuses sizes that do not fit.
        let status = unsafe {
            if function.early {
                sys::cuLaunchKernelEx(&raw const config, kernel, arguments, none)
            } else if function.cooperative {
                sys::cuLaunchCooperativeKernel(
                    kernel, blocks, 1, 1, threads, 1, 1, shared, stream, arguments,
                )
            } else {
                sys::cuLaunchKernel(
                    kernel, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, none,
                )
            }
        };
        check("launch kernel", status)
            .map_err(|e| e.with_context("blocks", blocks).with_context("shared memory", shared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_libraries_is_refused_with_the_key() {
        let folder = Path::new("/opt/cuda/lib");
        let error = CudaDriver.load(Some(folder)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("`libraries`: found /opt/cuda/lib"), "{error}");
    }

    #[test]
    fn a_driver_out_of_memory_does_not_say_that_all_ranks_may_go_on() {
        let error = failed("launch kernel", sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(error.kind(), ErrorKind::System);
        let text = error.to_string();
        assert!(text.contains("OUT_OF_MEMORY") && text.contains("arena_mib"), "{text}");
    }
}
