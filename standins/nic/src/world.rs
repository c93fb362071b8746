//! The state that all stand-in NICs of a process share: tables of all objects, behind one lock.

use std::collections::VecDeque;
use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokenyard_sys_verbs::ffi::{self, Wc};

/// An entry of the list of devices.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) name: CString,
    pub(super) index: usize,
}

#[derive(Debug)]
pub(super) struct NicState {
    pub(super) device: &'static Device,
    pub(super) held: bool,
    pub(super) refuse_after: Option<usize>,
    pub(super) unbreakable: bool,
    pub(super) is_cut: bool,
    /// Events by type, and the numbers of the queue pairs that they are about.
    pub(super) events: VecDeque<(c_int, Option<u32>)>,
    pub(super) journal: Vec<&'static str>,
}

impl NicState {
    pub(super) fn new(device: &'static Device) -> Self {
        Self {
            device,
            held: false,
            refuse_after: None,
            unbreakable: false,
            is_cut: false,
            events: VecDeque::new(),
            journal: Vec::new(),
        }
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CqState {
    pub(super) nic: usize,
    pub(super) entries: VecDeque<Wc>,
    pub(super) room: usize,
}

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct SrqState {
    pub(super) nic: usize,
    pub(super) posted: usize,
}

/// A memory region; its place in the table is its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// A queue pair; its number is its place in the table plus one.
#[derive(Debug)]
pub(super) struct QpState {
    pub(super) nic: usize,
    /// The address of the caller's object; a number, so that threads may share it.
    pub(super) raw: usize,
    pub(super) state: c_int,
    pub(super) send_cq: usize,
    pub(super) recv_cq: usize,
    pub(super) srq: Option<usize>,
    pub(super) peer: u32,
    pub(super) sent: VecDeque<Sent>,
    pub(super) depth: usize,
}

/// The most bytes that may be inline.
pub(super) const INLINE: usize = 64;

/// A work request that was posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) id: u64,
    pub(super) opcode: c_int,
    pub(super) reported: bool,
    pub(super) imm: u32,
    pub(super) inline: Option<[u8; INLINE]>,
    pub(super) local: u64,
    pub(super) bytes: u64,
    pub(super) lkey: u32,
    pub(super) remote: u64,
    pub(super) rkey: u32,
    pub(super) add: u64,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) nics: Vec<NicState>,
    pub(super) cqs: Vec<CqState>,
    pub(super) srqs: Vec<SrqState>,
    pub(super) regions: Vec<Option<Region>>,
    pub(super) qps: Vec<QpState>,
}

impl World {
    pub(super) fn enter() -> MutexGuard<'static, Self> {
        static WORLD: Mutex<World> = Mutex::new(World {
            nics: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            regions: Vec::new(),
            qps: Vec::new(),
        });
        WORLD.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&mut self, nic: usize, what: &'static str) {
        self.nics[nic].journal.push(what);
    }

    pub(super) fn complete(&mut self, queue: usize, completion: Wc) {
        let CqState { nic, entries, room } = &mut self.cqs[queue];
        if entries.len() == *room {
            let nic = *nic;
            return self.note(nic, "OVERRUN of a completion queue");
        }
        entries.push_back(completion);
    }

    pub(super) fn execute_all(&mut self) {
        (0..self.qps.len()).for_each(|at| self.execute(at));
    }

    /// Executes the posted requests of a queue pair, as far as possible.
    pub(super) fn execute(&mut self, at: usize) {
        while let Some(sent) = self.qps[at].sent.front().copied() {
            let qp = &self.qps[at];
            let status = match qp.state {
                ffi::QPS_ERR => ffi::WC_WR_FLUSH_ERR,
                _ if self.nics[qp.nic].held => return,
                _ if self.is_cut_off(qp) => ffi::WC_RETRY_EXC_ERR,
                _ => match self.perform(qp.peer, &sent) {
                    Some(status) => status,
                    None => return,
                },
            };
            let qp = &mut self.qps[at];
            qp.sent.pop_front();
            if status != ffi::WC_SUCCESS {
                qp.state = ffi::QPS_ERR;
            }
            let queue = qp.send_cq;
            if sent.reported || status != ffi::WC_SUCCESS {
                self.complete(queue, Wc { wr_id: sent.id, status, ..Wc::default() });
            }
        }
    }

    /// Executes a work request, and returns the status of its completion; `None` if it waits for a
    /// receive of the peer.
    fn perform(&mut self, number: u32, sent: &Sent) -> Option<c_int> {
        let Some(peer) = self.qps.get(number.wrapping_sub(1) as usize) else {
            return Some(ffi::WC_RETRY_EXC_ERR);
        };
        if !matches!(peer.state, ffi::QPS_RTR | ffi::QPS_RTS) {
            return Some(ffi::WC_RETRY_EXC_ERR);
        }
        if sent.inline.is_none() && !self.is_inside(sent.lkey, sent.local, sent.bytes) {
            return Some(ffi::WC_LOC_PROT_ERR);
        }
        if !self.is_inside(sent.rkey, sent.remote, sent.bytes) {
            return Some(ffi::WC_REM_ACCESS_ERR);
        }
        let (srq, recv_cq) = (peer.srq, peer.recv_cq);
        if sent.opcode == ffi::WR_RDMA_WRITE_WITH_IMM {
            let posted = &mut self.srqs[srq?].posted;
            *posted = posted.checked_sub(1)?;
        }
        let source = sent.inline.as_ref().map_or(sent.local, |bytes| bytes.as_ptr() as u64);
        // SAFETY: both places are inside registered regions, which the process keeps mapped while
        // they are registered, or inside `sent`. Tests access the memory of a write only after its
        // signal.
        unsafe { transfer(sent, source) };
        if sent.opcode == ffi::WR_RDMA_WRITE_WITH_IMM {
            let opcode = ffi::WC_RECV_RDMA_WITH_IMM;
            let qp_num = number;
            self.complete(recv_cq, Wc { opcode, imm_data: sent.imm, qp_num, ..Wc::default() });
        }
        Some(ffi::WC_SUCCESS)
    }

    /// Whether one of the two ends is cut off from the other, which is on another NIC.
    fn is_cut_off(&self, qp: &QpState) -> bool {
        let peer = self.qps.get(qp.peer.wrapping_sub(1) as usize);
        let cut = |nic: usize| self.nics[nic].is_cut;
        peer.is_some_and(|peer| peer.nic != qp.nic && (cut(peer.nic) || cut(qp.nic)))
    }

    fn is_inside(&self, key: u32, address: u64, bytes: u64) -> bool {
        let region = self.regions.get(key as usize).copied().flatten();
        bytes == 0
            || region.is_some_and(|region| {
                address >= region.address && address + bytes <= region.address + region.bytes
            })
    }
}

/// # Safety
/// `sent.bytes` bytes at `source` and at `sent.remote` are mapped, and no other code writes them.
unsafe fn transfer(sent: &Sent, source: u64) {
    let (local, remote, bytes) = (source as *mut u8, sent.remote as *mut u8, sent.bytes as usize);
    // SAFETY: by this function's contract.
    unsafe {
        match sent.opcode {
            _ if bytes == 0 => {}
            ffi::WR_RDMA_READ => std::ptr::copy(remote, local, bytes),
            ffi::WR_ATOMIC_FETCH_AND_ADD => {
                let total = AtomicU64::from_ptr(remote.cast());
                let before = total.fetch_add(sent.add, Ordering::Release);
                local.cast::<u64>().write_unaligned(before);
            }
            _ => std::ptr::copy(local, remote, bytes),
        }
    }
}
