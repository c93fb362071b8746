//! The backend for machines without an accelerator: the `shm` transport between processes of one
//! machine, and the `cpu` kernel set.
//!
//! Core validates every argument; this crate trusts what core promises and checks what comes from
//! other processes. It keeps no process-wide state, so that several ranks may be threads of one
//! process. `docs.md` in this folder is the page for operators.
//!
//! `engine` concerns every operation; `moe`, `ops` and `transport` may change alone. Loops on vectors (`convert`,
//! `sum`, `coded`) give the same bits on every processor. Watched by the tests in these files, `tests` beside them,
//! and the whole suite: `conformance/tests/in_threads.rs` (L0 to L2), `faults.rs` (L3) and `same_bits.rs`.

mod built_in;
pub mod coded;
mod config;
pub mod convert;
mod element;
mod engine;
pub mod kernels;
mod lanes;
mod moe;
mod ops;
pub mod pool;
pub mod sum;
mod transport;

#[cfg(test)]
mod samples;

pub use built_in::link;
pub use config::ShmConfig;
pub use kernels::CpuKernels;
pub use transport::Shm;
