// Puts of kernels through a device API, in a loop: a team of one rank puts to itself (nic.rs). Defines:
// TY_OWN_ARGS_BYTES, TY_UP_PARAM_BYTES.
#include "transport.cuh"

namespace up {
#include "up_device_api.cuh"
}

namespace ty {

// The arguments of every kernel. Mirrored in nic.rs; TY_OWN_ARGS_BYTES checks the size.
struct NicProbeArgs {
  const u64* abort;
  WaitReport* report;
  u64 cap_ns;
  u64* times;    // three for each block or put: begun, posted, seen
  u64* raised;   // of each queue: signals so far
  u64* next;     // number of the next put, of all blocks together; 0 before a launch
  u64 room;      // bytes of a half of the window: sources are in the first one
  u64 bytes;     // of a put, at most `room`; 0: only its signal
  u64 puts;      // of each posting wave, of all together, or one after the other
  u64 window;    // puts of a queue that are under way
};
#ifdef TY_OWN_ARGS_BYTES
static_assert(sizeof(NicProbeArgs) == TY_OWN_ARGS_BYTES, "nic.rs and nic.cu differ");
#endif

using Up = up::DeviceApi;
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the host passes other parameters than the device API takes");

// TY_PHASE_ROWS of the plugin ABI. Such a wait names its queue in the place of a peer: there is only one peer.
constexpr u32 kRows = 3;

__device__ inline bool post(const Up& up, const NicProbeArgs& a, u32 queue, u64 number, Guard& guard) {
  if (a.bytes == 0) return up.signal(queue, 0, {0, 1}, guard);
  u64 at = number % (a.room / a.bytes) * a.bytes;
  return up.put_signal(Thread(), queue, 0, {0, a.room + at}, {0, at}, a.bytes, {0, 1}, guard);
}

// Ends a block that has posted so many: once it has seen all signals of its queue. One thread.
__device__ inline void end(const Up& up, const NicProbeArgs& a, u64 begun, u64 puts, Guard& guard) {
  u32 queue = blockIdx.x;
  up.submit(queue);
  u64 posted = now_ns(), expected = load_relaxed(a.raised + queue) + puts;
  if (!wait_signal(up, queue, {kRows, queue, 0, expected}, guard)) return;
  u64 seen = now_ns();
  if (!up.flush(Thread(), queue, guard)) return;
  store_relaxed(a.raised + queue, expected);
  a.times[3 * queue] = begun;
  a.times[3 * queue + 1] = posted;
  a.times[3 * queue + 2] = seen;
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
    for (u64 i = 0; i < a.puts && ok; i++) ok = post(up, a, blockIdx.x, first + i, guard);
  if (!sync_block_and(ok)) return;
  if (threadIdx.x == 0) end(up, a, begun, all, guard);
}

// One thread of each block posts, and takes the next puts of all blocks once few of its queue are under way: so no
// queue is left with more than another. It takes a few at once, and looks at the signal only when it must: a look and
// an atomic take as long as the wire takes for 64 KiB. One thread.
TY_KERNEL(64) ty_nic_stream(TY_ARGUMENT ty::NicProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  using namespace ty;
  if (threadIdx.x != 0) return;
  Up up(p);
  Guard guard(a.abort, a.cap_ns, a.report);
  u32 queue = blockIdx.x;
  u64 begun = now_ns(), before = load_relaxed(a.raised + queue), mine = 0, seen = 0, run = (a.window + 3) / 4;
  for (u64 first; (first = atomic_add(a.next, run)) < a.puts;) {
    u64 last = first + run < a.puts ? first + run : a.puts;
    for (u64 number = first; number < last; number++, mine++) {
      if (mine - seen >= a.window) seen = up.read_signal(queue, 0) - before;
      if (mine - seen >= a.window) {
        if (!wait_signal(up, queue, {kRows, queue, 0, before + mine - a.window + 1}, guard)) return;
        seen = mine - a.window + 1;
      }
      if (!post(up, a, queue, number, guard)) return;
      up.submit(queue);
    }
  }
  end(up, a, begun, mine, guard);
}

// Each put is posted once the signal of the one before it was seen. One thread.
TY_KERNEL(64) ty_nic_trips(TY_ARGUMENT ty::NicProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  using namespace ty;
  if (threadIdx.x != 0) return;
  Up up(p);
  Guard guard(a.abort, a.cap_ns, a.report);
  u64 before = load_relaxed(a.raised);
  for (u64 i = 0; i < a.puts; i++) {
    u64 begun = now_ns();
    if (!post(up, a, 0, i, guard)) return;
    up.submit(0);
    u64 posted = now_ns();
    if (!wait_signal(up, 0, {kRows, 0, 0, before + i + 1}, guard)) return;
    a.times[3 * i] = begun;
    a.times[3 * i + 1] = posted;
    a.times[3 * i + 2] = now_ns();
  }
  store_relaxed(a.raised, before + a.puts);
}
