//! The shape that a kernel set is opened for, its needs of the transports, and its plan.

use core::ffi::c_void;

use crate::common::TyWindow;
use crate::transport::{TyCapabilities, TyTransportTable};
use crate::wait::TyWaitBoard;

/// In [`TyShape`]: dispatches and combines. Each set takes it.
pub const TY_RUNS_MOE: u32 = 0;
/// In [`TyShape`]: messages between pairs of ranks. The set then has `TY_KERNELS_CAP_PIPE` among its needs, or
/// refuses to open. E, K, H, M and the number of handles are 0.
pub const TY_RUNS_PIPE: u32 = 1;
/// In [`TyShape`]: gathers over all ranks. The set then has `TY_KERNELS_CAP_GATHER` among its needs, or refuses to
/// open. E, K, H, M and the number of handles are 0.
pub const TY_RUNS_GATHER: u32 = 2;
/// In [`TyShape`]: entries of a table that all ranks hold together. The set then has `TY_KERNELS_CAP_TABLE` among its
/// needs, or refuses to open. E, K, H and the number of handles are 0.
pub const TY_RUNS_TABLE: u32 = 3;
/// In [`TyShape`]: gathers, as with `TY_RUNS_GATHER`, and reduce-scatters. The set then has `TY_KERNELS_CAP_GATHER` and
/// `TY_KERNELS_CAP_REDUCE` among its needs, or refuses to open. `in_flight` is even: each call has two slots.
pub const TY_RUNS_REDUCE: u32 = 4;

/// The shape that a kernel set is opened for. The host has validated it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyShape {
    /// `sizeof(TyShape)`.
    pub size: usize,
    /// This rank.
    pub rank: u32,
    /// R.
    pub ranks: u32,
    /// D. If 1, one link of either level reaches every rank. If more, both links are given, and each
    /// row crosses the scale-out link once per domain. Ranks are domain-major: rank r is peer r mod R/D
    /// of its scale-up team and peer r / (R/D) of its scale-out team, the rail. Where one link reaches
    /// every rank, rank r is peer r. Absent ranks (`TY_RANK_ABSENT`) are not counted.
    pub domains: u32,
    /// E, a multiple of R.
    pub experts: u32,
    /// K, 1 to 32.
    pub topk: u32,
    /// H in elements.
    pub hidden: u32,
    /// M. With `TY_RUNS_TABLE`: most indices of a fetch.
    pub max_tokens: u32,
    /// Operations that may be sent and not yet received; operation n uses slot n mod in_flight. With
    /// `TY_RUNS_PIPE`: messages from one rank to another.
    pub in_flight: u32,
    /// Handles that may live at once.
    pub handles: u32,
    /// The operations of the instance: one of `TY_RUNS_*`.
    pub runs: u32,
    /// Most bytes of a message with `TY_RUNS_PIPE`, of a rank's shards with `TY_RUNS_GATHER` and `TY_RUNS_REDUCE`; the
    /// bytes of an entry, its scales included, with `TY_RUNS_TABLE`; else 0.
    pub message_bytes: u64,
    /// With `TY_RUNS_TABLE`: most entries of a rank in a layer; else 0.
    pub entries: u64,
    /// With `TY_RUNS_TABLE`: layers; else 0.
    pub layers: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most windows a kernel set may ask for.
pub const TY_MAX_WINDOWS: usize = 8;

/// The scale-up level: inside a domain.
pub const TY_LEVEL_SCALE_UP: u64 = 0;
/// The scale-out level: between domains.
pub const TY_LEVEL_SCALE_OUT: u64 = 1;

/// The capabilities that the transports of both levels declared. All fields of a level without a
/// transport are zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyLimits {
    /// `sizeof(TyLimits)`.
    pub size: usize,
    /// The transport inside the domain.
    pub scale_up: TyCapabilities,
    /// The transport between domains.
    pub scale_out: TyCapabilities,
}

/// The resources of one transport that a kernel set uses. All zero for a level without a transport.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TyLinkNeeds {
    /// Queues used.
    pub queues: u32,
    /// Signals used.
    pub signals: u32,
    /// Most commands of a queue that are not done yet.
    pub queue_depth: u32,
    /// Zero.
    pub reserved: u32,
    /// Most bytes of one put.
    pub largest_put: u64,
}

/// In [`TyKernelNeeds`]: it can go on without lost ranks (`lost` in [`TyPlan`]).
pub const TY_KERNELS_CAP_MASKING: u32 = 1;
/// In [`TyKernelNeeds`]: it takes calls in the order of a stream (`TY_DISPATCH_ON_STREAM`,
/// `TY_COMBINE_ON_STREAM`). Only a set that works on a device, and has its table.
pub const TY_KERNELS_CAP_STREAMS: u32 = 2;

/// In [`TyKernelNeeds`]: it takes calls for which no host thread waits (`TY_DISPATCH_NO_SYNC`,
/// `TY_COMBINE_NO_SYNC`), also on a stream that captures a graph. With `TY_KERNELS_CAP_STREAMS` only.
pub const TY_KERNELS_CAP_NO_SYNC: u32 = 4;
/// In [`TyKernelNeeds`]: it takes `max_tokens` of a dispatch.
pub const TY_KERNELS_CAP_CALL_TOKENS: u32 = 8;
/// In [`TyKernelNeeds`]: it takes `TY_COMBINE_ROUND_ONCE`, and `beside` of a combine.
pub const TY_KERNELS_CAP_ROUND_ONCE: u32 = 16;
/// In [`TyKernelNeeds`]: it takes `TY_COMBINE_SUM_WEIGHTS`.
pub const TY_KERNELS_CAP_SUM_WEIGHTS: u32 = 32;
/// In [`TyKernelNeeds`]: a handle needs nothing of the region of its dispatch, in any layout.
pub const TY_KERNELS_CAP_NO_REGION: u32 = 64;
/// In [`TyKernelNeeds`]: combines of the packed layout take `TY_COMBINE_ROUND_ONCE`, `topk_weights` and `topk_idx`.
pub const TY_KERNELS_CAP_PACKED_SUMS: u32 = 128;

