//! libibverbs for tokenyard: the structures and calls that an RC transport needs, and no more.
//!
//! Nothing is linked: [`Library::get`] opens `libibverbs.so.1` at run time, so that its absence is an
//! answer and not a loader's error. [`ffi`] was made once from rdma-core's `verbs.h` and is compared
//! with the header by a test. The calls that are `static inline` there (post, poll) go through the
//! table of operations of the device's provider.
//!
//! The types own what they name and keep alive what it stands on, so that everything is destroyed
//! in the right order: a queue pair before its queues, those and memory regions before their
//! protection domain, all before the device. A queue pair has its state in its type ([`Qp`]).
//!
//! The feature `stand-in` is for tests: its module `stand_in` takes the place of the library and of
//! NICs.
//!
//! Threads: libibverbs allows every call from any thread; what is unsafe here says what else holds.

mod device;
pub mod ffi;
mod library;
mod memory;
mod qp;
mod queue;
#[cfg(feature = "stand-in")]
pub mod stand_in;

pub use device::{Async, Context, Devices};
pub use library::{CallError, Library, LoadError};
pub use memory::{DmabufRange, Mr, Pd};
pub use qp::{Address, Init, Qp, QpRequest, Receive, Reset, Rtr, Rts, Send};
pub use queue::{Cq, RECEIVE_BATCH, Srq};
