//! Dispatch and combine: their arguments and their results. Precisions of sums.

use core::ffi::c_void;

use crate::common::TyStr;

/// A tensor of one or two dimensions. `data` is null where a tensor is absent, and only there: a tensor
/// without elements has an address too.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTensor {
    /// Address of element (0, 0).
    pub data: *mut u8,
    /// Element type: 1 bf16, 2 fp16, 3 fp32, 4 fp8 e4m3, 5 u8, 6 i32, 7 i64.
    pub dtype: u32,
    /// Zero.
    pub reserved: u32,
    /// Rows and columns; one-dimensional tensors have one column.
    pub shape: [u64; 2],
    /// Elements from one row to the next, and from one column to the next.
    pub stride: [i64; 2],
}

/// Rows in one block, by source rank, then source token.
pub const TY_LAYOUT_FLAT: u32 = 1;
/// Rows grouped by local expert with aligned starts.
pub const TY_LAYOUT_EXPERT_MAJOR: u32 = 2;
/// `[E/R, R*M, H]` with counts.
pub const TY_LAYOUT_PACKED: u32 = 3;
/// `[R, M, H]` with counts: one row per token and rank, where source rank and the token's number among those of
/// its source that come here fix the place. Only with `TY_KERNELS_CAP_RANK_MAJOR`.
pub const TY_LAYOUT_RANK_MAJOR: u32 = 4;

/// Rows travel as they are.
pub const TY_CAST_NONE: u32 = 0;
/// Rows are cast to FP8 e4m3 with one f32 scale per 128 channels.
pub const TY_CAST_FP8: u32 = 1;
/// As `TY_CAST_FP8`, with scales rounded up to powers of two.
pub const TY_CAST_FP8_ROUND: u32 = 2;
/// As `TY_CAST_FP8_ROUND`, with the scales' exponent bytes packed by four (UE8M0).
pub const TY_CAST_FP8_UE8M0: u32 = 3;

/// In [`TyReduce`](crate::TyReduce): parts travel as they are.
pub const TY_PRECISION_FP32: u32 = 0;
/// In [`TyReduce`](crate::TyReduce): the parts of f32 tensors travel as bf16. An element of four that follow each other
/// becomes the upper half of its bits plus 16 bits of a hash of the four and of their place; `docs/pipes.md` has the
/// hash. The part that stays on its rank is not rounded.
pub const TY_PRECISION_BF16: u32 = 1;

/// Reuse the routing of the handle: no counting.
pub const TY_DISPATCH_REPLAY: u32 = 1;
/// Worst-case sizes: the host learns no count, the counts stay in device memory.
pub const TY_DISPATCH_WORST_CASE: u32 = 2;
/// Zero the padding rows of the expert-major layout, or those of the rank-major one behind each source's last row.
pub const TY_DISPATCH_ZERO_PADDING: u32 = 4;
/// In the order of `stream`: tensors are read after the work that was queued there before
/// `submit`, and work queued there after `finish` runs after the operation. Neither call
/// waits for rows. Ranks need not agree on the flag.
pub const TY_DISPATCH_ON_STREAM: u32 = 8;

/// With `TY_DISPATCH_ON_STREAM`: the host waits for nothing; `submit` does not even wait for the
/// agreement of the ranks. A fresh dispatch has `TY_DISPATCH_WORST_CASE` too. A failure on the device closes
/// the communicator: a later call, or `flush`, reports it. Ranks need not agree on the flag; a refusal, too,
/// closes the communicator on the ranks that set it.
///
/// The stream may capture a graph: then nothing runs, and a refusal of this rank is reported to this
/// rank alone. Both halves belong to one capture. The graph may be launched any number of times while
/// no operation is open, in the same order with other operations on all ranks. The output of the call,
/// its handle and its tensors stay valid until the last launch of the graph.
pub const TY_DISPATCH_NO_SYNC: u32 = 16;

