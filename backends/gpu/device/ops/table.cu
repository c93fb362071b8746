// Entries of a table (src/ops/table.rs): their indices are checked, then loaded from the windows of their ranks; and
// a rank's own ones are stored into its window. No kernel waits for another rank. Defines: TY_OWN_ARGS_BYTES.
#include "arch.cuh"

namespace ty {

// The arguments of every kernel, for the values or the scales of entries. Mirrored in src/ops/table/args.rs.
struct TableArgs {
  const u64* windows;  // [R]: where the window of each rank lies
  const u64* counts;   // [R]: entries of the layer that each rank has written
  const u8* indices;   // [count], of index_bytes each
  u8* part;            // [count, units], without gaps
  u64* wrong;          // becomes 1 + the place of an index without an entry
  u64 first;           // where those of the layer's entry 0 lie in a window
  u64 pitch;           // from one entry to the next, in a window
  u64 entries;         // most of a rank: index i names entry i % entries of rank i / entries
  u64 count;
  u32 units;           // of an entry in the part: of 16 bytes, 4 or 1
  u32 index_bytes;     // 4 or 8
  u32 rank;
  u32 ranks;
};
#ifdef TY_OWN_ARGS_BYTES
static_assert(sizeof(TableArgs) == TY_OWN_ARGS_BYTES, "args.rs and table.cu differ");
#endif

// Negative ones are large, and of no rank.
__device__ inline u64 index_at(const TableArgs& a, u64 i) {
  if (a.index_bytes == 8) return reinterpret_cast<const u64*>(a.indices)[i];
  return (u64)(i64)reinterpret_cast<const i32*>(a.indices)[i];
}

__device__ inline u64 first_of_grid() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline u64 step_of_grid() { return (u64)gridDim.x * blockDim.x; }

// A thread for each index.
__device__ inline void check(const TableArgs& a) {
#pragma unroll 1
  for (u64 i = first_of_grid(); i < a.count; i += step_of_grid()) {
    u64 index = index_at(a, i), rank = index / a.entries;
    if (rank >= a.ranks || index % a.entries >= a.counts[rank]) store_relaxed(a.wrong, i + 1);
  }
}

// In registers: AMD's compiler copies the structure of 16 bytes through memory.
__device__ inline uint4 load(const uint4* at) { return load_16(at); }
__device__ inline void store(uint4* at, const uint4& unit) { store_16(at, unit); }
template <class Unit>
__device__ inline Unit load(const Unit* at) { return *at; }
template <class Unit>
__device__ inline void store(Unit* at, const Unit& unit) { *at = unit; }

template <class Unit>
__device__ inline const Unit* fetched(const TableArgs& a, u64 at) {
  u64 index = index_at(a, at / a.units);
  u64 entry = a.windows[index / a.entries] + a.first + index % a.entries * a.pitch;
  return reinterpret_cast<const Unit*>(entry) + at % a.units;
}

// A thread for each unit. Those of a batch are loaded before the first is stored, so that all are under way at once.
template <class Unit>
__device__ inline void fetch(const TableArgs& a) {
  constexpr u32 kBatch = 4;
  u64 step = step_of_grid(), all = a.count * a.units;
  Unit* to = reinterpret_cast<Unit*>(a.part);
#pragma unroll 1
  for (u64 first = first_of_grid(); first < all; first += kBatch * step) {
    Unit units[kBatch];
#pragma unroll
    for (u32 i = 0; i < kBatch; i++)
      // The last unit once more where there are no others: none stays unset.
      units[i] = load(fetched<Unit>(a, min(first + i * step, all - 1)));
#pragma unroll
    for (u32 i = 0; i < kBatch; i++)
      if (first + i * step < all) store(to + first + i * step, units[i]);
  }
}

// The part becomes this rank's entries.
template <class Unit>
__device__ inline void write(const TableArgs& a) {
  u64 all = a.count * a.units, entries = a.windows[a.rank] + a.first;
  const Unit* from = reinterpret_cast<const Unit*>(a.part);
#pragma unroll 1
  for (u64 at = first_of_grid(); at < all; at += step_of_grid())
    reinterpret_cast<Unit*>(entries + at / a.units * a.pitch)[at % a.units] = from[at];
}

}  // namespace ty

TY_KERNEL(256) ty_table_check(TY_ARGUMENT ty::TableArgs a) { ty::check(a); }
TY_KERNEL(256) ty_table_fetch_16(TY_ARGUMENT ty::TableArgs a) { ty::fetch<uint4>(a); }
TY_KERNEL(256) ty_table_fetch_4(TY_ARGUMENT ty::TableArgs a) { ty::fetch<ty::u32>(a); }
TY_KERNEL(256) ty_table_fetch_1(TY_ARGUMENT ty::TableArgs a) { ty::fetch<ty::u8>(a); }
TY_KERNEL(256) ty_table_write_16(TY_ARGUMENT ty::TableArgs a) { ty::write<uint4>(a); }
TY_KERNEL(256) ty_table_write_4(TY_ARGUMENT ty::TableArgs a) { ty::write<ty::u32>(a); }
TY_KERNEL(256) ty_table_write_1(TY_ARGUMENT ty::TableArgs a) { ty::write<ty::u8>(a); }
