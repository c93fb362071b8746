//! The kernel set table: the compute on one kind of device. Unstable until 1.0: exact layout.

use core::ffi::c_void;

use crate::common::{TyError, TyExportHeader, TyMemoryNeeds, TyStr, TyWindow};
use crate::device::TyDeviceTable;
use crate::host::TyHost;
use crate::plan::{TyKernelNeeds, TyLimits, TyPlan, TyShape};
use crate::transport::TyConfig;

/// Major version of the kernel set ABI.
pub const TY_KERNELS_MAJOR: u32 = 0;
/// Minor version of the kernel set ABI.
pub const TY_KERNELS_MINOR: u32 = 16;

/// A kernel set. All slots of one instance are called by one thread at a time.
///
/// Order of calls: `probe`, `open`, `needs`, `allocate` per window, `plan`, then operations, then `close`. `runs` of
/// the shape says which. A set that does not know them refuses `open` with `TY_UNSUPPORTED`.
///
/// - `TY_RUNS_MOE`: dispatches and combines, in the same order on all ranks. One is submitted (`TY_SUBMIT_DISPATCH`
///   or `TY_SUBMIT_COMBINE`), and finished. Operation n may be sent only when operation n - in_flight has been
///   received.
/// - `TY_RUNS_GATHER`: `TY_SUBMIT_GATHER` and `TY_FINISH_GATHER`, by the same rules.
/// - `TY_RUNS_REDUCE`: these, and `TY_SUBMIT_REDUCE` and `TY_FINISH_REDUCE`. The host leaves numbers of operations out,
///   the same on all ranks.
/// - `TY_RUNS_TABLE`: `TY_SUBMIT_ENTRIES` on all ranks; `TY_SUBMIT_FETCH` and `TY_FINISH_FETCH` by each for itself.
/// - `TY_RUNS_PIPE`: `TY_SUBMIT_SEND` and `TY_SUBMIT_RECV`, in any order: ranks make different calls. `flush` waits
///   until all messages of this rank are taken, too, and reports as `TY_SUBMIT_SEND` does.
///
/// With several domains of several ranks an operation is two exchanges. For a dispatch the host submits
/// that of the rail; that of the owners, whose rows are those that come over the rail; a `TY_SUBMIT_AGREE`
/// on the rail; and finishes the dispatch. For a combine it first submits that of the owners, which makes
/// a sum for each row that had come over the rail in the dispatch. Then it submits a `TY_SUBMIT_AGREE` on
/// the rail; the combine of the rail, whose rows are those sums; and finishes it. Where losses are masked,
/// a `TY_SUBMIT_AGREE` on the owners' exchange follows each on the rail.
///
/// Each of these calls returns when its exchange has done that, or has queued it. If it has queued it, the
/// next call reads T, rows and refusals where the device has left them. The host then waits in the last
/// exchange that it submits, and in the agreement behind a dispatch. The host passes the first refusal that this rank
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
    /// Required. Starts work. `tag` is one of `TY_SUBMIT_*`, and says of which type `call` is. Each of these
    /// structures starts with its size. `TY_UNSUPPORTED` for a tag that the set does not take.
    pub submit: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            tag: u32,
            call: *const c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the operation that `call` names. `tag` is one of `TY_FINISH_*`, and says of which type `call`
    /// is, as for `submit`.
    pub finish: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            tag: u32,
            call: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Answers a question in `call`. `tag` is one of `TY_QUERY_*`, and says of which type `call` is, as
    /// for `submit`.
    pub query: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            tag: u32,
            call: *mut c_void,
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
