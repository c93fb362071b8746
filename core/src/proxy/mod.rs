//! Threads that post commands for other threads.
//!
//! A transport whose calls are slow, or whose fabric must be driven, passes its commands to **proxy
//! threads**. Each thread owns one [`FabricShare`], which posts to the fabric, and a fixed set of queues:
//! queue l belongs to thread l mod n.
//!
//! ```text
//!  poster of a queue          ring of commands             proxy thread            fabric
//!     Proxy::post   ──────►  64 bytes each, in order ──►  FabricShare::post   ──────►
//!     Proxy::poll   ◄──────  ring of events          ◄──  FabricShare::poll   ◄──────
//! ```
//!
//! - **Room** (INV-5). A command occupies its place in the queue until it is done and its event, if it
//!   has one, was read. A full queue accepts fewer commands.
//! - **Every accepted command ends once** (INV-7): as done, or as an error event. When a share fails,
//!   panics or breaks its rules, it is dropped; then all commands that it had not ended, and all later
//!   ones, end as errors. [`Proxy::health`] returns the first failure of a share.
//! - **Sleep.** A thread without work spins, then yields, then sleeps for a nap. [`Proxy::post`] wakes it at
//!   once through a futex. The post reads one flag, behind a fence: without it, a thread that falls asleep
//!   could miss the post. A [`Proxy::poll`] that finds nothing wakes it, too, because the caller may wait for
//!   data that only the share can fetch from the fabric. Data that no thread waits for is fetched when a nap
//!   is over.
//! - **The hot calls** allocate no memory and never wait. A flag guards each queue; only a breach of
//!   the thread rule finds it set.
//!
//! The ring's memory layout is described in `ring.rs`.
//!
//! Watched by the step `model` of `cargo xtask test` (all schedules), `core/tests/proxy`, and `bench/tests/proxy.rs`
//! for allocations.

mod bell;
mod health;
mod in_flight;
mod queue;
mod ring;
mod start;
mod sync;
mod thread;

#[cfg(all(test, feature = "loom"))]
mod model;

pub use start::{Proxy, ProxyOptions};
pub(crate) use thread::pin;

use crate::transport::{Command, Event};

/// Most commands of one [`FabricShare::post`], and most events of one [`FabricShare::poll`].
pub const MAX_BATCH: usize = 32;

/// One thread's share of a transport, driven by a proxy thread. Used by that thread alone.
///
/// Every command that a share receives has `TY_FLAG_NOTIFY`, and a tag of the proxy.
///
/// It owns, or shares ownership of, all memory that it accesses. Its drop ends all access to the memory
/// of its commands, because these are reported as failed afterwards (INV-8). Neither a call nor the
/// drop may block: during one, none of the thread's queues moves and the proxy cannot end.
pub trait FabricShare: Send + 'static {
    /// Accepts the first n of `commands`, which are 1 to [`MAX_BATCH`] of one queue, and returns n.
    /// Fewer than all is back-pressure: the rest is offered again after the next [`poll`](Self::poll).
    ///
    /// # Errors
    /// A status `TY_*` below zero, if the share cannot continue. It is dropped then.
    ///
    /// # Safety
    /// As [`Transport::post`](crate::transport::Transport::post): source memory of an accepted command
    /// stays unchanged until the command has ended or the share is dropped.
    unsafe fn post(&mut self, queue: u32, commands: &[Command]) -> Result<usize, i32>;

    /// Drives the fabric, fills `events` from the front and returns how many were written: one event
    /// for each accepted command, in any order, with its queue and tag. Called whether or not commands
    /// are in flight, so this call also fetches signals of peers.
    ///
    /// # Errors
    /// As [`post`](Self::post). A single command that fails is an event, not an error of this call; the
    /// transport stores it for its health (INV-7).
    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32>;

    /// Processors that the thread is pinned to, for example those of the NIC's NUMA node; any if empty.
    /// Called once, at the start of the thread. Where the system refuses, a warning is logged.
    fn cpus(&self) -> &[u32] {
        &[]
    }
}
