//! libmlx5 for tokenyard: DEVX objects of a ConnectX device, and the bytes of its queues.
//!
//! Nothing is linked: [`Library::get`] opens `libmlx5.so.1` at run time, so that its absence is an error value
//! and not a failure of the loader. [`ffi`] was made from rdma-core 44's `mlx5dv.h`; a test compares it with
//! the header.
//!
//! | module | content |
//! |---|---|
//! | [`mailbox`] | commands to the device: one table of fields for a driver that writes and a device that reads |
//! | [`wqe`] | work requests of one block of 64 bytes |
//! | [`cqe`] | completions |
//! | [`doorbell`] | doorbell records, and the two ways to ring |
//!
//! Those four modules are plain data: they call nothing and contain no `unsafe`.
//!
//! Threads: libmlx5 allows every call from any thread; the unsafe functions here state all other conditions.

pub mod cqe;
mod devx;
pub mod doorbell;
pub mod ffi;
mod field;
mod library;
pub mod mailbox;
pub mod wqe;

pub use devx::{Devx, Object, Uar, UarKind, Umem, UmemRequest};
pub use field::{Field, Value};
pub use library::Library;
pub use tokenyard_sys_verbs::CallError;
