// Weak memory: where a test says so, the thread that stores to a range of memory holds its stores back.
// They become visible in any order, some at each access to memory, and all of them at a fence, a release,
// or the end of the kernel. So a missing fence shows, which would not show on a host of strong order. Fences are
// cumulative: where a warp has met, the fence of one lane is for the stores of all before that. Loads are never early
// here, so the model shows no errors in their order. Included in cuda.h.
#pragma once

namespace model {

struct Range {
  const unsigned char* begin;
  size_t bytes;
};
// Memory that other devices read. Set before a kernel runs.
inline std::vector<Range> weak;
// The effect of a store to a register of another device.
inline void (*ring)(void* at, uint64_t value) = nullptr;

// The fence that a run omits, by the letter of the comment before it; 0: none. A test writes calls of
// `keeps` into a source.
inline char without = 0;
inline bool keeps(char fence) { return fence != without; }

inline bool is_weak(const void* at) {
  for (const Range& range : weak)
    if ((const unsigned char*)at >= range.begin && (const unsigned char*)at < range.begin + range.bytes) return true;
  return false;
}

// A random number; each thread of the system draws from its own sequence.
inline unsigned draw(unsigned below) {
  static thread_local uint64_t state = 0x9e3779b97f4a7c15 * (1 + (uintptr_t)here);
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (unsigned)(state >> 33) % below;
}

// Words are whole.
inline void let_out(const Held& store) {
  uint64_t words[2];
  memcpy(words, store.value, 16);
  if (store.is_register) return ring(store.to, words[0]);
  if (store.bytes == 4) return at((uint32_t*)store.to).store((uint32_t)words[0], std::memory_order_release);
  for (unsigned i = 0; i < store.bytes / 8; i++)
    at((uint64_t*)store.to + i).store(words[i], std::memory_order_release);
}

// One of the stores; of those to one place, the first.
inline void let_one_out(std::vector<Held>& held) {
  size_t which = draw((unsigned)held.size());
  const unsigned char *begin = held[which].to, *end = begin + held[which].bytes;
  auto meets = [&](const Held& other) { return other.to < end && begin < other.to + other.bytes; };
  auto first = std::find_if(held.begin(), held.end(), meets);
  Held store = *first;
  held.erase(first);
  let_out(store);
}

inline std::vector<Held>& shared_of_warp() { return here->shared[here->current / kWave]; }
// Later stores to one place stay behind earlier ones: those before the last meeting are first.
inline void drain() {
  if (here == nullptr) return;
  for (std::vector<Held>* held : {&shared_of_warp(), &here->fibers[here->current].held})
    while (!held->empty()) let_one_out(*held);
}
inline void drain_some() {
  for (std::vector<Held>* held : {&shared_of_warp(), &here->fibers[here->current].held}) {
    while (!held->empty() && draw(16) == 0) let_one_out(*held);
    if (!held->empty()) return;
  }
}
// Before a warp meets. With `MODEL_FENCES_ALONE` the fence of a lane is for its own stores, as in a device that
// promises less: so a fence that all lanes need there shows.
inline void share() {
#ifndef MODEL_FENCES_ALONE
  std::vector<Held>&held = here->fibers[here->current].held, &shared = shared_of_warp();
  shared.insert(shared.end(), held.begin(), held.end());
  held.clear();
#endif
}

inline void hold(void* to, const void* value, unsigned bytes, bool is_register) {
  Held store{(unsigned char*)to, bytes, is_register, {}};
  memcpy(store.value, value, bytes);
  here->fibers[here->current].held.push_back(store);
}

template <class T>
void store(T* to, const T& value) {
  if (!weak.empty() && is_weak(to)) return hold(to, &value, sizeof(T), false);
  if constexpr (sizeof(T) == 16)
    *to = value;
  else
    at(to).store(value, std::memory_order_relaxed);
}

}  // namespace model
