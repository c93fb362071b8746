//! The `verbs` transport: RDMA over InfiniBand and RoCE, driven by the thread that calls.
//!
//! It is loaded as a plugin (`plugins/verbs`). libibverbs is opened at run time: without it, and
//! without a device, the component is there and its probe says what is missing. Core validates every
//! argument; this crate checks what comes from other processes and from the device. `docs.md` in
//! this folder is the page for operators.

mod config;
mod device;
pub mod endpoint;
pub mod rules;
mod transport;

pub use config::{DeviceChoice, Flush, Mtu, SignalChoice, VerbsConfig};
pub use transport::Verbs;