/// `finish` follows at once: the caller queues and computes nothing between the two.
pub const TY_DISPATCH_AT_ONCE: u32 = 32;

/// In the packed layout: the scales of each local expert's rows lie column by column. Only with
/// `TY_KERNELS_CAP_PACKED_FORMS`. Ranks need not agree on the flag.
pub const TY_DISPATCH_COLUMN_SCALES: u32 = 64;
/// In the packed layout: `source` has source tokens alone, without their rank. As `TY_DISPATCH_COLUMN_SCALES`.
pub const TY_DISPATCH_SOURCE_TOKENS: u32 = 128;

/// With `max_rows`: rows from there on are dropped. Without it, a dispatch of which more rows come is refused with
/// `is_full` on all ranks, before a row moves; it has exact sizes then.
///
/// The rows of x have the places that they have without a cap: an expert-major expert starts behind the aligned rows of
/// those before it. The row of a copy from `max_rows` on is dropped: its slot is -1, a combine leaves it out of its
/// sums, and the weight that returns for it is 0. `expert_counts`, `expert_starts` and `expert_ends` name the rows
/// that are left. Of flat rows, those from `max_rows` on are dropped, and N counts the others. So does a replay.
pub const TY_DISPATCH_DROP: u32 = 256;

/// In `exchange`: with the owners of experts, which are the ranks of this domain where there are several.
pub const TY_EXCHANGE_OWNERS: u32 = 0;
/// In `exchange`: with the ranks of other domains that have this rank's index there.
pub const TY_EXCHANGE_RAIL: u32 = 1;

/// Why a rank takes no part in an operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyRefusal {
    /// Empty: it takes part.
    pub text: TyStr,
    /// The world rank whose refusal it is: the calling one, or another that the caller has it from.
    pub rank: u32,
    /// 1 where that rank has no room, 0 where it refuses its input.
    pub is_full: u32,
}

/// One dispatch. Tensors are valid until `finish` returns; with `TY_DISPATCH_ON_STREAM` until
/// the stream has passed the work that `finish` queued there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDispatch {
    /// `sizeof(TyDispatch)`.
    pub size: usize,
    /// Operation number: the same on all ranks, 0, 1, 2, ...
    pub operation: u64,
    /// Handle slot to fill, or to replay.
    pub handle: u32,
    /// Bits `TY_DISPATCH_*`.
    pub flags: u32,
    /// One of `TY_LAYOUT_*`.
    pub layout: u32,
    /// Alignment of expert starts in rows, at least 1 (expert-major only).
    pub alignment: u32,
    /// One of `TY_CAST_*`.
    pub cast: u32,
    /// M of this call: no rank has more tokens. It bounds worst-case sizes, and packed and rank-major blocks,
    /// and it is the factor in `source`. At most M of the shape; equal to it unless the set declares
    /// `TY_KERNELS_CAP_CALL_TOKENS`; equal on all ranks. Zero in a replay, which takes M of its dispatch.
    pub max_tokens: u32,
    /// One of `TY_EXCHANGE_*`: [`TyKernelsTable`](crate::TyKernelsTable) says when which is submitted.
    pub exchange: u32,
    /// With `TY_DISPATCH_ON_STREAM`: the multiprocessors that kernels of the call occupy, at most 1024; as many as the
    /// device has where it has fewer. Zero: the set's own number. Ranks may name different ones.
    pub sms: u32,
    /// `[T, H]`, rows contiguous. In a replay `[T, any]`: rows of another width may take the same routes, of at
    /// most as many bytes as max(H, K + 1) numbers of f32, rounded up to 16 bytes.
    pub x: TyTensor,
    /// `[T, S]` of 4-byte elements, any strides; absent unless the caller has quantised the rows.
    pub scales: TyTensor,
    /// `[T, K]` i64, contiguous; absent in a replay.
    pub topk_idx: TyTensor,
    /// `[T, K]` f32, contiguous; may be absent.
    pub topk_weights: TyTensor,
    /// With a text: no part is taken. Nothing moves, tensors are not read; all ranks receive the text.
    pub refusal: TyRefusal,
    /// With `TY_DISPATCH_ON_STREAM`: a stream of the device. Null there is CUDA's legacy default
    /// stream. It lives until the region of the output was released and `flush` or `close` called.
    pub stream: *mut c_void,
    /// With `TY_DISPATCH_NO_SYNC` and without `TY_DISPATCH_REPLAY`: T, in device memory, at most the rows
    /// of `topk_idx`; read as the other tensors are. Null: as many as those rows.
    pub tokens: *const u32,
    /// i32 `[E/R]` on the set's device, or null: the rows that each local expert receives are added. Only with
    /// `TY_KERNELS_CAP_STATISTICS`, and for the packed layout.
    pub expert_totals: *mut i32,
    /// i64 `[R]` beside it, or null: the nanoseconds are added for which this rank has waited until each rank had
    /// entered.
    pub waited_ns: *mut i64,
    /// The most rows of x of this rank's output (flat and expert-major), worst-case sizes too; 0: no cap. Ranks may
    /// name different ones. Zero in a replay, which takes that of its dispatch. Only with `TY_KERNELS_CAP_ROW_CAP`.
    pub max_rows: u64,
}

