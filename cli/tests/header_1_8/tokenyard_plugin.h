/*
 * The plugin ABI of tokenyard. Generated from abi/src: do not edit.
 *
 * A plugin is a shared library that exports one *data* symbol per kind of part it provides (see
 * the end of this file), so that nothing of it is called before it was judged. The author's guide
 * is docs/plugin-guide.md; plugins/example-c is a complete transport in one file.
 *
 * Rules that hold for every slot:
 * - every structure starts with its size in bytes; fields are only ever appended;
 * - enumerations cross as fixed-width integers; an unknown value is an error, never a guess;
 * - no allocation crosses: who makes a thing destroys it; strings are (pointer, length), UTF-8,
 *   not terminated, valid for the call only;
 * - a slot returns a status (TY_OK is 0); details go to the caller's TyError;
 * - a plugin must not unwind or longjmp across a slot; libraries are never unloaded;
 * - each slot says which threads may call it.
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
 * The call did what it was asked.
 */
#define TY_OK 0

/**
 * The component cannot run here: a library, device, right or capability is missing.
 */
#define TY_UNAVAILABLE -1

/**
 * The component does not support what was asked.
 */
#define TY_UNSUPPORTED -2

/**
 * The component's own config table is wrong.
 */
#define TY_CONFIG -3

/**
 * The operating system refused a call; `TyError.os_errno` says why.
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
 * The host raised the abort word of the wait board; the call gave up waiting.
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
 * Ranks disagree on what must be equal, for example on which operation comes next.
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
 * Log levels of [`TyHost::log`].
 */
#define TY_LOG_ERROR 1

/**
 * Something is wrong but the component goes on.
 */
#define TY_LOG_WARN 2

/**
 * What an operator wants to see once.
 */
#define TY_LOG_INFO 3

/**
 * What a developer of the component wants to see.
 */
#define TY_LOG_DEBUG 4

/**
 * Kinds of memory, as bits: ordinary host memory.
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
 * Kinds of handles, as bits: what the descriptor of a window is. Host memory as a memfd, which other
 * processes map.
 */
#define TY_HANDLE_MEMFD 1

/**
 * Device memory that its driver has exported to a POSIX descriptor, for the same driver in another process.
 */
#define TY_HANDLE_POSIX 2

/**
 * Device memory that its driver has exported for other hosts of the same fabric. Kept for NVLink across
 * hosts: it has no descriptor, and nothing uses it yet.
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
#define TY_KERNELS_MINOR 6

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
#define TY_NEEDS_MASKING 1

/**
 * In [`TyKernelNeeds`]: it takes calls in the order of a stream (`TY_DISPATCH_ON_STREAM`,
 * `TY_COMBINE_ON_STREAM`), and has the slots from `stream_create` on.
 */
#define TY_NEEDS_STREAMS 2

/**
 * In [`TyKernelNeeds`]: it takes calls that nobody waits for (`TY_DISPATCH_NO_SYNC`,
 * `TY_COMBINE_NO_SYNC`), also on a stream that captures a graph, and has the slots from `graph_begin`
 * on. With `TY_NEEDS_STREAMS` only.
 */
#define TY_NEEDS_NO_SYNC 4

/**
 * In `lost` of [`TyPlan`]: the rank was there when the teams were made, and is lost.
 */
#define TY_RANK_LOST 1

/**
 * In `lost` of [`TyPlan`]: the rank is in no team.
 */
#define TY_RANK_ABSENT 2

/**
 * In [`TyWaitBoard`]: an operation without a number, as a graph launched it, so that no host knows whether
 * all ranks have begun it.
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
 * Rows travel as they are.
 */
#define TY_CAST_NONE 0

/**
 * Rows are cast to FP8 e4m3 with one f32 scale per 128 channels.
 */
#define TY_CAST_FP8 1

/**
 * The same with scales rounded up to powers of two.
 */
#define TY_CAST_FP8_ROUND 2

/**
 * The same, the scales' exponent bytes packed by four (UE8M0).
 */
#define TY_CAST_FP8_UE8M0 3

/**
 * Reuse the routing of the handle: no counting.
 */
#define TY_DISPATCH_REPLAY 1

/**
 * Worst-case sizes: the host learns no count, the counts stay in device memory.
 */
#define TY_DISPATCH_WORST_CASE 2

/**
 * Zero the padding rows of the expert-major layout.
 */
