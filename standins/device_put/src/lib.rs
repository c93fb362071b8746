//! A tool for tests: the transport `device-put`, whose kernels can only put.
//!
//! It stands in for a NIC that kernels drive themselves, over the memory of GPUs of one machine. Kernels
//! write commands into rings in host memory, one ring for each queue (`device_put.cuh`). A host thread takes
//! submitted commands and holds each for a while. It executes them by the host API of `nvlink`, in another
//! order, which a seed decides. A signal follows its own payload (INV-1), and nothing else is promised. On
//! request it breaks one promise: see [`Fault`].
//!
//! It is a stand-in: its times say nothing about any fabric.

mod config;
pub mod nested;
mod ring;
mod server;
mod transport;
pub mod twins;

pub use config::{DevicePutConfig, Fault};
pub use transport::DevicePut;
