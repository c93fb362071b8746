//! The `ibgda` transport: kernels write the work requests of a ConnectX and ring its doorbells themselves. No thread of
//! the host takes part in sending a row. The host's own calls post in the same form, on connections of their own.
//!
//! It is loaded as a plugin (`plugins/ibgda`). libibverbs and libmlx5 are opened at run time. Without them, or
//! without a ConnectX, the component is still listed and its probe names what is missing. Core validates every
//! argument; this crate checks all input from other processes and from the device. `docs.md` in this folder is
//! the page for operators.
//!
//! Nothing here has run on a ConnectX, and the device side has not run on a GPU: `docs.md` lists what has run on
//! stand-ins.
//!
//! Watched by the tests in these files, `tests/model.rs` (the device API over a software ConnectX), and
//! `cli/tests/software_hca.rs` (the suite).

mod bell;
mod config;
mod connect;
mod device;
pub mod device_api;
pub mod endpoint;
mod fault;
mod pages;
mod pair;
mod queue_pair;
mod transport;

pub use bell::{Bell, KernelBell, Ringer};
pub use config::{Doorbell, IbgdaConfig, Placement, SignalChoice};
pub use fault::{FaultRecord, QueueFault};
pub use pair::Steps;
pub use queue_pair::QueuePair;
pub use transport::Ibgda;
