// The cost of commands that kernels write into a ring of the host (gpu_ring.cuh). Defines:
// TY_OWN_ARGS_BYTES, TY_UP_PARAM_BYTES.
#include "transport.cuh"

namespace up {
#include "up_device_api.cuh"
}

namespace ty {

// The arguments of every kernel. Mirrored in ring.rs; TY_OWN_ARGS_BYTES checks the size.
struct RingProbeArgs {
  const u64* abort;
  WaitReport* report;
  u64 cap_ns;
  u64* times;    // a pair for each block or round trip: begun and ended
  u64 raised;    // commands before this launch: each raises signal 0 of this rank by 1
  u32 commands;  // of each posting wave, or round trips
  u32 unused;
};
#ifdef TY_OWN_ARGS_BYTES
static_assert(sizeof(RingProbeArgs) == TY_OWN_ARGS_BYTES, "ring.rs and ring.cu differ");
#endif

using Up = up::DeviceApi;
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the host passes other parameters than the device API takes");

// TY_PHASE_QUEUE of the plugin ABI.
constexpr u32 kQueue = 6;
constexpr Raise kRaise = {0, 1};

}  // namespace ty

// One lane of each wave posts, as exchanges do; the block ends once the host has done all posted
// commands.
TY_KERNEL(1024) ty_ring_posts(TY_ARGUMENT ty::RingProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  ty::Up up(p);
  ty::Guard guard(a.abort, a.cap_ns, a.report);
  ty::u64 begun = ty::now_ns();
  bool ok = true;
  if (ty::lane_id() == 0)
    for (ty::u32 i = 0; i < a.commands && ok; i++) ok = up.signal(0, 0, ty::kRaise, guard);
  if (!ty::sync_block_and(ok)) return;
  if (!up.flush(ty::Block(), 0, guard)) return;
  if (threadIdx.x == 0) {
    a.times[2 * blockIdx.x] = begun;
    a.times[2 * blockIdx.x + 1] = ty::now_ns();
  }
}

// Each command is posted once the host has shown the signal of the one before it. One thread.
TY_KERNEL(64) ty_ring_trips(TY_ARGUMENT ty::RingProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  if (threadIdx.x != 0) return;
  ty::Up up(p);
  ty::Guard guard(a.abort, a.cap_ns, a.report);
  for (ty::u32 i = 0; i < a.commands; i++) {
    ty::u64 begun = ty::now_ns();
    if (!up.signal(0, 0, ty::kRaise, guard)) return;
    if (!ty::wait_signal(up, 0, {ty::kQueue, 0, 0, a.raised + i + 1}, guard)) return;
    a.times[2 * i] = begun;
    a.times[2 * i + 1] = ty::now_ns();
  }
}