#define TY_DISPATCH_ZERO_PADDING 4

/**
 * In the order of `stream`: tensors are read behind what was queued there before `dispatch_send`,
 * and what is queued there after `dispatch_recv` runs behind the operation. Neither waits for rows.
 * Ranks need not agree on it.
 */
#define TY_DISPATCH_ON_STREAM 8

/**
 * With `TY_DISPATCH_ON_STREAM`: the host waits for nothing, `dispatch_send` not even for what the ranks
 * agree on. A fresh dispatch has `TY_DISPATCH_WORST_CASE` too. What goes wrong on the device closes the
 * communicator: a later call, or `flush`, tells it. Ranks need not agree on it; a refusal ends those that do too.
 *
 * The stream may capture a graph: then nothing runs, and what this rank refuses is told to it alone.
 * Both halves come within one capture, and the graph may be launched any number of times while no
 * operation is open, in the same order with other operations on all ranks. What the call gave, its
 * handle and its tensors stay until the graph is launched no more.
 */
#define TY_DISPATCH_NO_SYNC 16

/**
 * `dispatch_recv` follows at once: the caller queues and computes nothing between the two.
 */
#define TY_DISPATCH_AT_ONCE 32

/**
 * Multiply each expert's row by its weight before summing (expert-major and packed).
 */
#define TY_COMBINE_WEIGHTED 1

/**
 * As `TY_DISPATCH_ON_STREAM`.
 */
#define TY_COMBINE_ON_STREAM 2

/**
 * As `TY_DISPATCH_NO_SYNC`. Where only the device knows T, rows of `out` behind it are left as they are.
 */
#define TY_COMBINE_NO_SYNC 4

/**
 * As `TY_DISPATCH_AT_ONCE`, of `combine_recv`.
 */
#define TY_COMBINE_AT_ONCE 8

/**
 * Layout hash of the transport ABI on 64-bit targets.
 */
#define TY_TRANSPORT_LAYOUT 13366110382220657394ull

/**
 * Layout hash of the topology ABI on 64-bit targets.
 */
#define TY_TOPOLOGY_LAYOUT 10371293804723655335ull

/**
 * Layout hash of the kernel set ABI on 64-bit targets.
 */
#define TY_KERNELS_LAYOUT 6180000397556328376

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
 * Bytes that fit the words on a missing NIC.
 */
#define TY_MISSING_NIC_BYTES 1024

/**
 * The operator named the NICs: they are used as they are, and not shared out among ranks.
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
#define TY_TRANSPORT_MINOR 8

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
 * `peer_address` works: peers' windows are mapped into this process for plain loads and stores.
 * Then a signal, with a put or alone, also carries every plain store that was made before its
 * `post`, as a release does: who sees the signal may load what was stored.
 */
#define TY_CAP_LOAD_STORE (1 << 4)

/**
 * A put to a lost peer ends within the deadline with an error; the process lives (INV-6).
 */
#define TY_CAP_BOUNDED_PUT (1 << 5)

/**
 * Nothing moves unless somebody drives it: `progress` is there, and the host calls it from a thread
 * of its own while the ranks compute.
 */
#define TY_CAP_MANUAL_PROGRESS (1 << 6)

/**
 * The transport must own window memory: the host calls `alloc` instead of the kernel set.
 */
#define TY_CAP_OWNS_MEMORY (1 << 7)

/**
 * Ranks may go on without a lost one (since minor version 2). Whatever it did when it ended or
 * stopped, it holds up nobody else (INV-6): `post` and `poll` return, commands to other peers go on,
 * the process lives. Every failure that is about one peer names it, in the rank of its error or in
 * its error event, and hides none of another: `health` tells them in turn. A put to the lost peer
 * may keep its place in the queue until the fabric gives it up.
 */
#define TY_CAP_MASKING (1 << 8)

/**
 * `device_api` works: kernels post and wait by themselves (since minor version 3).
 */
#define TY_CAP_DEVICE_API (1 << 9)

/**
 * It uses the NICs that `open` names (since minor version 5): ranks of a rail then need NICs that reach
 * each other, and a missing one keeps the communicator from opening.
 */
#define TY_CAP_PLACED_NICS (1 << 10)

/**
 * Copy `bytes` from the source window to the destination window of `peer`.
 */
#define TY_OP_PUT 1

