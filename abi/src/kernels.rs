//! The kernel set table: the compute on one kind of device. Unstable until 1.0: exact layout.

use core::ffi::c_void;

use crate::common::{TyError, TyExportHeader, TyMemoryNeeds, TyStr, TyWindow};
use crate::counters::{TyCounters, TyTrace};
use crate::device::TyDeviceTable;
use crate::gpu_ring::TyGpuRing;
use crate::host::TyHost;
use crate::operations::{
    TyAgree, TyCombine, TyCopies, TyDispatch, TyMasks, TyReceived, TyRoutingCounts, TyTensor,
};
use crate::plan::{TyKernelNeeds, TyLimits, TyPlan, TyShape};
use crate::transport::TyConfig;

/// Major version of the kernel set ABI.
pub const TY_KERNELS_MAJOR: u32 = 0;
/// Minor version of the kernel set ABI.
pub const TY_KERNELS_MINOR: u32 = 11;

/// A kernel set. All slots of one instance are called by one thread at a time.
///
/// Order of calls: `probe`, `open`, `needs`, `allocate` per window, `plan`, then operations in the
/// same order on all ranks, then `close`. Operation n may be sent only when operation
/// n - in_flight has been received.
///
/// With several domains of several ranks an operation is two exchanges. For a dispatch the host calls
/// `dispatch_send` for the rail; `dispatch_send` for the owners, whose rows are those that come over the
/// rail; `agree` on the rail; and `dispatch_recv`. For a combine it first calls `combine_send` for the
/// owners, which makes a sum for each row that had come over the rail in the dispatch. Then it calls
/// `agree` on the rail; `combine_send` for the rail, whose rows are those sums; and `combine_recv`. Where
/// losses are masked, `agree` on the owners' exchange follows each `agree` on the rail.
///
/// Each of these calls returns when its exchange has done that, or has queued it. If it has queued it, the
/// next call reads T, rows and refusals where the device has left them. The host then waits in the last
/// call that sends, and in `agree` behind a dispatch. The host passes the first refusal that this rank
/// knows of to the next calls.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelsTable {
    /// `sizeof(TyKernelsTable)` of the plugin.
    pub size: usize,
    /// The component's name as a config writes it. Static.
    pub name: TyStr,
    /// The component's own version, as text for display. Static.
    pub version: TyStr,
    /// One line of text for display. Static.
    pub about: TyStr,
    /// Required. Whether the component can run here, without side effects; `memory_kinds` becomes the
    /// kinds of memory that it works on (bits `TY_MEMORY_*`).
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
    /// Required. States the resources that the set will use, within `limits`.
    pub needs: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            limits: *const TyLimits,
            needs: *mut TyKernelNeeds,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Allocates the memory of one window. The host sets `id` and `bytes`.
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
    /// Required. Gives an arena region for expert outputs of a handle, so that combine need not copy
    /// them: `[rows, H]` of `dtype`. Where the handle's dispatch was in the order of a stream, the
    /// region is too: only work on that stream may write it.
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
    /// Optional, of a set that takes several domains of several ranks. Passes on the refusal that this rank
    /// knows, and learns those of others. An error is the first of them, in order of ranks.
    pub agree: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            call: *const TyAgree,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Waits until all commands that the set posted are done (INV-4), so that the transports
    /// may be closed once all ranks have returned from it. Waits also for operations that were received
    /// in the order of a stream and have not ended, and reports their errors. No operation is open.
    pub flush: Option<unsafe extern "C" fn(instance: *mut c_void, error: *mut TyError) -> i32>,
    /// Required. Frees an arena region. A region that was given out in the order of a stream becomes
    /// free once the stream has passed the work that is queued on it now.
    pub release: Option<unsafe extern "C" fn(instance: *mut c_void, region: u64)>,
    /// Calls for tools on the set's device; null where the set works on host memory.
    pub device: *const TyDeviceTable,
    /// Optional, after `plan`, once for each level that has a transport. Fills in the ring of the level that
    /// `ring` names, where kernels post through the host on that level; the ring is valid until `close`. Else
    /// `commands` stays null. The host stops reading the ring before transports are closed.
    pub gpu_ring: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            ring: *mut TyGpuRing,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, after `plan`. Gives the counters for reports. Without this slot, reports show them as
    /// unknown.
    pub counters: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            counters: *mut TyCounters,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, for tools. Gives the times of one of the last `in_flight` operations, which has ended:
    /// call `flush` before.
    pub trace: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            trace: *mut TyTrace,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional. Called between the halves of a dispatch. Gives the place of its output, as `dispatch_recv`
    /// will describe it, if the place is fixed already; else `x` stays absent. Until `dispatch_recv` nothing
    /// in the output may be read, and `tokens` may be 0. The host claims the region from this call on, and
    /// releases it whether the dispatch succeeds or not.
    pub dispatch_output: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            received: *mut TyReceived,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, of a set with `TY_KERNELS_CAP_STREAMS`. Every region, released before this call or after it,
    /// becomes free only once this stream, too, has passed the work that is queued on it now. A stream that
    /// captures a graph is passed within that graph alone: there it holds back the regions that operations of
    /// the graph may get again.
    pub release_after: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, of a set with `TY_KERNELS_CAP_MASKING` whose operations may leave out ranks that
    /// live. Reads or changes the masks of ranks, behind the kernels of all operations that were
    /// sent. No operation is open when a mask changes, and no rank is inside an operation when a
    /// rank is unmasked.
    pub masks: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            masks: *const TyMasks,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional. Writes `expert_counts` of an operation to `counts`, host memory for `count` = E/R, without a wait
    /// for its rows. The operation is a dispatch or a replay for which the host waits. It was received, and is one of
    /// the last `in_flight`. `TY_UNSUPPORTED` where the set has no such counts.
    pub expert_counts: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            counts: *mut u32,
            count: u32,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required of a set that works on a device: no other has it. Copies arrays of an output that was received.
    pub copy_out: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            copies: *const TyCopies,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required of a set with `TY_KERNELS_CAP_STREAMS`: no other has it. Counts a routing.
    pub count_routing: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            counts: *const TyRoutingCounts,
            error: *mut TyError,
        ) -> i32,
    >,
}

/// The symbol `tokenyard_kernels_v0`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelsExport {
    /// Checked first.
    pub header: TyExportHeader,
    /// `count` tables.
    pub components: *const *const TyKernelsTable,
    /// Number of tables.
    pub count: usize,
}
