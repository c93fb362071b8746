//! The library files and their functions.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;

use tokenyard_sys_load::{LoadError, functions};

use crate::types::{AccessDesc, AllocationProp, DeviceProp, IpcHandle, Uuid};

/// Files of HIP, the newest first: an installation without headers has no plain name.
const HIP: &[&str] = &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];
/// Files of its compiler.
const HIPRTC: &[&str] = &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"];

/// The files in a folder, or where the loader looks for them.
fn files_in(folder: Option<&Path>, files: &[&str]) -> Vec<String> {
    let file = |file: &&str| match folder {
        Some(folder) => folder.join(file).display().to_string(),
        None => (*file).to_owned(),
    };
    files.iter().map(file).collect()
}

/// The first of the files that the loader finds.
fn first<L>(files: &[String], load: impl Fn(&str) -> Result<L, LoadError>) -> Result<L, LoadError> {
    let mut reasons: Vec<String> = Vec::new();
    for file in files {
        match load(file) {
            Err(LoadError::Absent { reason, .. }) => {
                let reason = reason.strip_prefix(&format!("{file}: ")).unwrap_or(&reason);
                if !reasons.iter().any(|known| known == reason) {
                    reasons.push(reason.to_owned());
                }
            }
            found => return found,
        }
    }
    Err(LoadError::Absent { file: files.join(", "), reason: reasons.join("; "), install: None })
}

/// The ways to open a library of ROCm.
macro_rules! opened {
    ($library:ident, $files:ident) => {
        impl $library {
            /// Opens the library in this folder, or where the loader finds it. It stays loaded for the
            /// life of the process.
            ///
            /// # Errors
            /// It is absent or too old.
            pub fn open(folder: Option<&Path>) -> Result<Self, LoadError> {
                Self::open_first(&files_in(folder, $files))
            }

            /// The first of these files that the loader finds.
            ///
            /// # Errors
            /// As of [`open`](Self::open).
            pub fn open_first(files: &[String]) -> Result<Self, LoadError> {
                // SAFETY: HIP's initialisers may run on any thread, before any of its calls. The types are those of
                // hip_runtime_api.h and hiprtc.h of ROCm 6 and 7.
                first(files, |file| unsafe { Self::load(file, file.to_owned()) })
            }
        }
    };
}
opened!(Hip, HIP);
opened!(Hiprtc, HIPRTC);

