//! A queue pair with its completion queue, in memory of the host. This crate makes both by DEVX commands and
//! writes the work requests itself.
//!
//! Either kernels post on it through `DeviceApi`, which gets its addresses from [`QueuePair::to_device`]; or the
//! host posts by [`QueuePair::post`]. Never both.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokenyard_sys_mlx5::cqe::{self, Cqe, Kind, Word};
use tokenyard_sys_mlx5::doorbell::{PAGE, RECORD, Ring, SEND, record_word};
use tokenyard_sys_mlx5::mailbox::{
    CreateCq, CreateCqOut, CreateQp, CreateQpOut, Init2Rtr, Rst2Init, Rtr2Rts,
};
use tokenyard_sys_mlx5::wqe::{BLOCK, Control, Request};
use tokenyard_sys_mlx5::{CallError, Devx, Object, Uar, Umem, UmemRequest};

use crate::device_api::{DEPTHS, DeviceQueue};
use crate::fault::QueueFault;

/// Pages of zeros.
#[derive(Debug)]
struct Pages {
    first: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, which only atomics touch.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates at least `bytes` bytes; more than 0.
    fn new(bytes: usize) -> Self {
        let rounded = bytes.max(1).next_multiple_of(PAGE);
        // SAFETY: a power of two, and a size that was rounded up to a multiple of it; sizes of queues are small.
        let layout = unsafe { Layout::from_size_align_unchecked(rounded, PAGE) };
        // SAFETY: not of size 0.
        let first = unsafe { alloc_zeroed(layout) };
        let first = NonNull::new(first).unwrap_or_else(|| handle_alloc_error(layout));
        Self { first, layout }
    }

    fn address(&self) -> u64 {
        self.first.as_ptr().expose_provenance() as u64
    }

    /// The aligned word of 4 bytes at an offset.
    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.layout.size(), "inside the pages");
        // SAFETY: inside the pages and aligned, as was just checked; only this type and the device access it, and
        // both allow atomic access by the other.
        unsafe { AtomicU32::from_ptr(self.first.as_ptr().add(offset).cast()) }
    }

    fn store(&self, offset: usize, bytes: &[u8]) {
        for (at, part) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_ne_bytes(std::array::from_fn(|i| part[i]));
            self.word(offset + 4 * at).store(word, Ordering::Relaxed);
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once. The device no longer uses it: its umem has ended before.
        unsafe { dealloc(self.first.as_ptr(), self.layout) };
    }
}

/// Makes stores before it visible to the device before later stores.
fn to_device() {
    // x86-64 does not reorder stores, also those to a register that is not cached; this fence stops the compiler
    // from moving them.
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
    // A device is outside the domain of the barriers between processors.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}

/// The commands that take a queue pair from its first state to the state in which it sends. `connect` fills in
/// the number of the queue pair in each.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Port and rights.
    pub init: Rst2Init,
    /// The peer and the path to it.
    pub receive: Init2Rtr,
    /// How requests are repeated.
    pub send: Rtr2Rts,
}

/// A queue pair and its completion queue.
#[derive(Debug)]
pub struct QueuePair {
    // Dropped in this order: the objects that a command named outlive the object that it made.
    qp: Object,
    _cq: Object,
    _umem: Umem,
    uar: Arc<Uar>,
    pages: Pages,
    number: u32,
    depth: u32,
    /// Requests that were posted, that were rung for, and that are done.
    posted: u64,
    rung: u64,
    done: u64,
}

