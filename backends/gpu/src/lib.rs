//! The kernel set of GPUs and the transport between those of one machine, written once.
//!
//! A maker's backend gives a [`Platform`]: its driver ([`driver::Driver`]), its compiler
//! ([`compile::Compiler`]) and its names. [`GpuKernels`] and [`Peers`] are the components over it, named
//! by [`Components`]. This crate links and names nothing of any maker.
//!
//! Kernels are templates over a transport's device API (`device/common/transport.cuh`) and compiled for the
//! present device. One process drives one device.
//!
//! All of it serves every maker and names none; `engine` names no operation. A kernel and its launch change
//! together. Watched by the tests in these files (over `tests/doubles`), `tests/exchange.rs` (the kernels on a model
//! of a GPU), `tests/{args,dialect,region}.rs`, and on GPUs the suite: `docs/testing-gpus.md`.

pub mod compile;
mod config;
mod decode;
pub mod driver;
mod engine;
mod flat_sms;
pub mod kernels;
mod moe;
mod ops;
mod platform;
pub mod probe;
pub mod resident;
mod transport;
pub mod twin;
pub mod warm;

pub use config::{Decode, Devices, GpuConfig, Outside, PeersConfig, RowCopy, Sms};
pub use flat_sms::{FlatOp, FlatWork};
pub use kernels::GpuKernels;
pub use moe::foresight::{Foreseen, LevelBytes, LinkPath};
pub use moe::limits::BlockLimits;
pub use platform::{Components, Dialect, Names, Platform};
pub use transport::Peers;
