//! IBGDA: kernels that write the work requests of a ConnectX and ring its doorbells themselves. No thread of
//! the host takes part in sending a row.
//!
//! **This crate is the device side alone.** It has the device API ([`device_api::SOURCE`]), the layouts that a
//! host fills in for it, and the host's error for an error completion. There is no transport and no plugin
//! yet: `docs.md` in this folder lists the missing parts, and the tests with their results.
//!
//! Nothing here has run on a GPU or on a ConnectX. `tests/model.rs` runs the device API on the CPU's model of
//! a GPU, over a software ConnectX that stops at a driver's first mistake.

pub mod device_api;
mod fault;
mod queue_pair;

pub use fault::{FaultRecord, QueueFault};
pub use queue_pair::{QueuePair, Steps};