/// In [`TyKernelNeeds`]: it takes `expert_totals` and `waited_ns` of calls in the packed layout.
pub const TY_KERNELS_CAP_STATISTICS: u32 = 256;
/// In [`TyKernelNeeds`]: it takes `TY_DISPATCH_COLUMN_SCALES` and `TY_DISPATCH_SOURCE_TOKENS`.
pub const TY_KERNELS_CAP_PACKED_FORMS: u32 = 512;
/// In [`TyKernelNeeds`]: it takes `TY_COMBINE_LOGFMT10`.
pub const TY_KERNELS_CAP_LOGFMT10: u32 = 1024;
/// In [`TyKernelNeeds`]: where losses are masked, its operations may leave out ranks that live, too. It then takes
/// `TY_SUBMIT_MASK` and `TY_QUERY_MASKS`. With `TY_KERNELS_CAP_MASKING` only.
pub const TY_KERNELS_CAP_MASKS: u32 = 2048;
/// In [`TyKernelNeeds`]: it takes `TY_LAYOUT_RANK_MAJOR`.
pub const TY_KERNELS_CAP_RANK_MAJOR: u32 = 4096;
/// In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_PIPE`: it takes `TY_SUBMIT_SEND` and
/// `TY_SUBMIT_RECV`.
pub const TY_KERNELS_CAP_PIPE: u32 = 8192;
/// In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_GATHER`: it takes `TY_SUBMIT_GATHER` and
/// `TY_FINISH_GATHER`.
pub const TY_KERNELS_CAP_GATHER: u32 = 16384;
/// In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_TABLE`: it takes `TY_SUBMIT_ENTRIES`,
/// `TY_SUBMIT_FETCH` and `TY_FINISH_FETCH`.
pub const TY_KERNELS_CAP_TABLE: u32 = 32768;
/// In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_REDUCE`: it takes `TY_SUBMIT_REDUCE` and
/// `TY_FINISH_REDUCE`.
pub const TY_KERNELS_CAP_REDUCE: u32 = 65536;
/// In [`TyKernelNeeds`]: it takes `max_rows` of a dispatch.
pub const TY_KERNELS_CAP_ROW_CAP: u32 = 131072;

/// In `lost` of [`TyPlan`]: the rank is a member of its teams, and is lost.
pub const TY_RANK_LOST: u8 = 1;
/// In `lost` of [`TyPlan`]: the rank is a member of no team.
pub const TY_RANK_ABSENT: u8 = 2;

/// The resources that a kernel set needs from the transports, within the given limits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelNeeds {
    /// `sizeof(TyKernelNeeds)`.
    pub size: usize,
    /// Windows used; `window_bytes[0 .. windows]` are their lengths, equal on all ranks.
    pub windows: u32,
    /// Calls that it takes beyond plain ones: bits `TY_KERNELS_CAP_*`.
    pub capabilities: u32,
    /// Needs of the transport inside the domain.
    pub scale_up: TyLinkNeeds,
    /// Needs of the transport between domains.
    pub scale_out: TyLinkNeeds,
    /// Bytes of each window.
    pub window_bytes: [u64; TY_MAX_WINDOWS],
    /// The levels of each window: bits `1 << TY_LEVEL_*`, or 0 for every level that has a transport. A
    /// window is registered with the transports of those levels only, and only their memory needs
    /// count. A transport numbers the windows registered with it from 0 on, in their order here:
    /// commands and device APIs use those numbers.
    pub window_levels: [u32; TY_MAX_WINDOWS],
    /// Ordinal of the GPU that the set works on, as its driver counts, or -1: the host.
    pub device: i32,
    /// Zero.
    pub reserved: u32,
}

/// An opened transport as a kernel set uses it. `table` is null where the level has none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyLink {
    /// The transport's table, with every required slot filled.
    pub table: *const TyTransportTable,
    /// Its instance.
    pub instance: *mut c_void,
    /// The capabilities that it declared.
    pub capabilities: TyCapabilities,
}

/// Arguments of `plan`: every size and place is fixed here. The board stays valid until `close`. The links
/// stay valid until the last operation has returned, because transports are closed before `close`. The
/// list of windows is valid for the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyPlan {
    /// `sizeof(TyPlan)`.
    pub size: usize,
    /// The transport inside the domain.
    pub scale_up: TyLink,
    /// The transport between domains.
    pub scale_out: TyLink,
    /// The registered windows, in order of their ids.
    pub windows: *const TyWindow,
    /// Number of windows.
    pub window_count: usize,
    /// The board shared with the host's watchdog.
    pub board: *mut TyWaitBoard,
    /// Most nanoseconds of a wait: a longer wait ends by itself, without the host.
    pub cap_ns: u64,
    /// Null where a lost rank ends the communicator. Else R bytes, one per rank, which stay valid like the
    /// board: `TY_RANK_LOST` from the loss of a rank on; `TY_RANK_ABSENT` from the start for a rank that
    /// is absent; else 0. The host writes them, with atomic stores of one byte. A lost or absent rank
    /// raises no more signals: waits on it end, its missing rows are left out, and no command names it. An
    /// absent rank is in no team: peers are numbered without it. A rank may be lost already when `plan` is
    /// called; it is then still a member of its team.
    pub lost: *const u8,
}
