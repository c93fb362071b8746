// Puts of kernels through a device API, in a loop: a team of one rank puts to itself (nic.rs). Defines:
// TY_PROBE_BYTES, TY_UP_PARAM_BYTES.
#include "transport.cuh"

namespace up {
#include "up_device_api.cuh"
}

namespace ty {

// The arguments of every kernel. Mirrored in nic.rs; TY_PROBE_BYTES checks the size.
struct NicProbeArgs {
  const u64* abort;
  WaitReport* report;
  u64 cap_ns;
  u64* times;    // three for each block or put: begun, posted, seen
  const u64* raised;  // of each queue: signals before this launch
  u64 room;      // bytes of a half of the window: sources are in the first one
  u64 bytes;     // of a put, at most `room`; 0: only its signal
  u32 puts;      // of each posting wave, or one after the other
  u32 unused;
};
#ifdef TY_PROBE_BYTES
static_assert(sizeof(NicProbeArgs) == TY_PROBE_BYTES, "nic.rs and nic.cu differ");
#endif

using Up = up::DeviceApi;
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the host passes other parameters than the device API takes");

// TY_PHASE_QUEUE of the plugin ABI.
constexpr u32 kQueue = 6;

__device__ inline bool post(const Up& up, const NicProbeArgs& a, u32 queue, u64 number, Guard& guard) {
  if (a.bytes == 0) return up.signal(queue, 0, {0, 1}, guard);
  u64 at = number % (a.room / a.bytes) * a.bytes;
  return up.put_signal(Thread(), queue, 0, {0, a.room + at}, {0, at}, a.bytes, {0, 1}, guard);
}

}  // namespace ty

// One lane of each wave posts on the queue of its block; the block ends once it has seen all signals of the queue.
TY_KERNEL(1024) ty_nic_puts(TY_ARGUMENT ty::NicProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  using namespace ty;
  Up up(p);
  Guard guard(a.abort, a.cap_ns, a.report);
  u64 begun = now_ns(), all = (u64)block_waves() * a.puts;
  u64 first = blockIdx.x * all + (u64)wave_id() * a.puts;
  bool ok = true;
  if (lane_id() == 0)
    for (u32 i = 0; i < a.puts && ok; i++) ok = post(up, a, blockIdx.x, first + i, guard);
  if (!sync_block_and(ok)) return;
  if (threadIdx.x != 0) return;
  up.submit(blockIdx.x);
  u64 posted = now_ns(), expected = load_relaxed(a.raised + blockIdx.x) + all;
  if (!wait_signal(up, blockIdx.x, {kQueue, 0, 0, expected}, guard)) return;
  if (!up.flush(Thread(), blockIdx.x, guard)) return;
  a.times[3 * blockIdx.x] = begun;
  a.times[3 * blockIdx.x + 1] = posted;
  a.times[3 * blockIdx.x + 2] = now_ns();
}

// Each put is posted once the signal of the one before it was seen. One thread.
TY_KERNEL(64) ty_nic_trips(TY_ARGUMENT ty::NicProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  using namespace ty;
  if (threadIdx.x != 0) return;
  Up up(p);
  Guard guard(a.abort, a.cap_ns, a.report);
  u64 before = load_relaxed(a.raised);
  for (u32 i = 0; i < a.puts; i++) {
    u64 begun = now_ns();
    if (!post(up, a, 0, i, guard)) return;
    up.submit(0);
    u64 posted = now_ns();
    if (!wait_signal(up, 0, {kQueue, 0, 0, before + i + 1}, guard)) return;
    a.times[3 * i] = begun;
    a.times[3 * i + 1] = posted;
    a.times[3 * i + 2] = now_ns();
  }
}
