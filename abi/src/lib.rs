//! The plugin ABI of tokenyard: plain C structures, `no_std`, no dependencies.
//!
//! A plugin is a shared library that exports one **data** symbol per kind of component it provides, so
//! that no code of it runs before the host has checked it:
//!
//! | symbol | type | stability |
//! |---|---|---|
//! | `tokenyard_transport_v1` | [`TyTransportExport`] | layout pinned until 1.0, then append only |
//! | `tokenyard_topology_v1` | [`TyTopologyExport`] | the same |
//! | `tokenyard_kernels_v0` | [`TyKernelsExport`] | exact layout, unstable until 1.0 |
//!
//! The host checks in this order and stops at the first failure: magic, major version, layout, sizes,
//! required slots, then `probe`, then `open`.
//!
//! Rules that hold for every slot:
//! - every structure starts with its size in bytes; fields are only ever appended;
//! - enumerations cross as fixed-width integers; an unknown value is an error, never a guess;
//! - no allocation crosses: the side that makes a thing destroys it; strings are (pointer, length),
//!   UTF-8, not terminated, valid for the call only;
//! - a slot returns a status (`TY_OK` is 0); details go to the caller's [`TyError`];
//! - a plugin must not unwind or `longjmp` across a slot; libraries are never unloaded;
//! - each slot states the threads that may call it.
//!
//! A structure or a number here is a promise to plugins that are built: append, and move nothing. `cargo xtask
//! header` then writes `abi/include` again. Watched by the tests in these files (layouts of earlier versions),
//! `core/tests/plugin_handshake.rs`, and `cli/tests/guide.rs`.

#![no_std]

// The header has the modules in this order; the empty lines stop rustfmt from sorting them.
mod common;
mod host;
mod kernels;
mod plan;
mod wait;

mod calls;
mod device;
mod gpu_ring;
mod operations;

mod counters;
mod layout;
mod topology;
mod transport;

pub use calls::*;
pub use common::*;
pub use counters::*;
pub use device::*;
pub use gpu_ring::*;
pub use host::*;
pub use kernels::*;
pub use layout::*;
pub use operations::*;
pub use plan::*;
pub use topology::*;
pub use transport::*;
pub use wait::*;
