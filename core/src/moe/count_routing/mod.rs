//! The operation that counts a routing, without a message: `counts` in host memory, `room` the call on a device, which
//! a kernel set carries out. Local, so it needs no session.
//! Watched by the tests in both files; the kernel by `backends/gpu/tests/model/copies.h`.

mod counts;
mod room;

pub use counts::RoutingCounts;
pub use room::RoutingRoom;
