//! Memory of a GPU for the NIC: registered, and named to commands.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::driver::{Context, Device, Vmm};
use tokenyard_sys_mlx5::{Devx, Umem, UmemRequest};
use tokenyard_sys_verbs::{DmabufRange, Mr, Pd};

/// The GPU with this ordinal; none where kernels run on the host.
pub(super) fn context(ordinal: Option<u32>) -> Result<Option<Arc<Context>>> {
    let Some(ordinal) = ordinal else { return Ok(None) };
    Context::retain(Device::choose(&tokenyard_cuda::PLATFORM, Some(ordinal))?).map(Some)
}

/// Whether this process sees a GPU whose kernels could post.
pub(super) fn is_there() -> bool {
    Device::choose(&tokenyard_cuda::PLATFORM, Some(0)).is_ok()
}

const FIX: &str = "use a driver that makes dmabufs (open kernel modules, kernel 5.12, rdma-core 34 for \
                   windows and newer for queues), or load the kernel module nvidia_peermem";

fn refused(
    what: &'static str,
    bytes: u64,
    by: &Error,
    by_address: &impl std::fmt::Display,
) -> Error {
    let message = format!(
        "{what} of {bytes} bytes in memory of the GPU: by dmabuf: {by}; by address: {by_address}"
    );
    Error::new(ErrorKind::System, "register", message).with_fix(FIX)
}

/// Registers memory of the GPU: by a dmabuf, else by its address through a kernel module.
///
/// # Safety
/// The memory lives until the result is dropped, and its users tolerate writes of the device where `access`
/// allows them.
pub(super) unsafe fn register(pd: &Arc<Pd>, memory: &Vmm, access: i32) -> Result<Mr> {
    let (pointer, bytes) = (memory.address() as *mut u8, memory.bytes());
    let by_dmabuf = || {
        let fd = memory.dmabuf()?;
        let range = DmabufRange { fd: fd.as_fd(), offset: 0, bytes: bytes as usize };
        // SAFETY: by this function's contract. A registration holds the dmabuf itself.
        let mr = unsafe { Mr::of_dmabuf(pd, &range, pointer, access) };
        mr.map_err(|e| Error::new(ErrorKind::System, "register", e.to_string()))
    };
    let error = match by_dmabuf() {
        Ok(mr) => return Ok(mr),
        Err(error) => error,
    };
    // SAFETY: by this function's contract.
    let mr = unsafe { Mr::new(pd, pointer, bytes as usize, access) };
    mr.map_err(|e| refused("signals", bytes, &error, &e))
}

/// Names memory of the GPU to commands, in the same two ways.
///
/// # Safety
/// The memory lives until the result is dropped, and its users tolerate accesses of the device.
pub(super) unsafe fn umem(devx: &Arc<Devx>, memory: &Vmm) -> Result<Umem> {
    let bytes = memory.bytes();
    let by_dmabuf = || {
        let fd = memory.dmabuf()?;
        let dmabuf = Some(fd.as_raw_fd());
        let request = UmemRequest { address: 0, bytes: bytes as usize, dmabuf };
        // SAFETY: by this function's contract. A umem holds the dmabuf itself.
        let umem = unsafe { Umem::new(devx, &request) };
        umem.map_err(|e| Error::new(ErrorKind::System, "register", e.to_string()))
    };
    let error = match by_dmabuf() {
        Ok(umem) => return Ok(umem),
        Err(error) => error,
    };
    let request = UmemRequest { address: memory.address(), bytes: bytes as usize, dmabuf: None };
    // SAFETY: by this function's contract.
    let umem = unsafe { Umem::new(devx, &request) };
    umem.map_err(|e| refused("queues", bytes, &error, &e))
}
