//! The calls of a kernel set: their tags, and the structures of those that are no operation.

use core::ffi::c_void;

use crate::common::TyStr;
use crate::counters::TyTrace;
use crate::operations::{TyReceived, TyTensor};

/// In `submit`, with `TyDispatch`: starts a dispatch. Each set takes it.
pub const TY_SUBMIT_DISPATCH: u32 = 1;
/// In `submit`, with `TyCombine`: starts a combine. Each set takes it.
pub const TY_SUBMIT_COMBINE: u32 = 2;
/// In `submit`, with `TyAgree`, of a set that takes several domains of several ranks: passes on the refusal that
/// this rank knows, and learns those of others. An error is the first of them, in order of ranks.
pub const TY_SUBMIT_AGREE: u32 = 3;
/// In `submit`, with `TyCopies`: copies arrays of an output that was received. Each set that works on a device
/// takes it, and no other.
pub const TY_SUBMIT_COPIES: u32 = 4;
/// In `submit`, with `TyRoutingCounts`: counts a routing. Each set with `TY_KERNELS_CAP_STREAMS` takes it, and no
/// other.
pub const TY_SUBMIT_ROUTING_COUNTS: u32 = 5;
/// In `submit`, with `TyMask`, of a set with `TY_KERNELS_CAP_MASKS`: changes the mask of a rank, behind the kernels
/// of all operations that were sent. No operation is open, and no rank is inside an operation when a rank is
/// unmasked.
pub const TY_SUBMIT_MASK: u32 = 6;
/// In `submit`, with `TyReleaseAfter`, of a set with `TY_KERNELS_CAP_STREAMS`. Every region, released before this
/// call or after it, becomes free only once this stream, too, has passed the work that is queued on it now. A
/// stream that captures a graph is passed within that graph alone: there it holds back the regions that
/// operations of the graph may get again.
pub const TY_SUBMIT_RELEASE_AFTER: u32 = 7;
/// In `submit`, with `TyMessage`, of an instance with `TY_KERNELS_CAP_PIPE`: sends a message to a rank. Waits while
/// `in_flight` messages to it are not taken. The memory may be changed once the call returns.
pub const TY_SUBMIT_SEND: u32 = 8;
/// In `submit`, with `TyMessage`, of an instance with `TY_KERNELS_CAP_PIPE`: waits for the next message of a rank, and
/// writes it to the memory.
pub const TY_SUBMIT_RECV: u32 = 9;
/// In `submit`, with `TyGather`, of an instance with `TY_KERNELS_CAP_GATHER`: sends the shards of this rank to all
/// ranks. Their memory may be changed once the call returns.
pub const TY_SUBMIT_GATHER: u32 = 10;
/// In `submit`, with `TyEntries`, of an instance with `TY_KERNELS_CAP_TABLE`: writes the entries of this rank in a
/// layer. All ranks do so between two barriers of the host, and no fetch is open on any of them. Their memory may be
/// changed once the call returns.
pub const TY_SUBMIT_ENTRIES: u32 = 11;
/// In `submit`, with `TyFetch`, of an instance with `TY_KERNELS_CAP_TABLE`: starts to read entries of any ranks, which
/// take no part. The indices may be changed once the call returns.
pub const TY_SUBMIT_FETCH: u32 = 12;
/// In `submit`, with `TyReduce`, of an instance with `TY_KERNELS_CAP_REDUCE`: sends each rank its part of the tensors.
/// Their memory may be changed once the call returns.
pub const TY_SUBMIT_REDUCE: u32 = 13;

/// In `finish`, with `TyDispatchOutput`: ends a dispatch. Each set takes it.
pub const TY_FINISH_DISPATCH: u32 = 1;
/// In `finish`, with `TyCombineEnd`: ends a combine. Each set takes it.
pub const TY_FINISH_COMBINE: u32 = 2;
/// In `finish`, with `TyGather`, of an instance with `TY_KERNELS_CAP_GATHER`: waits for the shards of all ranks, and
/// writes them. Each part has room for those of all ranks, in order of ranks.
pub const TY_FINISH_GATHER: u32 = 3;
/// In `finish`, with `TyFetch`, of an instance with `TY_KERNELS_CAP_TABLE`: waits for the entries, and writes them.
/// Fetches are finished in any order. `TY_REFUSED` for an index without an entry: no output is written then, and the
/// instance goes on.
pub const TY_FINISH_FETCH: u32 = 4;
/// In `finish`, with `TyReduce`, of an instance with `TY_KERNELS_CAP_REDUCE`: waits for the parts of all ranks, and
/// writes their sums.
pub const TY_FINISH_REDUCE: u32 = 5;

