/*
 * The plugin ABI of tokenyard. Generated from abi/src: do not edit.
 *
 * A plugin is a shared library that exports one *data* symbol per kind of component it provides (see
 * the end of this file), so that no code of it runs before the host has checked it. The author's guide
 * is docs/plugin-guide.md; plugins/example-c is a complete transport in one file.
 *
 * Rules that hold for every slot:
 * - every structure starts with its size in bytes; fields are only ever appended;
 * - enumerations cross as fixed-width integers; an unknown value is an error, never a guess;
 * - no allocation crosses: the side that makes a thing destroys it; strings are (pointer, length), UTF-8,
 *   not terminated, valid for the call only;
 * - a slot returns a status (TY_OK is 0); details go to the caller's TyError;
 * - a plugin must not unwind or longjmp across a slot; libraries are never unloaded;
 * - each slot states the threads that may call it.
 */

#ifndef TOKENYARD_PLUGIN_H
#define TOKENYARD_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

struct TyHost;
struct TyTransportTable;

/**
 * First eight bytes of every export: `TOKNYARD` read as a little-endian integer.
 */
#define TY_MAGIC 4923069194490826580

/**
 * The call succeeded.
 */
#define TY_OK 0

/**
 * The component cannot run here: a library, device, right or capability is missing.
 */
#define TY_UNAVAILABLE -1

/**
 * The component does not support the request.
 */
#define TY_UNSUPPORTED -2

/**
 * The component's own config table is wrong.
 */
#define TY_CONFIG -3

/**
 * The operating system refused a call; `TyError.os_errno` has the reason.
 */
#define TY_SYSTEM -4

/**
 * A peer could not be reached or is gone.
 */
#define TY_PEER_LOST -5

/**
 * A command failed on the fabric (an error completion), or the fabric is unhealthy.
 */
#define TY_TRANSPORT -6

/**
 * The call did not end within its deadline.
 */
#define TY_DEADLINE -7

/**
 * The host raised the abort word of the wait board; the call stopped waiting.
 */
#define TY_ABORTED -8

/**
 * A peer sent bytes that fail a check.
 */
#define TY_PROTOCOL -9

/**
 * The arena or another fixed resource is full; nothing was moved.
 */
#define TY_FULL -10

/**
 * This rank or a peer refused its input; nothing was moved.
 */
#define TY_REFUSED -11

/**
 * The component broke its own contract.
 */
#define TY_INTERNAL -12

/**
 * The component panicked; the instance must not be used again.
 */
#define TY_PANIC -13

/**
 * Ranks disagree on a value that must be equal, for example on the next operation.
 */
#define TY_MISMATCH -14

/**
 * Bytes that fit an operation's name in a [`TyError`].
 */
#define TY_ERROR_OPERATION 32

/**
 * Bytes that fit a message in a [`TyError`].
 */
#define TY_ERROR_MESSAGE 464

/**
 * Log level of `TyHost::log`: an error.
 */
#define TY_LOG_ERROR 1

/**
 * Something is wrong, but the component continues.
 */
#define TY_LOG_WARN 2

/**
 * News for an operator, once.
 */
#define TY_LOG_INFO 3

/**
 * Details for a developer of the component.
 */
#define TY_LOG_DEBUG 4

/**
 * Kind of memory, a bit: ordinary host memory.
 */
#define TY_MEMORY_HOST 1

/**
 * CUDA device memory.
 */
#define TY_MEMORY_CUDA 2

/**
 * HIP device memory.
 */
#define TY_MEMORY_HIP 4

/**
 * Kind of handle, a bit: the type of a window's descriptor. Here a memfd of host memory, which other
 * processes map.
 */
#define TY_HANDLE_MEMFD 1

/**
 * Device memory that its driver has exported to a POSIX descriptor, for the same driver in another process.
 */
#define TY_HANDLE_POSIX 2

/**
 * Device memory that its driver has exported for other hosts of the same fabric. Reserved for NVLink
 * across hosts: it has no descriptor, and nothing uses it yet.
 */
#define TY_HANDLE_FABRIC 4

/**
 * Device memory as a dmabuf, for NICs.
 */
#define TY_HANDLE_DMABUF 8

/**
 * Major version of the kernel set ABI.
 */
#define TY_KERNELS_MAJOR 0

/**
 * Minor version of the kernel set ABI.
 */
#define TY_KERNELS_MINOR 16

/**
 * In [`TyShape`]: dispatches and combines. Each set takes it.
 */
#define TY_RUNS_MOE 0

/**
 * In [`TyShape`]: messages between pairs of ranks. The set then has `TY_KERNELS_CAP_PIPE` among its needs, or
 * refuses to open. E, K, H, M and the number of handles are 0.
 */
#define TY_RUNS_PIPE 1

/**
 * In [`TyShape`]: gathers over all ranks. The set then has `TY_KERNELS_CAP_GATHER` among its needs, or refuses to
 * open. E, K, H, M and the number of handles are 0.
 */
#define TY_RUNS_GATHER 2

/**
 * In [`TyShape`]: entries of a table that all ranks hold together. The set then has `TY_KERNELS_CAP_TABLE` among its
 * needs, or refuses to open. E, K, H and the number of handles are 0.
 */
#define TY_RUNS_TABLE 3

/**
 * In [`TyShape`]: gathers, as with `TY_RUNS_GATHER`, and reduce-scatters. The set then has `TY_KERNELS_CAP_GATHER` and
 * `TY_KERNELS_CAP_REDUCE` among its needs, or refuses to open. `in_flight` is even: each call has two slots.
 */
#define TY_RUNS_REDUCE 4

/**
 * Most windows a kernel set may ask for.
 */
#define TY_MAX_WINDOWS 8

/**
 * The scale-up level: inside a domain.
 */
#define TY_LEVEL_SCALE_UP 0

/**
 * The scale-out level: between domains.
 */
#define TY_LEVEL_SCALE_OUT 1

/**
 * In [`TyKernelNeeds`]: it can go on without lost ranks (`lost` in [`TyPlan`]).
 */
#define TY_KERNELS_CAP_MASKING 1

/**
 * In [`TyKernelNeeds`]: it takes calls in the order of a stream (`TY_DISPATCH_ON_STREAM`,
 * `TY_COMBINE_ON_STREAM`). Only a set that works on a device, and has its table.
 */
#define TY_KERNELS_CAP_STREAMS 2

/**
 * In [`TyKernelNeeds`]: it takes calls for which no host thread waits (`TY_DISPATCH_NO_SYNC`,
 * `TY_COMBINE_NO_SYNC`), also on a stream that captures a graph. With `TY_KERNELS_CAP_STREAMS` only.
 */
#define TY_KERNELS_CAP_NO_SYNC 4

/**
 * In [`TyKernelNeeds`]: it takes `max_tokens` of a dispatch.
 */
#define TY_KERNELS_CAP_CALL_TOKENS 8

/**
 * In [`TyKernelNeeds`]: it takes `TY_COMBINE_ROUND_ONCE`, and `beside` of a combine.
 */
#define TY_KERNELS_CAP_ROUND_ONCE 16

/**
 * In [`TyKernelNeeds`]: it takes `TY_COMBINE_SUM_WEIGHTS`.
 */
#define TY_KERNELS_CAP_SUM_WEIGHTS 32

/**
 * In [`TyKernelNeeds`]: a handle needs nothing of the region of its dispatch, in any layout.
 */
#define TY_KERNELS_CAP_NO_REGION 64

/**
 * In [`TyKernelNeeds`]: combines of the packed layout take `TY_COMBINE_ROUND_ONCE`, `topk_weights` and `topk_idx`.
 */
#define TY_KERNELS_CAP_PACKED_SUMS 128

/**
 * In [`TyKernelNeeds`]: it takes `expert_totals` and `waited_ns` of calls in the packed layout.
 */
#define TY_KERNELS_CAP_STATISTICS 256

/**
 * In [`TyKernelNeeds`]: it takes `TY_DISPATCH_COLUMN_SCALES` and `TY_DISPATCH_SOURCE_TOKENS`.
 */
#define TY_KERNELS_CAP_PACKED_FORMS 512

/**
 * In [`TyKernelNeeds`]: it takes `TY_COMBINE_LOGFMT10`.
 */
#define TY_KERNELS_CAP_LOGFMT10 1024

/**
 * In [`TyKernelNeeds`]: where losses are masked, its operations may leave out ranks that live, too. It then takes
 * `TY_SUBMIT_MASK` and `TY_QUERY_MASKS`. With `TY_KERNELS_CAP_MASKING` only.
 */
#define TY_KERNELS_CAP_MASKS 2048

/**
 * In [`TyKernelNeeds`]: it takes `TY_LAYOUT_RANK_MAJOR`.
 */
#define TY_KERNELS_CAP_RANK_MAJOR 4096

/**
 * In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_PIPE`: it takes `TY_SUBMIT_SEND` and
 * `TY_SUBMIT_RECV`.
 */
#define TY_KERNELS_CAP_PIPE 8192

/**
 * In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_GATHER`: it takes `TY_SUBMIT_GATHER` and
 * `TY_FINISH_GATHER`.
 */
#define TY_KERNELS_CAP_GATHER 16384

/**
 * In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_TABLE`: it takes `TY_SUBMIT_ENTRIES`,
 * `TY_SUBMIT_FETCH` and `TY_FINISH_FETCH`.
 */
#define TY_KERNELS_CAP_TABLE 32768

/**
 * In [`TyKernelNeeds`], of an instance that was opened with `TY_RUNS_REDUCE`: it takes `TY_SUBMIT_REDUCE` and
 * `TY_FINISH_REDUCE`.
 */
#define TY_KERNELS_CAP_REDUCE 65536

/**
 * In [`TyKernelNeeds`]: it takes `max_rows` of a dispatch.
 */
#define TY_KERNELS_CAP_ROW_CAP 131072

/**
 * In `lost` of [`TyPlan`]: the rank is a member of its teams, and is lost.
 */
#define TY_RANK_LOST 1

/**
 * In `lost` of [`TyPlan`]: the rank is a member of no team.
 */
#define TY_RANK_ABSENT 2

/**
 * In [`TyWaitBoard`]: an operation without a number: a graph launched it, so no host knows whether all
 * ranks have begun it.
 */
#define TY_OPERATION_OF_GRAPH UINT64_MAX

/**
 * Waiting for a peer to enter the operation at all: bounded by `late_ms`.
 */
#define TY_PHASE_ENTRY 1

/**
 * Waiting for an owner's grant (base offsets): bounded by `deadline_ms`, as are those below.
 */
#define TY_PHASE_GRANT 2

/**
 * Waiting for the rows of a dispatch.
 */
#define TY_PHASE_ROWS 3

/**
 * Waiting for the rows of a combine.
 */
#define TY_PHASE_COMBINE_ROWS 4

/**
 * Waiting until a peer has read this rank's rows.
 */
#define TY_PHASE_DONE 5

/**
 * Waiting for room in a command queue.
 */
#define TY_PHASE_QUEUE 6

/**
 * Waiting until a peer sends a message, or takes one: bounded by `late_ms`.
 */
#define TY_PHASE_MESSAGE 7

/**
 * In `submit`, with `TyDispatch`: starts a dispatch. Each set takes it.
 */
#define TY_SUBMIT_DISPATCH 1

/**
 * In `submit`, with `TyCombine`: starts a combine. Each set takes it.
 */
#define TY_SUBMIT_COMBINE 2

/**
 * In `submit`, with `TyAgree`, of a set that takes several domains of several ranks: passes on the refusal that
 * this rank knows, and learns those of others. An error is the first of them, in order of ranks.
 */
#define TY_SUBMIT_AGREE 3

/**
 * In `submit`, with `TyCopies`: copies arrays of an output that was received. Each set that works on a device
 * takes it, and no other.
 */
#define TY_SUBMIT_COPIES 4

/**
 * In `submit`, with `TyRoutingCounts`: counts a routing. Each set with `TY_KERNELS_CAP_STREAMS` takes it, and no
 * other.
 */
#define TY_SUBMIT_ROUTING_COUNTS 5

/**
 * In `submit`, with `TyMask`, of a set with `TY_KERNELS_CAP_MASKS`: changes the mask of a rank, behind the kernels
 * of all operations that were sent. No operation is open, and no rank is inside an operation when a rank is
 * unmasked.
 */
#define TY_SUBMIT_MASK 6