/// The output of a dispatch, in the arena. Absent tensors have null data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyReceived {
    /// `sizeof(TyReceived)`.
    pub size: usize,
    /// The arena region that holds all of the output; `release` frees it. Where rows are flat or
    /// rank-major, it may be freed before the end of the handle: a combine or a replay reads nothing of it.
    pub region: u64,
    /// Tokens received, N; the worst case where the host learns no count.
    pub tokens: u64,
    /// Rows of `x`: N (flat), X (expert-major), E/R * R*M (packed) or R*M (rank-major); the worst case likewise.
    pub rows: u64,
    /// `[rows, H]`.
    pub x: TyTensor,
    /// `[rows, S]`; with `TY_DISPATCH_COLUMN_SCALES` `[E/R * S, R*M]`, contiguous: S columns of each expert.
    pub scales: TyTensor,
    /// i32 local expert ids or -1: `[N, K]` (flat), or `[rows, K]` with -1 where no token is (rank-major).
    pub ids: TyTensor,
    /// f32: `[N, K]` (flat), `[rows, K]` (rank-major), else `[rows, 1]`.
    pub weights: TyTensor,
    /// i32 `source rank * M + source token`, M that of the call: `[N, 1]`, or `[rows, 1]` (packed, rank-major). With
    /// `TY_DISPATCH_SOURCE_TOKENS` the token alone.
    pub source: TyTensor,
    /// `[N, K]` i32: row of each expert's copy, or -1 (expert-major).
    pub slots: TyTensor,
    /// `[E/R, 1]` i32: rows per local expert, without padding.
    pub expert_counts: TyTensor,
    /// `[E/R, 1]` i32: first row per local expert (expert-major).
    pub expert_starts: TyTensor,
    /// `[E/R, 1]` i32: the row after the last one of each local expert, padding left out (expert-major); may
    /// be absent.
    pub expert_ends: TyTensor,
    /// `[R, 1]` i32: tokens per source rank.
    pub source_counts: TyTensor,
    /// `[R, 1]` i32: tokens of a source rank and of all ranks before it; may be absent.
    pub source_ends: TyTensor,
    /// `[E/R, R]` i64: `count | begin << 32` (packed).
    pub ranges: TyTensor,
    /// `[2, 1]` i64: the true N and the true number of rows: N (flat, rank-major), X with its padding (expert-major),
    /// or the rows of all experts (packed).
    pub totals: TyTensor,
    /// `[R, 1]` u8: 1 where rows of a source rank are left out because it was lost, else 0. Where such
    /// rows have places already, the places hold zeros, with ids, slots and source -1.
    pub lost: TyTensor,
    /// `[E/R, 1]` i32: rows of each local expert that were dropped. Absent where rows are not capped, as is `overflow`.
    pub dropped: TyTensor,
    /// `[1, 1]` i32: 1 where any row was dropped, else 0.
    pub overflow: TyTensor,
}