/**
 * The same, then add `add` to `signal` of `peer`: payload before signal (INV-1).
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
 * The command failed (INV-7). `status` is negative and the details are in `health`.
 */
#define TY_EVENT_ERROR 2

/**
 * The contract of device APIs: `backends/gpu/device/transport.cuh` of this version.
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
 * Kernels load from and store to windows of peers (`kLoadStore`); without it they put. As
 * [`TY_CAP_LOAD_STORE`] says it of the transport.
 */
#define TY_DEVICE_API_LOAD_STORE 1

/**
 * Room that the host gives to `endpoint`.
 */
#define TY_ENDPOINT_BYTES 4096

/**
 * Room that the host gives to `link_name`.
 */
#define TY_LINK_NAME_BYTES 256

/**
 * NICs of all names reach each other: where a transport can use none of the NICs that the topology chose
 * for this rank, it may use others, and says so. Without the flag it refuses to open.
 */
#define TY_OPEN_ANY_RAILS 1

/**
 * What a transport can do here. Declared, not guessed; the conformance suite tests exactly this.
 */
typedef struct TyCapabilities {
  /**
   * `sizeof(TyCapabilities)`; set by the host, kept by the component.
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
 * A tensor of one or two dimensions. `data` is null where a tensor is absent, and only there: one
 * without elements has some address.
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
 * A string that is borrowed for the duration of a call: UTF-8, not terminated.
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
 * One combine. Tensors are valid until `combine_recv` returns; with `TY_COMBINE_ON_STREAM` until the
 * stream has passed what `combine_recv` left there.
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
   * Expert outputs: as many rows as the dispatch gave, `[rows, H]`, contiguous.
   */
  struct TyTensor x;
  /**
   * f32, shaped as the dispatch's `weights`; may be absent.
   */
  struct TyTensor weights;
  /**
   * `[T, H]` of the type of `x`; may be absent.
   */
  struct TyTensor bias0;
  /**
   * The same.
   */
  struct TyTensor bias1;
  /**
   * `[T, H]` of the type of `x`, written by `combine_recv`.
   */
  struct TyTensor out;
  /**
   * `[T, K]` f32; absent unless `weights` is given.
   */
  struct TyTensor out_weights;
  /**
   * `[T, 1]` u8, may be absent: written by `combine_recv` with how many of the token's selected
   * experts are left out of its sum, because their rank was lost.
   */
  struct TyTensor missing;
  /**
   * As in [`TyDispatch`].
   */
  struct TyStr refusal;
  /**
   * As in [`TyDispatch`].
   */
  void *stream;
} TyCombine;

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
   * The queue it is posted on; repeated here for the transport's convenience.
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
   * What to add to the signal: 1 to 65,535.
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
   * Comes back in the event.
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
 * What passed between this rank and another one over one level, since `plan`. Every field only grows,
 * and is read by the host at any time: one thread stores it, atomically.
 */
typedef struct TyPeerCounters {
  /**
   * Commands to the peer that the transport has accepted.
   */
  uint64_t posted;
  /**
   * Those of them that have ended (INV-4), also with an error.
   */
  uint64_t done;
  /**
   * How far this rank has raised the peer's signals, all in all: the sum of `add`.
   */
  uint64_t raised;
  /**
   * How far it has waited, or waits, for the peer to raise its own.
   */
  uint64_t expected;
  /**
   * How far it has seen those rise: up to the end of its last wait on the peer that succeeded.
   */
  uint64_t received;
} TyPeerCounters;

/**
 * How far this rank has raised one signal of a peer. As in [`TyPeerCounters`].
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
 * What a kernel set counts for reports, in memory of its own that stays valid until `close`.
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
 * What a kernel set compiles into its kernels to use a transport.
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
   * Bits of `TY_DEVICE_API_*` that say how kernels use it.
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
   * Its size.
   */
  size_t param_bytes;
  /**
   * Its alignment.
   */
  size_t param_alignment;
} TyDeviceApi;

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
   * Index of the rank on its machine, as the launcher says.
   */
  uint32_t local_rank;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyDiscover;

/**
 * One dispatch. Tensors are valid until `dispatch_recv` returns; with `TY_DISPATCH_ON_STREAM` until
 * the stream has passed what `dispatch_recv` left there.
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
   * Zero.
   */
  uint32_t reserved;
  /**
   * `[T, H]`, rows contiguous.
   */
  struct TyTensor x;
  /**
   * `[T, S]` of 4-byte elements, any strides; absent unless the rows were quantised before.
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
   * Not empty: this rank refuses its input. Nothing moves; the text is told to all ranks.
   */
  struct TyStr refusal;
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
} TyDispatch;