/**
 * In `submit`, with `TyReleaseAfter`, of a set with `TY_KERNELS_CAP_STREAMS`. Every region, released before this
 * call or after it, becomes free only once this stream, too, has passed the work that is queued on it now. A
 * stream that captures a graph is passed within that graph alone: there it holds back the regions that
 * operations of the graph may get again.
 */
#define TY_SUBMIT_RELEASE_AFTER 7

/**
 * In `submit`, with `TyMessage`, of an instance with `TY_KERNELS_CAP_PIPE`: sends a message to a rank. Waits while
 * `in_flight` messages to it are not taken. The memory may be changed once the call returns.
 */
#define TY_SUBMIT_SEND 8

/**
 * In `submit`, with `TyMessage`, of an instance with `TY_KERNELS_CAP_PIPE`: waits for the next message of a rank, and
 * writes it to the memory.
 */
#define TY_SUBMIT_RECV 9

/**
 * In `submit`, with `TyGather`, of an instance with `TY_KERNELS_CAP_GATHER`: sends the shards of this rank to all
 * ranks. Their memory may be changed once the call returns.
 */
#define TY_SUBMIT_GATHER 10

/**
 * In `submit`, with `TyEntries`, of an instance with `TY_KERNELS_CAP_TABLE`: writes the entries of this rank in a
 * layer. All ranks do so between two barriers of the host, and no fetch is open on any of them. Their memory may be
 * changed once the call returns.
 */
#define TY_SUBMIT_ENTRIES 11

/**
 * In `submit`, with `TyFetch`, of an instance with `TY_KERNELS_CAP_TABLE`: starts to read entries of any ranks, which
 * take no part. The indices may be changed once the call returns.
 */
#define TY_SUBMIT_FETCH 12

/**
 * In `submit`, with `TyReduce`, of an instance with `TY_KERNELS_CAP_REDUCE`: sends each rank its part of the tensors.
 * Their memory may be changed once the call returns.
 */
#define TY_SUBMIT_REDUCE 13

/**
 * In `finish`, with `TyDispatchOutput`: ends a dispatch. Each set takes it.
 */
#define TY_FINISH_DISPATCH 1

/**
 * In `finish`, with `TyCombineEnd`: ends a combine. Each set takes it.
 */
#define TY_FINISH_COMBINE 2

/**
 * In `finish`, with `TyGather`, of an instance with `TY_KERNELS_CAP_GATHER`: waits for the shards of all ranks, and
 * writes them. Each part has room for those of all ranks, in order of ranks.
 */
#define TY_FINISH_GATHER 3

/**
 * In `finish`, with `TyFetch`, of an instance with `TY_KERNELS_CAP_TABLE`: waits for the entries, and writes them.
 * Fetches are finished in any order. `TY_REFUSED` for an index without an entry: no output is written then, and the
 * instance goes on.
 */
#define TY_FINISH_FETCH 4

/**
 * In `finish`, with `TyReduce`, of an instance with `TY_KERNELS_CAP_REDUCE`: waits for the parts of all ranks, and
 * writes their sums.
 */
#define TY_FINISH_REDUCE 5

/**
 * In `query`, with `TyDispatchOutput`; optional. Called between the halves of a dispatch. Gives the place of its
 * output, as `TY_FINISH_DISPATCH` will describe it, if the place is fixed already; else `x` stays absent. Until
 * the end of the dispatch nothing in the output may be read, and `tokens` may be 0. The host claims the region
 * from this call on, and releases it whether the dispatch succeeds or not.
 */
#define TY_QUERY_DISPATCH_OUTPUT 1

/**
 * In `query`, with `TyCombineInput`: gives an arena region for expert outputs of a handle, so that combine need
 * not copy them. Where the handle's dispatch was in the order of a stream, the region is too: only work on that
 * stream may write it. Each set takes it.
 */
#define TY_QUERY_COMBINE_INPUT 2

/**
 * In `query`, with `TyExpertCounts`; optional: gives the counts of an operation without a wait for its rows. The
 * operation is a dispatch or a replay for which the host waits. It was received, and is one of the last
 * `in_flight`.
 */
#define TY_QUERY_EXPERT_COUNTS 3

/**
 * In `query`, with `TyMasks`, of a set with `TY_KERNELS_CAP_MASKS`: gives the masks of ranks, behind the kernels
 * of all operations that were sent.
 */
#define TY_QUERY_MASKS 4

/**
 * In `query`, with `TyGpuRing`; optional. After `plan`, once for each level that has a transport. Fills in the
 * ring of the level that it names, where kernels post through the host on that level; the ring is valid until
 * `close`. Else `commands` stays null. The host stops reading the ring before transports are closed.
 */
#define TY_QUERY_GPU_RING 5

/**
 * In `query`, with `TyCounters`; optional. After `plan`. Gives the counters for reports, which show them as
 * unknown where `peers` stays null.
 */
#define TY_QUERY_COUNTERS 6

/**
 * In `query`, with `TyOperationTrace`; optional, for tools. Gives the times of one of the last `in_flight`
 * operations, which has ended: call `flush` before.
 */
#define TY_QUERY_TRACE 7

/**
 * In [`TyGather`], of an instance with `TY_KERNELS_CAP_STREAMS`: shards are read, and outputs written, in the order of
 * `stream`. They stay valid until it has passed the work that `submit` and `finish` queue there. Both halves of a
 * gather name the same stream.
 */
#define TY_GATHER_ON_STREAM 1

/**
 * In [`TyReduce`], in `submit`: a gather of the sums follows, as operation + 1. So ranks that make an all-reduce
 * differ from those that make a reduce-scatter alone, and learn it before any of them waits for that gather.
 */
#define TY_REDUCE_GATHERED 1

/**
 * Rows in one block, by source rank, then source token.
 */
#define TY_LAYOUT_FLAT 1

/**
 * Rows grouped by local expert with aligned starts.
 */
#define TY_LAYOUT_EXPERT_MAJOR 2

/**
 * `[E/R, R*M, H]` with counts.
 */
#define TY_LAYOUT_PACKED 3

/**
 * `[R, M, H]` with counts: one row per token and rank, where source rank and the token's number among those of
 * its source that come here fix the place. Only with `TY_KERNELS_CAP_RANK_MAJOR`.
 */
#define TY_LAYOUT_RANK_MAJOR 4

/**
 * Rows travel as they are.
 */
#define TY_CAST_NONE 0

/**
 * Rows are cast to FP8 e4m3 with one f32 scale per 128 channels.
 */
#define TY_CAST_FP8 1

/**
 * As `TY_CAST_FP8`, with scales rounded up to powers of two.
 */
#define TY_CAST_FP8_ROUND 2

/**
 * As `TY_CAST_FP8_ROUND`, with the scales' exponent bytes packed by four (UE8M0).
 */
#define TY_CAST_FP8_UE8M0 3

/**
 * In [`TyReduce`](crate::TyReduce): parts travel as they are.
 */
#define TY_PRECISION_FP32 0

/**
 * In [`TyReduce`](crate::TyReduce): the parts of f32 tensors travel as bf16. An element of four that follow each other
 * becomes the upper half of its bits plus 16 bits of a hash of the four and of their place; `docs/pipes.md` has the
 * hash. The part that stays on its rank is not rounded.
 */
#define TY_PRECISION_BF16 1

/**
 * Reuse the routing of the handle: no counting.
 */
#define TY_DISPATCH_REPLAY 1

/**
 * Worst-case sizes: the host learns no count, the counts stay in device memory.
 */
#define TY_DISPATCH_WORST_CASE 2

/**
 * Zero the padding rows of the expert-major layout, or those of the rank-major one behind each source's last row.
 */
#define TY_DISPATCH_ZERO_PADDING 4

/**
 * In the order of `stream`: tensors are read after the work that was queued there before
 * `submit`, and work queued there after `finish` runs after the operation. Neither call
 * waits for rows. Ranks need not agree on the flag.
 */
#define TY_DISPATCH_ON_STREAM 8

/**
 * With `TY_DISPATCH_ON_STREAM`: the host waits for nothing; `submit` does not even wait for the
 * agreement of the ranks. A fresh dispatch has `TY_DISPATCH_WORST_CASE` too. A failure on the device closes
 * the communicator: a later call, or `flush`, reports it. Ranks need not agree on the flag; a refusal, too,
 * closes the communicator on the ranks that set it.
 *
 * The stream may capture a graph: then nothing runs, and a refusal of this rank is reported to this
 * rank alone. Both halves belong to one capture. The graph may be launched any number of times while
 * no operation is open, in the same order with other operations on all ranks. The output of the call,
 * its handle and its tensors stay valid until the last launch of the graph.
 */
#define TY_DISPATCH_NO_SYNC 16

/**
 * `finish` follows at once: the caller queues and computes nothing between the two.
 */
#define TY_DISPATCH_AT_ONCE 32

/**
 * In the packed layout: the scales of each local expert's rows lie column by column. Only with
 * `TY_KERNELS_CAP_PACKED_FORMS`. Ranks need not agree on the flag.
 */
#define TY_DISPATCH_COLUMN_SCALES 64

/**
 * In the packed layout: `source` has source tokens alone, without their rank. As `TY_DISPATCH_COLUMN_SCALES`.
 */
#define TY_DISPATCH_SOURCE_TOKENS 128

/**
 * With `max_rows`: rows from there on are dropped. Without it, a dispatch of which more rows come is refused with
 * `is_full` on all ranks, before a row moves; it has exact sizes then.
 *
 * The rows of x have the places that they have without a cap: an expert-major expert starts behind the aligned rows of
 * those before it. The row of a copy from `max_rows` on is dropped: its slot is -1, a combine leaves it out of its
 * sums, and the weight that returns for it is 0. `expert_counts`, `expert_starts` and `expert_ends` name the rows
 * that are left. Of flat rows, those from `max_rows` on are dropped, and N counts the others. So does a replay.
 */
#define TY_DISPATCH_DROP 256

/**
 * In `exchange`: with the owners of experts, which are the ranks of this domain where there are several.
 */
#define TY_EXCHANGE_OWNERS 0

/**
 * In `exchange`: with the ranks of other domains that have this rank's index there.
 */
#define TY_EXCHANGE_RAIL 1

/**
 * In [`TyCopy`]: `to` has elements of 8 bytes, signed as those of `from` are.
 */
#define TY_COPY_WIDE 1

/**
 * In [`TyCopy`]: only rows that arrived are copied, and those behind them, up to `room`, become `fill`. Otherwise all
 * elements are copied.
 */
#define TY_COPY_FILL 2

/**
 * In [`TyCopy`]: `to` has the columns of `from` one after the other, each with room for `room / columns`
 * elements. Alone.
 */
#define TY_COPY_COLUMNS 4

/**
 * In [`TyCopies`]: in the order of `stream`. Otherwise the copies have ended when the call returns.
 */
#define TY_COPIES_ON_STREAM 1

/**
 * Most copies of one call.
 */
#define TY_MAX_COPIES 13

/**
 * Multiply each expert's row by its weight before summing (expert-major and packed).
 */
#define TY_COMBINE_WEIGHTED 1

/**
 * As `TY_DISPATCH_ON_STREAM`.
 */
#define TY_COMBINE_ON_STREAM 2

/**
 * As `TY_DISPATCH_NO_SYNC`. Where only the device knows T, rows of `out` from T on are not written.
 */
#define TY_COMBINE_NO_SYNC 4

/**
 * As `TY_DISPATCH_AT_ONCE`, for `finish`.
 */
#define TY_COMBINE_AT_ONCE 8

/**
 * Round each sum once, on the rank of its token, and not the sum of each rank's experts before (expert-major
 * and packed). Only with `TY_KERNELS_CAP_ROUND_ONCE`, or, for the packed layout, `TY_KERNELS_CAP_PACKED_SUMS`.
 */
#define TY_COMBINE_ROUND_ONCE 16

/**
 * Each entry of `out_weights` is the sum of the `weights` of all ranks that received the token, not only the
 * entry of the expert's rank (flat and rank-major). Only with `TY_KERNELS_CAP_SUM_WEIGHTS`.
 */
#define TY_COMBINE_SUM_WEIGHTS 32

/**
 * Each rank's sum for a token is rounded to bf16 and has the values of a LogFMT-10 round trip after that, also
 * a rank's sum for its own token. Rows are packed bf16 rows, H is a multiple of 512, and sums are not rounded
 * once. Only with `TY_KERNELS_CAP_LOGFMT10`.
 */
#define TY_COMBINE_LOGFMT10 64

/**
 * Layout hash of the transport ABI on 64-bit targets.
 */
