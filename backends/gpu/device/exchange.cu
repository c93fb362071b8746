// The kernels, over the device API of the level inside a domain. Defines: TY_ROWS_TMA, TY_ARGS_BYTES,
// TY_HOST_DEVICE_API_VERSION, TY_UP_PARAM_BYTES, TY_UP_PRELUDE (a header, or empty), TY_PUTS (the device
// API only puts), TY_GROUPED (see args.cuh), TY_MASKS (see transport.cuh).
//
// With several domains, each level has a program of its own: this one over the device API of its
// level.
#include "decode_args.cuh"
// Headers of the device API, which open namespaces of their own.
#ifdef TY_UP_PRELUDE
#include TY_UP_PRELUDE
#endif

namespace up {
#include "up_device_api.cuh"
}

#include "combine.cuh"
#include "copies.cuh"
#include "dispatch.cuh"
#include "experts.cuh"
#include "fused_combine.cuh"
#include "put_combine.cuh"
#include "decode_combine.cuh"
#include "decode_rank_major.cuh"
#include "decode_rank_major_combine.cuh"

using Up = up::DeviceApi;
static_assert(Up::kLoadStore == !TY_PUTS, "the device API loads and stores, or it puts, as the host defines");
static_assert(Up::kSharedQueues, "blocks share queues");
static_assert(TY_DEVICE_API_VERSION == TY_HOST_DEVICE_API_VERSION, "the device API's contract is of another version");
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the transport passes other parameters than its device API takes");
TY_SHARED_BYTES(shared);

TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_dispatch(TY_ARGUMENT ty::DispatchArgs a, TY_ARGUMENT Up::Params p) {
  ty::dispatch(ty::in_place(a), Up(p), shared);
}

#if TY_PUTS

TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_return_put(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine_put(ty::in_place(a), Up(p), shared);
}
// Between domains one kernel puts rows back and sums.
template <class Type>
__device__ TY_INLINED void sum_or_return(const ty::CombineArgs& a, const Up& up) {
#if TY_RUNS
  ty::return_runs<Type>(a, up, shared);
#else
  ty::Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  ty::sum_returned<Type>(a, shared, guard, [] {});
#endif
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_combine_bf16(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  sum_or_return<ty::Bf16>(ty::in_place(a), Up(p));
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_combine_f16(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  sum_or_return<ty::F16>(ty::in_place(a), Up(p));
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_combine_f32(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  sum_or_return<ty::F32>(ty::in_place(a), Up(p));
}

#else

TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_combine_bf16(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine<ty::Bf16>(ty::in_place(a), Up(p), shared);
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_combine_f16(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine<ty::F16>(ty::in_place(a), Up(p), shared);
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_combine_f32(TY_ARGUMENT ty::CombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine<ty::F32>(ty::in_place(a), Up(p), shared);
}

#endif

// Without bulk copies rows wait in registers, and 128 are too few for rows and sums: 860 bytes of a thread would spill.
#if !TY_PUTS && !TY_GROUPED && (TY_ROWS_TMA || TY_MANY_REGISTERS)

TY_KERNEL_ALONE(ty::kFusedWarps * ty::kWave)
    ty_combine_fused_bf16(TY_ARGUMENT ty::FusedCombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine_fused<ty::Bf16>(ty::in_place(a), Up(p), shared);
}
TY_KERNEL_ALONE(ty::kFusedWarps * ty::kWave)
    ty_combine_fused_f16(TY_ARGUMENT ty::FusedCombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine_fused<ty::F16>(ty::in_place(a), Up(p), shared);
}
TY_KERNEL_ALONE(ty::kFusedWarps * ty::kWave)
    ty_combine_fused_f32(TY_ARGUMENT ty::FusedCombineArgs a, TY_ARGUMENT Up::Params p) {
  ty::combine_fused<ty::F32>(ty::in_place(a), Up(p), shared);
}

#endif

#if !TY_PUTS && !TY_GROUPED

// A kernel for each length of rows. Rows that are cast have half as many pieces.
#define TY_DECODE_DISPATCH(name, pieces, is_cast) \
  TY_KERNEL_ALONE(ty::kWarps * ty::kWave) name(TY_ARGUMENT ty::DecodeDispatchArgs a, TY_ARGUMENT Up::Params p) { \
    ty::dispatch_decode<pieces, is_cast>(ty::in_place(a), Up(p), shared); \
  }
#define TY_DECODE_COMBINE(name, pieces, Type, Partial) \
  TY_KERNEL_ALONE(ty::kWarps * ty::kWave) name(TY_ARGUMENT ty::DecodeCombineArgs a, TY_ARGUMENT Up::Params p) { \
    ty::combine_decode<ty::Type, ty::Partial, pieces>(ty::in_place(a), Up(p), shared); \
  }
TY_DECODE_DISPATCH(ty_dispatch_decode, 2, false)
TY_DECODE_DISPATCH(ty_dispatch_decode_long, ty::kMostPieces, false)
TY_DECODE_DISPATCH(ty_dispatch_decode_cast, 1, true)
TY_DECODE_DISPATCH(ty_dispatch_decode_cast_long, ty::kMostPieces, true)
// Masks leave no rank out of rank-major rows.
#if !TY_MASKS
#define TY_DECODE_RANK_MAJOR(name, pieces, is_cast) \
  TY_KERNEL_ALONE(ty::kWarps * ty::kWave) name(TY_ARGUMENT ty::DecodeDispatchArgs a, TY_ARGUMENT Up::Params p) { \
    ty::dispatch_rank_major<pieces, is_cast>(ty::in_place(a), Up(p), shared); \
  }
TY_DECODE_RANK_MAJOR(ty_dispatch_decode_rank_major, 2, false)
TY_DECODE_RANK_MAJOR(ty_dispatch_decode_rank_major_long, ty::kMostPieces, false)
TY_DECODE_RANK_MAJOR(ty_dispatch_decode_rank_major_cast, 1, true)
TY_DECODE_RANK_MAJOR(ty_dispatch_decode_rank_major_cast_long, ty::kMostPieces, true)
#define TY_COMBINE_RANK_MAJOR(name, Type) \
  TY_KERNEL_PAIRED(ty::kWarps * ty::kWave) name(TY_ARGUMENT ty::DecodeCombineArgs a, TY_ARGUMENT Up::Params p) { \
    ty::combine_rank_major<ty::Type, 2>(ty::in_place(a), Up(p), shared); \
  }
TY_COMBINE_RANK_MAJOR(ty_combine_rank_major_bf16, Bf16)
TY_COMBINE_RANK_MAJOR(ty_combine_rank_major_f16, F16)
#endif
TY_DECODE_COMBINE(ty_combine_decode_bf16, 2, Bf16, Bf16)
TY_DECODE_COMBINE(ty_combine_decode_bf16_long, ty::kMostPieces, Bf16, Bf16)
TY_DECODE_COMBINE(ty_combine_decode_f16, 2, F16, F16)
TY_DECODE_COMBINE(ty_combine_decode_f16_long, ty::kMostPieces, F16, F16)
TY_DECODE_COMBINE(ty_combine_decode_f32, 2, F32, F32)
TY_DECODE_COMBINE(ty_combine_decode_f32_long, ty::kMostPieces, F32, F32)
// Sums that are rounded once: no longer rows fit the inbox as f32.
TY_DECODE_COMBINE(ty_combine_decode_bf16_once, 2, Bf16, F32)
TY_DECODE_COMBINE(ty_combine_decode_f16_once, 2, F16, F32)
// Sums that travel in LogFMT-10.
TY_DECODE_COMBINE(ty_combine_decode_bf16_logfmt, 2, Bf16, Coded)
TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_refuse_decode(TY_ARGUMENT ty::DecodeRefusalArgs a, TY_ARGUMENT Up::Params p) {
  ty::refuse_decode(ty::in_place(a), Up(p), shared);
}

#endif

TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_spread(TY_ARGUMENT ty::SpreadArgs a, TY_ARGUMENT Up::Params) {
  ty::spread(ty::in_place(a), shared);
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_merge_bf16(TY_ARGUMENT ty::MergeArgs a, TY_ARGUMENT Up::Params) {
  ty::merge<ty::Bf16>(ty::in_place(a), shared);
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_merge_f16(TY_ARGUMENT ty::MergeArgs a, TY_ARGUMENT Up::Params) {
  ty::merge<ty::F16>(ty::in_place(a), shared);
}
TY_KERNEL_ALONE(ty::kSummingWarps * ty::kWave)
    ty_merge_f32(TY_ARGUMENT ty::MergeArgs a, TY_ARGUMENT Up::Params) {
  ty::merge<ty::F32>(ty::in_place(a), shared);
}

TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_agree(TY_ARGUMENT ty::Common c, TY_ARGUMENT Up::Params p) {
  ty::agree(ty::in_place(c), Up(p), shared);
}

#if TY_GROUPED
TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_group(TY_ARGUMENT ty::GroupArgs a, TY_ARGUMENT Up::Params) {
  ty::group(ty::in_place(a));
}
#endif

TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_copy_out(TY_ARGUMENT ty::CopyArgs a, TY_ARGUMENT Up::Params) {
  ty::copy_out(ty::in_place(a));
}
TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_count_routing(TY_ARGUMENT ty::CountArgs a, TY_ARGUMENT Up::Params) {
  ty::count_routing(ty::in_place(a));
}
TY_KERNEL_ALONE(ty::kWarps * ty::kWave)
    ty_arrive(TY_ARGUMENT ty::ArriveArgs a, TY_ARGUMENT Up::Params p) {
  ty::Guard guard(a.abort, a.cap_ns, a.report);
  Up device_api(p);
  ty::u32 first = (2 * a.cell->slot + a.done) * a.ranks;
  ty::arrive({a.cell, a.state, a.rank, a.ranks, first, a.phase}, device_api, guard);
  ty::flush_queues(*a.state, device_api, guard);
  if (guard.ended()) a.state->stopped = 1;
  ty::sync_block();
  if (threadIdx.x == 0) a.trace->arrived = ty::now_ns();
}