/**
 * Where a component writes what went wrong. The caller owns it and sets `size`; the component fills the
 * rest when it returns a negative status. Text is UTF-8, ended by a zero byte or the array's end.
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
   * The world rank the error is about, or -1.
   */
  int32_t rank;
  /**
   * Which operation failed, for example `connect`.
   */
  uint8_t operation[TY_ERROR_OPERATION];
  /**
   * What was found, what was expected, what to do.
   */
  uint8_t message[TY_ERROR_MESSAGE];
} TyError;

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
   * `TY_OK` or why it failed.
   */
  int32_t status;
  /**
   * Tag of the command.
   */
  uint64_t tag;
} TyEvent;

/**
 * The first field of every export: what the host judges before anything of the plugin runs.
 */
typedef struct TyExportHeader {
  /**
   * [`TY_MAGIC`].
   */
  uint64_t magic;
  /**
   * A break of compatibility. Must be equal on both sides.
   */
  uint32_t major;
  /**
   * Additions. Any value is accepted.
   */
  uint32_t minor;
  /**
   * The layout hash of this kind (`TY_TRANSPORT_LAYOUT`, ...). Must be equal until 1.0.
   */
  uint64_t layout;
  /**
   * `sizeof` of the whole export structure.
   */
  size_t size;
} TyExportHeader;

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
   * What to add to the signal: 1 to 65,535.
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
   * Number of the command + 1, stored last, with release order at system scope: the slot then
   * belongs to the host until the command is done.
   */
  uint64_t sequence;
} TyGpuRingCommand;

/**
 * What the host tells kernels about a ring. Every field is stored with release order.
 */
typedef struct TyGpuRingStatus {
  /**
   * Commands that are done (INV-4, INV-5), all before it included: only grows.
   */
  uint64_t done;
  /**
   * Not 0: the ring is dead, and no command ends any more; 1 + the number of the command that
   * failed, or all ones where none is to blame. The transport's `health` says more (INV-7).
   */
  uint64_t failed;
  /**
   * Status below zero of the failure.
   */
  int64_t status;
} TyGpuRingStatus;

/**
 * Memory that a kernel set gives the host, so that its kernels may use a transport that has no device
 * device API: they write commands, and a thread of the host posts them and tells what came of it.
 *
 * Command number n is in slot n mod `capacity`. A kernel may write it once `done` + `capacity` > n.
 * Everything starts as zeros and is written by both sides, so it is accessed by atomic loads and
 * stores, but for a command whose `sequence` was seen.
 */
typedef struct TyGpuRing {
  /**
   * `sizeof(TyGpuRing)`.
   */
  size_t size;
  /**
   * The level whose transport is used: one of `TY_LEVEL_*`. The host writes which it asks for.
   */
  uint64_t level;
  /**
   * The queue that commands are posted on, which nobody else uses.
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
   * One.
   */
  struct TyGpuRingStatus *status;
  /**
   * `signals` words: the totals of the signals on this rank, stored after what came with them is
   * visible to the device (INV-1).
   */
  uint64_t *totals;
  /**
   * Signals that are told, from 0 on.
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
 * What the kernel set will use. The host has checked it against the capabilities.
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
   * How long a connect or a single command may take, in nanoseconds.
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
   * The ranks that will talk to each other.
   */
  struct TyTeam team;
  /**
   * What will be used.
   */
  struct TyTransportNeeds needs;
  /**
   * `nic_count` names of NICs that the topology chose for this rank. None: it chose none. A
   * transport whose table names NICs uses those.
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
   * Zero.
   */
  uint32_t reserved;
} TyTransportOpen;

/**
 * What a transport demands of window memory. Needs of two levels are merged by the host: kinds
 * are intersected, handles united, the larger alignment wins.
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
   * Handles that a window must have, of those that its kind of memory can have: bits `TY_HANDLE_*`.
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
   * Where the window starts behind `fd`.
   */
  uint64_t fd_offset;
  /**
   * What `fd` is: one of `TY_HANDLE_*`, or 0 where there is none.
   */
  uint32_t handle;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyWindow;