#define TY_TRANSPORT_LAYOUT 2018482854712914890

/**
 * Layout hash of the topology ABI on 64-bit targets.
 */
#define TY_TOPOLOGY_LAYOUT 10371293804723655335ull

/**
 * Layout hash of the kernel set ABI on 64-bit targets.
 */
#define TY_KERNELS_LAYOUT 16531797373215281530ull

/**
 * Major version of the topology ABI.
 */
#define TY_TOPOLOGY_MAJOR 1

/**
 * Minor version of the topology ABI.
 */
#define TY_TOPOLOGY_MINOR 2

/**
 * Bytes that fit a host's identity.
 */
#define TY_HOST_BYTES 64

/**
 * Most NICs of a place.
 */
#define TY_PLACE_NICS 8

/**
 * Bytes that fit the name of a NIC.
 */
#define TY_NIC_BYTES 64

/**
 * Bytes that fit the text about a missing NIC.
 */
#define TY_MISSING_NIC_BYTES 1024

/**
 * The operator named the NICs: they are used unchanged, and not divided among ranks.
 */
#define TY_PLACE_NICS_GIVEN 1

/**
 * NICs of all names reach each other, so ranks of a rail may have
 * different ones.
 */
#define TY_PLACE_ANY_RAILS 2

/**
 * Major version of the transport ABI.
 */
#define TY_TRANSPORT_MAJOR 1

/**
 * Minor version of the transport ABI.
 */
#define TY_TRANSPORT_MINOR 12

/**
 * Puts of one queue to one peer arrive in order. Informative: protocols never need it (INV-2).
 */
#define TY_CAP_ORDERED 1

/**
 * Signals are raised by the fabric's own atomics.
 */
#define TY_CAP_NATIVE_ATOMICS (1 << 1)

/**
 * Puts carry immediate data.
 */
#define TY_CAP_IMMEDIATE (1 << 2)

/**
 * The op `TY_OP_GET` works.
 */
#define TY_CAP_GET (1 << 3)

/**
 * `peer_address` works: peers' windows are mapped into this process for plain loads and stores. Then a
 * signal, with a put or alone, also carries every plain store that was made before its `post`, as a
 * release does: a reader that sees the signal may load the stored values.
 */
#define TY_CAP_LOAD_STORE (1 << 4)

/**
 * A command to a lost peer, gets from it included, ends within the deadline: with an error, or as done (INV-4). Done
 * is right where the memory of a killed peer outlives it, as shared memory does, and where a buffer holds the put
 * until a stopped peer goes on. The process lives (INV-6).
 */
#define TY_CAP_BOUNDED_PUT (1 << 5)

/**
 * Nothing moves unless a thread drives it: the transport has `progress`, and the host calls it from a
 * thread of its own while the ranks compute.
 */
#define TY_CAP_MANUAL_PROGRESS (1 << 6)

/**
 * The transport must own window memory: the host calls `alloc` instead of the kernel set.
 */
#define TY_CAP_OWNS_MEMORY (1 << 7)

/**
 * Ranks may continue without a lost one (since minor version 2). A peer that ended or stopped, at any
 * point, delays no other peer (INV-6): `post` and `poll` return, commands to other peers continue, the
 * process lives. A failure of one peer hides no failure of another: `health` reports them in turn. A put to
 * the lost peer may occupy its place in the queue until the fabric ends it.
 */
#define TY_CAP_MASKING (1 << 8)

/**
 * `device_api` works: kernels post and wait by themselves (since minor version 3).
 */
#define TY_CAP_DEVICE_API (1 << 9)

/**
 * The transport uses the NICs that `open` names (since minor version 5). Ranks of a rail then need NICs
 * that reach each other, and the communicator does not open if one is missing.
 */
#define TY_CAP_PLACED_NICS (1 << 10)

/**
 * Copy `bytes` from the source window to the destination window of `peer`.
 */
#define TY_OP_PUT 1

/**
 * Copy as `TY_OP_PUT` does, then add `add` to `signal` of `peer`: payload before signal (INV-1).
 */
#define TY_OP_PUT_SIGNAL 2

/**
 * Store the 8 bytes of `value` at the destination, which is 8-byte aligned (INV-3).
 */
#define TY_OP_PUT_VALUE 3

/**
 * Add `add` to `signal` of `peer`.
 */
#define TY_OP_SIGNAL 4

/**
 * Copy `bytes` from the destination window of `peer` to the source window. Optional.
 */
#define TY_OP_GET 5

/**
 * Ask for a `TY_EVENT_DONE` with the command's tag. Errors are always reported.
 */
#define TY_FLAG_NOTIFY 1

/**
 * The command is done: its source is reusable and its slot is free (INV-4, INV-5).
 */
#define TY_EVENT_DONE 1

/**
 * The command failed (INV-7). `status` is negative and `peer` is that of the command. The details are in `health`,
 * whose error names the peer by its world rank if it is about one.
 */
#define TY_EVENT_ERROR 2

/**
 * The contract of device APIs: `backends/gpu/device/common/transport.cuh` of this version.
 */
#define TY_DEVICE_API_VERSION 2

/**
 * A device API in CUDA C++.
 */
#define TY_DIALECT_CUDA 1

/**
 * A device API in HIP C++.
 */
#define TY_DIALECT_HIP 2

/**
 * CUDA's run-time compiler can compile the device API; so can nvcc.
 */
#define TY_COMPILER_NVRTC 1

/**
 * Only nvcc can.
 */
#define TY_COMPILER_NVCC 2

/**
 * HIP's run-time compiler can compile the device API; so can hipcc.
 */
#define TY_COMPILER_HIPRTC 3

/**
 * Only hipcc can.
 */
#define TY_COMPILER_HIPCC 4

/**
 * Kernels load from and store to windows of peers (`kLoadStore`); without it they put. Has the meaning
 * of [`TY_CAP_LOAD_STORE`] for kernels.
 */
#define TY_DEVICE_API_LOAD_STORE 1

/**
 * Room that the host gives to `endpoint`.
 */
#define TY_ENDPOINT_BYTES 4096

/**
 * Most bytes that one rank gives to `all_gather` of a [`TyExchange`].
 */
#define TY_EXCHANGE_BYTES 65536

/**
 * Room that the host gives to `link_name`.
 */
#define TY_LINK_NAME_BYTES 256

/**
 * NICs of all names reach each other: where a transport can use none of the NICs that the topology chose
 * for this rank, it may use others, and logs that. Without the flag it refuses to open.
 */
#define TY_OPEN_ANY_RAILS 1

/**
 * A string, borrowed for the duration of a call: UTF-8, not terminated.
 */
typedef struct TyStr {
  /**
   * First byte; may be null if `bytes` is 0.
   */
  const uint8_t *data;
  /**
   * Length in bytes.
   */
  size_t bytes;
} TyStr;

/**
 * Why a rank takes no part in an operation.
 */
typedef struct TyRefusal {
  /**
   * Empty: it takes part.
   */
  struct TyStr text;
  /**
   * The world rank whose refusal it is: the calling one, or another that the caller has it from.
   */
  uint32_t rank;
  /**
   * 1 where that rank has no room, 0 where it refuses its input.
   */
  uint32_t is_full;
} TyRefusal;

/**
 * A round of an operation without rows: ranks of an exchange learn whether one of them knows of a refusal.
 */
typedef struct TyAgree {
  /**
   * `sizeof(TyAgree)`.
   */
  size_t size;
  /**
   * Operation number.
   */
  uint64_t operation;
  /**
   * One of `TY_EXCHANGE_*`.
   */
  uint32_t exchange;
  /**
   * 1 where the operation is a combine, which begins on the rail with this round; 0 where it is a
   * dispatch, which ends there with it.
   */
  uint32_t is_combine;
  /**
   * The refusal that this rank knows.
   */
  struct TyRefusal refusal;
} TyAgree;

/**
 * The capabilities of a transport on this machine. The transport declares them, and the conformance
 * suite tests exactly these.
 */
typedef struct TyCapabilities {
  /**
   * `sizeof(TyCapabilities)`; set by the host, left unchanged by the component.
   */
  size_t size;
  /**
   * Bits `TY_CAP_*`.
   */
  uint64_t flags;
  /**
   * Kinds of memory that can be registered: bits `TY_MEMORY_*`.
   */
  uint32_t memory_kinds;
  /**
   * Most ranks of a team, this one included.
   */
  uint32_t max_peers;
  /**
   * Most queues.
   */
  uint32_t max_queues;
  /**
   * Most signals on one rank; at most 65,536.
   */
  uint32_t max_signals;
  /**
   * Most commands of a queue that are not done yet.
   */
  uint32_t max_queue_depth;
  /**
   * Most windows.
   */
  uint32_t max_windows;
  /**
   * Most bytes of one put.
   */
  uint64_t largest_put;
} TyCapabilities;

/**
 * A tensor of one or two dimensions. `data` is null where a tensor is absent, and only there: a tensor
 * without elements has an address too.
 */
typedef struct TyTensor {
  /**
   * Address of element (0, 0).
   */
  uint8_t *data;
  /**
   * Element type: 1 bf16, 2 fp16, 3 fp32, 4 fp8 e4m3, 5 u8, 6 i32, 7 i64.
   */
  uint32_t dtype;
  /**
   * Zero.
   */
  uint32_t reserved;
  /**
   * Rows and columns; one-dimensional tensors have one column.
   */
  uint64_t shape[2];
  /**
   * Elements from one row to the next, and from one column to the next.
   */
  int64_t stride[2];
} TyTensor;

/**
 * One combine. Tensors are valid until `finish` returns; with `TY_COMBINE_ON_STREAM` until the
 * stream has passed the work that `finish` queued there.
 */
typedef struct TyCombine {
  /**
   * `sizeof(TyCombine)`.
   */
  size_t size;
  /**
   * Operation number.
   */
  uint64_t operation;
  /**
   * Handle slot.
   */
  uint32_t handle;
  /**
   * Bits `TY_COMBINE_*`.
   */
  uint32_t flags;
  /**
   * As in [`TyDispatch`].
   */
  uint32_t exchange;
  /**
   * As in [`TyDispatch`], with `TY_COMBINE_ON_STREAM`.
   */
  uint32_t sms;
  /**
   * Expert outputs: as many rows as the dispatch returned, `[rows, H]`, contiguous.
   */
  struct TyTensor x;
  /**
   * f32, of the shape of the dispatch's `weights`; may be absent.
   */
  struct TyTensor weights;
  /**
   * `[rows, W]` f32, the output of a replay of this handle whose rows have W > K numbers; absent unless
   * the set declares `TY_KERNELS_CAP_ROUND_ONCE`. With `TY_COMBINE_WEIGHTED` the first K numbers of a row are
   * its token's weights instead of the dispatch's. The bits of the number after them select the experts'
   * rows, of the K, that enter the sum; other rows are left out.
   */
  struct TyTensor beside;
  /**
   * `[T, H]` of the type of `x`; may be absent.
   */
  struct TyTensor bias0;
  /**
   * As `bias0`.
   */
  struct TyTensor bias1;
  /**
   * `[T, H]` of the type of `x`, written by `finish`.
   */
  struct TyTensor out;
  /**
   * `[T, K]` f32; absent unless `weights` is given.
   */
  struct TyTensor out_weights;
  /**
   * `[T, 1]` u8, may be absent: `finish` writes the number of the token's selected experts
   * that are left out of its sum because their rank was lost.
   */
  struct TyTensor missing;
  /**
   * As in [`TyDispatch`].
   */
  struct TyRefusal refusal;
  /**
   * As in [`TyDispatch`].
   */
  void *stream;
  /**
   * `[T, K]` f32: weights of this call instead of the dispatch's; absent unless the set declares
   * `TY_KERNELS_CAP_PACKED_SUMS`, the layout is packed, and `TY_COMBINE_WEIGHTED` is set.
   */
  struct TyTensor topk_weights;
  /**
   * `[T, K]` i64, may be absent: a negative id leaves the expert's row out of the sum. Only with
   * `topk_weights`.
   */
  struct TyTensor topk_idx;
  /**
   * As in [`TyDispatch`].
   */
  int64_t *waited_ns;
} TyCombine;

/**
 * The end of a combine.
 */
typedef struct TyCombineEnd {
  /**
   * `sizeof(TyCombineEnd)`.
   */
  size_t size;
  /**
   * Operation number of the combine.
   */
  uint64_t operation;
} TyCombineEnd;

/**
 * A region for expert outputs.
 */
