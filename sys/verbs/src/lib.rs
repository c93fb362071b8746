//! libibverbs for tokenyard: only the structures and calls that an RC transport needs.
//!
//! No library is linked: [`Library::get`] opens `libibverbs.so.1` at run time, so that its absence
//! is a result and not an error of the loader. [`ffi`] was made once from rdma-core's `verbs.h`,
//! and a test compares it with the header. The calls that are `static inline` in the header (post,
//! poll) use the table of operations of the device's provider.
//!
//! The types own their objects and hold references to the objects that these depend on. So everything is
//! destroyed in the right order: a queue pair before its queues, queues and memory regions before their
//! protection domain, and all of them before the device. A queue pair has its state in its type ([`Qp`]).
//!
//! A stand-in for the library and NICs, for tests, is in `standins/nic`: [`Library::install`].
//!
//! Threads: libibverbs allows every call from any thread; unsafe functions state their further
//! conditions.

mod address;
mod device;
pub mod ffi;
mod library;
mod memory;
mod qp;
mod queue;

pub use address::AddressHandle;
pub use device::{Async, Context, Devices};
pub use library::{CallError, Library};
pub use memory::{DmabufRange, Mr, Pd};
pub use qp::{Address, Init, Qp, QpRequest, Receive, Reset, Rtr, Rts, Send};
pub use queue::{Cq, RECEIVE_BATCH, Srq};