/**
 * A transport: who fills this structure contributes a fabric.
 *
 * Thread rules: *cold* slots (`probe`, `open`, `close`, `memory_needs`, `alloc`, `register`,
 * `endpoint`, `connect`, `commit`, `peer_address`) are called on one thread that may block. *Hot* slots
 * (`post`, `poll`, `read_signal`) of one queue are called by one thread at a time; different queues
 * may be used by different threads at once. `health` may be called from any thread.
 *
 * Order of calls: `probe`, `open`, `memory_needs`, (`alloc`,) `register` per window, `endpoint` and
 * `connect` per peer, `commit`, then hot slots, then `close`.
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
   * The component's own version, for people. Static.
   */
  struct TyStr version;
  /**
   * One line for people: fabric, hardware. Static.
   */
  struct TyStr about;
  /**
   * Required, cold. Says what the component can do here, without side effects. `config` is the
   * text of the component's own TOML table, `file` the name of the file for messages.
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
   * Required, cold. Ends the instance: no access to windows after it. Called once.
   */
  void (*close)(void *instance);
  /**
   * Required, cold. What window memory must be like.
   */
  int32_t (*memory_needs)(void *instance, struct TyMemoryNeeds *needs, struct TyError *error);
  /**
   * Optional, cold; required with `TY_CAP_OWNS_MEMORY`. Allocates the memory of one window
   * (`id` and `bytes` are given, the rest is filled). Freed by `close`.
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
   * Required, cold. Connects to `peer` (this rank itself included) with the bytes that the
   * peer's `endpoint` wrote. The bytes come from another process: check them. May wait for the
   * peer, at most `deadline_ns`.
   */
  int32_t (*connect)(void *instance,
                     uint32_t peer,
                     const uint8_t *data,
                     size_t bytes,
                     struct TyError *error);
  /**
   * Optional, cold; required with `TY_CAP_LOAD_STORE`. Where window `window` of `peer` is
   * mapped in this process; valid until `close`.
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
   * Required, hot. The 64-bit total of signal `id` on this rank, never reset, with acquire
   * order: what came with the signal is visible to the caller (INV-1).
   */
  uint64_t (*read_signal)(void *instance, uint32_t queue, uint32_t id);
  /**
   * Required, any thread. `TY_OK`, or the first asynchronous error; it stays (INV-7). With
   * `TY_CAP_MASKING` the first error of each peer, from call to call that of another, unless one
   * is about no peer: then that.
   */
  int32_t (*health)(void *instance, struct TyError *error);
  /**
   * Optional, any thread, also beside hot calls of every queue; required with
   * `TY_CAP_MANUAL_PROGRESS`. Moves the fabric forward and keeps what completes for the next
   * `poll`. Returns at once if somebody else is driving. 1 if something moved, `TY_OK` if not,
   * or a status below zero.
   */
  int32_t (*progress)(void *instance);
  /**
   * Optional, any thread, after `connect`. One line for diagnoses: what connects this rank to
   * `peer` (device, provider, both addresses). `*bytes` becomes its length, at most `capacity`.
   */
  int32_t (*link_name)(void *instance, uint32_t peer, uint8_t *data, size_t capacity, size_t *bytes);
  /**
   * Optional, cold, after `connect`; required with `TY_CAP_DEVICE_API`. What kernels compile
   * in to use this transport. What it points to is valid until `close`.
   */
  int32_t (*device_api)(void *instance, struct TyDeviceApi *device_api, struct TyError *error);
  /**
   * Optional, cold, without an instance. What `device_api` will give, but for the value of the
   * parameters: `params` is null, their size and alignment are set. So kernels can be compiled ahead of
   * a job, on a machine without the fabric. What it points to is static.
   */
  int32_t (*device_source)(struct TyDeviceApi *device_api, struct TyError *error);
  /**
   * Optional, cold, collective: every rank of the team calls it once, behind its last `connect` and before
   * anything that uses the connections. For fabrics that register windows only once the team is
   * connected. May wait for peers that still connect, at most `deadline_ns`.
   */
  int32_t (*commit)(void *instance, struct TyError *error);
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
 * What a kernel set uses of one transport. All zero for a level without one.
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
 * What a kernel set needs from the transports, within the limits it was given.
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
   * Bits `TY_NEEDS_*`.
   */
  uint32_t flags;
  /**
   * Of the transport inside the domain.
   */
  struct TyLinkNeeds scale_up;
  /**
   * Of the transport between domains.
   */
  struct TyLinkNeeds scale_out;
  /**
   * Bytes of each window.
   */
  uint64_t window_bytes[TY_MAX_WINDOWS];
  /**
   * Which levels each window is for: bits `1 << TY_LEVEL_*`, or 0 for every level that has a
   * transport. It is registered with those transports only, and only their memory needs count. A
   * transport numbers the windows that it gets from 0 on, in their order here: commands and device
   * device APIs name those numbers.
   */
  uint32_t window_levels[TY_MAX_WINDOWS];
} TyKernelNeeds;

