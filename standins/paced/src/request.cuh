// A request of the transport `paced`: kernels or the host write it, the engine carries it out.

// Mirrored in queues.rs.
struct Request {
  ty::u32 op, peer;
  ty::u64 src, dst;         // a window in the highest 16 bits, an offset in the others
  ty::u64 bytes;            // of a put or get; the value of a put of a value
  ty::u32 signal, add;
  ty::u64 reserved;
  ty::u64 posted;           // the device's time of the post, in ns
  ty::u64 sequence;         // number of the request + 1, stored last
};
static_assert(sizeof(Request) == 64, "the host writes requests of another size");
// TY_OP_* of the plugin ABI.
constexpr ty::u32 kPut = 1, kPutSignal = 2, kPutValue = 3, kSignal = 4, kGet = 5;
constexpr ty::u32 kWindowShift = 48;
