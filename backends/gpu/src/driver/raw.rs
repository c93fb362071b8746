//! The calls that a GPU's driver must offer: CUDA and HIP implement all of them.

use std::ffi::{CStr, c_void};
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use tokenyard_core::Result;

use crate::compile::Architecture;

/// Handles are the driver's own pointers and numbers. They are plain data: only the objects of this
/// crate's `driver` folder own the resources that handles name.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident($raw:ty),)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub $raw);

        // SAFETY: a name without an owner; drivers take their handles on any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// A device.
    RawDevice(i32),
    /// A device's primary context.
    RawContext(*mut c_void),
    /// A stream, which may be a caller's own. Null is the legacy default stream.
    RawStream(*mut c_void),
    /// A mark in a stream.
    RawEvent(*mut c_void),
    /// A graph that can be launched.
    RawGraph(*mut c_void),
    /// A loaded image of machine code.
    RawModule(*mut c_void),
    /// Physical memory that other processes can map.
    RawMemory(u64),
}

/// A kernel of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawFunction {
    /// The driver's handle.
    pub raw: *mut c_void,
    /// Whether blocks wait for each other: all are resident at once, or the launch fails.
    pub cooperative: bool,
    /// Whether the kernel may start before the kernel ahead of it in its stream has ended: it waits for that
    /// itself. Only where [`DeviceFacts::starts_early`].
    pub early: bool,
}

// SAFETY: as for the handles above.
unsafe impl Send for RawFunction {}
// SAFETY: as above.
unsafe impl Sync for RawFunction {}

/// A device's name, the same in every process.
pub type Uuid = [u8; 16];

/// The access that one device has to the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// None.
    Nothing,
    /// Loads and stores. Signals need atomics too, because many blocks add to them at once.
    WithoutAtomics,
    /// Loads, stores and atomics.
    Whole,
}

/// The numbers of a device that sizes and kernels depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The architecture that kernels are compiled for.
    pub architecture: Architecture,
    /// Threads of a warp.
    pub wave: u32,
    /// Multiprocessors.
    pub processors: u32,
    /// Most bytes of dynamic shared memory that a block may have.
    pub most_shared: u32,
    /// How the device shares its memory with other processes, in its maker's words; none if it cannot.
    pub shares_by: Option<&'static str>,
    /// Whether kernels may start before the kernel ahead of them in their stream has ended.
    pub starts_early: bool,
}

/// The size of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks of the grid, 1 or more.
    pub blocks: u32,
    /// Threads of a block: a multiple of the warp, at most 1024.
    pub threads: u32,
    /// Bytes of dynamic shared memory; at most the allowed number.
    pub shared: u32,
}

impl Launch {
    /// Blocks of this many threads each.
    pub fn of_threads(blocks: u32, threads: u32, shared: u32) -> Self {
        Self { blocks, threads, shared }
    }
}

/// The devices of a [`Driver`].
pub trait DriverDevices {
    /// Devices that this process sees; may be 0.
    fn device_count(&self) -> Result<i32>;

    /// The device number `ordinal`, below [`device_count`](Self::device_count).
    fn device(&self, ordinal: i32) -> Result<RawDevice>;

    /// The device of the context that is current on this thread, if one is.
    fn current_device(&self) -> Option<RawDevice>;

    /// The numbers of a device.
    fn facts(&self, device: RawDevice) -> Result<DeviceFacts>;

    /// A device's name, as its maker calls it.
    fn name(&self, device: RawDevice) -> Result<String>;

    /// A device's name, the same in every process.
    fn uuid(&self, device: RawDevice) -> Result<Uuid>;

    /// The access of `device` to the memory of `other`.
    fn reach(&self, device: RawDevice, other: RawDevice) -> Result<Reach>;
}

/// The memory of a [`Driver`], whose conditions hold here, too.
pub trait DriverMemory {
    /// Plain device memory.
    fn alloc(&self, bytes: usize) -> Result<u64>;

    /// Frees memory of [`alloc`](Self::alloc). May wait for kernels.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn free(&self, address: u64);

    /// Device memory from the driver's pool, in the order of the default stream. Allocation and
    /// release do not wait for kernels; the pool returns nothing to the system.
    fn alloc_pooled(&self, device: RawDevice, bytes: usize) -> Result<u64>;

    /// Returns the memory to the pool.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn free_pooled(&self, address: u64);