/**
 * What a kernel set is opened for. The host has validated it.
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
   * D. 1: one link reaches every rank, whichever level it is of. More: both links are given, and
   * each row crosses the scale-out link once per domain. Ranks are domain-major: rank r is peer
   * r mod R/D of its scale-up team and peer r / (R/D) of its scale-out team, the rail. Where one
   * link reaches all, rank r is peer r. Absent ranks (`TY_RANK_ABSENT`) are not counted.
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
   * M.
   */
  uint32_t max_tokens;
  /**
   * Operations that may be sent and not yet received; operation n uses slot n mod in_flight.
   */
  uint32_t in_flight;
  /**
   * Handles that may live at once.
   */
  uint32_t handles;
  /**
   * Zero.
   */
  uint32_t reserved;
} TyShape;

/**
 * What the transports of both levels declared. A level without a transport has all zero.
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
   * What it declared.
   */
  struct TyCapabilities capabilities;
} TyLink;

/**
 * What a waiting kernel set tells the host, and how the host stops it (INV-6). Shared by both
 * sides while the communicator lives. Every field is accessed with atomic loads and stores of 8 bytes.
 * A waiter writes `phase` last when it starts to wait, and 0 when it ends.
 */
typedef struct TyWaitBoard {
  /**
   * Not 0: stop waiting now and return `TY_ABORTED`. Written by the host.
   */
  uint64_t abort;
  /**
   * One of `TY_PHASE_*`, or 0 while nobody waits.
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
   * The phase of a wait that ended without its signal, the last such one; else 0. A waiter writes it
   * before `phase` becomes 0, and leaves the fields above as they were: so the host can still tell
   * what the wait was for.
   */
  uint64_t gave_up;
  /**
   * Null, or `ranks` totals, one per world rank: nanoseconds that waits on it took. A waiter adds
   * what a wait took when it ends. Set by the host.
   */
  uint64_t *waited_ns;
  /**
   * Length of `waited_ns`. Set by the host.
   */
  uint64_t ranks;
} TyWaitBoard;

/**
 * Arguments of `plan`: everything is fixed here. The board stays valid until `close`; links until
 * the last operation has returned, because transports are closed before; the list of windows for
 * the call only.
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
   * Shared with the host's watchdog.
   */
  struct TyWaitBoard *board;
  /**
   * A wait that lasts longer than this ends by itself, whatever the host does.
   */
  uint64_t cap_ns;
  /**
   * Null where a lost rank ends the communicator. Else R bytes, one per rank, which stay valid like the
   * board: `TY_RANK_LOST` once a rank is lost, and then for ever; `TY_RANK_ABSENT` from the start
   * for a rank that is not there; else 0. The host writes them, with atomic stores of one byte.
   * Neither's signals come any more: waits on it end, what it owes is left out, and no command
   * names it. An absent rank is in no team: peers are numbered without it. A rank may be lost
   * already when `plan` is called, and is then in its team.
   */
  const uint8_t *lost;
} TyPlan;

/**
 * What a dispatch leaves in the arena. Absent tensors have null data.
 */