/// In `query`, with `TyDispatchOutput`; optional. Called between the halves of a dispatch. Gives the place of its
/// output, as `TY_FINISH_DISPATCH` will describe it, if the place is fixed already; else `x` stays absent. Until
/// the end of the dispatch nothing in the output may be read, and `tokens` may be 0. The host claims the region
/// from this call on, and releases it whether the dispatch succeeds or not.
pub const TY_QUERY_DISPATCH_OUTPUT: u32 = 1;
/// In `query`, with `TyCombineInput`: gives an arena region for expert outputs of a handle, so that combine need
/// not copy them. Where the handle's dispatch was in the order of a stream, the region is too: only work on that
/// stream may write it. Each set takes it.
pub const TY_QUERY_COMBINE_INPUT: u32 = 2;
/// In `query`, with `TyExpertCounts`; optional: gives the counts of an operation without a wait for its rows. The
/// operation is a dispatch or a replay for which the host waits. It was received, and is one of the last
/// `in_flight`.
pub const TY_QUERY_EXPERT_COUNTS: u32 = 3;
/// In `query`, with `TyMasks`, of a set with `TY_KERNELS_CAP_MASKS`: gives the masks of ranks, behind the kernels
/// of all operations that were sent.
pub const TY_QUERY_MASKS: u32 = 4;
/// In `query`, with `TyGpuRing`; optional. After `plan`, once for each level that has a transport. Fills in the
/// ring of the level that it names, where kernels post through the host on that level; the ring is valid until
/// `close`. Else `commands` stays null. The host stops reading the ring before transports are closed.
pub const TY_QUERY_GPU_RING: u32 = 5;
/// In `query`, with `TyCounters`; optional. After `plan`. Gives the counters for reports, which show them as
/// unknown where `peers` stays null.
pub const TY_QUERY_COUNTERS: u32 = 6;
/// In `query`, with `TyOperationTrace`; optional, for tools. Gives the times of one of the last `in_flight`
/// operations, which has ended: call `flush` before.
pub const TY_QUERY_TRACE: u32 = 7;

/// The mask of a rank.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyMask {
    /// `sizeof(TyMask)`.
    pub size: usize,
    /// The rank to mask or unmask. One to unmask is not lost.
    pub rank: u32,
    /// 1 masks it, 0 unmasks it.
    pub is_masked: u32,
}

/// The ranks that operations leave out.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyMasks {
    /// `sizeof(TyMasks)`.
    pub size: usize,
    /// R bytes, which become 1 where a rank is left out, else 0.
    pub masks: *mut u8,
    /// R.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// One side of a message.
///
/// `refusal` says that the input of this rank was refused. A sender then sends it in place of the bytes, and the call
/// of the receiver fails with `TY_REFUSED` and the text. A receiver takes the message and drops its bytes.
///
/// A sender learns that a message was refused (`TY_REFUSED`, with the text), or that another length was expected
/// (`TY_MISMATCH`), from the first `TY_SUBMIT_SEND` that needs the message's slot again, or from `flush`. That call
/// sends nothing. Each message is reported once. `TY_UNSUPPORTED`: no link leads to the rank, and nothing was posted.
/// The instance goes on after these.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyMessage {
    /// `sizeof(TyMessage)`.
    pub size: usize,
    /// Memory of the set's kind, contiguous; null where it has no bytes.
    pub data: *mut c_void,
    /// Its length: at most `message_bytes` of the shape.
    pub bytes: u64,
    /// The other rank of the message; not this one.
    pub peer: u32,
    /// Zero.
    pub reserved: u32,
    /// Why this rank refuses; no bytes where it does not.
    pub refusal: TyStr,
}

/// A tensor of a gather: contiguous memory of the set's kind.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyPart {
    /// Null where it has no bytes.
    pub data: *mut c_void,
    /// Its length.
    pub bytes: u64,
}

/// In [`TyGather`], of an instance with `TY_KERNELS_CAP_STREAMS`: shards are read, and outputs written, in the order of
/// `stream`. They stay valid until it has passed the work that `submit` and `finish` queue there. Both halves of a
/// gather name the same stream.
pub const TY_GATHER_ON_STREAM: u64 = 1;

/// A half of a gather. All ranks make it, with as many parts of the same lengths: else it ends with `TY_MISMATCH` on
/// all of them. With a refusal of any rank it ends with `TY_REFUSED` on all. The instance goes on after both.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyGather {
    /// `sizeof(TyGather)`.
    pub size: usize,
    /// Operation number.
    pub operation: u64,
    /// The shards in `submit`, the outputs in `finish`.
    pub parts: *const TyPart,
    /// How many.
    pub count: usize,
    /// In `submit`: why this rank refuses; no bytes where it does not.
    pub refusal: TyStr,
    /// Bits `TY_GATHER_*`.
    pub flags: u64,
    /// The stream, with `TY_GATHER_ON_STREAM`.
    pub stream: *mut c_void,
}

