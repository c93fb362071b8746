//! The device table of a kernel set: what only tools need, which have no memory, streams or graphs of their own.

use core::ffi::c_void;

use crate::common::TyError;

/// What tools need of the device that a kernel set works on. Every slot is required. `instance` is the kernel
/// set's; the thread rules are the same.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDeviceTable {
    /// `sizeof(TyDeviceTable)` of the plugin.
    pub size: usize,
    /// Gives memory of the kind it works on, for tensors of tools that have none of their own.
    pub tensor_alloc: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            bytes: u64,
            pointer: *mut *mut u8,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Takes such memory back. An operation that was sent and never received may still use it: the
    /// set waits for its kernels first, as it does in `copy`.
    pub tensor_free: Option<unsafe extern "C" fn(instance: *mut c_void, pointer: *mut u8)>,
    /// Copies between host memory and memory of the kind it works on, and waits for it. Runs behind
    /// everything in streams of `stream_create`.
    pub copy: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            to: *mut u8,
            from: *const u8,
            bytes: u64,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Makes a stream for tools that have none of their own. It waits for no other stream.
    pub stream_create: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Takes such a stream back, after everything in it.
    pub stream_destroy: Option<unsafe extern "C" fn(instance: *mut c_void, stream: *mut c_void)>,
    /// Queues a copy between two places of the device's memory on a stream of the caller, which lives
    /// until it has passed the copy.
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
    /// What is queued on such a stream from now on is recorded into a graph, and does not run. Only where
    /// the set says `TY_NEEDS_NO_SYNC`, as the next three.
    pub graph_begin: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Ends the recording and gives the graph.
    pub graph_end: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            graph: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Queues a graph on such a stream.
    pub graph_launch: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            graph: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Takes a graph back, after every launch of it.
    pub graph_destroy: Option<unsafe extern "C" fn(instance: *mut c_void, graph: *mut c_void)>,
}
