//! The kernel set table: the compute on one kind of device. Unstable until 1.0: exact layout.

use core::ffi::c_void;

use crate::common::{TyError, TyExportHeader, TyMemoryNeeds, TyStr, TyWindow};
use crate::counters::{TyCounters, TyTrace};
use crate::device::TyDeviceTable;
use crate::gpu_ring::TyGpuRing;
use crate::host::TyHost;
use crate::operations::{TyCombine, TyDispatch, TyReceived, TyTensor};
use crate::plan::{TyKernelNeeds, TyLimits, TyPlan, TyShape};
use crate::transport::TyConfig;

/// Major version of the kernel set ABI.
pub const TY_KERNELS_MAJOR: u32 = 0;
/// Minor version of the kernel set ABI.
pub const TY_KERNELS_MINOR: u32 = 9;

/// A kernel set. All slots of one instance are called by one thread at a time.
///
/// Order of calls: `probe`, `open`, `needs`, `allocate` per window, `plan`, then operations in the
/// same order on all ranks, then `close`. Operation n may be sent only when operation
/// n - in_flight has been received.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelsTable {
    /// `sizeof(TyKernelsTable)` of the plugin.
    pub size: usize,
    /// The component's name as a config writes it. Static.
    pub name: TyStr,
    /// The component's own version, for people. Static.
    pub version: TyStr,
    /// One line for people. Static.
    pub about: TyStr,
    /// Required. Whether the component can run here, without side effects; `memory_kinds` becomes the
    /// kinds of memory it works on (bits `TY_MEMORY_*`).
    pub probe: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            config: *const TyConfig,
            memory_kinds: *mut u32,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Makes an instance.
    pub open: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            config: *const TyConfig,
            shape: *const TyShape,
            instance: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the instance and frees its windows, after the transports were closed.
    pub close: Option<unsafe extern "C" fn(instance: *mut c_void)>,
    /// Required. What it will use, within `limits`.
    pub needs: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            limits: *const TyLimits,
            needs: *mut TyKernelNeeds,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Allocates the memory of one window (`id` and `bytes` are given).
    pub allocate: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            needs: *const TyMemoryNeeds,
            window: *mut TyWindow,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Fixes every size, offset and buffer.
    pub plan: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            plan: *const TyPlan,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Starts a dispatch.
    pub dispatch_send: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            dispatch: *const TyDispatch,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the dispatch with this operation number.
    pub dispatch_recv: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            received: *mut TyReceived,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Gives an arena region for expert outputs of a handle, so that combine need not
    /// copy them: `[rows, H]` of `dtype`. Where the handle's dispatch was in the order of a stream, so
    /// is the region: written there only.
    pub combine_input: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            handle: u32,
            dtype: u32,
            region: *mut u64,
            tensor: *mut TyTensor,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Starts a combine.
    pub combine_send: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            combine: *const TyCombine,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the combine with this operation number.
    pub combine_recv: Option<
        unsafe extern "C" fn(instance: *mut c_void, operation: u64, error: *mut TyError) -> i32,
    >,
    /// Required. Waits until everything it posted is done (INV-4), so that the transports may be
    /// closed once all ranks have said so; also what was received in the order of a stream and has
    /// not ended, whose errors it tells. No operation is open.
    pub flush: Option<unsafe extern "C" fn(instance: *mut c_void, error: *mut TyError) -> i32>,
    /// Required. Takes back an arena region. One that was given out in the order of a stream is free
    /// once the stream has passed what is queued there now.
    pub release: Option<unsafe extern "C" fn(instance: *mut c_void, region: u64)>,
    /// What tools need of its device; null where it works on host memory.
    pub device: *const TyDeviceTable,
    /// Optional, after `plan`, once for each level that has a transport. Where kernels post through the
    /// host on the level that `ring` names: its ring, valid until `close`. Else `commands` stays null. The host stops looking at it before transports are closed.
    pub gpu_ring: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            ring: *mut TyGpuRing,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, after `plan`. What it counts for reports; without it they say that it is unknown.
    pub counters: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            counters: *mut TyCounters,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, for tools. When things happened in one of the last `in_flight` operations, which has
    /// ended: call `flush` before.
    pub trace: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            trace: *mut TyTrace,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional. Between the halves of a dispatch: where its output will lie, as `dispatch_recv` will describe it, if
    /// that is fixed; else `x` stays absent. Until then nothing in it may be read, and its `tokens` may be 0. The
    /// host claims the region from then on, and releases it whether the dispatch succeeds or not.
    pub dispatch_output: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            received: *mut TyReceived,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, of a set with `TY_NEEDS_STREAMS`. What was released before, and is from now on, is free once this
    /// stream, too, has passed what is queued there now. Not while the stream is captured.
    pub release_after: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
}

/// The symbol `tokenyard_kernels_v0`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelsExport {
    /// Judged first.
    pub header: TyExportHeader,
    /// `count` tables.
    pub components: *const *const TyKernelsTable,
    /// Number of tables.
    pub count: usize,
}
