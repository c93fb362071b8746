//! A **stand-in for a GPU's driver**, for tests: its memory is the host's, at the same addresses, so a thread of the
//! host can do what a kernel does. It makes no dmabuf, and runs no kernels.

use std::ffi::{CStr, c_void};
use std::os::fd::{BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::path::Path;

use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_cuda::{Nvcc, Nvrtc};
use tokenyard_gpu::driver::{
    DeviceFacts, Driver, DriverDevices, DriverMemory, Launch, RawContext, RawDevice, RawEvent,
    RawFunction, RawGraph, RawMemory, RawModule, RawStream, Reach, Uuid,
};
use tokenyard_gpu::{Names, Platform};

/// GPUs that are memory of the host.
pub(crate) static PLATFORM: Platform = platform(&HostDriver { maps_registers: true });

/// The platform, with a driver that maps no registers.
pub(crate) static WITHOUT_REGISTERS: Platform = platform(&HostDriver { maps_registers: false });

const fn platform(driver: &'static HostDriver) -> Platform {
    Platform {
        driver,
        compiler: &Nvrtc,
        program_compiler: |named| Ok(Box::new(Nvcc::find(named)?)),
        named_compiles_all: false,
        dialect: tokenyard_cuda::PLATFORM.dialect,
        names: NAMES,
        memory: abi::TY_MEMORY_CUDA,
    }
}

const NAMES: Names = Names {
    kernels: "stand-in",
    link: "stand-in",
    interface: "stand-in",
    see_devices: "nothing",
    see_access: "nothing",
};

const PAGE: usize = 4096;

#[derive(Debug)]
struct HostDriver {
    maps_registers: bool,
}

fn refused<T>(operation: &'static str) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, operation, "the stand-in of a GPU does not do this"))
}

fn layout(bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(bytes.next_multiple_of(PAGE), PAGE).unwrap()
}

/// Memory that stays: tests are short.
fn allocate(bytes: usize) -> *mut c_void {
    // SAFETY: not of size 0, as callers round up.
    unsafe { std::alloc::alloc_zeroed(layout(bytes.max(1))).cast() }
}

fn at(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Maps the memory behind a descriptor.
fn map(bytes: usize, memory: i32) -> u64 {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: new addresses.
    let mapped =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_SHARED, memory, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.expose_provenance() as u64
}

// SAFETY of all blocks below: the contract of `Driver`, whose callers name memory of this driver.
#[allow(clippy::undocumented_unsafe_blocks, reason = "see above")]
impl DriverDevices for HostDriver {
    fn device_count(&self) -> Result<i32> {
        Ok(1)
    }
    fn device(&self, ordinal: i32) -> Result<RawDevice> {
        Ok(RawDevice(ordinal))
    }
    fn current_device(&self) -> Option<RawDevice> {
        None
    }
    fn facts(&self, _: RawDevice) -> Result<DeviceFacts> {
        refused("facts")
    }
    fn name(&self, _: RawDevice) -> Result<String> {
        Ok("stand-in".to_owned())
    }
    fn uuid(&self, _: RawDevice) -> Result<Uuid> {
        Ok([0; 16])
    }
    fn reach(&self, _: RawDevice, _: RawDevice) -> Result<Reach> {
        Ok(Reach::Nothing)
    }
}

#[allow(clippy::undocumented_unsafe_blocks, reason = "see above")]
impl DriverMemory for HostDriver {
    fn alloc(&self, bytes: usize) -> Result<u64> {
        Ok(allocate(bytes).expose_provenance() as u64)
    }
    unsafe fn free(&self, _: u64) {}
    fn alloc_pooled(&self, _: RawDevice, _: usize) -> Result<u64> {
        refused("alloc_pooled")
    }
    unsafe fn free_pooled(&self, _: u64) {}
    fn alloc_pinned(&self, bytes: usize) -> Result<*mut c_void> {
        Ok(allocate(bytes))
    }
    unsafe fn free_pinned(&self, _: *mut c_void) {}
    unsafe fn register_host(&self, pointer: *mut c_void, _: usize) -> Result<u64> {
        Ok(pointer.expose_provenance() as u64)
    }
    unsafe fn unregister_host(&self, _: *mut c_void) {}
    unsafe fn register_io(&self, pointer: *mut c_void, bytes: usize) -> Result<u64> {
        assert_eq!((pointer as usize % PAGE, bytes), (0, PAGE), "a page of registers");
        if self.maps_registers {
            Ok(pointer.expose_provenance() as u64)
        } else {
            refused("register registers")
        }
    }
    fn granularity(&self, _: RawDevice) -> Result<u64> {
        Ok(PAGE as u64)
    }
    fn memory_create(&self, _: RawDevice, bytes: usize) -> Result<RawMemory> {
        let fd = unsafe { libc::memfd_create(c"gpu".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0 && unsafe { libc::ftruncate(fd, bytes as i64) } == 0);
        Ok(RawMemory(fd as u64))
    }
    unsafe fn memory_export(&self, memory: RawMemory) -> Result<OwnedFd> {
        let fd = unsafe { BorrowedFd::borrow_raw(memory.0 as i32) };
        Ok(fd.try_clone_to_owned().unwrap())
    }
    unsafe fn range_dmabuf(&self, _: u64, _: usize) -> Result<OwnedFd> {
        refused("make dmabuf")
    }
    fn memory_import(&self, fd: BorrowedFd<'_>) -> Result<RawMemory> {
        Ok(RawMemory(fd.try_clone_to_owned().unwrap().into_raw_fd() as u64))
    }
    unsafe fn memory_release(&self, memory: RawMemory) {
        drop(unsafe { OwnedFd::from_raw_fd(memory.0 as i32) });
    }
    unsafe fn memory_map(&self, memory: RawMemory, bytes: usize, _: RawDevice) -> Result<u64> {
        Ok(map(bytes, memory.0 as i32))
    }
    unsafe fn memory_unmap(&self, _: RawMemory, address: u64, bytes: usize) {
        unsafe { libc::munmap(at(address).cast(), bytes) };
    }
}

#[allow(clippy::undocumented_unsafe_blocks, reason = "see above")]
impl Driver for HostDriver {
    fn load(&self, _: Option<&Path>) -> Result<()> {
        Ok(())
    }
    fn version(&self) -> Result<String> {
        Ok("stand-in".to_owned())
    }
    fn context_retain(&self, _: RawDevice) -> Result<RawContext> {
        Ok(RawContext(std::ptr::null_mut()))
    }
    unsafe fn context_release(&self, _: RawDevice) {}
    unsafe fn context_push(&self, context: RawContext) -> Result<RawContext> {
        Ok(context)
    }
    unsafe fn context_pop(&self, _: RawContext) {}
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        unsafe { std::ptr::copy(at(from).cast_const(), at(to), bytes) };
        Ok(())
    }
    unsafe fn zero(&self, to: u64, bytes: usize) -> Result<()> {
        unsafe { std::ptr::write_bytes(at(to), 0, bytes) };
        Ok(())
    }
    unsafe fn copy_async(&self, _: RawStream, to: u64, from: u64, bytes: usize) -> Result<()> {
        unsafe { self.copy(to, from, bytes) }
    }
    unsafe fn zero_async(&self, _: RawStream, to: u64, bytes: usize) -> Result<()> {
        unsafe { self.zero(to, bytes) }
    }
    fn stream_create(&self) -> Result<RawStream> {
        refused("stream_create")
    }
    unsafe fn stream_destroy(&self, _: RawStream) {}
    unsafe fn stream_query(&self, _: RawStream) -> Result<bool> {
        Ok(true)
    }
    unsafe fn stream_synchronize(&self, _: RawStream) -> Result<()> {
        Ok(())
    }
    unsafe fn stream_wait(&self, _: RawStream, _: RawEvent) -> Result<()> {
        refused("stream_wait")
    }
    unsafe fn stream_write(&self, _: RawStream, _: u64, _: u64) -> Result<()> {
        refused("stream_write")
    }
    unsafe fn stream_is_captured(&self, _: RawStream) -> Result<bool> {
        Ok(false)
    }
    unsafe fn stream_capture(&self, _: RawStream) -> Result<Option<u64>> {
        Ok(None)
    }
    fn capture_relax(&self) -> Result<i32> {
        Ok(0)
    }
    fn capture_restore(&self, _: i32) {}
    fn event_create(&self, _: bool) -> Result<RawEvent> {
        refused("event_create")
    }
    unsafe fn event_destroy(&self, _: RawEvent) {}
    unsafe fn event_record(&self, _: RawEvent, _: RawStream) -> Result<()> {
        refused("event_record")
    }
    unsafe fn event_query(&self, _: RawEvent) -> Result<bool> {
        refused("event_query")
    }
    unsafe fn event_elapsed(&self, _: RawEvent, _: RawEvent) -> Result<f32> {
        refused("event_elapsed")
    }
    unsafe fn graph_begin(&self, _: RawStream) -> Result<()> {
        refused("graph_begin")
    }
    unsafe fn graph_end(&self, _: RawStream) -> Result<RawGraph> {
        refused("graph_end")
    }
    unsafe fn graph_launch(&self, _: RawGraph, _: RawStream) -> Result<()> {
        refused("graph_launch")
    }
    unsafe fn graph_destroy(&self, _: RawGraph) {}
    unsafe fn module_load(&self, _: &[u8]) -> Result<RawModule> {
        refused("module_load")
    }
    unsafe fn module_unload(&self, _: RawModule) {}
    unsafe fn module_function(&self, _: RawModule, _: &CStr) -> Result<RawFunction> {
        refused("module_function")
    }
    unsafe fn module_word(&self, _: RawModule, _: &CStr) -> Result<u64> {
        refused("module_word")
    }
    unsafe fn function_allow_shared(&self, _: RawFunction, _: u32) -> Result<()> {
        refused("function_allow_shared")
    }
    unsafe fn function_launch(
        &self,
        _: RawFunction,
        _: Launch,
        _: RawStream,
        _: &mut [*mut c_void],
    ) -> Result<()> {
        refused("function_launch")
    }
}