typedef struct TyCombineInput {
  /**
   * `sizeof(TyCombineInput)`.
   */
  size_t size;
  /**
   * Handle slot.
   */
  uint32_t handle;
  /**
   * Element type, as in [`TyTensor`].
   */
  uint32_t dtype;
  /**
   * Filled in: the region.
   */
  uint64_t region;
  /**
   * Filled in: `[rows, H]`.
   */
  struct TyTensor tensor;
} TyCombineInput;

/**
 * One command: 64 bytes of plain data. Commands of a queue may overtake each other.
 */
typedef struct TyCommand {
  /**
   * One of `TY_OP_*`.
   */
  uint8_t op;
  /**
   * Zero.
   */
  uint8_t reserved;
  /**
   * Bits `TY_FLAG_*`.
   */
  uint16_t flags;
  /**
   * The queue that the command is posted on; repeated here for the transport's convenience.
   */
  uint32_t queue;
  /**
   * Index into the team. May be this rank itself.
   */
  uint32_t peer;
  /**
   * Signal id on the peer.
   */
  uint32_t signal;
  /**
   * The amount to add to the signal: 1 to 65,535.
   */
  uint32_t add;
  /**
   * Window id on this rank.
   */
  uint16_t src_window;
  /**
   * Window id on the peer.
   */
  uint16_t dst_window;
  /**
   * Offset in the source window.
   */
  uint64_t src_offset;
  /**
   * Offset in the destination window.
   */
  uint64_t dst_offset;
  /**
   * Bytes to move; may be 0 for `TY_OP_PUT_SIGNAL`.
   */
  uint64_t bytes;
  /**
   * The value of `TY_OP_PUT_VALUE`.
   */
  uint64_t value;
  /**
   * Returned in the event of the command.
   */
  uint64_t tag;
} TyCommand;

/**
 * A component's own config table.
 */
typedef struct TyConfig {
  /**
   * `sizeof(TyConfig)`.
   */
  size_t size;
  /**
   * TOML text, lines numbered as in the operator's file. Empty if there is no table.
   */
  struct TyStr text;
  /**
   * Name of the file, for messages.
   */
  struct TyStr file;
} TyConfig;

/**
 * A copy of one array of an output.
 */
typedef struct TyCopy {
  /**
   * Elements of 4 bytes.
   */
  const uint8_t *from;
  /**
   * Memory of the caller, with elements of 4 bytes, or of 8.
   */
  uint8_t *to;
  /**
   * Elements of `from`.
   */
  uint64_t elements;
  /**
   * Elements of `to`, at least as many.
   */
  uint64_t room;
  /**
   * Elements of a row.
   */
  uint32_t columns;
  /**
   * If it is not 0, elements that are not negative become their remainder by it.
   */
  uint32_t modulus;
  /**
   * The value of elements behind the rows that arrived.
   */
  int32_t fill;
  /**
   * Bits `TY_COPY_*`; others are an error.
   */
  uint32_t flags;
} TyCopy;

/**
 * Copies of arrays of one output.
 */
typedef struct TyCopies {
  /**
   * `sizeof(TyCopies)`.
   */
  size_t size;
  /**
   * `count` copies; memory of the host.
   */
  const struct TyCopy *copies;
  /**
   * At most `TY_MAX_COPIES`.
   */
  uint32_t count;
  /**
   * Bits `TY_COPIES_*`.
   */
  uint32_t flags;
  /**
   * `totals` of the output: the number of rows that arrived comes first.
   */
  const int64_t *totals;
  /**
   * The stream, with `TY_COPIES_ON_STREAM`.
   */
  void *stream;
} TyCopies;

/**
 * Traffic between this rank and another one over one level, since `plan`. Every field only grows. One
 * thread stores a field, atomically; the host reads it at any time.
 */
typedef struct TyPeerCounters {
  /**
   * Commands to the peer that the transport has accepted.
   */
  uint64_t posted;
  /**
   * Accepted commands that have ended (INV-4), also with an error.
   */
  uint64_t done;
  /**
   * The sum of `add` over all signals of the peer that this rank has raised.
   */
  uint64_t raised;
  /**
   * The total that this rank has waited for, or waits for, over its own signals that the peer
   * raises.
   */
  uint64_t expected;
  /**
   * The total seen on those signals, at the end of the last wait on the peer that succeeded.
   */
  uint64_t received;
  /**
   * Bytes that this rank has put to the peer, records included; 8 for a value. Loads and stores are not counted.
   */
  uint64_t bytes;
} TyPeerCounters;

/**
 * The total by which this rank has raised one signal of a peer. Stored and read as [`TyPeerCounters`].
 */
typedef struct TyRaised {
  /**
   * Signal id on the peer, plus one; 0 where it was never raised.
   */
  uint64_t signal;
  /**
   * The sum of `add`; equals the peer's total once all of it has arrived.
   */
  uint64_t total;
} TyRaised;

/**
 * The counters of a kernel set for reports, in memory of its own that stays valid until `close`.
 */
typedef struct TyCounters {
  /**
   * `sizeof(TyCounters)`.
   */
  size_t size;
  /**
   * R.
   */
  uint32_t ranks;
  /**
   * Entries of `raised` per level and rank.
   */
  uint32_t signals;
  /**
   * Most commands of a queue that are not done, per level.
   */
  uint32_t queue_depth[2];
  /**
   * `2 * R`: by level, then world rank.
   */
  const struct TyPeerCounters *peers;
  /**
   * `2 * R * signals`: by level, then world rank.
   */
  const struct TyRaised *raised;
} TyCounters;

/**
 * The source that a kernel set compiles into its kernels to use a transport.
 */
typedef struct TyDeviceApi {
  /**
   * `sizeof(TyDeviceApi)`.
   */
  size_t size;
  /**
   * [`TY_DEVICE_API_VERSION`] that the source was written for.
   */
  uint32_t version;
  /**
   * One of `TY_DIALECT_*`.
   */
  uint32_t dialect;
  /**
   * One of `TY_COMPILER_*`.
   */
  uint32_t compiler;
  /**
   * Bits `TY_DEVICE_API_*`: how kernels use it.
   */
  uint32_t flags;
  /**
   * Source text of `struct DeviceApi`, to be included inside a namespace.
   */
  struct TyStr source;
  /**
   * Folders that the source includes from.
   */
  const struct TyStr *include_folders;
  /**
   * Number of folders.
   */
  size_t include_folder_count;
  /**
   * Macros of the form `NAME=VALUE`.
   */
  const struct TyStr *defines;
  /**
   * Number of macros.
   */
  size_t define_count;
  /**
   * The value of `DeviceApi::Params`, which kernels take by value.
   */
  const uint8_t *params;
  /**
   * Size of the parameters in bytes.
   */
  size_t param_bytes;
  /**
   * Alignment of the parameters in bytes.
   */
  size_t param_alignment;
} TyDeviceApi;

/**
 * The details of a failure. The caller owns the structure and sets `size`; the component fills the rest
 * when it returns a negative status. Text is UTF-8, ended by a zero byte or the array's end.
 */
typedef struct TyError {
  /**
   * `sizeof(TyError)` of the caller.
   */
  size_t size;
  /**
   * `errno` of a failed system call, or 0.
   */
  int32_t os_errno;
  /**
   * The world rank that the error is about, or -1.
   */
  int32_t rank;
  /**
   * The operation that failed, for example `connect`.
   */
  uint8_t operation[TY_ERROR_OPERATION];
  /**
   * The value found, the value expected, and the fix.
   */
  uint8_t message[TY_ERROR_MESSAGE];
} TyError;

/**
 * Calls for tools on the device that a kernel set works on. Every slot is required. `instance` is that of
 * the kernel set; the thread rules are the same.
 */
typedef struct TyDeviceTable {
  /**
   * `sizeof(TyDeviceTable)` of the plugin.
   */
  size_t size;
  /**
   * Allocates memory of the kind that the set works on, for tensors of tools.
   */
  int32_t (*tensor_alloc)(void *instance, uint64_t bytes, uint8_t **pointer, struct TyError *error);
  /**
   * Frees memory of `tensor_alloc`. An operation that was sent and never received may still use it:
   * the set waits for its kernels first, as it does in `copy`.
   */
  void (*tensor_free)(void *instance, uint8_t *pointer);
  /**
   * Copies between host memory and memory of the kind that the set works on, and waits for the end
   * of the copy. Runs after all work queued on streams of `stream_create`.
   */
  int32_t (*copy)(void *instance,
                  uint8_t *to,
                  const uint8_t *from,
                  uint64_t bytes,
                  struct TyError *error);
  /**
   * Creates a stream for tools. The stream waits for no other stream.
   */
  int32_t (*stream_create)(void *instance, void **stream, struct TyError *error);
  /**
   * Destroys a stream of `stream_create`, after all work queued on it.
   */
  void (*stream_destroy)(void *instance, void *stream);
  /**
   * Queues a copy between two places of the device's memory on a stream of the caller. The stream
   * lives until it has passed the copy.
   */
  int32_t (*copy_on)(void *instance,
                     void *stream,
                     uint8_t *to,
                     const uint8_t *from,
                     uint64_t bytes,
                     struct TyError *error);
  /**
   * Starts a capture: work queued on the stream from now on is recorded into a graph, and does not
   * run. This slot and the next three are called only where the set declares `TY_KERNELS_CAP_NO_SYNC`.
   */
  int32_t (*graph_begin)(void *instance, void *stream, struct TyError *error);
  /**
   * Ends the capture and returns the graph.
   */
  int32_t (*graph_end)(void *instance, void *stream, void **graph, struct TyError *error);
  /**
   * Launches a graph on a stream of `stream_create`.
   */
  int32_t (*graph_launch)(void *instance, void *stream, void *graph, struct TyError *error);
  /**
   * Destroys a graph, after every launch of it.
   */
  void (*graph_destroy)(void *instance, void *graph);
} TyDeviceTable;

/**
 * Arguments of `discover`.
 */