typedef struct TyReceived {
  /**
   * `sizeof(TyReceived)`.
   */
  size_t size;
  /**
   * The arena region that holds all of it; goes back with `release`. That may come before the end
   * of the handle where rows are flat: then nothing of it may be read for a combine or a replay.
   */
  uint64_t region;
  /**
   * Tokens received, N; the worst case where the host learns no count.
   */
  uint64_t tokens;
  /**
   * Rows of `x`: N (flat), X (expert-major) or E/R * R*M (packed); the worst case likewise.
   */
  uint64_t rows;
  /**
   * `[rows, H]`.
   */
  struct TyTensor x;
  /**
   * `[rows, S]`.
   */
  struct TyTensor scales;
  /**
   * `[N, K]` i32: local expert ids or -1 (flat).
   */
  struct TyTensor ids;
  /**
   * f32: `[N, K]` (flat), else `[rows, 1]`.
   */
  struct TyTensor weights;
  /**
   * i32 `source rank * M + source token`: `[N, 1]`, or `[rows, 1]` (packed).
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
   * `[R, 1]` i32: tokens per source rank.
   */
  struct TyTensor source_counts;
  /**
   * `[E/R, R]` i64: `count | begin << 32` (packed).
   */
  struct TyTensor ranges;
  /**
   * `[2, 1]` i64: the true N and the true number of rows, padding included.
   */
  struct TyTensor totals;
  /**
   * `[R, 1]` u8: 1 where rows of a source rank are left out because it was lost, else 0. Where
   * places were given to such rows, they hold zeros, ids and slots -1, and source -1.
   */
  struct TyTensor lost;
} TyReceived;

/**
 * When things happened in an operation on this rank, for tools: nanoseconds of the device's clock,
 * which starts anywhere and is not that of another device.
 */
typedef struct TyTrace {
  /**
   * `sizeof(TyTrace)`.
   */
  size_t size;
  /**
   * Its first kernel began.
   */
  uint64_t begun;
  /**
   * This rank's routing was counted, and its records were sent; where nothing is counted, as `begun`.
   */
  uint64_t counted;
  /**
   * The records of all ranks were there.
   */
  uint64_t heard;
  /**
   * Rows had left; of a combine: sums were made.
   */
  uint64_t moved;
  /**
   * The rows of all ranks had arrived; of a combine: all had read this rank's.
   */
  uint64_t arrived;
} TyTrace;

