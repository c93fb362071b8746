//! A queue pair with its completion queue, in memory of the host. This crate makes both by DEVX commands and
//! writes the work requests itself.
//!
//! Either kernels post on it through `DeviceApi`, which gets its addresses from [`QueuePair::to_device`]; or the
//! host posts by [`QueuePair::post`]. Never both.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokenyard_sys_mlx5::cqe::{self, Cqe, Kind, Word};
use tokenyard_sys_mlx5::doorbell::{PAGE, SEND};
use tokenyard_sys_mlx5::wqe::{BLOCK, Control, Request};
use tokenyard_sys_mlx5::{CallError, Devx, Uar, Umem, UmemRequest};

use crate::bell::Bell;
use crate::device_api::DeviceQueue;
use crate::fault::QueueFault;
use crate::pages::Pages;
use crate::pair::{Pair, Parents, QueueLayout, Steps, UmemPlace};

/// A queue pair in memory of the host.
#[derive(Debug)]
pub struct QueuePair {
    // Dropped in this order: the device ends its use of the pages first.
    pair: Pair,
    pages: Pages,
    depth: u32,
    fence: bool,
    /// Requests that were posted, that were rung for, and that are done.
    posted: u64,
    rung: u64,
    done: u64,
}

/// Layout behind the send queue: a page for the completion, then a page for the record.
fn completion_at(depth: u32) -> usize {
    (BLOCK * depth as usize).next_multiple_of(PAGE)
}

fn record_at(depth: u32) -> usize {
    completion_at(depth) + PAGE
}

impl QueuePair {
    /// Makes a queue pair with room for `depth` requests, in protection domain `pd`, that rings by the first
    /// register of `uar`.
    ///
    /// # Errors
    /// `EINVAL` for a depth that is not a power of two in [`DEPTHS`](crate::device_api::DEPTHS); else the error of the
    /// library or the device.
    pub fn new(devx: &Arc<Devx>, uar: &Arc<Uar>, pd: u32, depth: u32) -> Result<Self, CallError> {
        let pages = Pages::new(record_at(depth) + PAGE);
        pages.store(completion_at(depth), &[cqe::FILL; cqe::BYTES]);
        let request = UmemRequest { address: pages.address(), bytes: pages.bytes(), dmabuf: None };
        // SAFETY: the pages are freed after the umem, and are accessed by atomics only.
        let umem = Arc::new(unsafe { Umem::new(devx, &request) }?);
        let place = |offset| UmemPlace { umem: &umem, offset };
        let layout = QueueLayout {
            requests: place(0),
            record: place(record_at(depth)),
            completion: place(completion_at(depth)),
        };
        let pair = Pair::new(&Parents { devx, uar, pd }, &layout, depth)?;
        Ok(Self { pair, pages, depth, fence: false, posted: 0, rung: 0, done: 0 })
    }

    /// Its number, 24 bits.
    pub fn number(&self) -> u32 {
        self.pair.number
    }

    /// Takes the queue pair to the state in which it receives and sends.
    ///
    /// # Errors
    /// The error of the library or the device.
    pub fn connect(&self, steps: &Steps) -> Result<(), CallError> {
        self.pair.connect(steps)
    }

    /// The structure by which a kernel posts. Addresses are the host's: a GPU that maps memory elsewhere needs others.
    pub fn to_device(&self) -> DeviceQueue {
        let at = |offset: usize| self.pages.address() + offset as u64;
        DeviceQueue {
            requests: at(0),
            record: at(record_at(self.depth)),
            doorbell: self.pair.uar.register().expose_provenance() as u64,
            completion: at(completion_at(self.depth) + cqe::layout::COUNTER),
            number: self.number(),
            mask: self.depth - 1,
            ..DeviceQueue::default()
        }
    }

    /// Writes a request behind earlier ones; the device sees it at [`ring`](Self::ring). Returns false, and writes
    /// nothing, while there is no room.
    ///
    /// A request that is not `signaled` is known to be done when a later one is done. The last request before each
    /// ring must be signaled, or room may never come.
    pub fn post(&mut self, request: &Request, signaled: bool) -> bool {
        if self.posted - self.done >= u64::from(self.depth) {
            return false;
        }
        // The index counts modulo 2^16.
        let fence = self.fence && matches!(request, Request::FetchAdd { .. });
        let control = Control { index: self.posted as u16, qpn: self.number(), signaled, fence };
        let slot = (self.posted % u64::from(self.depth)) as usize * BLOCK;
        self.pages.store(slot, &request.to_block(control));
        self.posted += 1;
        true
    }

    /// Rings for the requests that were posted.
    pub fn ring(&mut self) {
        if self.rung != self.posted {
            // SAFETY: record and register belong to this queue pair.
            unsafe { self.bell().ring(self.posted) };
            self.rung = self.posted;
        }
    }

    /// The doorbell, for a thread that rings for kernels.
    pub fn bell(&self) -> Bell {
        let record = self.pages.word(record_at(self.depth) + SEND);
        Bell { record, register: self.pair.uar.register(), number: self.number() }
    }

    /// Lets additions wait for earlier reads and additions.
    pub fn fence_additions(&mut self) {
        self.fence = true;
    }

    /// Counts the requests that are done, of all that were ever posted. The count never falls.
    ///
    /// # Errors
    /// A request failed. Every later call fails, too: the queue pair is broken.
    pub fn done(&mut self) -> Result<u64, QueueFault> {
        let at = completion_at(self.depth);
        let load =
            |offset: usize| self.pages.word(at + offset).load(Ordering::Acquire).to_ne_bytes();
        let word = Word::from_bytes(load(cqe::layout::COUNTER));
        match word.kind {
            Kind::None => {}
            Kind::RequestError => return Err(failure(self.number(), load)),
            _ => {
                let more = u64::from(word.counter.wrapping_add(1).wrapping_sub(self.done as u16));
                if more <= u64::from(self.depth) {
                    self.done += more;
                }
            }
        }
        Ok(self.done)
    }

    /// The number of a request that is under way, counted since the beginning, by its index.
    pub(crate) fn absolute(&self, index: u16) -> u64 {
        self.done + u64::from(index.wrapping_sub(self.done as u16))
    }

    /// Requests that were posted since the beginning.
    pub fn posted(&self) -> u64 {
        self.posted
    }
}

/// The failure that a completion reports; `load` gives 4 bytes at an offset of it.
pub(crate) fn failure(number: u32, load: impl Fn(usize) -> [u8; 4]) -> QueueFault {
    let mut bytes = [0; cqe::BYTES];
    for (index, part) in bytes.chunks_exact_mut(4).enumerate() {
        part.copy_from_slice(&load(4 * index));
    }
    let Cqe { word, syndrome, vendor, .. } = Cqe::from_bytes(&bytes);
    QueueFault { peer: 0, queue: 0, number, index: word.counter, syndrome, vendor }
}
