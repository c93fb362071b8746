//! A tool for measurements: the transport `paced`, a NIC whose rate and latency are set.
//!
//! There is no NIC: a kernel stands in for it, and stays on a few multiprocessors of the same GPU (`engine.cu`).
//! Kernels of operations write requests of 64 bytes into queues in device memory (`paced.cuh`), or the host writes
//! them. The engine books the wire for each request. It copies the bytes to the windows of the other ranks of this
//! machine, by `nvlink`'s mappings. It raises the signal once the payload is there and the latency is over. On request
//! it breaks one promise: see [`Fault`].
//!
//! Where a time is shown that was measured over it, it is named as a stand-in.
//!
//! Watched by the tests in these files, and `tests/engine.rs`, which runs the engine on the model of a GPU;
//! `docs/testing-gpus.md` has its checks on GPUs.

mod config;
mod engine;
mod queues;
mod transport;

pub use config::{Fault, Order, PacedConfig, Poster};
pub use engine::compile_engine;
pub use transport::Paced;

tokenyard_core::export_transports!(Paced);
