// Kernels of the program gpu_posts: single calls of the device API, and threads that post as fast as they can.
#include "transport.cuh"

namespace up {
#include "ibgda.cuh"
}
using Up = up::DeviceApi;

// A call of the device API by one thread: see `Call` of tests/calls.
struct Call {
  ty::u64 what, bytes, value;
};

TY_KERNEL(32) ty_call(Up::Params p, Call call, ty::u64* abort, ty::WaitReport* report) {
  if (threadIdx.x != 0) return;
  Up up(p);
  ty::Guard guard(abort, 1'000'000'000, report);
  ty::At at{0, 0};
  ty::Raise raise{0, (ty::u32)call.value};
  if (call.what == 0) up.put(ty::Thread(), 0, 0, at, at, call.bytes, guard);
  if (call.what == 1) up.put_value(0, 0, at, call.value, guard);
  if (call.what == 2 || call.what == 5) up.signal(0, 0, raise, guard);
  if (call.what == 3) up.get(ty::Thread(), 0, 0, at, at, call.bytes, guard);
  if (call.what == 4) up.put_signal(ty::Thread(), 0, 0, at, at, call.bytes, raise, guard);
}

// Some lanes of each warp put rows; all blocks on one queue, or each on its own.
struct Posting {
  ty::u32 each, lanes, own_queues, unused;
};

TY_KERNEL(512) ty_posts(Up::Params p, Posting a, ty::u64* abort, ty::WaitReport* report) {
  if (ty::lane_id() >= a.lanes) return;
  Up up(p);
  ty::Guard guard(abort, 5'000'000'000, report);
  ty::u32 queue = a.own_queues != 0 ? blockIdx.x : 0;
  for (ty::u32 n = 0; n < a.each; n++) up.put(ty::Thread(), queue, 0, ty::At{0, n * 64}, ty::At{0, n * 64}, 14336, guard);
}

// Lanes of each warp post one request or two, on one queue: each third lane adds its number, plus 1, behind its row.
TY_KERNEL(512) ty_mixed(Up::Params p, Posting a, ty::u64* abort, ty::WaitReport* report) {
  Up up(p);
  ty::Guard guard(abort, 5'000'000'000, report);
  ty::u32 lane = ty::lane_id();
  ty::At at{0, lane * 64};
  for (ty::u32 n = 0; n < a.each; n++) {
    if (lane % 3 == 0) up.put_signal(ty::Thread(), 0, 0, at, at, 64, ty::Raise{0, lane + 1}, guard);
    else up.put(ty::Thread(), 0, 0, at, at, 64, guard);
  }
}
