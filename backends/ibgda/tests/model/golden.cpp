// Requests as the device API writes them, without a device: reads calls from standard input, prints the block
// of each request. A line: call, number of the queue pair, index, remote address and key, local address and
// key, bytes, and the value that is added or stored; numbers in hexadecimal, except the call.
#include "helpers.h"
#include "transport.cuh"

namespace up {
#include "up_device_api.cuh"
}  // namespace up
using Up = up::DeviceApi;
using namespace ty;

constexpr u32 kDepth = 64;

struct Call {
  unsigned what, number, index, remote_key, local_key;
  unsigned long long remote, local, bytes, value;
};

u32 read_call(Call& c) {
  int found = scanf("%u %x %x %llx %x %llx %x %llx %llx", &c.what, &c.number, &c.index, &c.remote, &c.remote_key,
                    &c.local, &c.local_key, &c.bytes, &c.value);
  return found == 9;
}

// Makes the requests of a call; returns their number.
u32 make(const Call& c, u8* requests, u64* record) {
  u32 completion = 0xffffffff;
  u64 fault[4] = {}, total = 0, abort = 0;
  // A request that is waited for is done at once.
  if (c.what == 3) completion = (c.index & 0xff) << 8 | c.index >> 8;
  Up::Queue queue{(uint4*)requests, (u32*)record, record, &completion, c.number, kDepth - 1, {},
                  c.index, 2 * c.index, c.index, 0, {}};
  Up::Key remote{c.remote, __builtin_bswap32(c.remote_key), 0}, local{c.local, __builtin_bswap32(c.local_key), 0};
  Up::Params params{&queue, &local, &remote, &remote, &total, local, fault, 1, 1, 1, 1, c.what == 5 ? 1u : 0u, 0};
  WaitReport report{};
  model::launch(1, kWave, [&] {
    if (threadIdx.x != 0) return;
    Up up(params);
    Guard guard(&abort, 1'000'000'000, &report);
    At at{0, 0};
    Raise raise{0, (u32)c.value};
    if (c.what == 0) up.put(Thread(), 0, 0, at, at, c.bytes, guard);
    if (c.what == 1) up.put_value(0, 0, at, c.value, guard);
    if (c.what == 2 || c.what == 5) up.signal(0, 0, raise, guard);
    if (c.what == 3) up.get(Thread(), 0, 0, at, at, c.bytes, guard);
    if (c.what == 4) up.put_signal(Thread(), 0, 0, at, at, c.bytes, raise, guard);
  });
  if (report.ended != 0) fail("a wait has ended");
  return (u32)(queue.reserved - c.index);
}

int main() {
  static u64 rung;
  model::ring = [](void*, uint64_t value) { rung = value; };
  u8* requests = room<u8>(64 * kDepth);
  u64* record = room<u64>(1);
  Call call;
  while (read_call(call)) {
    memset(requests, 0, 64 * kDepth);
    u32 count = make(call, requests, record);
    for (u32 i = 0; i < count; i++) {
      const u8* block = requests + 64 * ((call.index + i) % kDepth);
      for (u32 at = 0; at < 64; at++) printf("%02x", block[at]);
      printf("\n");
    }
    // The value of the record, and the value that was rung.
    printf("%08x %016llx\n", __builtin_bswap32((u32)(*record >> 32)), (unsigned long long)__builtin_bswap64(rung));
  }
}