    /// Pinned host memory that every device reads and writes at the same address.
    fn alloc_pinned(&self, bytes: usize) -> Result<*mut c_void>;

    /// Frees pinned memory.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn free_pinned(&self, pointer: *mut c_void);

    /// Pins `bytes` of host memory; returns its address for the device.
    ///
    /// # Safety
    /// The memory stays mapped until [`unregister_host`](Self::unregister_host).
    unsafe fn register_host(&self, pointer: *mut c_void, bytes: usize) -> Result<u64>;

    /// Unpins host memory.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn unregister_host(&self, pointer: *mut c_void);

    /// Maps registers of another device, which are mapped in this process, for the GPU; returns their address there.
    ///
    /// # Errors
    /// The driver's error: most drivers refuse it unless an option allows it.
    ///
    /// # Safety
    /// The registers stay mapped until [`unregister_host`](Self::unregister_host).
    unsafe fn register_io(&self, pointer: *mut c_void, bytes: usize) -> Result<u64>;

    /// The unit of shareable memory: addresses and lengths are multiples of it.
    fn granularity(&self, device: RawDevice) -> Result<u64>;

    /// Physical memory that other processes can map, and NICs where the device supports it.
    fn memory_create(&self, device: RawDevice, bytes: usize) -> Result<RawMemory>;

    /// A descriptor of shareable memory for another process.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn memory_export(&self, memory: RawMemory) -> Result<OwnedFd>;

    /// A dmabuf of mapped memory, for NICs. Address and length are multiples of a page.
    ///
    /// # Errors
    /// `Unsupported` where the driver makes none.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn range_dmabuf(&self, address: u64, bytes: usize) -> Result<OwnedFd>;

    /// The memory behind another process's descriptor, which may be closed afterwards.
    fn memory_import(&self, fd: BorrowedFd<'_>) -> Result<RawMemory>;

    /// Releases shareable memory.
    ///
    /// # Safety
    /// Nothing of it is mapped.
    unsafe fn memory_release(&self, memory: RawMemory);

    /// Maps shareable memory, which lets a device load and store there; returns its address. The driver
    /// refuses a length beyond that of the memory.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn memory_map(&self, memory: RawMemory, bytes: usize, device: RawDevice) -> Result<u64>;

    /// Unmaps shareable memory.
    ///
    /// # Safety
    /// It was mapped at this address, with this length.
    unsafe fn memory_unmap(&self, memory: RawMemory, address: u64, bytes: usize);
}

/// A GPU's driver.
///
/// Implementations translate calls and statuses, and have no state except the loaded library. Errors
/// name the operation and the driver's own text for the status. Any thread may call; the driver does
/// its own locking.
///
/// # Order
/// [`load`](Self::load) succeeds before any other call. Calls on memory and work need
/// the context that is current on the calling thread ([`context_push`](Self::context_push)).
///
/// # Safety of calls
/// In all `unsafe` calls, handles and addresses come from this driver and have not been destroyed. No kernel
/// and no copy that still runs uses memory that is freed, unmapped or destroyed. A call names any further
/// requirement.
pub trait Driver: DriverDevices + DriverMemory + Debug + Send + Sync {
    /// Loads and initialises the library, once per process: out of this folder, or where it is found.
    /// Without a folder, a library that is loaded serves.
    ///
    /// # Errors
    /// `Unavailable`: no driver, too old a driver, or no device, with the fix. `Config`: the driver takes no
    /// folder, or is loaded out of another one.
    fn load(&self, folder: Option<&Path>) -> Result<()>;

    /// The version of the interface that the driver speaks, in its maker's words.
    fn version(&self) -> Result<String>;

    /// Retains a device's primary context, which frameworks share.
    fn context_retain(&self, device: RawDevice) -> Result<RawContext>;

    /// Releases the context once.
    ///
    /// # Safety
    /// The context was retained as often.
    unsafe fn context_release(&self, device: RawDevice);

    /// Makes a context current on this thread; returns what restores the present state.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn context_push(&self, context: RawContext) -> Result<RawContext>;

    /// Makes the previous context current again, which [`context_push`](Self::context_push) returned.
    ///
    /// # Safety
    /// This thread has pushed a context.
    unsafe fn context_pop(&self, previous: RawContext);

    /// Copies between places of any kind that this process can name, in the order of the default
    /// stream. May return before the copy has ended.
    ///
    /// # Safety
    /// Both places are valid for `bytes` until the default stream has passed the copy.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()>;

