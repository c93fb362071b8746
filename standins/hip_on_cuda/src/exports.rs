//! The exported functions. Their types are those of `tokenyard-sys-hip`.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys;
use tokenyard_sys_hip::{AccessDesc, AllocationProp, DeviceProp, IpcHandle, Uuid, consts};

use crate::device::{self, SHARED};
use crate::knobs;
use crate::memory::{POSIX_FD, access, properties, range_handle};
use crate::status::{self, Answer, Failed, INVALID_VALUE, of_cuda};

type Pointer = *mut c_void;

/// The answer of a call: a failure on demand, else what it does.
fn answer(function: &str, work: impl FnOnce() -> Answer) -> c_uint {
    let status = match knobs::failure(function) {
        Some(status) => status,
        None => work().err().map_or(0, |Failed(status)| status),
    };
    status::note(status);
    status
}

/// Exports functions. Those behind `context` run in the context of this thread's device; each body is an
/// [`Answer`]. Those behind `cuda` are one call of NVIDIA's driver.
///
/// SAFETY of all: a caller keeps HIP's contracts, which are the driver's, too.
macro_rules! exports {
    (plain { $($plain:ident($($p:ident: $pt:ty),*) $plain_body:block)* }
     context { $($work:ident($($a:ident: $t:ty),*) $body:block)* }
     cuda { $($one:ident($($b:ident: $bt:ty),*) => $cuda:ident($($argument:expr),*);)* }) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $plain($($p: $pt),*) -> c_uint {
                answer(stringify!($plain), || $plain_body)
            }
        )*
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $work($($a: $t),*) -> c_uint {
                answer(stringify!($work), || device::enter_present().and_then(|()| $body))
            }
        )*
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $one($($b: $bt),*) -> c_uint {
                answer(stringify!($one), || {
                    device::enter_present()?;
                    // SAFETY: see above.
                    of_cuda(unsafe { sys::$cuda($($argument),*) })
                })
            }
        )*
        /// The functions that return a status.
        pub const SYMBOLS: &[&str] =
            &[$(stringify!($plain),)* $(stringify!($work),)* $(stringify!($one)),*];
    };
}

/// Stores a value.
///
/// # Safety
/// `at` is valid.
unsafe fn set<T>(at: *mut T, value: T) -> Answer {
    // SAFETY: by this function's contract.
    unsafe { at.write(value) };
    Ok(())
}

fn mode(mode: c_uint) -> Result<sys::CUstreamCaptureMode, Failed> {
    use sys::CUstreamCaptureMode_enum as M;
    let modes = [
        M::CU_STREAM_CAPTURE_MODE_GLOBAL,
        M::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        M::CU_STREAM_CAPTURE_MODE_RELAXED,
    ];
    modes.into_iter().find(|known| *known as c_uint == mode).ok_or(INVALID_VALUE)
}

/// The dynamic shared memory that a kernel may have: what a block of gfx942 has, less what it declares.
fn allow_shared(kernel: sys::CUfunction) -> Answer {
    use sys::CUfunction_attribute_enum as F;
    let mut declared = 0;
    let attribute = F::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: a kernel that lives; the number is ours.
    of_cuda(unsafe { sys::cuFuncGetAttribute(&mut declared, attribute, kernel) })?;
    let attribute = F::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: as above.
    of_cuda(unsafe { sys::cuFuncSetAttribute(kernel, attribute, SHARED - declared) })
}

/// A launch's sizes: blocks, then threads of a block.
type Sizes = [c_uint; 6];

/// # Safety
/// As of `cuLaunchKernel`.
unsafe fn launch(
    kernel: Pointer,
    sizes: Sizes,
    shared: c_uint,
    stream: Pointer,
    arguments: *mut Pointer,
) -> Answer {
    if shared > SHARED as c_uint {
        return Err(INVALID_VALUE);
    }
    let ([a, b, c, x, y, z], none) = (sizes, std::ptr::null_mut());
    let (kernel, stream) = (kernel.cast(), stream.cast());
    // SAFETY: by this function's contract.
    of_cuda(unsafe {
        sys::cuLaunchKernel(kernel, a, b, c, x, y, z, shared, stream, arguments, none)
    })
}

