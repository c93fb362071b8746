//! Memory: shareable allocations and their mappings, plain device memory, pinned host memory.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use tokenyard_core::Result;

use super::times::{CallKind, timed};
use super::{Context, Device, RawMemory, RawStream};

/// The unit of shareable memory: addresses and lengths are multiples of it.
pub(crate) fn granularity(device: Device) -> Result<u64> {
    device.platform.driver.granularity(device.raw())
}

/// Physical memory that other processes can map.
#[derive(Debug)]
struct Handle {
    context: Arc<Context>,
    raw: RawMemory,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made or imported once; its mapping has gone before.
        unsafe { self.context.driver().memory_release(self.raw) };
    }
}

/// A mapping of shareable memory at an address of this process.
#[derive(Debug)]
pub(crate) struct Reserved {
    address: u64,
    bytes: usize,
    /// Dropped after the mapping.
    memory: Handle,
}

impl Reserved {
    /// Maps memory that another process made, for this rank's device. Its descriptor may be closed
    /// afterwards. `bytes` is a multiple of the granularity.
    pub(crate) fn import(context: &Arc<Context>, fd: &OwnedFd, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let raw = context.driver().memory_import(fd.as_fd()).map_err(|e| {
            e.with_fix("let the ranks of a machine see the same devices (containers, cgroups)")
        })?;
        Self::map(Handle { context: Arc::clone(context), raw }, bytes)
    }

    fn map(memory: Handle, bytes: u64) -> Result<Self> {
        let (context, bytes) = (&memory.context, bytes as usize);
        // SAFETY: memory that was just made or imported.
        let address =
            unsafe { context.driver().memory_map(memory.raw, bytes, context.device.raw())? };
        Ok(Self { address, bytes, memory })
    }

    /// First byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Handle { context, raw } = &self.memory;
        let _entered = context.enter();
        // SAFETY: our own mapping; kernels that use it have ended (transports and kernel sets
        // synchronise before they drop memory).
        unsafe { context.driver().memory_unmap(*raw, self.address, self.bytes) };
    }
}

/// Shareable device memory of this rank, mapped and zeroed.
#[derive(Debug)]
pub struct Vmm {
    mapping: Reserved,
    fd: OwnedFd,
    bytes: u64,
}

impl Vmm {
    /// `bytes` is rounded up to the granularity.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let bytes = bytes.max(1).next_multiple_of(granularity(context.device)?);
        let driver = context.driver();
        let made = driver.memory_create(context.device.raw(), bytes as usize);
        let raw = made.map_err(|e| e.with_context("bytes", bytes))?;
        let handle = Handle { context: Arc::clone(context), raw };
        // SAFETY: the memory was made just above.
        let fd = unsafe { driver.memory_export(raw)? };
        let mapping = Reserved::map(handle, bytes)?;
        zero(context, mapping.address, bytes as usize)?;
        Ok(Self { mapping, fd, bytes })
    }

    /// First byte.
    pub fn address(&self) -> u64 {
        self.mapping.address
    }

    /// Length, a multiple of the granularity.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The descriptor that other processes map.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// The same memory as a dmabuf, for NICs.
    ///
    /// # Errors
    /// The error of the driver where it makes no dmabuf.
    pub fn dmabuf(&self) -> Result<OwnedFd> {
        let context = &self.mapping.memory.context;
        let _entered = context.enter()?;
        // SAFETY: our own mapping.
        unsafe { context.driver().range_dmabuf(self.mapping.address, self.mapping.bytes) }
    }
}

/// Plain device memory, zeroed.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    address: u64,
}

impl Buffer {
    /// Memory of this many bytes.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let bytes = bytes.max(1) as usize;
        let address = context.driver().alloc(bytes).map_err(|e| e.with_context("bytes", bytes))?;
        let this = Self { context: Arc::clone(context), address };
        zero(context, address, bytes)?;
        Ok(this)
    }

    /// First byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// A copy of plain values in device memory.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn of<T: Copy>(context: &Arc<Context>, values: &[T]) -> Result<Self> {
        let this = Self::new(context, size_of_val(values) as u64)?;
        copy(context, this.address, values.as_ptr() as u64, size_of_val(values) as u64)?;
        Ok(this)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; each caller that launched kernels on it has synchronised.
        unsafe { self.context.driver().free(self.address) };
    }
}

/// Plain device memory from the driver's pool, zeroed. Unlike that of [`Buffer`], it is allocated
/// and freed without a wait for kernels, which may wait for peers that wait for this process.
#[derive(Debug)]
pub(crate) struct Pooled {
    context: Arc<Context>,
    address: u64,
}

impl Pooled {
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        timed(CallKind::Allocate, || Self::zeroed(context, bytes))
    }

    fn zeroed(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let bytes = bytes.max(1) as usize;
        // In the order of the default stream, which `zero` waits for.
        let made = context.driver().alloc_pooled(context.device.raw(), bytes);
        let address = made.map_err(|e| e.with_context("bytes", bytes))?;
        let this = Self { context: Arc::clone(context), address };
        zero(context, address, bytes)?;
        Ok(this)
    }

    /// First byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; each caller that launched kernels on it has synchronised.
        unsafe { self.context.driver().free_pooled(self.address) };
    }
}

/// Copies between any two places that this process can name, and waits for the copy.
///
/// # Errors
/// The error of the driver.
pub fn copy(context: &Context, to: u64, from: u64, bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let _entered = context.enter()?;
    // SAFETY: the caller names memory of its own; the driver determines the kind of each place, and
    // refuses unknown addresses.
    unsafe { context.driver().copy(to, from, bytes as usize)? };
    settle(context)
}

/// Zeroes memory of this context's device that was just allocated, and waits for the end. The
/// context is current.
fn zero(context: &Context, at: u64, bytes: usize) -> Result<()> {
    // SAFETY: the callers' own memory, of this length.
    unsafe { context.driver().zero(at, bytes)? };
    settle(context)
}

/// Waits for calls without a stream. They run in the default stream and may return before their
/// work has ended; the streams of this crate do not wait for that stream.
fn settle(context: &Context) -> Result<()> {
    // SAFETY: null names the default stream of the current context.
    unsafe { context.driver().stream_synchronize(RawStream(std::ptr::null_mut())) }
}

/// Values in pinned host memory that the device reads and writes too. Zero at first; accessed
/// by raw pointer only, because both sides write it.
#[derive(Debug)]
pub struct Pinned<T> {
    context: Arc<Context>,
    raw: *mut T,
}

// SAFETY: an address; every access is unsafe, and its caller is responsible.
unsafe impl<T> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Pinned<T> {}

impl<T: Copy> Pinned<T> {
    /// Memory for `count` values.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn new(context: &Arc<Context>, count: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let bytes = count.max(1) * size_of::<T>();
        let raw = context.driver().alloc_pinned(bytes)?;
        // SAFETY: memory of this length that was just allocated.
        unsafe { std::ptr::write_bytes(raw.cast::<u8>(), 0, bytes) };
        Ok(Self { context: Arc::clone(context), raw: raw.cast() })
    }

    /// Value number `index`, at an address that both sides use (unified addressing).
    pub fn at(&self, index: usize) -> *mut T {
        self.raw.wrapping_add(index)
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; each caller that launched kernels on it has synchronised.
        unsafe { self.context.driver().free_pinned(self.raw.cast()) };
    }
}
