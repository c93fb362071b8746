// The types that rows may have: how 16 bytes become floats, and back.
#pragma once
#include "transport.cuh"

namespace ty {

struct Bf16 {
  static constexpr u32 kLanes = 8;
  __device__ static void widen(const uint4& v, float* f) {
    const u32* w = &v.x;
    for (u32 i = 0; i < 4; i++) {
      f[2 * i] = float_of(w[i] << 16);
      f[2 * i + 1] = float_of(w[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 narrow(const float* f) {
    u32 w[4];
    for (u32 i = 0; i < 4; i++)
      w[i] = to_bf16x2(f[2 * i], f[2 * i + 1]);
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};
struct F16 {
  static constexpr u32 kLanes = 8;
  __device__ static void widen(const uint4& v, float* f) {
    const u32* w = &v.x;
    for (u32 i = 0; i < 8; i++) {
      u16 half = (u16)(w[i / 2] >> 16 * (i % 2));
      f[i] = from_f16(half);
    }
  }
  __device__ static uint4 narrow(const float* f) {
    u32 w[4];
    for (u32 i = 0; i < 4; i++)
      w[i] = to_f16x2(f[2 * i], f[2 * i + 1]);
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};
struct F32 {
  static constexpr u32 kLanes = 4;
  __device__ static void widen(const uint4& v, float* f) {
    const u32* w = &v.x;
    for (u32 i = 0; i < 4; i++) f[i] = float_of(w[i]);
  }
  __device__ static uint4 narrow(const float* f) {
    return make_uint4(bits_of(f[0]), bits_of(f[1]), bits_of(f[2]),
                      bits_of(f[3]));
  }
};

// The start of a sum: adding a term to -0 gives the term, the sign of a zero included, but not all bits of a NaN. To
// start with the first term instead took a choice for each value that is added.
constexpr float kNothing = -0.0f;

template <class Type>
struct Sum {
  float value[Type::kLanes];
  bool empty = true;

  __device__ Sum() {
    for (u32 i = 0; i < Type::kLanes; i++) value[i] = kNothing;
  }

  __device__ void add(const uint4& term) {
    float f[Type::kLanes];
    Type::widen(term, f);
    for (u32 i = 0; i < Type::kLanes; i++) value[i] = add_rn(value[i], f[i]);
    empty = false;
  }
  // One rounding per term.
  __device__ void add_weighted(const uint4& term, float weight) {
    float f[Type::kLanes];
    Type::widen(term, f);
    for (u32 i = 0; i < Type::kLanes; i++) value[i] = fma_rn(weight, f[i], value[i]);
    empty = false;
  }
  __device__ uint4 result() const { return empty ? make_uint4(0, 0, 0, 0) : Type::narrow(value); }
};

// The sums of one thread: its vectors are one warp's length apart, so that a warp has four lines each
// in flight.
template <class Type>
struct Sums {
  static constexpr u32 kCount = 4;
  static constexpr u32 kApart = kWave * 16;
  static constexpr u64 kBytes = kCount * kApart;
  Sum<Type> sum[kCount];

  // Adds a row that starts at `from`; `left` bytes of it follow the thread's first.
  __device__ void add(u64 from, i64 left, bool weighted, float weight) {
    uint4 term[kCount];
#pragma unroll
    for (u32 i = 0; i < kCount; i++)
      if (left > (i64)i * kApart) term[i] = load_16(reinterpret_cast<const uint4*>(from + i * kApart));
#pragma unroll
    for (u32 i = 0; i < kCount; i++) {
      if (left <= (i64)i * kApart) continue;
      if (weighted)
        sum[i].add_weighted(term[i], weight);
      else
        sum[i].add(term[i]);
    }
  }
  // Adds another sum, rounded.
  __device__ void take(const Sums& other, i64 left) {
#pragma unroll
    for (u32 i = 0; i < kCount; i++)
      if (left > (i64)i * kApart) sum[i].add(other.sum[i].result());
  }
  __device__ void store(u8* to, i64 left) const {
#pragma unroll
    for (u32 i = 0; i < kCount; i++)
      if (left > (i64)i * kApart) store_16(reinterpret_cast<uint4*>(to + i * kApart), sum[i].result());
  }
};

}  // namespace ty