    /// Zeroes device memory in the order of the default stream. May return before the memory is
    /// zero.
    ///
    /// # Safety
    /// The memory is valid for `bytes` until the default stream has passed.
    unsafe fn zero(&self, at: u64, bytes: usize) -> Result<()>;

    /// Copies in stream order.
    ///
    /// # Safety
    /// Both places are valid for `bytes` until the stream has passed the copy.
    unsafe fn copy_async(&self, stream: RawStream, to: u64, from: u64, bytes: usize) -> Result<()>;

    /// Zeroes in stream order.
    ///
    /// # Safety
    /// The memory is valid for `bytes` until the stream has passed.
    unsafe fn zero_async(&self, stream: RawStream, at: u64, bytes: usize) -> Result<()>;

    /// A stream that does not wait for the default stream.
    fn stream_create(&self) -> Result<RawStream>;

    /// Destroys a stream; queued work ends by itself.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn stream_destroy(&self, stream: RawStream);

    /// Whether everything in the stream has ended. Errors of kernels show here.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn stream_query(&self, stream: RawStream) -> Result<bool>;

    /// Waits for everything in the stream.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn stream_synchronize(&self, stream: RawStream) -> Result<()>;

    /// Queues a wait for a mark.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn stream_wait(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Stores 8 bytes, whole, after everything before it in the stream.
    ///
    /// # Safety
    /// `at` is aligned, and valid until the stream has passed.
    unsafe fn stream_write(&self, stream: RawStream, at: u64, value: u64) -> Result<()>;

    /// Whether calls on the stream are recorded into a graph.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn stream_is_captured(&self, stream: RawStream) -> Result<bool>;

    /// A number of the capture in which calls on the stream are recorded; no other capture of the process has it.
    /// None if they are not recorded.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn stream_capture(&self, stream: RawStream) -> Result<Option<u64>>;

    /// Lets this thread make calls that a capture elsewhere would refuse; returns the previous mode.
    fn capture_relax(&self) -> Result<i32>;

    /// Restores the previous mode.
    fn capture_restore(&self, mode: i32);

    /// A mark. A `timed` mark records the time at which it is passed, and costs more.
    fn event_create(&self, timed: bool) -> Result<RawEvent>;

    /// Destroys a mark.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn event_destroy(&self, event: RawEvent);

    /// Marks the present end of a stream.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Whether everything before the mark has ended. Errors of kernels show here.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn event_query(&self, event: RawEvent) -> Result<bool>;

    /// Milliseconds from one mark to another; both are timed and have been passed.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn event_elapsed(&self, earlier: RawEvent, later: RawEvent) -> Result<f32>;

    /// Starts to record the work that is queued on the stream; other threads are not disturbed.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn graph_begin(&self, stream: RawStream) -> Result<()>;

    /// Ends the recording.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn graph_end(&self, stream: RawStream) -> Result<RawGraph>;

    /// Launches a graph behind everything in the stream.
    ///
    /// # Safety
    /// The recorded work may run again.
    unsafe fn graph_launch(&self, graph: RawGraph, stream: RawStream) -> Result<()>;

    /// Destroys a graph; a launch that runs ends by itself.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn graph_destroy(&self, graph: RawGraph);

    /// Loads machine code that this driver's compiler has made.
    ///
    /// # Safety
    /// The image comes from a compiler; the device runs it.
    unsafe fn module_load(&self, image: &[u8]) -> Result<RawModule>;

    /// Unloads a module.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn module_unload(&self, module: RawModule);

    /// One kernel of a module, loaded now: a load during a kernel that spins can wait for ever.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn module_function(&self, module: RawModule, name: &CStr) -> Result<RawFunction>;

    /// The address of a constant of a module, which has 4 bytes.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn module_word(&self, module: RawModule, name: &CStr) -> Result<u64>;

    /// Allows a kernel this many bytes of dynamic shared memory.
    ///
    /// # Safety
    /// As for all calls.
    unsafe fn function_allow_shared(&self, function: RawFunction, bytes: u32) -> Result<()>;

    /// Launches a kernel behind everything in the stream.
    ///
    /// # Safety
    /// `arguments` point to one value per parameter of the kernel, of its type. The objects that
    /// they name stay valid until the stream has passed the kernel.
    unsafe fn function_launch(
        &self,
        function: RawFunction,
        launch: Launch,
        stream: RawStream,
        arguments: &mut [*mut c_void],
    ) -> Result<()>;
}
