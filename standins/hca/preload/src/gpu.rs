//! Memory of NVIDIA's GPUs, for programs whose windows or queues lie there. A NIC reaches such memory over PCIe;
//! this device copies it through the driver, on a stream of its own, beside the kernels that wait. So it shows
//! nothing of order between a NIC and a GPU.
//!
//! Programs that have not loaded NVIDIA's driver have no such memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use tokenyard_hca::{HostMemory, Memory, Unmapped};

/// Bytes that are copied at once.
const STAGING: usize = 1 << 20;

/// A range of addresses in the memory of a GPU.
#[derive(Clone, Copy)]
struct Area {
    address: u64,
    bytes: u64,
    gpu: &'static Gpu,
}

/// The areas that the device was given.
static AREAS: Mutex<Vec<Area>> = Mutex::new(Vec::new());
/// Whether there are any.
static HAS_AREAS: AtomicBool = AtomicBool::new(false);

fn areas() -> MutexGuard<'static, Vec<Area>> {
    AREAS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepares for accesses to a range that a program registers. Returns whether it is memory of a GPU.
pub(crate) fn prepare(address: u64, bytes: u64) -> bool {
    let gpu = device_of(address).and_then(gpu);
    let mut areas = areas();
    let Some(gpu) = gpu else {
        // Addresses of a GPU that were given back may be the host's now.
        areas
            .retain(|area| area.address + area.bytes <= address || address + bytes <= area.address);
        return false;
    };
    // A program registers the same addresses again and again.
    areas.retain(|area| area.address < address || address + bytes < area.address + area.bytes);
    areas.push(Area { address, bytes, gpu });
    HAS_AREAS.store(true, Ordering::Release);
    true
}

fn gpu_at(address: u64) -> Option<&'static Gpu> {
    if !HAS_AREAS.load(Ordering::Acquire) {
        return None;
    }
    let areas = areas();
    let within = |area: &&Area| address.wrapping_sub(area.address) < area.bytes;
    areas.iter().find(within).map(|area| area.gpu)
}

/// The ordinal of the GPU at whose memory an address points.
fn device_of(address: u64) -> Option<c_int> {
    // SAFETY: a terminated name; nothing is loaded.
    let loaded =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if loaded.is_null() {
        return None;
    }
    let found = match facts(address) {
        // The thread that registers need not have a context; the program has made one.
        Err(sys::CUresult::CUDA_ERROR_INVALID_CONTEXT) => {
            let _entered = Entered::new(active_context()?).ok()?;
            facts(address)
        }
        found => found,
    };
    let (kind, ordinal) = found.ok()?;
    (kind == sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32).then_some(ordinal)
}

/// The kind of memory at an address, and the ordinal of its device.
fn facts(address: u64) -> Result<(u32, c_int), sys::CUresult> {
    use sys::CUpointer_attribute_enum::{
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as KIND,
    };
    let (mut kind, mut ordinal) = (0, 0);
    for (attribute, value) in
        [(KIND, (&raw mut kind).cast::<c_void>()), (ORDINAL, (&raw mut ordinal).cast())]
    {
        // SAFETY: the driver is loaded; both attributes are 4 bytes.
        let status = unsafe { sys::cuPointerGetAttribute(value, attribute, address) };
        if status != sys::CUresult::CUDA_SUCCESS {
            return Err(status);
        }
    }
    Ok((kind, ordinal))
}

/// The primary context of the first device that has one in this process.
fn active_context() -> Option<sys::CUcontext> {
    let mut count = 0;
    // SAFETY: the driver is loaded; a place for the result.
    let _ = unsafe { sys::cuDeviceGetCount(&mut count) };
    (0..count).find_map(|device| {
        let (mut flags, mut active, mut context) = (0, 0, std::ptr::null_mut());
        // SAFETY: as above; devices of the driver are numbered from 0 on.
        let status = unsafe {
            sys::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active);
            if active == 0 {
                return None;
            }
            sys::cuDevicePrimaryCtxRetain(&mut context, device)
        };
        (status == sys::CUresult::CUDA_SUCCESS).then_some(context)
    })
}

/// The resources of copies on one GPU. They stay for the life of the process.
struct Gpu {
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// [`STAGING`] bytes of pinned memory, of the thread that holds the lock.
    staging: Mutex<*mut u8>,
}

// SAFETY: handles of the driver, whose calls any thread may make, and memory behind a lock.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// The GPU with an ordinal; made by the first call, before kernels run: to make it may wait for them.
fn gpu(ordinal: c_int) -> Option<&'static Gpu> {
    static GPUS: Mutex<BTreeMap<c_int, &'static Gpu>> = Mutex::new(BTreeMap::new());
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = gpus.get(&ordinal) {
        return Some(gpu);
    }
    let made = Gpu::new(ordinal).inspect_err(|error| eprintln!("stand-in of mlx5: {error}"));
    let made: &'static Gpu = Box::leak(Box::new(made.ok()?));
    gpus.insert(ordinal, made);
    Some(made)
}