functions! {
    /// The functions of HIP. Handles are its own pointers; statuses are [`crate::consts`].
    pub struct Hip {
        /// The file that was loaded.
        pub file: String,
    }
    expected "ROCm 6 or newer";
    pub needed {
    // Devices
    init: "hipInit" fn(c_uint) -> c_uint;
    runtime_get_version: "hipRuntimeGetVersion" fn(*mut c_int) -> c_uint;
    get_device_count: "hipGetDeviceCount" fn(*mut c_int) -> c_uint;
    get_device: "hipGetDevice" fn(*mut c_int) -> c_uint;
    set_device: "hipSetDevice" fn(c_int) -> c_uint;
    device_get: "hipDeviceGet" fn(*mut c_int, c_int) -> c_uint;
    device_get_name: "hipDeviceGetName" fn(*mut c_char, c_int, c_int) -> c_uint;
    get_device_properties: "hipGetDevicePropertiesR0600" fn(*mut DeviceProp, c_int) -> c_uint;
    device_get_uuid: "hipDeviceGetUuid" fn(*mut Uuid, c_int) -> c_uint;
    device_get_attribute: "hipDeviceGetAttribute" fn(*mut c_int, c_uint, c_int) -> c_uint;
    device_can_access_peer: "hipDeviceCanAccessPeer" fn(*mut c_int, c_int, c_int) -> c_uint;
    device_get_peer_attribute: "hipDeviceGetP2PAttribute" fn(*mut c_int, c_uint, c_int, c_int) -> c_uint;
    get_error_name: "hipGetErrorName" fn(c_uint) -> *const c_char;
    get_error_string: "hipGetErrorString" fn(c_uint) -> *const c_char;
    get_last_error: "hipGetLastError" fn() -> c_uint;
    // Memory of one process
    malloc: "hipMalloc" fn(*mut *mut c_void, usize) -> c_uint;
    ext_malloc_with_flags: "hipExtMallocWithFlags" fn(*mut *mut c_void, usize, c_uint) -> c_uint;
    free: "hipFree" fn(*mut c_void) -> c_uint;
    malloc_async: "hipMallocAsync" fn(*mut *mut c_void, usize, *mut c_void) -> c_uint;
    free_async: "hipFreeAsync" fn(*mut c_void, *mut c_void) -> c_uint;
    device_get_default_mem_pool: "hipDeviceGetDefaultMemPool" fn(*mut *mut c_void, c_int) -> c_uint;
    mem_pool_set_attribute: "hipMemPoolSetAttribute" fn(*mut c_void, c_uint, *mut c_void) -> c_uint;
    host_malloc: "hipHostMalloc" fn(*mut *mut c_void, usize, c_uint) -> c_uint;
    host_free: "hipHostFree" fn(*mut c_void) -> c_uint;
    host_register: "hipHostRegister" fn(*mut c_void, usize, c_uint) -> c_uint;
    host_unregister: "hipHostUnregister" fn(*mut c_void) -> c_uint;
    host_get_device_pointer: "hipHostGetDevicePointer" fn(*mut *mut c_void, *mut c_void, c_uint) -> c_uint;
    memcpy: "hipMemcpy" fn(*mut c_void, *const c_void, usize, c_uint) -> c_uint;
    memcpy_async: "hipMemcpyAsync" fn(*mut c_void, *const c_void, usize, c_uint, *mut c_void) -> c_uint;
    memset: "hipMemset" fn(*mut c_void, c_int, usize) -> c_uint;
    memset_async: "hipMemsetAsync" fn(*mut c_void, c_int, usize, *mut c_void) -> c_uint;
    // Memory that processes share
    mem_get_allocation_granularity: "hipMemGetAllocationGranularity" fn(*mut usize, *const AllocationProp, c_uint) -> c_uint;
    mem_create: "hipMemCreate" fn(*mut *mut c_void, usize, *const AllocationProp, u64) -> c_uint;
    mem_release: "hipMemRelease" fn(*mut c_void) -> c_uint;
    mem_export_to_shareable_handle: "hipMemExportToShareableHandle" fn(*mut c_void, *mut c_void, c_uint, u64) -> c_uint;
    mem_import_from_shareable_handle: "hipMemImportFromShareableHandle" fn(*mut *mut c_void, *mut c_void, c_uint) -> c_uint;
    mem_address_reserve: "hipMemAddressReserve" fn(*mut *mut c_void, usize, usize, *mut c_void, u64) -> c_uint;
    mem_address_free: "hipMemAddressFree" fn(*mut c_void, usize) -> c_uint;
    mem_map: "hipMemMap" fn(*mut c_void, usize, usize, *mut c_void, u64) -> c_uint;
    mem_unmap: "hipMemUnmap" fn(*mut c_void, usize) -> c_uint;
    mem_set_access: "hipMemSetAccess" fn(*mut c_void, usize, *const AccessDesc, usize) -> c_uint;
    mem_get_address_range: "hipMemGetAddressRange" fn(*mut *mut c_void, *mut usize, *mut c_void) -> c_uint;
    ipc_get_mem_handle: "hipIpcGetMemHandle" fn(*mut IpcHandle, *mut c_void) -> c_uint;
    ipc_open_mem_handle: "hipIpcOpenMemHandle" fn(*mut *mut c_void, IpcHandle, c_uint) -> c_uint;
    ipc_close_mem_handle: "hipIpcCloseMemHandle" fn(*mut c_void) -> c_uint;
    // Streams, events and graphs
    stream_create_with_flags: "hipStreamCreateWithFlags" fn(*mut *mut c_void, c_uint) -> c_uint;
    stream_destroy: "hipStreamDestroy" fn(*mut c_void) -> c_uint;
    stream_query: "hipStreamQuery" fn(*mut c_void) -> c_uint;
    stream_synchronize: "hipStreamSynchronize" fn(*mut c_void) -> c_uint;
    stream_wait_event: "hipStreamWaitEvent" fn(*mut c_void, *mut c_void, c_uint) -> c_uint;
    stream_write_value_64: "hipStreamWriteValue64" fn(*mut c_void, *mut c_void, u64, c_uint) -> c_uint;
    stream_is_capturing: "hipStreamIsCapturing" fn(*mut c_void, *mut c_uint) -> c_uint;
    stream_get_capture_info: "hipStreamGetCaptureInfo" fn(*mut c_void, *mut c_uint, *mut u64) -> c_uint;
    thread_exchange_stream_capture_mode: "hipThreadExchangeStreamCaptureMode" fn(*mut c_uint) -> c_uint;
    event_create_with_flags: "hipEventCreateWithFlags" fn(*mut *mut c_void, c_uint) -> c_uint;
    event_destroy: "hipEventDestroy" fn(*mut c_void) -> c_uint;
    event_record: "hipEventRecord" fn(*mut c_void, *mut c_void) -> c_uint;
    event_query: "hipEventQuery" fn(*mut c_void) -> c_uint;
    event_elapsed_time: "hipEventElapsedTime" fn(*mut f32, *mut c_void, *mut c_void) -> c_uint;
    stream_begin_capture: "hipStreamBeginCapture" fn(*mut c_void, c_uint) -> c_uint;
    stream_end_capture: "hipStreamEndCapture" fn(*mut c_void, *mut *mut c_void) -> c_uint;
    graph_instantiate: "hipGraphInstantiate" fn(*mut *mut c_void, *mut c_void, *mut *mut c_void, *mut c_char, usize) -> c_uint;
    graph_launch: "hipGraphLaunch" fn(*mut c_void, *mut c_void) -> c_uint;
    graph_destroy: "hipGraphDestroy" fn(*mut c_void) -> c_uint;
    graph_exec_destroy: "hipGraphExecDestroy" fn(*mut c_void) -> c_uint;
    // Kernels
    module_load_data: "hipModuleLoadData" fn(*mut *mut c_void, *const c_void) -> c_uint;
    module_unload: "hipModuleUnload" fn(*mut c_void) -> c_uint;
    module_get_function: "hipModuleGetFunction" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_uint;
    module_get_global: "hipModuleGetGlobal" fn(*mut *mut c_void, *mut usize, *mut c_void, *const c_char) -> c_uint;
    module_launch_kernel: "hipModuleLaunchKernel" fn(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> c_uint;
    module_launch_cooperative_kernel: "hipModuleLaunchCooperativeKernel" fn(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void) -> c_uint;
    }
    optional {
    // Of ROCm 7 and newer: a dmabuf of mapped memory.
    mem_get_handle_for_address_range: "hipMemGetHandleForAddressRange" fn(*mut c_void, *mut c_void, usize, c_uint, u64) -> c_uint;
    }
}

functions! {
    /// The functions of the run-time compiler.
    pub struct Hiprtc {
        /// The file that was loaded.
        pub file: String,
    }
    expected "ROCm 6 or newer";
    pub needed {
    version: "hiprtcVersion" fn(*mut c_int, *mut c_int) -> c_uint;
    create_program: "hiprtcCreateProgram" fn(*mut *mut c_void, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_uint;
    compile_program: "hiprtcCompileProgram" fn(*mut c_void, c_int, *const *const c_char) -> c_uint;
    destroy_program: "hiprtcDestroyProgram" fn(*mut *mut c_void) -> c_uint;
    get_code_size: "hiprtcGetCodeSize" fn(*mut c_void, *mut usize) -> c_uint;
    get_code: "hiprtcGetCode" fn(*mut c_void, *mut c_char) -> c_uint;
    get_program_log_size: "hiprtcGetProgramLogSize" fn(*mut c_void, *mut usize) -> c_uint;
    get_program_log: "hiprtcGetProgramLog" fn(*mut c_void, *mut c_char) -> c_uint;
    get_error_string: "hiprtcGetErrorString" fn(c_uint) -> *const c_char;
    }
    optional {}
}