typedef struct TyDiscover {
  /**
   * `sizeof(TyDiscover)`.
   */
  size_t size;
  /**
   * The component's own table.
   */
  struct TyConfig config;
  /**
   * World rank.
   */
  uint32_t rank;
  /**
   * Ranks in the world.
   */
  uint32_t ranks;
  /**
   * Index of the rank on its machine, from the launcher.
   */
  uint32_t local_rank;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyDiscover;

/**
 * One dispatch. Tensors are valid until `finish` returns; with `TY_DISPATCH_ON_STREAM` until
 * the stream has passed the work that `finish` queued there.
 */
typedef struct TyDispatch {
  /**
   * `sizeof(TyDispatch)`.
   */
  size_t size;
  /**
   * Operation number: the same on all ranks, 0, 1, 2, ...
   */
  uint64_t operation;
  /**
   * Handle slot to fill, or to replay.
   */
  uint32_t handle;
  /**
   * Bits `TY_DISPATCH_*`.
   */
  uint32_t flags;
  /**
   * One of `TY_LAYOUT_*`.
   */
  uint32_t layout;
  /**
   * Alignment of expert starts in rows, at least 1 (expert-major only).
   */
  uint32_t alignment;
  /**
   * One of `TY_CAST_*`.
   */
  uint32_t cast;
  /**
   * M of this call: no rank has more tokens. It bounds worst-case sizes, and packed and rank-major blocks,
   * and it is the factor in `source`. At most M of the shape; equal to it unless the set declares
   * `TY_KERNELS_CAP_CALL_TOKENS`; equal on all ranks. Zero in a replay, which takes M of its dispatch.
   */
  uint32_t max_tokens;
  /**
   * One of `TY_EXCHANGE_*`: [`TyKernelsTable`](crate::TyKernelsTable) says when which is submitted.
   */
  uint32_t exchange;
  /**
   * With `TY_DISPATCH_ON_STREAM`: the multiprocessors that kernels of the call occupy, at most 1024; as many as the
   * device has where it has fewer. Zero: the set's own number. Ranks may name different ones.
   */
  uint32_t sms;
  /**
   * `[T, H]`, rows contiguous. In a replay `[T, any]`: rows of another width may take the same routes, of at
   * most as many bytes as max(H, K + 1) numbers of f32, rounded up to 16 bytes.
   */
  struct TyTensor x;
  /**
   * `[T, S]` of 4-byte elements, any strides; absent unless the caller has quantised the rows.
   */
  struct TyTensor scales;
  /**
   * `[T, K]` i64, contiguous; absent in a replay.
   */
  struct TyTensor topk_idx;
  /**
   * `[T, K]` f32, contiguous; may be absent.
   */
  struct TyTensor topk_weights;
  /**
   * With a text: no part is taken. Nothing moves, tensors are not read; all ranks receive the text.
   */
  struct TyRefusal refusal;
  /**
   * With `TY_DISPATCH_ON_STREAM`: a stream of the device. Null there is CUDA's legacy default
   * stream. It lives until the region of the output was released and `flush` or `close` called.
   */
  void *stream;
  /**
   * With `TY_DISPATCH_NO_SYNC` and without `TY_DISPATCH_REPLAY`: T, in device memory, at most the rows
   * of `topk_idx`; read as the other tensors are. Null: as many as those rows.
   */
  const uint32_t *tokens;
  /**
   * i32 `[E/R]` on the set's device, or null: the rows that each local expert receives are added. Only with
   * `TY_KERNELS_CAP_STATISTICS`, and for the packed layout.
   */
  int32_t *expert_totals;
  /**
   * i64 `[R]` beside it, or null: the nanoseconds are added for which this rank has waited until each rank had
   * entered.
   */
  int64_t *waited_ns;
  /**
   * The most rows of x of this rank's output (flat and expert-major), worst-case sizes too; 0: no cap. Ranks may
   * name different ones. Zero in a replay, which takes that of its dispatch. Only with `TY_KERNELS_CAP_ROW_CAP`.
   */
  uint64_t max_rows;
} TyDispatch;

/**
 * The output of a dispatch, in the arena. Absent tensors have null data.
 */
typedef struct TyReceived {
  /**
   * `sizeof(TyReceived)`.
   */
  size_t size;
  /**
   * The arena region that holds all of the output; `release` frees it. Where rows are flat or
   * rank-major, it may be freed before the end of the handle: a combine or a replay reads nothing of it.
   */
  uint64_t region;
  /**
   * Tokens received, N; the worst case where the host learns no count.
   */
  uint64_t tokens;
  /**
   * Rows of `x`: N (flat), X (expert-major), E/R * R*M (packed) or R*M (rank-major); the worst case likewise.
   */
  uint64_t rows;
  /**
   * `[rows, H]`.
   */
  struct TyTensor x;
  /**
   * `[rows, S]`; with `TY_DISPATCH_COLUMN_SCALES` `[E/R * S, R*M]`, contiguous: S columns of each expert.
   */
  struct TyTensor scales;
  /**
   * i32 local expert ids or -1: `[N, K]` (flat), or `[rows, K]` with -1 where no token is (rank-major).
   */
  struct TyTensor ids;
  /**
   * f32: `[N, K]` (flat), `[rows, K]` (rank-major), else `[rows, 1]`.
   */
  struct TyTensor weights;
  /**
   * i32 `source rank * M + source token`, M that of the call: `[N, 1]`, or `[rows, 1]` (packed, rank-major). With
   * `TY_DISPATCH_SOURCE_TOKENS` the token alone.
   */
  struct TyTensor source;
  /**
   * `[N, K]` i32: row of each expert's copy, or -1 (expert-major).
   */
  struct TyTensor slots;
  /**
   * `[E/R, 1]` i32: rows per local expert, without padding.
   */
  struct TyTensor expert_counts;
  /**
   * `[E/R, 1]` i32: first row per local expert (expert-major).
   */
  struct TyTensor expert_starts;
  /**
   * `[E/R, 1]` i32: the row after the last one of each local expert, padding left out (expert-major); may
   * be absent.
   */
  struct TyTensor expert_ends;
  /**
   * `[R, 1]` i32: tokens per source rank.
   */
  struct TyTensor source_counts;
  /**
   * `[R, 1]` i32: tokens of a source rank and of all ranks before it; may be absent.
   */
  struct TyTensor source_ends;
  /**
   * `[E/R, R]` i64: `count | begin << 32` (packed).
   */
  struct TyTensor ranges;
  /**
   * `[2, 1]` i64: the true N and the true number of rows: N (flat, rank-major), X with its padding (expert-major),
   * or the rows of all experts (packed).
   */
  struct TyTensor totals;
  /**
   * `[R, 1]` u8: 1 where rows of a source rank are left out because it was lost, else 0. Where such
   * rows have places already, the places hold zeros, with ids, slots and source -1.
   */
  struct TyTensor lost;
  /**
   * `[E/R, 1]` i32: rows of each local expert that were dropped. Absent where rows are not capped, as is `overflow`.
   */
  struct TyTensor dropped;
  /**
   * `[1, 1]` i32: 1 where any row was dropped, else 0.
   */
  struct TyTensor overflow;
} TyReceived;

/**
 * The output of a dispatch.
 */
typedef struct TyDispatchOutput {
  /**
   * `sizeof(TyDispatchOutput)`.
   */
  size_t size;
  /**
   * Operation number of the dispatch.
   */
  uint64_t operation;
  /**
   * Filled in.
   */
  struct TyReceived received;
} TyDispatchOutput;

/**
 * A tensor of a gather: contiguous memory of the set's kind.
 */
typedef struct TyPart {
  /**
   * Null where it has no bytes.
   */
  void *data;
  /**
   * Its length.
   */
  uint64_t bytes;
} TyPart;

/**
 * The entries of this rank in a layer.
 */
typedef struct TyEntries {
  /**
   * `sizeof(TyEntries)`.
   */
  size_t size;
  /**
   * The layer, below `layers` of the shape.
   */
  uint32_t layer;
  /**
   * Zero.
   */
  uint32_t reserved;
  /**
   * R numbers, in host memory, valid for the call: the entries that each rank writes to the layer now, at most
   * `entries` of the shape.
   */
  const uint64_t *counts;
  /**
   * The values of all entries of this rank, and their scales; null bytes where an entry has none. Together an entry
   * has `message_bytes` of the shape.
   */
  struct TyPart parts[2];
} TyEntries;

/**
 * One event of `poll`.
 */
typedef struct TyEvent {
  /**
   * One of `TY_EVENT_*`.
   */
  uint32_t kind;
  /**
   * Queue of the command.
   */
  uint32_t queue;
  /**
   * Peer of the command.
   */
  uint32_t peer;
  /**
   * `TY_OK`, or the status of the failure. That of a command to a lost peer is `TY_PEER_LOST`, `TY_DEADLINE`
   * or `TY_TRANSPORT`.
   */
  int32_t status;
  /**
   * Tag of the command.
   */
  uint64_t tag;
} TyEvent;

/**
 * A service of the host for `open`, on the thread that calls `open` and while `open` runs. It is for
 * values that ranks must agree on before windows and endpoints exist, such as NCCL's unique id.
 */
typedef struct TyExchange {
  /**
   * `sizeof(TyExchange)` of the host.
   */
  size_t size;
  /**
   * Passed back to every slot.
   */
  void *context;
  /**
   * Writes the bytes of each rank of the team to `all`, in the team's order: `count` times `bytes` bytes.
   * Collective: all ranks pass equally many bytes, at most `TY_EXCHANGE_BYTES`, and call it equally often,
   * including the ranks of the same component's other teams. Ends with an error at the latest when the
   * world's deadlines pass; `open` then returns that status.
   */
  int32_t (*all_gather)(void *context,
                        const uint8_t *mine,
                        size_t bytes,
                        uint8_t *all,
                        struct TyError *error);
} TyExchange;

/**
 * The rows of each local expert.
 */
typedef struct TyExpertCounts {
  /**
   * `sizeof(TyExpertCounts)`.
   */
  size_t size;
  /**
   * Operation number.
   */
  uint64_t operation;
  /**
   * Host memory for `count` numbers, which are written: `expert_counts` of the operation.
   */
  uint32_t *counts;
  /**
   * E/R.
   */
  uint32_t count;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyExpertCounts;

/**
 * The first field of every export. The host checks it before any code of the plugin runs.
 */
typedef struct TyExportHeader {
  /**
   * [`TY_MAGIC`].
   */
  uint64_t magic;
  /**
   * Major version: a new one breaks compatibility. Must be equal on both sides.
   */
  uint32_t major;
  /**
   * Minor version: a new one adds fields.
   */
  uint32_t minor;
  /**
   * The layout hash of this kind (`TY_TRANSPORT_LAYOUT`, ...). Until 1.0 the host accepts its own, and those of
   * earlier minor versions that its structures only append to.
   */
  uint64_t layout;
  /**
   * `sizeof` of the whole export structure.
   */
  size_t size;
} TyExportHeader;

/**
 * A half of a fetch. Index i names entry i mod `entries` of rank i / `entries`, of the shape.
 */
typedef struct TyFetch {
  /**
   * `sizeof(TyFetch)`.
   */
  size_t size;
  /**
   * Operation number. Fetch n uses slot n mod in_flight, which is free.
   */
  uint64_t operation;
  /**
   * The layer, below `layers` of the shape.
   */
  uint32_t layer;
  /**
   * Bytes of an index: 4 or 8. Indices are signed.
   */
  uint32_t index_bytes;
  /**
   * In `submit`: the indices, in memory of the set's kind, contiguous; null where there are none.
   */
  const void *indices;
  /**
   * How many: at most `max_tokens` of the shape.
   */
  uint64_t count;
  /**
   * In `finish`: room for the values of so many entries, in the order of indices, and for their scales; as in
   * [`TyEntries`]. Both have no bytes where the caller cannot take the entries: the fetch ends, and writes nothing.
   */
  struct TyPart parts[2];
} TyFetch;

/**
 * The first numbers of one user among those of a transport.
 */
typedef struct TyFirst {
  /**
   * `sizeof(TyFirst)`.
   */
  size_t size;
  /**
   * Window.
   */
  uint32_t window;
  /**
   * Queue.
   */
  uint32_t queue;
  /**
   * Signal.
   */
  uint32_t signal;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyFirst;

/**
 * A half of a gather. All ranks make it, with as many parts of the same lengths: else it ends with `TY_MISMATCH` on
 * all of them. With a refusal of any rank it ends with `TY_REFUSED` on all. The instance goes on after both.
 */
typedef struct TyGather {
  /**
   * `sizeof(TyGather)`.
   */
  size_t size;
  /**
   * Operation number.
   */
  uint64_t operation;
  /**
   * The shards in `submit`, the outputs in `finish`.
   */
  const struct TyPart *parts;
  /**
   * How many.
   */
  size_t count;
  /**
   * In `submit`: why this rank refuses; no bytes where it does not.
   */
  struct TyStr refusal;
  /**
   * Bits `TY_GATHER_*`.
   */
  uint64_t flags;
  /**
   * The stream, with `TY_GATHER_ON_STREAM`.
   */
  void *stream;
} TyGather;

/**
 * One command of a device, written by a kernel into a [`TyGpuRing`]: the fields of
 * [`TyCommand`](crate::TyCommand) that a kernel fills, then `sequence`.
 */
typedef struct TyGpuRingCommand {
  /**
   * One of `TY_OP_*`, but not `TY_OP_GET`.
   */
  uint32_t op;
  /**
   * Index into the team of the level.
   */
  uint32_t peer;
  /**
   * Signal id on the peer.
   */
  uint32_t signal;
  /**
   * The amount to add to the signal: 1 to 65,535.
   */
  uint32_t add;
  /**
   * Window id on this rank.
   */
  uint32_t src_window;
  /**
   * Window id on the peer.
   */
  uint32_t dst_window;
  /**
   * Offset in the source window.
   */
  uint64_t src_offset;
  /**
   * Offset in the destination window.
   */
  uint64_t dst_offset;
  /**
   * Bytes to move.
   */
  uint64_t bytes;
  /**
   * The value of `TY_OP_PUT_VALUE`.
   */
  uint64_t value;
  /**
   * Number of the command + 1. The kernel stores it last, with release order at system scope: from
   * then on the slot belongs to the host until the command is done.
   */
  uint64_t sequence;
} TyGpuRingCommand;

/**
 * The host's report to kernels about a ring. Every field is stored with release order.
 */
typedef struct TyGpuRingStatus {
  /**
   * Number of commands that are done (INV-4, INV-5): all commands below this number. It only grows.
   */
  uint64_t done;
  /**
   * Not 0: the ring has failed, and no command ends any more. The value is 1 + the number of the
   * command that failed, or all ones where no single command caused the failure. The transport's
   * `health` has the details (INV-7).
   */
  uint64_t failed;
  /**
   * Status of the failure, below zero.
   */
  int64_t status;
} TyGpuRingStatus;

/**
 * Memory that a kernel set gives the host, so that its kernels may use a transport that has no device
 * API. Kernels write commands, and a thread of the host posts them and reports the results.
 *
 * Command number n is in slot n mod `capacity`. A kernel may write it once `done` + `capacity` > n.
 * All of it starts as zeros. Both sides write it, so both use atomic loads and stores, except for the
 * fields of a command after its `sequence` was seen.
 */
typedef struct TyGpuRing {
  /**
   * `sizeof(TyGpuRing)`.
   */
  size_t size;
  /**
   * The level whose transport is used: one of `TY_LEVEL_*`. The host sets it before the call.
   */
  uint64_t level;
  /**
   * The queue on which commands are posted. Only this ring uses it.
   */
  uint32_t queue;
  /**
   * Number of slots, a power of two.
   */
  uint32_t capacity;
  /**
   * `capacity` slots.
   */
  struct TyGpuRingCommand *commands;
  /**
   * One status record.
   */
  struct TyGpuRingStatus *status;
  /**
   * `signals` words: the totals of the signals on this rank, stored after the payload is visible to
   * the device (INV-1).
   */
  uint64_t *totals;
  /**
   * Number of signals in `totals`: ids 0 to `signals` - 1.
   */
  uint32_t signals;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyGpuRing;

/**
 * An ordered list of world ranks that a transport is opened for. A `peer` is an index into it.
 */
typedef struct TyTeam {
  /**
   * `sizeof(TyTeam)`.
   */
  size_t size;
  /**
   * This process' index in the list.
   */
  uint32_t me;
  /**
   * Length of the list.
   */
  uint32_t count;
  /**
   * `count` world ranks, valid for the call only.
   */
  const uint32_t *world_ranks;
} TyTeam;

/**
 * The resources that the kernel set will use. The host has checked them against the capabilities.
 */
typedef struct TyTransportNeeds {
  /**
   * `sizeof(TyTransportNeeds)`.
   */
  size_t size;
  /**
   * Windows that will be registered.
   */
  uint32_t windows;
  /**
   * Queues that will be used: 0 .. queues.
   */
  uint32_t queues;
  /**
   * Signal ids that will be used on every rank: 0 .. signals; at most 65,536.
   */
  uint32_t signals;
  /**
   * Most commands of a queue that are not done yet.
   */
  uint32_t queue_depth;
  /**
   * Most bytes of one put.
   */
  uint64_t largest_put;
  /**
   * Most time of a connect, of a commit, and of a command whose peer takes nothing, in nanoseconds.
   */
  uint64_t deadline_ns;
} TyTransportNeeds;

/**
 * Arguments of `open`. Everything is valid for the call only.
 */
typedef struct TyTransportOpen {
  /**
   * `sizeof(TyTransportOpen)`.
   */
  size_t size;
  /**
   * The component's own table.
   */
  struct TyConfig config;
  /**
   * The ranks that will communicate with each other.
   */
  struct TyTeam team;
  /**
   * The resources that will be used.
   */
  struct TyTransportNeeds needs;
  /**
   * `nic_count` names of NICs that the topology chose for this rank. Empty if it chose none. A
   * transport whose own table names NICs uses those.
   */
  const struct TyStr *nics;
  /**
   * Number of `nics`.
   */
  size_t nic_count;
  /**
   * Bits `TY_OPEN_*` (since minor version 6).
   */
  uint32_t flags;
  /**
   * Ordinal of the GPU whose kernels use the transport, as its driver counts, or -1: they run on the
   * host (since minor version 9).
   */
  int32_t device;
  /**
   * The exchange of bytes among the ranks of the team while they open (since minor version 9).
   */
  const struct TyExchange *exchange;
} TyTransportOpen;

/**
 * A transport's requirements on window memory. The host merges those of both levels: it intersects
 * kinds, unites handles and takes the larger alignment.
 */
typedef struct TyMemoryNeeds {
  /**
   * `sizeof(TyMemoryNeeds)`.
   */
  size_t size;
  /**
   * Acceptable kinds: bits `TY_MEMORY_*`.
   */
  uint32_t kinds;
  /**
   * Handles that a window must have, where its kind of memory can have them: bits `TY_HANDLE_*`.
   */
  uint32_t handles;
  /**
   * Required alignment of address and length in bytes; a power of two.
   */
  uint64_t alignment;
} TyMemoryNeeds;

/**
 * One window: registered memory of the same layout on every rank, addressed by (peer, offset).
 */
typedef struct TyWindow {
  /**
   * `sizeof(TyWindow)`.
   */
  size_t size;
  /**
   * Dense, in order of registration, from 0.
   */
  uint32_t id;
  /**
   * One of `TY_MEMORY_*`.
   */
  uint32_t kind;
  /**
   * First byte on this rank; a multiple of 128 where the host asked for the memory.
   */
  uint8_t *pointer;
  /**
   * Length in bytes; equal on all ranks.
   */
  uint64_t bytes;
  /**
   * A descriptor of the memory that stays open while the window lives, or -1.
   */
  int32_t fd;
  /**
   * Device ordinal, or -1 for host memory.
   */
  int32_t device;
  /**
   * Offset of the window in the file of `fd`, in bytes.
   */
  uint64_t fd_offset;
  /**
   * The type of `fd`: one of `TY_HANDLE_*`, or 0 where there is none.
   */
  uint32_t handle;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyWindow;

/**
 * A ring of kernels that a transport may serve. The memory behind the pointers of `ring`, and behind
 * `counters` and `raised`, stays valid until `close` has returned; the rest is valid for the call.
 */
typedef struct TyServeRing {
  /**
   * `sizeof(TyServeRing)`.
   */
  size_t size;
  /**
   * The ring. Kernels wrote its commands, so they are checked: peer, windows, ends of puts, signal and
   * `add`. A command that breaks a rule ends the ring with a failure.
   */
  const struct TyGpuRing *ring;
  /**
   * `peers` entries, for reports: the thread stores `posted`, `done`, `raised` and `bytes` atomically.
   */
  struct TyPeerCounters *counters;
  /**
   * `peers * ring.signals` words, by peer, then signal: the total by which each was raised, stored in
   * the same way.
   */
  uint64_t *raised;
  /**
   * The windows of this transport, in order of their ids.
   */
  const struct TyWindow *windows;
  /**
   * Number of windows.
   */
  size_t window_count;
  /**
   * Most bytes of one put.
   */
  uint64_t largest_put;
  /**
   * Ranks of the team.
   */
  uint32_t peers;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyServeRing;

/**
 * A transport. A vendor fills this structure to contribute a fabric.
 *
 * Thread rules: the host calls *cold* slots (`probe`, `open`, `close`, `memory_needs`, `alloc`,
 * `register`, `endpoint`, `connect`, `commit`, `serve_ring`, `peer_address`) on one thread at a time,
 * which may block: up to `serve_ring` it is a thread of the bring-up. One thread at a time calls *hot*
 * slots (`post`, `poll`, `read_signal`) of one queue; different threads may use different queues at
 * once. `health` may be called from any thread.
 *
 * Order of calls: `probe`, `open`, `memory_needs`, (`alloc`,) `register` per window, `endpoint` and
 * `connect` per peer, `commit`, (`serve_ring`,) then hot slots, then `close`.
 */
typedef struct TyTransportTable {
  /**
   * `sizeof(TyTransportTable)` of the plugin.
   */
  size_t size;
  /**
   * The component's name as a config writes it: `[a-z0-9_-]+`. Static.
   */
  struct TyStr name;
  /**
   * The component's own version, as text for display. Static.
   */
  struct TyStr version;
  /**
   * One line of text for display: fabric, hardware. Static.
   */
  struct TyStr about;
  /**
   * Required, cold. Gives the capabilities of the component on this machine, without side effects.
   * `config` is the text of the component's own TOML table, `file` the name of the file for
   * messages.
   */
  int32_t (*probe)(const struct TyHost *host,
                   const struct TyConfig *config,
                   struct TyCapabilities *capabilities,
                   struct TyError *error);
  /**
   * Required, cold. Makes an instance for a team.
   */
  int32_t (*open)(const struct TyHost *host,
                  const struct TyTransportOpen *open,
                  void **instance,
                  struct TyError *error);
  /**
   * Required, cold. Ends the instance: it accesses no window afterwards. Called once.
   */
  void (*close)(void *instance);
  /**
   * Required, cold. Gives the requirements on window memory.
   */
  int32_t (*memory_needs)(void *instance, struct TyMemoryNeeds *needs, struct TyError *error);
  /**
   * Optional, cold; required with `TY_CAP_OWNS_MEMORY`. Allocates the memory of one window: the host
   * sets `id` and `bytes`, the transport fills the rest. `close` frees it.
   */
  int32_t (*alloc)(void *instance, struct TyWindow *window, struct TyError *error);
  /**
   * Required, cold. Registers one window. All ranks register equal sizes in the same order.
   */
  int32_t (*register_)(void *instance, const struct TyWindow *window, struct TyError *error);
  /**
   * Required, cold. Writes the bytes that `peer` needs to reach this rank. `capacity` is at
   * least `TY_ENDPOINT_BYTES`; `*bytes` becomes the length.
   */
  int32_t (*endpoint)(void *instance,
                      uint32_t peer,
                      uint8_t *data,
                      size_t capacity,
                      size_t *bytes,
                      struct TyError *error);
  /**
   * Required, cold. Connects to `peer` (this rank itself included) with the bytes that the peer's
   * `endpoint` wrote. They come from another process: check them, and that they are of this peer. May wait
   * for the peer, at most `deadline_ns`.
   */
  int32_t (*connect)(void *instance,
                     uint32_t peer,
                     const uint8_t *data,
                     size_t bytes,
                     struct TyError *error);
  /**
   * Optional, cold; required with `TY_CAP_LOAD_STORE`. Gives the address at which window `window` of
   * `peer` is mapped in this process; valid until `close`.
   */
  int32_t (*peer_address)(void *instance,
                          uint32_t window,
                          uint32_t peer,
                          uint8_t **address,
                          struct TyError *error);
  /**
   * Required, hot. Accepts the first `*accepted` of `count` commands of a queue. Accepting fewer
   * is back-pressure, not an error. A command that cannot be accepted because its peer is lost
   * is accepted and ends as a `TY_EVENT_ERROR`.
   */
  int32_t (*post)(void *instance,
                  uint32_t queue,
                  const struct TyCommand *commands,
                  size_t count,
                  size_t *accepted);
  /**
   * Required, hot. Drives the queue and writes up to `capacity` events.
   */
  int32_t (*poll)(void *instance,
                  uint32_t queue,
                  struct TyEvent *events,
                  size_t capacity,
                  size_t *count);
  /**
   * Required, hot. The 64-bit total of signal `id` on this rank, never reset, with acquire order:
   * the payload of the signal is visible to the caller (INV-1).
   */
  uint64_t (*read_signal)(void *instance, uint32_t queue, uint32_t id);
  /**
   * Required, any thread. `TY_OK`, or the first asynchronous error; it stays (INV-7). An error about a
   * peer names it, by its world rank. With `TY_CAP_MASKING`: the first error that is about no peer, if
   * there is one; else the first error of a peer, of another peer at each call.
   */
  int32_t (*health)(void *instance, struct TyError *error);
  /**
   * Optional, any thread, also beside hot calls of every queue; required with
   * `TY_CAP_MANUAL_PROGRESS`. Drives the fabric and stores completions for the next `poll`. Returns
   * at once if another thread is driving. 1 if something moved, `TY_OK` if not, or a status below
   * zero.
   */
  int32_t (*progress)(void *instance);
  /**
   * Optional, any thread, after `connect`. One line for diagnoses: the connection from this rank to
   * `peer` (device, provider, both addresses). `*bytes` becomes its length, at most `capacity`.
   */
  int32_t (*link_name)(void *instance, uint32_t peer, uint8_t *data, size_t capacity, size_t *bytes);
  /**
   * Optional, cold, after `connect`; required with `TY_CAP_DEVICE_API`. Gives the source that
   * kernels compile in to use this transport. Its pointers are valid until `close`.
   */
  int32_t (*device_api)(void *instance, struct TyDeviceApi *device_api, struct TyError *error);
  /**
   * Optional, cold, without an instance. Gives the result of `device_api` without the value of the
   * parameters: `params` is null, their size and alignment are set. So kernels can be compiled ahead of
   * a job, on a machine without the fabric. Its pointers are static.
   */
  int32_t (*device_source)(struct TyDeviceApi *device_api, struct TyError *error);
  /**
   * Optional, cold, collective: every rank of the team calls it once, after its last `connect` and before
   * any use of the connections. For fabrics that register windows only once the team is connected. May
   * wait for peers that still connect, at most `deadline_ns`.
   */
  int32_t (*commit)(void *instance, struct TyError *error);
  /**
   * Optional, cold, after `commit` (since minor version 10). Takes over a ring of kernels, for a
   * transport with threads of its own. One of them takes the commands out, so that a kernel's command
   * is handed over once. That thread takes the place of the host's thread, by the rules of
   * [`TyGpuRing`]. `close` ends the service. `TY_UNSUPPORTED` leaves the ring to the host.
   */
  int32_t (*serve_ring)(void *instance, const struct TyServeRing *ring, struct TyError *error);
  /**
   * Optional, cold, after `connect` (since minor version 12). As `device_api`, for kernels that count windows,
   * queues and signals from 0 and have a part of them: number 0 is the first of that part. So several users share
   * one instance. Its pointers are valid until `close`. `TY_UNSUPPORTED`: such kernels need an instance of their
   * own.
   */
  int32_t (*device_api_of)(void *instance,
                           const struct TyFirst *first,
                           struct TyDeviceApi *device_api,
                           struct TyError *error);
} TyTransportTable;

/**
 * Services of the host. Statics are per library, so a component logs through this table. It outlives
 * every component. Any thread may call any slot.
 */
typedef struct TyHost {
  /**
   * `sizeof(TyHost)` of the host.
   */
  size_t size;
  /**
   * Passed back to every slot.
   */
  void *context;
  /**
   * Writes one line to the host's log. `target` names the component.
   */
  void (*log)(void *context, uint32_t level, struct TyStr target, struct TyStr message);
  /**
   * Finds the table of a transport that the host has loaded, for components that wrap others; null if
   * there is none of that name. The table lives as long as the process.
   */
  const struct TyTransportTable *(*find_transport)(void *context, struct TyStr name);
} TyHost;

/**
 * The resources of one transport that a kernel set uses. All zero for a level without a transport.
 */
typedef struct TyLinkNeeds {
  /**
   * Queues used.
   */
  uint32_t queues;
  /**
   * Signals used.
   */
  uint32_t signals;
  /**
   * Most commands of a queue that are not done yet.
   */
  uint32_t queue_depth;
  /**
   * Zero.
   */
  uint32_t reserved;
  /**
   * Most bytes of one put.
   */
  uint64_t largest_put;
} TyLinkNeeds;

/**
 * The resources that a kernel set needs from the transports, within the given limits.
 */
typedef struct TyKernelNeeds {
  /**
   * `sizeof(TyKernelNeeds)`.
   */
  size_t size;
  /**
   * Windows used; `window_bytes[0 .. windows]` are their lengths, equal on all ranks.
   */
  uint32_t windows;
  /**
   * Calls that it takes beyond plain ones: bits `TY_KERNELS_CAP_*`.
   */
  uint32_t capabilities;
  /**
   * Needs of the transport inside the domain.
   */
  struct TyLinkNeeds scale_up;
  /**
   * Needs of the transport between domains.
   */
  struct TyLinkNeeds scale_out;
  /**
   * Bytes of each window.
   */
  uint64_t window_bytes[TY_MAX_WINDOWS];
  /**
   * The levels of each window: bits `1 << TY_LEVEL_*`, or 0 for every level that has a transport. A
   * window is registered with the transports of those levels only, and only their memory needs
   * count. A transport numbers the windows registered with it from 0 on, in their order here:
   * commands and device APIs use those numbers.
   */
  uint32_t window_levels[TY_MAX_WINDOWS];
  /**
   * Ordinal of the GPU that the set works on, as its driver counts, or -1: the host.
   */
  int32_t device;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyKernelNeeds;

/**
 * The shape that a kernel set is opened for. The host has validated it.
 */
typedef struct TyShape {
  /**
   * `sizeof(TyShape)`.
   */
  size_t size;
  /**
   * This rank.
   */
  uint32_t rank;
  /**
   * R.
   */
  uint32_t ranks;
  /**
   * D. If 1, one link of either level reaches every rank. If more, both links are given, and each
   * row crosses the scale-out link once per domain. Ranks are domain-major: rank r is peer r mod R/D
   * of its scale-up team and peer r / (R/D) of its scale-out team, the rail. Where one link reaches
   * every rank, rank r is peer r. Absent ranks (`TY_RANK_ABSENT`) are not counted.
   */
  uint32_t domains;
  /**
   * E, a multiple of R.
   */
  uint32_t experts;
  /**
   * K, 1 to 32.
   */
  uint32_t topk;
  /**
   * H in elements.
   */
  uint32_t hidden;
  /**
   * M. With `TY_RUNS_TABLE`: most indices of a fetch.
   */
  uint32_t max_tokens;
  /**
   * Operations that may be sent and not yet received; operation n uses slot n mod in_flight. With
   * `TY_RUNS_PIPE`: messages from one rank to another.
   */
  uint32_t in_flight;
  /**
   * Handles that may live at once.
   */
  uint32_t handles;
  /**
   * The operations of the instance: one of `TY_RUNS_*`.
   */
  uint32_t runs;
  /**
   * Most bytes of a message with `TY_RUNS_PIPE`, of a rank's shards with `TY_RUNS_GATHER` and `TY_RUNS_REDUCE`; the
   * bytes of an entry, its scales included, with `TY_RUNS_TABLE`; else 0.
   */
  uint64_t message_bytes;
  /**
   * With `TY_RUNS_TABLE`: most entries of a rank in a layer; else 0.
   */
  uint64_t entries;
  /**
   * With `TY_RUNS_TABLE`: layers; else 0.
   */
  uint32_t layers;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyShape;

/**
 * The capabilities that the transports of both levels declared. All fields of a level without a
 * transport are zero.
 */
typedef struct TyLimits {
  /**
   * `sizeof(TyLimits)`.
   */
  size_t size;
  /**
   * The transport inside the domain.
   */
  struct TyCapabilities scale_up;
  /**
   * The transport between domains.
   */
  struct TyCapabilities scale_out;
} TyLimits;

/**
 * An opened transport as a kernel set uses it. `table` is null where the level has none.
 */
typedef struct TyLink {
  /**
   * The transport's table, with every required slot filled.
   */
  const struct TyTransportTable *table;
  /**
   * Its instance.
   */
  void *instance;
  /**
   * The capabilities that it declared.
   */
  struct TyCapabilities capabilities;
} TyLink;

/**
 * The current wait of a kernel set, for the host to read, and the word by which the host stops it
 * (INV-6). Shared by both sides while the communicator lives. Every field is accessed with atomic
 * loads and stores of 8 bytes. A waiter writes `phase` last when it starts to wait, and 0 when it
 * ends.
 */
typedef struct TyWaitBoard {
  /**
   * Not 0: stop waiting now and return `TY_ABORTED`. Written by the host.
   */
  uint64_t abort;
  /**
   * One of `TY_PHASE_*`, or 0 while no wait runs.
   */
  uint64_t phase;
  /**
   * The world rank that is waited for.
   */
  uint64_t peer;
  /**
   * The signal id that is waited for.
   */
  uint64_t signal;
  /**
   * The total that ends the wait.
   */
  uint64_t expected;
  /**
   * The total last seen.
   */
  uint64_t found;
  /**
   * `CLOCK_MONOTONIC` in nanoseconds when the wait began.
   */
  uint64_t since_ns;
  /**
   * Operation number, or `TY_OPERATION_OF_GRAPH`.
   */
  uint64_t operation;
  /**
   * The level whose transport raises the signal: one of `TY_LEVEL_*`.
   */
  uint64_t level;
  /**
   * The phase of the last wait that ended without its signal; else 0. A waiter writes it before
   * `phase` becomes 0, and leaves the fields above unchanged: so the host can still report the wait.
   */
  uint64_t gave_up;
  /**
   * Null, or `ranks` totals, one per world rank: nanoseconds that waits on it took. A waiter adds
   * the time of a wait at its end. Set by the host.
   */
  uint64_t *waited_ns;
  /**
   * Length of `waited_ns`. Set by the host.
   */
  uint64_t ranks;
} TyWaitBoard;

/**
 * Arguments of `plan`: every size and place is fixed here. The board stays valid until `close`. The links
 * stay valid until the last operation has returned, because transports are closed before `close`. The
 * list of windows is valid for the call only.
 */
typedef struct TyPlan {
  /**
   * `sizeof(TyPlan)`.
   */
  size_t size;
  /**
   * The transport inside the domain.
   */
  struct TyLink scale_up;
  /**
   * The transport between domains.
   */
  struct TyLink scale_out;
  /**
   * The registered windows, in order of their ids.
   */
  const struct TyWindow *windows;
  /**
   * Number of windows.
   */
  size_t window_count;
  /**
   * The board shared with the host's watchdog.
   */
  struct TyWaitBoard *board;
  /**
   * Most nanoseconds of a wait: a longer wait ends by itself, without the host.
   */
  uint64_t cap_ns;
  /**
   * Null where a lost rank ends the communicator. Else R bytes, one per rank, which stay valid like the
   * board: `TY_RANK_LOST` from the loss of a rank on; `TY_RANK_ABSENT` from the start for a rank that
   * is absent; else 0. The host writes them, with atomic stores of one byte. A lost or absent rank
   * raises no more signals: waits on it end, its missing rows are left out, and no command names it. An
   * absent rank is in no team: peers are numbered without it. A rank may be lost already when `plan` is
   * called; it is then still a member of its team.
   */
  const uint8_t *lost;
} TyPlan;

/**
 * A kernel set. All slots of one instance are called by one thread at a time.
 *
 * Order of calls: `probe`, `open`, `needs`, `allocate` per window, `plan`, then operations, then `close`. `runs` of
 * the shape says which. A set that does not know them refuses `open` with `TY_UNSUPPORTED`.
 *
 * - `TY_RUNS_MOE`: dispatches and combines, in the same order on all ranks. One is submitted (`TY_SUBMIT_DISPATCH`
 *   or `TY_SUBMIT_COMBINE`), and finished. Operation n may be sent only when operation n - in_flight has been
 *   received.
 * - `TY_RUNS_GATHER`: `TY_SUBMIT_GATHER` and `TY_FINISH_GATHER`, by the same rules.
 * - `TY_RUNS_REDUCE`: these, and `TY_SUBMIT_REDUCE` and `TY_FINISH_REDUCE`. The host leaves numbers of operations out,
 *   the same on all ranks.
 * - `TY_RUNS_TABLE`: `TY_SUBMIT_ENTRIES` on all ranks; `TY_SUBMIT_FETCH` and `TY_FINISH_FETCH` by each for itself.
 * - `TY_RUNS_PIPE`: `TY_SUBMIT_SEND` and `TY_SUBMIT_RECV`, in any order: ranks make different calls. `flush` waits
 *   until all messages of this rank are taken, too, and reports as `TY_SUBMIT_SEND` does.
 *
 * With several domains of several ranks an operation is two exchanges. For a dispatch the host submits
 * that of the rail; that of the owners, whose rows are those that come over the rail; a `TY_SUBMIT_AGREE`
 * on the rail; and finishes the dispatch. For a combine it first submits that of the owners, which makes
 * a sum for each row that had come over the rail in the dispatch. Then it submits a `TY_SUBMIT_AGREE` on
 * the rail; the combine of the rail, whose rows are those sums; and finishes it. Where losses are masked,
 * a `TY_SUBMIT_AGREE` on the owners' exchange follows each on the rail.
 *
 * Each of these calls returns when its exchange has done that, or has queued it. If it has queued it, the
 * next call reads T, rows and refusals where the device has left them. The host then waits in the last
 * exchange that it submits, and in the agreement behind a dispatch. The host passes the first refusal that this rank
 * knows of to the next calls.
 */
typedef struct TyKernelsTable {
  /**
   * `sizeof(TyKernelsTable)` of the plugin.
   */
  size_t size;
  /**
   * The component's name as a config writes it. Static.
   */
  struct TyStr name;
  /**
   * The component's own version, as text for display. Static.
   */
  struct TyStr version;
  /**
   * One line of text for display. Static.
   */
  struct TyStr about;
  /**
   * Required. Whether the component can run here, without side effects; `memory_kinds` becomes the
   * kinds of memory that it works on (bits `TY_MEMORY_*`).
   */
  int32_t (*probe)(const struct TyHost *host,
                   const struct TyConfig *config,
                   uint32_t *memory_kinds,
                   struct TyError *error);
  /**
   * Required. Makes an instance.
   */
  int32_t (*open)(const struct TyHost *host,
                  const struct TyConfig *config,
                  const struct TyShape *shape,
                  void **instance,
                  struct TyError *error);
  /**
   * Required. Ends the instance and frees its windows, after the transports were closed.
   */
  void (*close)(void *instance);
  /**
   * Required. States the resources that the set will use, within `limits`.
   */
  int32_t (*needs)(void *instance,
                   const struct TyLimits *limits,
                   struct TyKernelNeeds *needs,
                   struct TyError *error);
  /**
   * Required. Allocates the memory of one window. The host sets `id` and `bytes`.
   */
  int32_t (*allocate)(void *instance,
                      const struct TyMemoryNeeds *needs,
                      struct TyWindow *window,
                      struct TyError *error);
  /**
   * Required. Fixes every size, offset and buffer.
   */
  int32_t (*plan)(void *instance, const struct TyPlan *plan, struct TyError *error);
  /**
   * Required. Starts work. `tag` is one of `TY_SUBMIT_*`, and says of which type `call` is. Each of these
   * structures starts with its size. `TY_UNSUPPORTED` for a tag that the set does not take.
   */
  int32_t (*submit)(void *instance, uint32_t tag, const void *call, struct TyError *error);
  /**
   * Required. Ends the operation that `call` names. `tag` is one of `TY_FINISH_*`, and says of which type `call`
   * is, as for `submit`.
   */
  int32_t (*finish)(void *instance, uint32_t tag, void *call, struct TyError *error);
  /**
   * Required. Answers a question in `call`. `tag` is one of `TY_QUERY_*`, and says of which type `call` is, as
   * for `submit`.
   */
  int32_t (*query)(void *instance, uint32_t tag, void *call, struct TyError *error);
  /**
   * Required. Waits until all commands that the set posted are done (INV-4), so that the transports
   * may be closed once all ranks have returned from it. Waits also for operations that were received
   * in the order of a stream and have not ended, and reports their errors. No operation is open.
   */
  int32_t (*flush)(void *instance, struct TyError *error);
  /**
   * Required. Frees an arena region. A region that was given out in the order of a stream becomes
   * free once the stream has passed the work that is queued on it now.
   */
  void (*release)(void *instance, uint64_t region);
  /**
   * Calls for tools on the set's device; null where the set works on host memory.
   */
  const struct TyDeviceTable *device;
} TyKernelsTable;

/**
 * The symbol `tokenyard_kernels_v0`.
 */
typedef struct TyKernelsExport {
  /**
   * Checked first.
   */
  struct TyExportHeader header;
  /**
   * `count` tables.
   */
  const struct TyKernelsTable *const *components;
  /**
   * Number of tables.
   */
  size_t count;
} TyKernelsExport;

/**
 * The mask of a rank.
 */
typedef struct TyMask {
  /**
   * `sizeof(TyMask)`.
   */
  size_t size;
  /**
   * The rank to mask or unmask. One to unmask is not lost.
   */
  uint32_t rank;
  /**
   * 1 masks it, 0 unmasks it.
   */
  uint32_t is_masked;
} TyMask;

/**
 * The ranks that operations leave out.
 */
typedef struct TyMasks {
  /**
   * `sizeof(TyMasks)`.
   */
  size_t size;
  /**
   * R bytes, which become 1 where a rank is left out, else 0.
   */
  uint8_t *masks;
  /**
   * R.
   */
  uint32_t count;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyMasks;

/**
 * One side of a message.
 *
 * `refusal` says that the input of this rank was refused. A sender then sends it in place of the bytes, and the call
 * of the receiver fails with `TY_REFUSED` and the text. A receiver takes the message and drops its bytes.
 *
 * A sender learns that a message was refused (`TY_REFUSED`, with the text), or that another length was expected
 * (`TY_MISMATCH`), from the first `TY_SUBMIT_SEND` that needs the message's slot again, or from `flush`. That call
 * sends nothing. Each message is reported once. `TY_UNSUPPORTED`: no link leads to the rank, and nothing was posted.
 * The instance goes on after these.
 */
typedef struct TyMessage {
  /**
   * `sizeof(TyMessage)`.
   */
  size_t size;
  /**
   * Memory of the set's kind, contiguous; null where it has no bytes.
   */
  void *data;
  /**
   * Its length: at most `message_bytes` of the shape.
   */
  uint64_t bytes;
  /**
   * The other rank of the message; not this one.
   */
  uint32_t peer;
  /**
   * Zero.
   */
  uint32_t reserved;
  /**
   * Why this rank refuses; no bytes where it does not.
   */
  struct TyStr refusal;
} TyMessage;

/**
 * Times of the steps of an operation on this rank, for tools, in nanoseconds of the device's clock.
 * The clock has an arbitrary start, and differs from the clock of another device.
 */
typedef struct TyTrace {
  /**
   * `sizeof(TyTrace)`.
   */
  size_t size;
  /**
   * The operation's first kernel began.
   */
  uint64_t begun;
  /**
   * This rank's routing was counted, and its records were sent; where nothing is counted, equal to
   * `begun`.
   */
  uint64_t counted;
  /**
   * The records of all ranks had arrived.
   */
  uint64_t entered;
  /**
   * Rows had left; in a combine: the sums were computed.
   */
  uint64_t moved;
  /**
   * The rows of all ranks had arrived; in a combine: all ranks had read this rank's rows.
   */
  uint64_t arrived;
} TyTrace;

/**
 * The times of an operation.
 */
typedef struct TyOperationTrace {
  /**
   * `sizeof(TyOperationTrace)`.
   */
  size_t size;
  /**
   * Operation number.
   */
  uint64_t operation;
  /**
   * Filled in.
   */
  struct TyTrace trace;
} TyOperationTrace;

/**
 * The place of one rank.
 */
typedef struct TyPlace {
  /**
   * `sizeof(TyPlace)`.
   */
  size_t size;
  /**
   * Identity of the machine: equal on ranks that share memory, different otherwise. UTF-8,
   * ended by a zero byte or the array's end.
   */
  uint8_t host[TY_HOST_BYTES];
  /**
   * Ordinal of the device that this rank drives, or -1 if it drives none.
   */
  int32_t device;
  /**
   * NUMA node of the rank, or -1 if unknown.
   */
  int32_t numa_node;
  /**
   * Number of logical processors that this process may run on; 0 if unknown.
   */
  uint32_t processors;
  /**
   * Bits `TY_PLACE_*`.
   */
  uint32_t flags;
  /**
   * How many of `nics` are set.
   */
  uint32_t nic_count;
  /**
   * Zero.
   */
  uint32_t reserved;
  /**
   * NICs that are nearest to the rank and equally near, in order. Ranks of a machine that name the
   * same NICs divide them. UTF-8, ended by a zero byte or the array's end.
   */
  uint8_t nics[TY_PLACE_NICS][TY_NIC_BYTES];
  /**
   * Text about the NIC that is missing near the rank, or cannot be used, if other ranks of this machine
   * have a NIC and this rank has none. Otherwise empty (since minor version 2). With a text, the
   * communicator does not open on a transport that uses placed NICs (`TY_CAP_PLACED_NICS`). UTF-8,
   * ended by a zero byte or the array's end.
   */
  uint8_t missing_nic[TY_MISSING_NIC_BYTES];
} TyPlace;

/**
 * A half of a reduce-scatter. Tensor i has R parts of as many elements, and rank r gets the sum of all ranks' parts r:
 * added in f32 in the order of ranks, multiplied by `scale`, rounded once to the type of the tensor. All ranks make
 * it, with as many tensors of the same types and lengths, and the same `precision`, `scale` and `flags`: else it ends
 * with `TY_MISMATCH` on all of them, also where some of them gather. With a refusal of any rank it ends with
 * `TY_REFUSED` on all. The instance goes on after both.
 *
 * A reduce-scatter takes two numbers, and two slots: its own, which is even, and the next one for a gather of the
 * sums. So `in_flight` of the shape is even, too. A set refuses odd ones.
 */
typedef struct TyReduce {
  /**
   * `sizeof(TyReduce)`.
   */
  size_t size;
  /**
   * Operation number, even. It shares the numbers, and the slots, with gathers.
   */
  uint64_t operation;
  /**
   * Contiguous tensors of bf16 or f32, of the set's memory: in `submit` the inputs, whose elements R divides; in
   * `finish` the sums.
   */
  const struct TyTensor *tensors;
  /**
   * How many. None in `finish`: the sums are not written.
   */
  size_t count;
  /**
   * In `submit`: one of `TY_PRECISION_*`.
   */
  uint32_t precision;
  /**
   * In `submit`: the factor of the sums.
   */
  float scale;
  /**
   * In `submit`: why this rank refuses; no bytes where it does not.
   */
  struct TyStr refusal;
  /**
   * In `submit`: bits `TY_REDUCE_*`.
   */
  uint64_t flags;
} TyReduce;

/**
 * A stream of the set's device.
 */
typedef struct TyReleaseAfter {
  /**
   * `sizeof(TyReleaseAfter)`.
   */
  size_t size;
  /**
   * The stream.
   */
  void *stream;
} TyReleaseAfter;

/**
 * Counts of a routing that no dispatch has sent yet, in memory of the set's device. Ids that are no experts count
 * nowhere.
 */
typedef struct TyRoutingCounts {
  /**
   * `sizeof(TyRoutingCounts)`.
   */
  size_t size;
  /**
   * `[T, K]` i64, contiguous.
   */
  struct TyTensor topk_idx;
  /**
   * Experts, a multiple of `ranks`.
   */
  uint32_t experts;
  /**
   * Ranks.
   */
  uint32_t ranks;
  /**
   * `[R]`, written: tokens for each rank, each token once.
   */
  int32_t *rank_tokens;
  /**
   * `[E]`, written: tokens for each expert.
   */
  int32_t *expert_tokens;
  /**
   * `[T, R]`, written: 1 where a token goes to the rank, else 0.
   */
  uint8_t *is_token_in_rank;
  /**
   * The stream in whose order they are read and written.
   */
  void *stream;
} TyRoutingCounts;

/**
 * A topology. `discover` is cold and has no instance.
 */
typedef struct TyTopologyTable {
  /**
   * `sizeof(TyTopologyTable)` of the plugin.
   */
  size_t size;
  /**
   * The component's name as a config writes it. Static.
   */
  struct TyStr name;
  /**
   * The component's own version, as text for display. Static.
   */
  struct TyStr version;
  /**
   * One line of text for display. Static.
   */
  struct TyStr about;
  /**
   * Required. Finds this rank's place.
   */
  int32_t (*discover)(const struct TyHost *host,
                      const struct TyDiscover *discover,
                      struct TyPlace *place,
                      struct TyError *error);
} TyTopologyTable;

/**
 * The symbol `tokenyard_topology_v1`.
 */
typedef struct TyTopologyExport {
  /**
   * Checked first.
   */
  struct TyExportHeader header;
  /**
   * `count` tables.
   */
  const struct TyTopologyTable *const *components;
  /**
   * Number of tables.
   */
  size_t count;
} TyTopologyExport;

/**
 * The symbol `tokenyard_transport_v1`.
 */
typedef struct TyTransportExport {
  /**
   * Checked first.
   */
  struct TyExportHeader header;
  /**
   * `count` tables, one per transport.
   */
  const struct TyTransportTable *const *components;
  /**
   * Number of tables.
   */
  size_t count;
} TyTransportExport;

#endif  /* TOKENYARD_PLUGIN_H */

/* Makes a symbol visible in a library that is compiled with -fvisibility=hidden. */
#if defined(__GNUC__)
#define TY_EXPORT __attribute__((visibility("default")))
#else
#define TY_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The exports of a plugin: it defines one or more of these constants. Their header is
 *   { TY_MAGIC, TY_TRANSPORT_MAJOR, TY_TRANSPORT_MINOR, TY_TRANSPORT_LAYOUT,
 *     sizeof(TyTransportExport) }
 * and likewise with TOPOLOGY and KERNELS. The tables that `components` points to, and their strings,
 * are constants of the library too.
 */

/* The transports of a plugin. */
extern TY_EXPORT const TyTransportExport tokenyard_transport_v1;

/* The topologies of a plugin. */
extern TY_EXPORT const TyTopologyExport tokenyard_topology_v1;

/* The kernel sets of a plugin. Unstable until 1.0. */
extern TY_EXPORT const TyKernelsExport tokenyard_kernels_v0;

#ifdef __cplusplus
}
#endif