/// In [`TyCopy`]: `to` has elements of 8 bytes, signed as those of `from` are.
pub const TY_COPY_WIDE: u32 = 1;
/// In [`TyCopy`]: only rows that arrived are copied, and those behind them, up to `room`, become `fill`. Otherwise all
/// elements are copied.
pub const TY_COPY_FILL: u32 = 2;
/// In [`TyCopy`]: `to` has the columns of `from` one after the other, each with room for `room / columns`
/// elements. Alone.
pub const TY_COPY_COLUMNS: u32 = 4;

/// A copy of one array of an output.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCopy {
    /// Elements of 4 bytes.
    pub from: *const u8,
    /// Memory of the caller, with elements of 4 bytes, or of 8.
    pub to: *mut u8,
    /// Elements of `from`.
    pub elements: u64,
    /// Elements of `to`, at least as many.
    pub room: u64,
    /// Elements of a row.
    pub columns: u32,
    /// If it is not 0, elements that are not negative become their remainder by it.
    pub modulus: u32,
    /// The value of elements behind the rows that arrived.
    pub fill: i32,
    /// Bits `TY_COPY_*`; others are an error.
    pub flags: u32,
}

/// In [`TyCopies`]: in the order of `stream`. Otherwise the copies have ended when the call returns.
pub const TY_COPIES_ON_STREAM: u32 = 1;
/// Most copies of one call.
pub const TY_MAX_COPIES: usize = 13;

/// Copies of arrays of one output.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCopies {
    /// `sizeof(TyCopies)`.
    pub size: usize,
    /// `count` copies; memory of the host.
    pub copies: *const TyCopy,
    /// At most `TY_MAX_COPIES`.
    pub count: u32,
    /// Bits `TY_COPIES_*`.
    pub flags: u32,
    /// `totals` of the output: the number of rows that arrived comes first.
    pub totals: *const i64,
    /// The stream, with `TY_COPIES_ON_STREAM`.
    pub stream: *mut c_void,
}

/// Counts of a routing that no dispatch has sent yet, in memory of the set's device. Ids that are no experts count
/// nowhere.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyRoutingCounts {
    /// `sizeof(TyRoutingCounts)`.
    pub size: usize,
    /// `[T, K]` i64, contiguous.
    pub topk_idx: TyTensor,
    /// Experts, a multiple of `ranks`.
    pub experts: u32,
    /// Ranks.
    pub ranks: u32,
    /// `[R]`, written: tokens for each rank, each token once.
    pub rank_tokens: *mut i32,
    /// `[E]`, written: tokens for each expert.
    pub expert_tokens: *mut i32,
    /// `[T, R]`, written: 1 where a token goes to the rank, else 0.
    pub is_token_in_rank: *mut u8,
    /// The stream in whose order they are read and written.
    pub stream: *mut c_void,
}

