//! The device table of a kernel set: calls for tools that have no device memory, streams or graphs of their
//! own.

use core::ffi::c_void;

use crate::common::TyError;

/// Calls for tools on the device that a kernel set works on. Every slot is required. `instance` is that of
/// the kernel set; the thread rules are the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDeviceTable {
    /// `sizeof(TyDeviceTable)` of the plugin.
    pub size: usize,
    /// Allocates memory of the kind that the set works on, for tensors of tools.
    pub tensor_alloc: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            bytes: u64,
            pointer: *mut *mut u8,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Frees memory of `tensor_alloc`. An operation that was sent and never received may still use it:
    /// the set waits for its kernels first, as it does in `copy`.
    pub tensor_free: Option<unsafe extern "C" fn(instance: *mut c_void, pointer: *mut u8)>,
    /// Copies between host memory and memory of the kind that the set works on, and waits for the end
    /// of the copy. Runs after all work queued on streams of `stream_create`.
    pub copy: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            to: *mut u8,
            from: *const u8,
            bytes: u64,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Creates a stream for tools. The stream waits for no other stream.
    pub stream_create: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Destroys a stream of `stream_create`, after all work queued on it.
    pub stream_destroy: Option<unsafe extern "C" fn(instance: *mut c_void, stream: *mut c_void)>,
    /// Queues a copy between two places of the device's memory on a stream of the caller. The stream
    /// lives until it has passed the copy.
    pub copy_on: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            to: *mut u8,
            from: *const u8,
            bytes: u64,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Starts a capture: work queued on the stream from now on is recorded into a graph, and does not
    /// run. This slot and the next three are called only where the set declares `TY_KERNELS_CAP_NO_SYNC`.
    pub graph_begin: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Ends the capture and returns the graph.
    pub graph_end: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            graph: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Launches a graph on a stream of `stream_create`.
    pub graph_launch: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            graph: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Destroys a graph, after every launch of it.
    pub graph_destroy: Option<unsafe extern "C" fn(instance: *mut c_void, graph: *mut c_void)>,
}