/// In [`TyReduce`], in `submit`: a gather of the sums follows, as operation + 1. So ranks that make an all-reduce
/// differ from those that make a reduce-scatter alone, and learn it before any of them waits for that gather.
pub const TY_REDUCE_GATHERED: u64 = 1;

/// A half of a reduce-scatter. Tensor i has R parts of as many elements, and rank r gets the sum of all ranks' parts r:
/// added in f32 in the order of ranks, multiplied by `scale`, rounded once to the type of the tensor. All ranks make
/// it, with as many tensors of the same types and lengths, and the same `precision`, `scale` and `flags`: else it ends
/// with `TY_MISMATCH` on all of them, also where some of them gather. With a refusal of any rank it ends with
/// `TY_REFUSED` on all. The instance goes on after both.
///
/// A reduce-scatter takes two numbers, and two slots: its own, which is even, and the next one for a gather of the
/// sums. So `in_flight` of the shape is even, too. A set refuses odd ones.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyReduce {
    /// `sizeof(TyReduce)`.
    pub size: usize,
    /// Operation number, even. It shares the numbers, and the slots, with gathers.
    pub operation: u64,
    /// Contiguous tensors of bf16 or f32, of the set's memory: in `submit` the inputs, whose elements R divides; in
    /// `finish` the sums.
    pub tensors: *const TyTensor,
    /// How many. None in `finish`: the sums are not written.
    pub count: usize,
    /// In `submit`: one of `TY_PRECISION_*`.
    pub precision: u32,
    /// In `submit`: the factor of the sums.
    pub scale: f32,
    /// In `submit`: why this rank refuses; no bytes where it does not.
    pub refusal: TyStr,
    /// In `submit`: bits `TY_REDUCE_*`.
    pub flags: u64,
}

/// The entries of this rank in a layer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyEntries {
    /// `sizeof(TyEntries)`.
    pub size: usize,
    /// The layer, below `layers` of the shape.
    pub layer: u32,
    /// Zero.
    pub reserved: u32,
    /// R numbers, in host memory, valid for the call: the entries that each rank writes to the layer now, at most
    /// `entries` of the shape.
    pub counts: *const u64,
    /// The values of all entries of this rank, and their scales; null bytes where an entry has none. Together an entry
    /// has `message_bytes` of the shape.
    pub parts: [TyPart; 2],
}

/// A half of a fetch. Index i names entry i mod `entries` of rank i / `entries`, of the shape.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyFetch {
    /// `sizeof(TyFetch)`.
    pub size: usize,
    /// Operation number. Fetch n uses slot n mod in_flight, which is free.
    pub operation: u64,
    /// The layer, below `layers` of the shape.
    pub layer: u32,
    /// Bytes of an index: 4 or 8. Indices are signed.
    pub index_bytes: u32,
    /// In `submit`: the indices, in memory of the set's kind, contiguous; null where there are none.
    pub indices: *const c_void,
    /// How many: at most `max_tokens` of the shape.
    pub count: u64,
    /// In `finish`: room for the values of so many entries, in the order of indices, and for their scales; as in
    /// [`TyEntries`]. Both have no bytes where the caller cannot take the entries: the fetch ends, and writes nothing.
    pub parts: [TyPart; 2],
}

/// A stream of the set's device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyReleaseAfter {
    /// `sizeof(TyReleaseAfter)`.
    pub size: usize,
    /// The stream.
    pub stream: *mut c_void,
}

/// The output of a dispatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDispatchOutput {
    /// `sizeof(TyDispatchOutput)`.
    pub size: usize,
    /// Operation number of the dispatch.
    pub operation: u64,
    /// Filled in.
    pub received: TyReceived,
}

/// The end of a combine.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCombineEnd {
    /// `sizeof(TyCombineEnd)`.
    pub size: usize,
    /// Operation number of the combine.
    pub operation: u64,
}

/// A region for expert outputs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCombineInput {
    /// `sizeof(TyCombineInput)`.
    pub size: usize,
    /// Handle slot.
    pub handle: u32,
    /// Element type, as in [`TyTensor`].
    pub dtype: u32,
    /// Filled in: the region.
    pub region: u64,
    /// Filled in: `[rows, H]`.
    pub tensor: TyTensor,
}

/// The rows of each local expert.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyExpertCounts {
    /// `sizeof(TyExpertCounts)`.
    pub size: usize,
    /// Operation number.
    pub operation: u64,
    /// Host memory for `count` numbers, which are written: `expert_counts` of the operation.
    pub counts: *mut u32,
    /// E/R.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// The times of an operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyOperationTrace {
    /// `sizeof(TyOperationTrace)`.
    pub size: usize,
    /// Operation number.
    pub operation: u64,
    /// Filled in.
    pub trace: TyTrace,
}
