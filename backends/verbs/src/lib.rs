//! The `verbs` transport: RDMA over InfiniBand and RoCE, driven by the calling thread.
//!
//! It is loaded as a plugin (`plugins/verbs`). libibverbs is opened at run time. Without it, or
//! without a device, the component is still listed and its probe names what is missing. Core
//! validates every argument; this crate checks all input from other processes and from the device.
//! `docs.md` in this folder is the page for operators.
//!
//! The transport `ibgda` shares the choice of ports, [`port`], endpoints and [`connection`] with it.
//!
//! Watched by the tests in these files, `tests` beside them over NICs of `standins/nic`, the steps `hca` and `vm` of
//! `cargo xtask test` (the suite), and `fuzz/fuzz_targets/verbs_endpoint.rs`.

pub mod config;
mod device;
pub mod endpoint;
pub mod port;
pub mod ports;
pub mod rules;
mod transport;

pub use config::{DeviceChoice, Flush, Mtu, SignalChoice, VerbsConfig};
pub use transport::{Verbs, connection};
