//! Calls for tools on a kernel set's device: tools have no memory, streams or graphs of their own.
//!
//! A kernel set that works on a device implements [`Device`] beside
//! [`KernelSet`](crate::kernels::KernelSet), and names the derived table in its `DEVICE`.

use std::ffi::c_void;

use crate::Result;

/// Memory, streams and graphs of the device of a kernel set, for tools. The thread rules are those of the
/// kernel set.
pub trait Device: Send + 'static {
    /// Allocates memory of the kind that the kernel set works on, for tensors.
    ///
    /// # Errors
    /// Errors of the device.
    fn tensor_alloc(&mut self, bytes: u64) -> Result<*mut u8>;

    /// Frees memory of [`tensor_alloc`](Self::tensor_alloc), once operations that were sent and never
    /// received no longer use it. Another address is ignored.
    fn tensor_free(&mut self, pointer: *mut u8);

    /// Copies between host memory and memory of the kind that the set works on, and waits for the end
    /// of the copy.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Safety
    /// Both ranges are valid. Operations that were sent and never received may still use them: the
    /// set waits for those first.
    unsafe fn copy(&mut self, to: *mut u8, from: *const u8, bytes: u64) -> Result<()>;

    /// Creates a stream, which waits for no other stream.
    ///
    /// # Errors
    /// Errors of the device.
    fn stream_create(&mut self) -> Result<*mut c_void>;

    /// Destroys a stream of [`stream_create`](Self::stream_create), after all work queued on it.
    /// Another address is ignored.
    fn stream_destroy(&mut self, stream: *mut c_void);

    /// Queues a copy between two places of the device's memory on a stream of the caller.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Safety
    /// The stream lives, and both ranges stay valid, until it has passed the copy.
    unsafe fn copy_on(
        &mut self,
        stream: *mut c_void,
        to: *mut u8,
        from: *const u8,
        bytes: u64,
    ) -> Result<()>;

    /// Starts a capture: work queued on a stream of [`stream_create`](Self::stream_create) from now on is
    /// recorded into a graph, and does not run. Called, as the next three, only with
    /// [`TY_KERNELS_CAP_NO_SYNC`](crate::abi::TY_KERNELS_CAP_NO_SYNC).
    ///
    /// # Errors
    /// An unknown stream; errors of the device.
    fn graph_begin(&mut self, stream: *mut c_void) -> Result<()>;

    /// Ends the capture and returns the graph.
    ///
    /// # Errors
    /// As [`graph_begin`](Self::graph_begin).
    fn graph_end(&mut self, stream: *mut c_void) -> Result<*mut c_void>;

    /// Launches a graph on a stream of [`stream_create`](Self::stream_create).
    ///
    /// # Errors
    /// As [`graph_begin`](Self::graph_begin); an unknown graph.
    ///
    /// # Safety
    /// The recorded work may run again: its memory is valid until the stream has passed it.
    unsafe fn graph_launch(&mut self, stream: *mut c_void, graph: *mut c_void) -> Result<()>;

    /// Destroys a graph, after every launch of it. Another address is ignored.
    fn graph_destroy(&mut self, graph: *mut c_void);
}
