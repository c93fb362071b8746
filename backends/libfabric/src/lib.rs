//! The transports `libfabric` and `efa`: any provider of libfabric that has reliable datagrams,
//! remote writes and completion data.
//!
//! A put with a signal is one write whose completion data name the signal; the receiver counts
//! them. So the fabric need not preserve any order (INV-2), and EFA's SRD works as well as TCP. The
//! crate links no library: libfabric is opened at run time, and without it `probe` names the
//! package to install. `docs.md` in this folder is the page for operators.
//!
//! Watched by the tests in these files, `tests` beside them over real providers, the step `libfabric` of `cargo xtask
//! test` (the suite), and `fuzz/fuzz_targets/endpoint.rs`.

mod config;
mod transport;

pub use config::{EfaConfig, Flush, LibfabricConfig, Rails};
pub use transport::{Efa, Libfabric, check_endpoint};
