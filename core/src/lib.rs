//! The core of tokenyard.
//!
//! Duties, from the outside in:
//! - the **communicator** validates every argument, so that components may trust their input;
//! - **components** (transport, kernel set, topology) do the work and report only errors that a caller
//!   could not have foreseen;
//! - the **loader** checks plugins before any of their code runs;
//! - the **bootstrap**, a crate of its own, is the only asynchronous one, on one control thread.
//!
//! It has two faces. Other items are private to the crate.
//! - **Callers** use [`communicator`] and [`ops`], with [`config`], [`moe`] and [`bootstrap`] for its arguments. Tools
//!   also use [`host`], [`capabilities`], [`conditions`] and [`report`].
//! - **Authors of components** implement [`transport`], [`kernels`] or [`topology`], and pass the type to [`export`].
//!   For kernel sets there are [`call`], [`arena_output`], [`refusal`], [`signature`], [`domains`], [`link`] and
//!   [`wait`]. For transports there are [`proxy`], [`gpu_ring`], [`device`], [`exchange`], [`fd_exchange`], [`nics`]
//!   and [`wire`].
//!
//! See `docs/architecture.md` for an overview, `docs/invariants.md` for INV-1 to INV-8.
//!
//! Its faces are held by `lints/src/faces.rs`. Watched by the tests in these files, `core/tests` (plugins, proxies),
//! and the suite of `conformance`, which depends on this crate.

pub mod arena_output;
pub mod call;
pub mod capabilities;
pub mod communicator;
pub mod conditions;
pub mod config;
pub mod device;
pub mod domains;
pub mod exchange;
pub mod export;
pub mod fd_exchange;
pub mod gpu_ring;
pub mod host;
mod idle;
pub mod kernels;
pub mod link;
pub mod moe;
pub mod nics;
pub mod ops;
pub mod proxy;
pub mod refusal;
pub mod report;
mod session;
pub mod signature;
pub mod topology;
pub mod transport;
pub mod wait;
pub mod wire;

/// Ranks find each other.
pub use tokenyard_bootstrap as bootstrap;

/// Names of this machine.
pub use tokenyard_bootstrap::machine;

/// The plain structures of the plugin ABI.
pub use tokenyard_abi as abi;

/// Opens and reads the files that a user names: the only way to do so.
pub use tokenyard_files as files;

/// The error type, and the words of its messages.
pub use tokenyard_errors as error;

pub use tokenyard_errors::{Error, ErrorKind, Result};

// The Rust code of the plugin author's guide compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/plugin-rust.md")]
mod plugin_guide {}
