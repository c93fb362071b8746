// The kernels, over the face of the level inside a domain. Defines: TY_ROWS_TMA, TY_ARGS_BYTES,
// TY_HOST_FACE_VERSION, TY_UP_PARAM_BYTES, TY_PUTS (the face only puts), TY_GROUPED (see args.cuh).
//
// Where there are several domains, each level has a program of its own: this one over its face.
#include "args.cuh"

namespace up {
#include "up_face.cuh"
}

#include "combine.cuh"
#include "dispatch.cuh"
#include "experts.cuh"
#include "put_combine.cuh"

using Up = up::Face;
static_assert(Up::kLoadStore == !TY_PUTS, "the face loads and stores, or it puts, as the host was told");
static_assert(Up::kSharedLanes, "every block raises signals on lane 0");
static_assert(TY_FACE_VERSION == TY_HOST_FACE_VERSION, "the face's contract is of another version");
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the transport passes other parameters than its face takes");
extern __shared__ __align__(1024) ty::u8 shared[];

extern "C" __global__ void __launch_bounds__(ty::kWarps * 32, 1)
    ty_dispatch(const __grid_constant__ ty::DispatchArgs a, const __grid_constant__ Up::Params p) {
  ty::dispatch(a, Up(p), shared);
}

#if TY_PUTS

extern "C" __global__ void __launch_bounds__(ty::kWarps * 32, 1)
    ty_give_back(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params p) {
  ty::give_back(a, Up(p), shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_combine_bf16(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params) {
  ty::sum_returned<ty::Bf16>(a, shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_combine_f16(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params) {
  ty::sum_returned<ty::F16>(a, shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_combine_f32(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params) {
  ty::sum_returned<ty::F32>(a, shared);
}

#else

extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_combine_bf16(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params p) {
  ty::combine<ty::Bf16>(a, Up(p), shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_combine_f16(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params p) {
  ty::combine<ty::F16>(a, Up(p), shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_combine_f32(const __grid_constant__ ty::CombineArgs a, const __grid_constant__ Up::Params p) {
  ty::combine<ty::F32>(a, Up(p), shared);
}

#endif

extern "C" __global__ void __launch_bounds__(ty::kWarps * 32, 1)
    ty_spread(const __grid_constant__ ty::SpreadArgs a, const __grid_constant__ Up::Params) {
  ty::spread(a, shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_merge_bf16(const __grid_constant__ ty::MergeArgs a, const __grid_constant__ Up::Params) {
  ty::merge<ty::Bf16>(a, shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_merge_f16(const __grid_constant__ ty::MergeArgs a, const __grid_constant__ Up::Params) {
  ty::merge<ty::F16>(a, shared);
}
extern "C" __global__ void __launch_bounds__(ty::kSummingWarps * 32, 1)
    ty_merge_f32(const __grid_constant__ ty::MergeArgs a, const __grid_constant__ Up::Params) {
  ty::merge<ty::F32>(a, shared);
}

extern "C" __global__ void __launch_bounds__(ty::kWarps * 32, 1)
    ty_agree(const __grid_constant__ ty::Common c, const __grid_constant__ Up::Params p) {
  ty::agree(c, Up(p), shared);
}

#if TY_GROUPED
extern "C" __global__ void __launch_bounds__(ty::kWarps * 32, 1)
    ty_group(const __grid_constant__ ty::GroupArgs a, const __grid_constant__ Up::Params) {
  ty::group(a);
}
#endif

extern "C" __global__ void __launch_bounds__(ty::kWarps * 32, 1)
    ty_arrive(const __grid_constant__ ty::ArriveArgs a, const __grid_constant__ Up::Params p) {
  ty::Guard guard(a.abort, a.cap_ns, a.report);
  Up face(p);
  ty::u32 first = (2 * a.cell->slot + a.done) * a.ranks;
  ty::arrive({a.cell, a.state, a.rank, a.ranks, first, a.phase}, face, guard);
  face.flush(ty::Block(), 0, guard);
  if (guard.ended()) a.state->stopped = 1;
  __syncthreads();
  if (threadIdx.x == 0) a.trace->arrived = ty::now_ns();
}