/**
 * A kernel set. All slots of one instance are called by one thread at a time.
 *
 * Order of calls: `probe`, `open`, `needs`, `allocate` per window, `plan`, then operations in the
 * same order on all ranks, then `close`. Operation n may be sent only when operation
 * n - in_flight has been received.
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
   * The component's own version, for people. Static.
   */
  struct TyStr version;
  /**
   * One line for people. Static.
   */
  struct TyStr about;
  /**
   * Required. Whether the component can run here, without side effects; `memory_kinds` becomes the
   * kinds of memory it works on (bits `TY_MEMORY_*`).
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
   * Required. What it will use, within `limits`.
   */
  int32_t (*needs)(void *instance,
                   const struct TyLimits *limits,
                   struct TyKernelNeeds *needs,
                   struct TyError *error);
  /**
   * Required. Allocates the memory of one window (`id` and `bytes` are given).
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
   * Required. Starts a dispatch.
   */
  int32_t (*dispatch_send)(void *instance, const struct TyDispatch *dispatch, struct TyError *error);
  /**
   * Required. Ends the dispatch with this operation number.
   */
  int32_t (*dispatch_recv)(void *instance,
                           uint64_t operation,
                           struct TyReceived *received,
                           struct TyError *error);
  /**
   * Required. Gives an arena region for expert outputs of a handle, so that combine need not
   * copy them: `[rows, H]` of `dtype`. Where the handle's dispatch was in the order of a stream, so
   * is the region: written there only.
   */
  int32_t (*combine_input)(void *instance,
                           uint32_t handle,
                           uint32_t dtype,
                           uint64_t *region,
                           struct TyTensor *tensor,
                           struct TyError *error);
  /**
   * Required. Starts a combine.
   */
  int32_t (*combine_send)(void *instance, const struct TyCombine *combine, struct TyError *error);
  /**
   * Required. Ends the combine with this operation number.
   */
  int32_t (*combine_recv)(void *instance, uint64_t operation, struct TyError *error);
  /**
   * Required. Waits until everything it posted is done (INV-4), so that the transports may be
   * closed once all ranks have said so; also what was received in the order of a stream and has
   * not ended, whose errors it tells. No operation is open.
   */
  int32_t (*flush)(void *instance, struct TyError *error);
  /**
   * Required. Takes back an arena region. One that was given out in the order of a stream is free
   * once the stream has passed what is queued there now.
   */
  void (*release)(void *instance, uint64_t region);
  /**
   * Optional; required where the set does not work on host memory, as are the next two. Gives
   * memory of the kind it works on, for tensors of tools that have none of their own.
   */
  int32_t (*tensor_alloc)(void *instance, uint64_t bytes, uint8_t **pointer, struct TyError *error);
  /**
   * Takes such memory back. An operation that was sent and never received may still use it: the
   * set waits for its kernels first, as it does in `copy`.
   */
  void (*tensor_free)(void *instance, uint8_t *pointer);
  /**
   * Copies between host memory and memory of the kind it works on, and waits for it. Runs behind
   * everything in streams of `stream_create`.
   */
  int32_t (*copy)(void *instance,
                  uint8_t *to,
                  const uint8_t *from,
                  uint64_t bytes,
                  struct TyError *error);
  /**
   * Optional; required with `TY_NEEDS_STREAMS`, as are the next two. Makes a stream for tools that
   * have none of their own. It waits for no other stream.
   */
  int32_t (*stream_create)(void *instance, void **stream, struct TyError *error);
  /**
   * Takes such a stream back, after everything in it.
   */
  void (*stream_destroy)(void *instance, void *stream);
  /**
   * Queues a copy between two places of the device's memory on a stream of the caller, which lives
   * until it has passed the copy.
   */
  int32_t (*copy_on)(void *instance,
                     void *stream,
                     uint8_t *to,
                     const uint8_t *from,
                     uint64_t bytes,
                     struct TyError *error);
  /**
   * Optional, after `plan`, once for each level that has a transport. Where kernels post through the
   * host on the level that `ring` names: its ring, valid until `close`. Else `commands` stays null. The host stops looking at it before transports are closed.
   */
  int32_t (*gpu_ring)(void *instance, struct TyGpuRing *ring, struct TyError *error);
  /**
   * Optional; required with `TY_NEEDS_NO_SYNC`, as are the next three. For tools: what is queued on
   * such a stream from now on is recorded into a graph, and does not run.
   */
  int32_t (*graph_begin)(void *instance, void *stream, struct TyError *error);
  /**
   * Ends the recording and gives the graph.
   */
  int32_t (*graph_end)(void *instance, void *stream, void **graph, struct TyError *error);
  /**
   * Queues a graph on such a stream.
   */
  int32_t (*graph_launch)(void *instance, void *stream, void *graph, struct TyError *error);
  /**
   * Takes a graph back, after every launch of it.
   */
  void (*graph_destroy)(void *instance, void *graph);
  /**
   * Optional, after `plan`. What it counts for reports; without it they say that it is unknown.
   */
  int32_t (*counters)(void *instance, struct TyCounters *counters, struct TyError *error);
  /**
   * Optional, for tools. When things happened in one of the last `in_flight` operations, which has
   * ended: call `flush` before.
   */
  int32_t (*trace)(void *instance, uint64_t operation, struct TyTrace *trace, struct TyError *error);
} TyKernelsTable;

/**
 * The symbol `tokenyard_kernels_v0`.
 */
typedef struct TyKernelsExport {
  /**
   * Judged first.
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
 * Where one rank is.
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
   * Device ordinal this rank drives, or -1 if it drives none.
   */
  int32_t device;
  /**
   * NUMA node of the rank, or -1 if unknown.
   */
  int32_t numa_node;
  /**
   * Logical processors this process may run on; 0 if unknown.
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
   * NICs that are nearest to the rank and equally near, in order. Ranks of a machine that name
   * the same ones share them out. UTF-8, ended by a zero byte or the array's end.
   */
  uint8_t nics[TY_PLACE_NICS][TY_NIC_BYTES];
  /**
   * What NIC is missing near the rank, or cannot be used, in words for people, where ranks of this machine
   * have one and this rank has none of its own; else empty (since minor version 2). Where a transport goes by the
   * NICs (`TY_CAP_PLACED_NICS`) the communicator does not open. UTF-8, ended by a zero byte or the array's end.
   */
  uint8_t missing_nic[TY_MISSING_NIC_BYTES];
} TyPlace;

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
   * The component's own version, for people. Static.
   */
  struct TyStr version;
  /**
   * One line for people. Static.
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
   * Judged first.
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
   * Judged first.
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
 * What a plugin exports: it defines one or more of these constants. Their header is
 *   { TY_MAGIC, TY_TRANSPORT_MAJOR, TY_TRANSPORT_MINOR, TY_TRANSPORT_LAYOUT,
 *     sizeof(TyTransportExport) }
 * and likewise with TOPOLOGY and KERNELS. The tables that `parts` points to, and their strings,
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