/// Multiply each expert's row by its weight before summing (expert-major and packed).
pub const TY_COMBINE_WEIGHTED: u32 = 1;
/// As `TY_DISPATCH_ON_STREAM`.
pub const TY_COMBINE_ON_STREAM: u32 = 2;
/// As `TY_DISPATCH_NO_SYNC`. Where only the device knows T, rows of `out` from T on are not written.
pub const TY_COMBINE_NO_SYNC: u32 = 4;
/// As `TY_DISPATCH_AT_ONCE`, for `finish`.
pub const TY_COMBINE_AT_ONCE: u32 = 8;
/// Round each sum once, on the rank of its token, and not the sum of each rank's experts before (expert-major
/// and packed). Only with `TY_KERNELS_CAP_ROUND_ONCE`, or, for the packed layout, `TY_KERNELS_CAP_PACKED_SUMS`.
pub const TY_COMBINE_ROUND_ONCE: u32 = 16;
/// Each entry of `out_weights` is the sum of the `weights` of all ranks that received the token, not only the
/// entry of the expert's rank (flat and rank-major). Only with `TY_KERNELS_CAP_SUM_WEIGHTS`.
pub const TY_COMBINE_SUM_WEIGHTS: u32 = 32;
/// Each rank's sum for a token is rounded to bf16 and has the values of a LogFMT-10 round trip after that, also
/// a rank's sum for its own token. Rows are packed bf16 rows, H is a multiple of 512, and sums are not rounded
/// once. Only with `TY_KERNELS_CAP_LOGFMT10`.
pub const TY_COMBINE_LOGFMT10: u32 = 64;

/// One combine. Tensors are valid until `finish` returns; with `TY_COMBINE_ON_STREAM` until the
/// stream has passed the work that `finish` queued there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCombine {
    /// `sizeof(TyCombine)`.
    pub size: usize,
    /// Operation number.
    pub operation: u64,
    /// Handle slot.
    pub handle: u32,
    /// Bits `TY_COMBINE_*`.
    pub flags: u32,
    /// As in [`TyDispatch`].
    pub exchange: u32,
    /// As in [`TyDispatch`], with `TY_COMBINE_ON_STREAM`.
    pub sms: u32,
    /// Expert outputs: as many rows as the dispatch returned, `[rows, H]`, contiguous.
    pub x: TyTensor,
    /// f32, of the shape of the dispatch's `weights`; may be absent.
    pub weights: TyTensor,
    /// `[rows, W]` f32, the output of a replay of this handle whose rows have W > K numbers; absent unless
    /// the set declares `TY_KERNELS_CAP_ROUND_ONCE`. With `TY_COMBINE_WEIGHTED` the first K numbers of a row are
    /// its token's weights instead of the dispatch's. The bits of the number after them select the experts'
    /// rows, of the K, that enter the sum; other rows are left out.
    pub beside: TyTensor,
    /// `[T, H]` of the type of `x`; may be absent.
    pub bias0: TyTensor,
    /// As `bias0`.
    pub bias1: TyTensor,
    /// `[T, H]` of the type of `x`, written by `finish`.
    pub out: TyTensor,
    /// `[T, K]` f32; absent unless `weights` is given.
    pub out_weights: TyTensor,
    /// `[T, 1]` u8, may be absent: `finish` writes the number of the token's selected experts
    /// that are left out of its sum because their rank was lost.
    pub missing: TyTensor,
    /// As in [`TyDispatch`].
    pub refusal: TyRefusal,
    /// As in [`TyDispatch`].
    pub stream: *mut c_void,
    /// `[T, K]` f32: weights of this call instead of the dispatch's; absent unless the set declares
    /// `TY_KERNELS_CAP_PACKED_SUMS`, the layout is packed, and `TY_COMBINE_WEIGHTED` is set.
    pub topk_weights: TyTensor,
    /// `[T, K]` i64, may be absent: a negative id leaves the expert's row out of the sum. Only with
    /// `topk_weights`.
    pub topk_idx: TyTensor,
    /// As in [`TyDispatch`].
    pub waited_ns: *mut i64,
}

/// A round of an operation without rows: ranks of an exchange learn whether one of them knows of a refusal.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyAgree {
    /// `sizeof(TyAgree)`.
    pub size: usize,
    /// Operation number.
    pub operation: u64,
    /// One of `TY_EXCHANGE_*`.
    pub exchange: u32,
    /// 1 where the operation is a combine, which begins on the rail with this round; 0 where it is a
    /// dispatch, which ends there with it.
    pub is_combine: u32,
    /// The refusal that this rank knows.
    pub refusal: TyRefusal,
}