exports! {
plain {
    hipInit(_flags: c_uint) { device::init() }
    hipRuntimeGetVersion(version: *mut c_int) {
        // SAFETY: see above.
        unsafe { set(version, knobs::version()) }
    }
    hipGetDeviceCount(count: *mut c_int) {
        device::ready()?;
        // SAFETY: see above.
        of_cuda(unsafe { sys::cuDeviceGetCount(count) })
    }
    hipGetDevice(device: *mut c_int) {
        // SAFETY: see above.
        unsafe { set(device, device::present()) }
    }
    hipSetDevice(device: c_int) { device::select(device) }
}
context {
    hipDeviceGet(device: *mut c_int, ordinal: c_int) {
        // SAFETY: see above. CUDA's devices are their ordinals.
        of_cuda(unsafe { sys::cuDeviceGet(device, ordinal) })
    }
    hipDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int) {
        // SAFETY: see above.
        unsafe { device::name(name, bytes, device) }
    }
    hipGetDevicePropertiesR0600(properties: *mut DeviceProp, device: c_int) {
        // SAFETY: see above.
        unsafe { device::properties(properties, device) }
    }
    hipDeviceGetUuid(uuid: *mut Uuid, device: c_int) {
        // SAFETY: see above.
        unsafe { device::uuid(uuid, device) }
    }
    hipDeviceGetAttribute(value: *mut c_int, which: c_uint, device: c_int) {
        // SAFETY: see above.
        unsafe { device::attribute(value, which, device) }
    }
    hipDeviceGetP2PAttribute(value: *mut c_int, which: c_uint, device: c_int, peer: c_int) {
        let atomics =
            sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        match which {
            // SAFETY: see above.
            consts::PEER_ATOMICS => of_cuda(unsafe {
                sys::cuDeviceGetP2PAttribute(value, atomics, device, peer)
            }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipExtMallocWithFlags(pointer: *mut Pointer, bytes: usize, flags: c_uint) {
        match flags {
            // SAFETY: see above.
            consts::MALLOC_UNCACHED => of_cuda(unsafe { sys::cuMemAlloc_v2(pointer.cast(), bytes) }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipMemPoolSetAttribute(pool: Pointer, which: c_uint, value: Pointer) {
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        match which {
            // SAFETY: see above.
            consts::POOL_RELEASE_THRESHOLD => of_cuda(unsafe {
                sys::cuMemPoolSetAttribute(pool.cast(), threshold, value)
            }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipHostMalloc(pointer: *mut Pointer, bytes: usize, flags: c_uint) {
        let own = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        match flags {
            // SAFETY: see above.
            consts::HOST_MALLOC_COHERENT => of_cuda(unsafe { sys::cuMemHostAlloc(pointer, bytes, own) }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipHostRegister(pointer: Pointer, bytes: usize, flags: c_uint) {
        let own = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        match flags {
            // SAFETY: see above.
            consts::HOST_REGISTER_MAPPED => of_cuda(unsafe { sys::cuMemHostRegister_v2(pointer, bytes, own) }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipMemGetAllocationGranularity(bytes: *mut usize, of: *const AllocationProp, _option: c_uint) {
        let flag = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: see above.
        let of = properties(unsafe { &*of })?;
        // SAFETY: see above.
        of_cuda(unsafe { sys::cuMemGetAllocationGranularity(bytes, &of, flag) })
    }
    hipMemCreate(memory: *mut Pointer, bytes: usize, of: *const AllocationProp, flags: u64) {
        // SAFETY: see above.
        let of = properties(unsafe { &*of })?;
        // SAFETY: see above. CUDA's handle is a number of a pointer's size.
        of_cuda(unsafe { sys::cuMemCreate(memory.cast(), bytes, &of, flags) })
    }
    hipMemExportToShareableHandle(fd: Pointer, memory: Pointer, kind: c_uint, flags: u64) {
        match kind {
            // SAFETY: see above.
            consts::MEM_HANDLE_POSIX_FD => of_cuda(unsafe {
                sys::cuMemExportToShareableHandle(fd, memory as u64, POSIX_FD, flags)
            }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipMemImportFromShareableHandle(memory: *mut Pointer, fd: Pointer, kind: c_uint) {
        match kind {
            // SAFETY: see above.
            consts::MEM_HANDLE_POSIX_FD => of_cuda(unsafe {
                sys::cuMemImportFromShareableHandle(memory.cast(), fd, POSIX_FD)
            }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipMemSetAccess(range: Pointer, bytes: usize, of: *const AccessDesc, count: usize) {
        if count != 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: see above.
        let of = access(unsafe { &*of })?;
        // SAFETY: see above.
        of_cuda(unsafe { sys::cuMemSetAccess(range as u64, bytes, &of, 1) })
    }
    hipMemGetHandleForAddressRange(fd: Pointer, range: Pointer, bytes: usize, kind: c_uint, flags: u64) {
        let kind = range_handle(kind)?;
        // SAFETY: see above.
        of_cuda(unsafe { sys::cuMemGetHandleForAddressRange(fd, range as u64, bytes, kind, flags) })
    }
    hipIpcOpenMemHandle(pointer: *mut Pointer, handle: IpcHandle, flags: c_uint) {
        let own = sys::CUipcMemHandle { reserved: handle.reserved.map(|byte| byte as c_char) };
        match flags {
            // SAFETY: see above.
            consts::IPC_LAZY_PEER_ACCESS => of_cuda(unsafe {
                sys::cuIpcOpenMemHandle_v2(pointer.cast(), own, flags)
            }),
            _ => Err(INVALID_VALUE),
        }
    }
    hipStreamBeginCapture(stream: Pointer, how: c_uint) {
        let how = mode(how)?;
        // SAFETY: see above.
        of_cuda(unsafe { sys::cuStreamBeginCapture_v2(stream.cast(), how) })
    }
    hipThreadExchangeStreamCaptureMode(how: *mut c_uint) {
        // SAFETY: see above.
        let mut own = mode(unsafe { *how })?;
        // SAFETY: the mode is ours.
        of_cuda(unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut own) })?;
        // SAFETY: see above.
        unsafe { set(how, own as c_uint) }
    }
    hipModuleGetFunction(kernel: *mut Pointer, module: Pointer, name: *const c_char) {
        // SAFETY: see above. HIP loads all kernels of a module with it.
        unsafe {
            of_cuda(sys::cuModuleGetFunction(kernel.cast(), module.cast(), name))?;
            of_cuda(sys::cuFuncLoad((*kernel).cast()))?;
            allow_shared((*kernel).cast())
        }
    }
    hipModuleLaunchKernel(kernel: Pointer, a: c_uint, b: c_uint, c: c_uint, x: c_uint, y: c_uint, z: c_uint,
        shared: c_uint, stream: Pointer, arguments: *mut Pointer, _extra: *mut Pointer) {
        // SAFETY: see above.
        unsafe { launch(kernel, [a, b, c, x, y, z], shared, stream, arguments) }
    }
    hipModuleLaunchCooperativeKernel(kernel: Pointer, a: c_uint, b: c_uint, c: c_uint, x: c_uint, y: c_uint,
        z: c_uint, shared: c_uint, stream: Pointer, arguments: *mut Pointer) {
        if shared > SHARED as c_uint {
            return Err(INVALID_VALUE);
        }
        let (kernel, stream) = (kernel.cast(), stream.cast());
        // SAFETY: see above.
        of_cuda(unsafe {
            sys::cuLaunchCooperativeKernel(kernel, a, b, c, x, y, z, shared, stream, arguments)
        })
    }
}
cuda {
    hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) => cuDeviceCanAccessPeer(can, device, peer);
    hipMalloc(pointer: *mut Pointer, bytes: usize) => cuMemAlloc_v2(pointer.cast(), bytes);
    hipFree(pointer: Pointer) => cuMemFree_v2(pointer as u64);
    hipMallocAsync(pointer: *mut Pointer, bytes: usize, stream: Pointer)
        => cuMemAllocAsync(pointer.cast(), bytes, stream.cast());
    hipFreeAsync(pointer: Pointer, stream: Pointer) => cuMemFreeAsync(pointer as u64, stream.cast());
    hipDeviceGetDefaultMemPool(pool: *mut Pointer, device: c_int) => cuDeviceGetDefaultMemPool(pool.cast(), device);
    hipHostFree(pointer: Pointer) => cuMemFreeHost(pointer);
    hipHostUnregister(pointer: Pointer) => cuMemHostUnregister(pointer);
    hipHostGetDevicePointer(device: *mut Pointer, pointer: Pointer, flags: c_uint)
        => cuMemHostGetDevicePointer_v2(device.cast(), pointer, flags);
    hipMemcpy(to: Pointer, from: *const c_void, bytes: usize, _kind: c_uint) => cuMemcpy(to as u64, from as u64, bytes);
    hipMemcpyAsync(to: Pointer, from: *const c_void, bytes: usize, _kind: c_uint, stream: Pointer)
        => cuMemcpyAsync(to as u64, from as u64, bytes, stream.cast());
    hipMemset(at: Pointer, value: c_int, bytes: usize) => cuMemsetD8_v2(at as u64, value as u8, bytes);
    hipMemsetAsync(at: Pointer, value: c_int, bytes: usize, stream: Pointer)
        => cuMemsetD8Async(at as u64, value as u8, bytes, stream.cast());
    hipMemRelease(memory: Pointer) => cuMemRelease(memory as u64);
    hipMemAddressReserve(range: *mut Pointer, bytes: usize, alignment: usize, at: Pointer, flags: u64)
        => cuMemAddressReserve(range.cast(), bytes, alignment, at as u64, flags);
    hipMemAddressFree(range: Pointer, bytes: usize) => cuMemAddressFree(range as u64, bytes);
    hipMemMap(range: Pointer, bytes: usize, offset: usize, memory: Pointer, flags: u64)
        => cuMemMap(range as u64, bytes, offset, memory as u64, flags);
    hipMemUnmap(range: Pointer, bytes: usize) => cuMemUnmap(range as u64, bytes);
    hipMemGetAddressRange(base: *mut Pointer, bytes: *mut usize, pointer: Pointer)
        => cuMemGetAddressRange_v2(base.cast(), bytes, pointer as u64);
    hipIpcGetMemHandle(handle: *mut IpcHandle, pointer: Pointer) => cuIpcGetMemHandle(handle.cast(), pointer as u64);
    hipIpcCloseMemHandle(pointer: Pointer) => cuIpcCloseMemHandle(pointer as u64);
    hipStreamCreateWithFlags(stream: *mut Pointer, flags: c_uint) => cuStreamCreate(stream.cast(), flags);
    hipStreamDestroy(stream: Pointer) => cuStreamDestroy_v2(stream.cast());
    hipStreamQuery(stream: Pointer) => cuStreamQuery(stream.cast());
    hipStreamSynchronize(stream: Pointer) => cuStreamSynchronize(stream.cast());
    hipStreamWaitEvent(stream: Pointer, event: Pointer, flags: c_uint)
        => cuStreamWaitEvent(stream.cast(), event.cast(), flags);
    hipStreamWriteValue64(stream: Pointer, at: Pointer, value: u64, flags: c_uint)
        => cuStreamWriteValue64_v2(stream.cast(), at as u64, value, flags);
    hipStreamIsCapturing(stream: Pointer, status: *mut c_uint) => cuStreamIsCapturing(stream.cast(), status.cast());
    hipStreamGetCaptureInfo(stream: Pointer, status: *mut c_uint, id: *mut u64)
        => cuStreamGetCaptureInfo_v3(
            stream.cast(), status.cast(), id, null_mut(), null_mut(), null_mut(), null_mut());
    hipEventCreateWithFlags(event: *mut Pointer, flags: c_uint) => cuEventCreate(event.cast(), flags);
    hipEventDestroy(event: Pointer) => cuEventDestroy_v2(event.cast());
    hipEventRecord(event: Pointer, stream: Pointer) => cuEventRecord(event.cast(), stream.cast());
    hipEventQuery(event: Pointer) => cuEventQuery(event.cast());
    hipEventElapsedTime(ms: *mut f32, from: Pointer, to: Pointer)
        => cuEventElapsedTime_v2(ms, from.cast(), to.cast());
    hipStreamEndCapture(stream: Pointer, graph: *mut Pointer) => cuStreamEndCapture(stream.cast(), graph.cast());
    hipGraphInstantiate(made: *mut Pointer, graph: Pointer, _node: *mut Pointer, _log: *mut c_char, _bytes: usize)
        => cuGraphInstantiateWithFlags(made.cast(), graph.cast(), 0);
    hipGraphLaunch(graph: Pointer, stream: Pointer) => cuGraphLaunch(graph.cast(), stream.cast());
    hipGraphDestroy(graph: Pointer) => cuGraphDestroy(graph.cast());
    hipGraphExecDestroy(graph: Pointer) => cuGraphExecDestroy(graph.cast());
    hipModuleLoadData(module: *mut Pointer, image: *const c_void) => cuModuleLoadData(module.cast(), image);
    hipModuleGetGlobal(at: *mut Pointer, bytes: *mut usize, module: Pointer, name: *const c_char) =>
        cuModuleGetGlobal_v2(at.cast(), bytes, module.cast(), name);
    hipModuleUnload(module: Pointer) => cuModuleUnload(module.cast());
}
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorName(status: c_uint) -> *const c_char {
    status::name(status).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorString(status: c_uint) -> *const c_char {
    status::text(status).as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> c_uint {
    status::take()
}
