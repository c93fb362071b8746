// Bulk copies, the second half of arch.cuh where rows move by them. They happen as late as they may: a load
// when a poll of its barrier fails, a store when a thread waits for it. So a copy that no thread waits for is
// lost. The threads are fibers of one thread of the system, so nothing here is atomic.

namespace model {

// Levels include this in namespaces of their own.
using namespace ::model;

struct Load { ty::u32 to; const ty::u8* from; ty::u32 bytes; ty::u64* barrier; };
struct Store { ty::u8* to; ty::u32 from; std::vector<ty::u8> read; ty::u32 bytes; bool is_read; };
struct Stores { std::vector<Store> open; std::vector<std::vector<Store>> groups; };

// The fields of a barrier's word: its phase, the arrivals that are left in it, the arrivals of a
// phase, and bytes in flight.
struct Barrier { ty::u32 phase : 1, left : 15, count : 16; ty::u32 bytes; };

inline thread_local ty::u64 anchor;
inline thread_local std::vector<Load> loads;
inline thread_local std::vector<Stores> stores;

inline ty::u8* of_address(ty::u32 address) { return (ty::u8*)&anchor + (int)address; }
template <class Change>
void change(ty::u64* word, Change change) {
  Barrier b;
  memcpy(&b, word, sizeof b);
  change(b);
  if (b.left == 0 && b.bytes == 0) b.phase ^= 1, b.left = b.count;
  memcpy(word, &b, sizeof b);
}
inline void load_one() {
  if (loads.empty()) return;
  Load l = loads.front();
  loads.erase(loads.begin());
  memcpy(of_address(l.to), l.from, l.bytes);
  change(l.barrier, [&](Barrier& b) { b.bytes -= l.bytes; });
}
inline Stores& my_stores() {
  if (stores.size() <= here->current) stores.resize(here->current + 1);
  return stores[here->current];
}
inline void read(Store& s) {
  if (s.is_read) return;
  s.read.assign(of_address(s.from), of_address(s.from) + s.bytes), s.is_read = true;
}
// All groups except the `but` newest are read; and complete, if so.
inline void wait_stores(size_t but, bool complete) {
  auto& groups = my_stores().groups;
  for (size_t i = 0; i + but < groups.size(); i++)
    for (Store& s : groups[i]) read(s);
  while (complete && groups.size() > but) {
    for (Store& s : groups.front()) memcpy(s.to, s.read.data(), s.bytes);
    groups.erase(groups.begin());
  }
}

}  // namespace model

namespace ty {

__device__ inline u32 shared_address(const void* at) { return (u32)(i32)((u8*)at - (u8*)&model::anchor); }
__device__ inline uint4 load_shared(const uint4* at) { return *at; }
__device__ inline void copy_async(void* to, const void* from, u32 bytes) { memcpy(to, from, bytes); }
__device__ inline void copies_done() {}
__device__ inline void init_barrier(u32 barrier, u32 count) {
  model::Barrier b{0, count, count, 0};
  memcpy(model::of_address(barrier), &b, sizeof b);
}
__device__ inline void arrive(u32 barrier) {
  model::change((u64*)model::of_address(barrier), [](model::Barrier& b) { b.left--; });
}
__device__ inline void bulk_load(u32 to, const u8* from, u32 bytes, u32 barrier) {
  u64* word = (u64*)model::of_address(barrier);
  model::change(word, [&](model::Barrier& b) { b.left--, b.bytes += bytes; });
  model::loads.push_back({to, from, bytes, word});
}
__device__ inline void bulk_store(u8* to, u32 from, u32 bytes) {
  model::my_stores().open.push_back({to, from, {}, bytes, false});
}
__device__ inline bool is_past(u32 barrier, u32 parity) {
  model::Barrier b;
  memcpy(&b, model::of_address(barrier), sizeof b);
  if (b.phase != parity) return true;
  model::load_one();
  model::poll();
  return false;
}
__device__ inline void wait_barrier(u32 barrier, u32 parity) {
  while (!is_past(barrier, parity)) {
  }
}
__device__ inline void publish_barriers() {}
__device__ inline void publish_shared() {}
__device__ inline void publish_places() {}
__device__ inline void close_stores() {
  model::Stores& mine = model::my_stores();
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}
__device__ inline void stores_read() { model::wait_stores(0, false); }
__device__ inline void stores_read_but_one() { model::wait_stores(1, false); }
__device__ inline void stores_done_but_one() { model::wait_stores(1, true); }
__device__ inline void stores_done() { model::wait_stores(0, true); }

}  // namespace ty