fn check(call: &str, status: sys::CUresult) -> Result<(), String> {
    match status {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        sys::CUresult::CUDA_ERROR_DEINITIALIZED => loop {
            // The process ends, and the driver has ended before this thread.
            std::thread::park();
        },
        other => Err(format!("{call}: {other:?}")),
    }
}

/// Makes a context current on this thread, until it is dropped.
struct Entered;

impl Entered {
    fn new(context: sys::CUcontext) -> Result<Self, String> {
        // SAFETY: a context that lives.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        Ok(Self)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut before = std::ptr::null_mut();
        // SAFETY: pushed on this thread by `new`.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut before) };
    }
}

impl Gpu {
    fn new(ordinal: c_int) -> Result<Self, String> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: the driver is loaded, and has memory of this device; places for the results.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, ordinal))?;
            let retained = sys::cuDevicePrimaryCtxRetain(&mut context, device);
            check("cuDevicePrimaryCtxRetain", retained)?;
        }
        let _entered = Entered::new(context)?;
        let (mut stream, mut staging) = (std::ptr::null_mut(), std::ptr::null_mut());
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; places for the results.
        unsafe {
            check("cuStreamCreate", sys::cuStreamCreate(&mut stream, flags))?;
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut staging, STAGING, 0))?;
        }
        Ok(Self { context, stream, staging: Mutex::new(staging.cast()) })
    }

    /// Runs `copy` in the context with the pinned memory, and waits for its end.
    fn run(&self, copy: impl FnOnce(*mut u8) -> sys::CUresult) -> Result<*mut u8, String> {
        let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let _entered = Entered::new(self.context)?;
        check("copy", copy(*staging))?;
        // SAFETY: a stream that lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })?;
        Ok(*staging)
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), String> {
        for (part, at) in into.chunks_mut(STAGING).zip((address..).step_by(STAGING)) {
            // SAFETY: memory that a program has registered; the driver refuses what is not mapped.
            let staging = self.run(|staging| unsafe {
                sys::cuMemcpyDtoHAsync_v2(staging.cast(), at, part.len(), self.stream)
            })?;
            // SAFETY: the copy has ended, and the device's one thread is the only user of the pinned memory.
            unsafe { std::ptr::copy_nonoverlapping(staging, part.as_mut_ptr(), part.len()) };
        }
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), String> {
        // A word arrives whole.
        if let (Ok(word), true) = (from.try_into(), address.is_multiple_of(8)) {
            return self.write_word(address, u64::from_ne_bytes(word));
        }
        for (part, at) in from.chunks(STAGING).zip((address..).step_by(STAGING)) {
            // SAFETY: as in `read`; there is room for the part.
            self.run(|staging| unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), staging, part.len());
                sys::cuMemcpyHtoDAsync_v2(at, staging.cast(), part.len(), self.stream)
            })?;
        }
        Ok(())
    }

    fn write_word(&self, address: u64, word: u64) -> Result<(), String> {
        // SAFETY: as in `read`, at an aligned address.
        self.run(|_| unsafe { sys::cuStreamWriteValue64_v2(self.stream, address, word, 0) })
            .map(drop)
    }
}

/// The memory of this process, on the host and on its GPUs.
pub(crate) struct ProcessMemory(pub(crate) HostMemory);

fn unmapped(address: u64, bytes: usize) -> impl FnOnce(String) -> Unmapped {
    move |error| {
        eprintln!("stand-in of mlx5: memory of a GPU at {address:#x}: {error}");
        Unmapped { address, bytes }
    }
}

impl Memory for ProcessMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        let Some(gpu) = gpu_at(address) else { return self.0.read(address, into) };
        let bytes = into.len();
        gpu.read(address, into).map_err(unmapped(address, bytes))
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Unmapped> {
        let Some(gpu) = gpu_at(address) else { return self.0.write(address, from) };
        gpu.write(address, from).map_err(unmapped(address, from.len()))
    }

    /// On a GPU it is atomic among accesses of this device alone: kernels only read what peers add to.
    fn update(&self, address: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, Unmapped> {
        let Some(gpu) = gpu_at(address) else { return self.0.update(address, change) };
        let mut old = [0; 8];
        if !address.is_multiple_of(8) {
            return Err(Unmapped { address, bytes: old.len() });
        }
        gpu.read(address, &mut old).map_err(unmapped(address, 8))?;
        let old = u64::from_ne_bytes(old);
        gpu.write_word(address, change(old)).map_err(unmapped(address, 8))?;
        Ok(old)
    }
}
