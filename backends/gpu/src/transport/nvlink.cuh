// The device API over NVLink: peers' windows and signals are mapped here. See transport.cuh.
// Compiled inside a namespace of its level; no include guard.

struct DeviceApi {
  struct Params {
    // [windows][peers]: first byte of each window of each peer.
    const ty::u64* windows;
    // [peers]: first signal of each peer; signals are `spacing` bytes apart.
    const ty::u64* signals;
    ty::u32 peers;
    ty::u32 me;
    ty::u32 spacing;
    ty::u32 reserved;
  };
  static constexpr bool kLoadStore = true;
  static constexpr bool kSharedQueues = true;

  Params p;
  __device__ explicit DeviceApi(const Params& params) : p(params) {}

  __device__ ty::u8* peer_ptr(ty::u32 window, ty::u32 peer, ty::u64 offset) const {
    return reinterpret_cast<ty::u8*>(p.windows[window * p.peers + peer] + offset);
  }

  template <class Coop>
  __device__ bool put(Coop coop, ty::u32, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                      ty::Guard&) const {
    ty::copy_16(coop, peer_ptr(dst.window, peer, dst.offset), peer_ptr(src.window, p.me, src.offset),
                bytes);
    return true;
  }

  template <class Coop>
  __device__ bool put_signal(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src,
                             ty::u64 bytes, ty::Raise raise, ty::Guard& guard) const {
    put(coop, queue, peer, dst, src, bytes, guard);
    ty::fence_system_all();
    coop.sync();
    return coop.index() != 0 || signal(queue, peer, raise, guard);
  }

  __device__ bool put_value(ty::u32, ty::u32 peer, ty::At dst, ty::u64 value, ty::Guard&) const {
    ty::store_relaxed(reinterpret_cast<ty::u64*>(peer_ptr(dst.window, peer, dst.offset)), value);
    return true;
  }

  __device__ bool signal(ty::u32, ty::u32 peer, ty::Raise raise, ty::Guard&) const {
    ty::add_release(signal_ptr(peer, raise.signal), raise.add);
    return true;
  }

  __device__ void submit(ty::u32) const {}

  __device__ ty::u64 read_signal(ty::u32, ty::u32 id) const {
    return ty::load_acquire(signal_ptr(p.me, id));
  }

  template <class Coop>
  __device__ bool flush(Coop, ty::u32, ty::Guard&) const {
    return true;
  }

  template <class Coop>
  __device__ bool get(Coop coop, ty::u32, ty::u32 peer, ty::At src, ty::At dst, ty::u64 bytes,
                      ty::Guard&) const {
    ty::copy_16(coop, peer_ptr(dst.window, p.me, dst.offset), peer_ptr(src.window, peer, src.offset),
                bytes);
    return true;
  }

 private:
  __device__ ty::u64* signal_ptr(ty::u32 peer, ty::u32 id) const {
    return reinterpret_cast<ty::u64*>(p.signals[peer] + (ty::u64)id * p.spacing);
  }
};
