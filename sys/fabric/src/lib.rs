//! Bindings to the part of libfabric's C API that tokenyard uses.
//!
//! The layouts are those of libfabric 1.17 (Debian 12). libfabric only appends to its structures
//! and tables, so they hold for later versions too; a test compiles a C program against the
//! installed headers and compares every size and offset.
//!
//! `libfabric.so.1` is opened at run time ([`Library::open`]), so a program that links this crate
//! starts on machines that lack it. Only six functions are symbols. All others are entries of
//! the objects' own tables; C has `static inline` functions for them, [`calls`] has them in Rust.

pub mod calls;
pub mod consts;
mod handlers;
mod library;
pub mod ops;
pub mod types;

pub use library::Library;
