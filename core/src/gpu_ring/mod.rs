//! Posting for kernels that cannot post: the host's half of the device API of the GPU ring.
//!
//! A kernel set whose kernels use a transport without a device API gives the host a ring of commands
//! in memory that both sides see ([`abi::TyGpuRing`]; the device's half is
//! `backends/gpu/device/gpu_ring.cuh`). A thread here takes commands out in order, posts them in batches
//! to the transport's host API, and tells the kernels what is done and which signals have come.
//!
//! ```text
//!  kernel                      ring                       proxy thread            transport
//!   reserve a number ───────►  64 bytes, sequence last ─► check, batch  ───────►  post
//!   wait for done    ◄───────  done                    ◄─ in order      ◄───────  poll
//!   read_signal      ◄───────  totals                  ◄───────────────────────  read_signal
//! ```
//!
//! - **Many producers.** Kernels number commands by an atomic add on a word of their own, so commands
//!   may be written in any order; the thread takes them by number, and waits for one that is late.
//! - **Room** (INV-5). A slot is free when its command, and every one before it, is done.
//! - **Payload first** (INV-1). A total is read with acquire order and stored with release order. That
//!   suffices where the windows lie in host memory, which the device reads coherently. Windows in device
//!   memory that a NIC writes past the host need a read-back or a flush of the device between the two.
//! - **Errors** (INV-7). After the first failure the ring is dead: `failed` tells the kernel set, which
//!   ends its kernels' waits, and nothing more is posted.
//! - **Sleep.** A thread without work spins, then yields, then naps: a device cannot wake it.
//!
//! [`proxy`](crate::proxy) is something else: it serves transports whose own calls are slow.

mod check;
mod counts;
mod ring;
mod thread;

#[cfg(all(test, tokenyard_loom))]
mod model;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::link::Link;
use crate::transport::{Command, Event, Window};
use crate::{Error, Result, abi};
use check::Limits;
pub(crate) use counts::Counts;
use ring::{RingMemory, Taker};
use thread::RingWorker;

/// What a thread posts to.
trait Fabric: Send + 'static {
    /// As [`Link::post`].
    ///
    /// # Safety
    /// As there.
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32>;
    /// As [`Link::poll`].
    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32>;
    /// As [`Link::read_signal`].
    fn read_signal(&mut self, id: u32) -> u64;
    /// Whether an asynchronous error has come.
    fn is_healthy(&mut self) -> bool;
}

/// One queue of a link.
struct RingQueue {
    link: Link,
    number: u32,
}

impl Fabric for RingQueue {
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32> {
        // SAFETY: by this function's contract; nobody else uses the queue.
        unsafe { self.link.post(self.number, commands) }
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        self.link.poll(self.number, events)
    }

    fn read_signal(&mut self, id: u32) -> u64 {
        self.link.read_signal(self.number, id)
    }

    fn is_healthy(&mut self) -> bool {
        self.link.health().is_ok()
    }
}

/// The thread that serves one ring. Its drop ends the thread: commands that are not posted by then
/// never are, and nothing touches link or ring after it.
#[derive(Debug)]
pub struct GpuRing {
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl GpuRing {
    /// Starts the thread for a ring over a link to `peers` ranks that have these windows.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the system starts no more threads.
    ///
    /// # Safety
    /// What the ring points to, the link and the windows stay valid until the value is dropped, and the
    /// ring is all zeros. Nobody else uses the queue. Kernels keep the sources of their commands
    /// unchanged until those are done, and nobody uses destinations before their signals.
    pub unsafe fn start(
        ring: &abi::TyGpuRing,
        link: Link,
        windows: &[Window],
        peers: u32,
    ) -> Result<Self> {
        let limits = Limits {
            peers,
            signals: ring.signals,
            largest_put: link.capabilities().largest_put,
            windows: windows.iter().map(|window| window.bytes).collect(),
        };
        // SAFETY: by this function's contract.
        let memory = unsafe { RingMemory::new(ring) };
        let taker = Taker::new(memory, ring.capacity as usize);
        Self::spawn(RingWorker::new(
            RingQueue { link, number: ring.queue },
            taker,
            limits,
            ring.queue,
        ))
    }

    fn spawn<F: Fabric>(mut worker: RingWorker<F>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let counts = worker.counts();
        let thread = std::thread::Builder::new()
            .name("tokenyard-ring".into())
            .spawn(move || worker.run(&stopped))
            .map_err(|e| Error::system("start GPU ring", "a thread cannot be made", e))?;
        Ok(Self { counts, stop, thread: Some(thread) })
    }

    /// What the ring has carried.
    pub(crate) fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.counts)
    }
}

impl GpuRing {
    /// Tells the thread to end, and hands it to who waits for that: what it uses stays valid meanwhile.
    pub(crate) fn stop(&mut self) -> Option<JoinHandle<()>> {
        self.stop.store(true, Ordering::Release);
        self.thread.take()
    }
}

impl Drop for GpuRing {
    fn drop(&mut self) {
        if let Some(thread) = self.stop()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a device's command ring panicked");
        }
    }
}
