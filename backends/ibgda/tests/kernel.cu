// A kernel that makes every call of the device API. `cargo xtask test` compiles it for GPUs, in its step
// `cuda-compile`. It is never run.
#include "transport.cuh"

namespace up {
#include "ibgda.cuh"
}

TY_KERNEL(128)
    ty_ibgda_calls(up::DeviceApi::Params p, ty::At to, ty::At from, ty::u64* abort, ty::WaitReport* report) {
  up::DeviceApi up(p);
  ty::Guard guard(abort, 1000, report);
  up.put(ty::Block(), 0, 1, to, from, 4096, guard);
  up.put_signal(ty::Warp(), 1, 2, to, from, 4096, ty::Raise{1, 2}, guard);
  up.put_signal(ty::Thread(), 1, 2, to, from, 4096, ty::Raise{1, 2}, guard);
  up.get(ty::Warp(), 0, 1, to, from, 4096, guard);
  if (threadIdx.x == 0) {
    up.put_value(0, 1, to, up.read_signal(0, 3), guard);
    up.signal(0, 1, ty::Raise{1, 2}, guard);
    up.submit(0);
  }
  up.flush(ty::Block(), 0, guard);
}