/// Layout behind the send queue: a page for the completion, then a page for the record. The completion queue's
/// own record, which is never rung, lies behind that.
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
    /// `EINVAL` for a depth that is not a power of two in [`DEPTHS`]; else the error of the library or the device.
    pub fn new(devx: &Arc<Devx>, uar: &Arc<Uar>, pd: u32, depth: u32) -> Result<Self, CallError> {
        if !DEPTHS.contains(&depth) || !depth.is_power_of_two() {
            let text = format!("found depth {depth}; expected a power of two in {DEPTHS:?}");
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
            return Err(CallError { call: "make queue pair", source });
        }
        let pages = Pages::new(record_at(depth) + PAGE);
        pages.store(completion_at(depth), &[cqe::FILL; cqe::BYTES]);
        let request =
            UmemRequest { address: pages.address(), bytes: pages.layout.size(), dmabuf: None };
        // SAFETY: the pages are freed after the umem, and are accessed by atomics only.
        let umem = unsafe { Umem::new(devx, &request) }?;
        let cq = CreateCq {
            dbr_umem_id: umem.id(),
            log_size: 0,
            uar_page: uar.page(),
            eqn: devx.event_queue(0)? as u8,
            dbr_offset: (record_at(depth) + BLOCK) as u64,
            buffer_offset: completion_at(depth) as u64,
            buffer_umem_id: umem.id(),
        };
        // SAFETY: umem and page of registers are stored beside it, and dropped after it.
        let (cq, CreateCqOut { cqn, .. }) = unsafe { Object::new(devx, &cq) }?;
        let qp = CreateQp {
            pd,
            log_sq_size: depth.ilog2() as u8,
            uar_page: uar.page(),
            user_index: 0,
            send_cqn: cqn,
            receive_cqn: cqn,
            dbr_offset: record_at(depth) as u64,
            dbr_umem_id: umem.id(),
            wq_offset: 0,
            wq_umem_id: umem.id(),
        };
        // SAFETY: as above, and the completion queue. The domain is the caller's: a device refuses to end one
        // that is in use.
        let (qp, CreateQpOut { qpn: number, .. }) = unsafe { Object::new(devx, &qp) }?;
        let uar = Arc::clone(uar);
        let (posted, rung, done) = (0, 0, 0);
        Ok(Self { qp, _cq: cq, _umem: umem, uar, pages, number, depth, posted, rung, done })
    }

    /// Its number, 24 bits.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Takes the queue pair to the state in which it receives and sends.
    ///
    /// # Errors
    /// The error of the library or the device.
    pub fn connect(&self, steps: &Steps) -> Result<(), CallError> {
        let qpn = self.number;
        self.qp.modify(&Rst2Init { qpn, ..steps.init })?;
        self.qp.modify(&Init2Rtr { qpn, ..steps.receive })?;
        self.qp.modify(&Rtr2Rts { qpn, ..steps.send })
    }

    /// The structure by which a kernel posts. Addresses are the host's: a GPU that maps memory elsewhere needs others.
    pub fn to_device(&self) -> DeviceQueue {
        let at = |offset: usize| self.pages.address() + offset as u64;
        DeviceQueue {
            requests: at(0),
            record: at(record_at(self.depth)),
            doorbell: self.uar.register().expose_provenance() as u64,
            completion: at(completion_at(self.depth) + cqe::layout::COUNTER),
            number: self.number,
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
        let control =
            Control { index: self.posted as u16, qpn: self.number, signaled, fence: false };
        let slot = (self.posted % u64::from(self.depth)) as usize * BLOCK;
        self.pages.store(slot, &request.to_block(control));
        self.posted += 1;
        true
    }

    /// Rings for the requests that were posted.
    pub fn ring(&mut self) {
        if self.rung == self.posted {
            return;
        }
        let next = self.posted as u16;
        to_device();
        self.pages.store(record_at(self.depth) + SEND, &record_word(next));
        to_device();
        let bytes = Ring::NextIndex { next, qpn: self.number }.to_bytes();
        // SAFETY: the register of a page that lives, aligned to 8 bytes; every store to it is whole.
        let register = unsafe { AtomicU64::from_ptr(self.uar.register()) };
        register.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        self.rung = self.posted;
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
            Kind::RequestError => {
                let mut bytes = [0; cqe::BYTES];
                for (index, part) in bytes.chunks_exact_mut(4).enumerate() {
                    part.copy_from_slice(&load(4 * index));
                }
                let cqe = Cqe::from_bytes(&bytes);
                return Err(QueueFault {
                    peer: 0,
                    queue: 0,
                    number: self.number,
                    index: word.counter,
                    syndrome: cqe.syndrome,
                    vendor: cqe.vendor,
                });
            }
            _ => {
                let more = u64::from(word.counter.wrapping_add(1).wrapping_sub(self.done as u16));
                if more <= u64::from(self.depth) {
                    self.done += more;
                }
            }
        }
        Ok(self.done)
    }

    /// Requests that were posted since the beginning.
    pub fn posted(&self) -> u64 {
        self.posted
    }
}

const _: () = assert!(RECORD <= BLOCK, "two records lie in a page, a block apart");
