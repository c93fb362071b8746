// The state of the engine of `paced` (engine.cu), between its warps and between launches. Behind request.cuh.
// Defines: TY_ROWS_TMA, TY_OWN_ARGS_BYTES, TY_UP_PARAM_BYTES.

namespace up {
#include "up_device_api.cuh"
}

namespace ty {

using Up = up::DeviceApi;
static_assert(Up::kLoadStore, "the engine stores into the windows of peers");
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the transport below passes other parameters than its device API takes");

constexpr u32 kCopyWarps = 14, kJobs = 128, kChunk = 14336, kOwnBytes = 12288;
// The wire is booked for this long ahead. Bytes are copied up to kLead before their turn; their signal waits for it.
constexpr u64 kAhead = 6000, kLead = 4000;
// Looks for requests between two at whether the launch ends, and between two at the host's memory.
constexpr u32 kLook = 16, kLongLook = 64;
// Small puts that a warp copies at once, and the bytes of a put that the warp copies which takes requests.
constexpr u32 kSmall = 2, kShort = 64;
// The wrong half of a request, where a fault splits it in two, comes this much later.
constexpr u64 kWrongHalf = 100000000;
constexpr u32 kLostOf = 64;
// Requests of a queue that are counted at once.
constexpr u32 kBits = 64;

enum Fault : u32 { kNone, kSignalFirst, kLost, kDoneEarly, kWrongQueue };

// One queue; `PacerQueue` of queues.rs.
struct Line {
  const Request* requests;
  u64* done;
  u64* taken;  // requests that earlier launches have taken
};

// State that a launch leaves to the next one; engine.rs reads the sums.
struct Wire {
  u64 begun;  // the device's time of the first launch, in ns; all times count from it
  u64 free;   // when the wire is free, in 1/1024 ns
  u64 raised, late, latest;  // signals; ns that all and the latest one came behind their time
  u64 busy;     // the latest time at which a block had a request that is not done
  u64 leaving;  // not 0: all blocks end this launch
  u64 left;     // blocks that have ended it
};
static_assert(sizeof(Wire) == 64, "engine.rs has another size of Wire");

// Mirrored in engine.rs; TY_OWN_ARGS_BYTES checks the size.
struct PacerArgs {
  const u64* stop;
  const Line* lines;
  Wire* wire;
  u64 byte_cost;     // in 2^-20 ns
  u64 message_cost;  // in 2^-10 ns
  u64 latency, spread;  // ns; to each time of arrival a part of `spread` is added, drawn from `seed`
  u64 idle, most;    // ns without work after which a launch ends, and the longest time of a launch
  u64 seed;
  u32 queues, mask, signals, fault;
};
#ifdef TY_OWN_ARGS_BYTES
static_assert(sizeof(PacerArgs) == TY_OWN_ARGS_BYTES, "engine.rs and jobs.cuh differ");
#endif

// A job moves until its payload is there, for all to see; it has arrived once its signal is raised.
enum State : u32 { kFree, kMoving, kThere, kArrived };

struct Job {
  u8* dst;
  const u8* src;
  u64 bytes;
  u64 begin, due;  // ns since `begun`: first byte on the wire; when the signal is raised
  u64 number;      // of the request in its queue
  u64* signal;
  u32 add, line, op, first, chunks;
  volatile u32 left, state, is_counted;
};

struct Shared {
  Job jobs[kJobs];
  volatile u64 done[kWave];   // of each queue of the block
  volatile u32 at[kCopyWarps];  // the job that a warp has come to
  volatile u32 made, quit;
};
static_assert(sizeof(Shared) <= kOwnBytes, "engine.rs asks for less shared memory");

__device__ inline u64 drawn(u64 seed, u64 number) {
  u64 x = seed + number * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

}  // namespace ty
