//! Makes payloads visible before their signals count (INV-1), where a completion does not guarantee
//! it.
//!
//! A completion in host memory may be seen before a payload that went to another device's memory is
//! visible there. A read by the same device cannot pass its own earlier writes. So a completed read
//! of the window's memory, posted after the completion was seen, proves that the payload is
//! visible.

use std::collections::VecDeque;
use std::sync::Arc;

use tokenyard_sys_verbs::ffi::{
    SEND_SIGNALED, SendWr, Sge, WC_SUCCESS, WR_RDMA_READ, Wc, WrRdma, WrTarget,
};
use tokenyard_sys_verbs::{Cq, Mr, Qp, Rts};

use super::commands::Datum;
use super::fault::Fault;
use super::signals::queue_fault;

/// A queue pair that is connected to itself, and the data that wait for its read.
#[derive(Debug)]
pub(super) struct ReadBack {
    /// Field order is drop order: the queue pair ends before the word that it reads into.
    qp: Qp<Rts>,
    cq: Arc<Cq>,
    region: Mr,
    word: Box<u64>,
    source: WrRdma,
    waiting: VecDeque<Datum>,
    /// The number of first entries of `waiting` that count when the read in flight is done.
    covered: usize,
    most: usize,
}

/// The source and the destination of a read-back.
#[derive(Debug)]
pub(super) struct ReadBackMemory {
    /// A window's first word.
    pub(super) source: WrRdma,
    /// The region of `word`.
    pub(super) region: Mr,
    pub(super) word: Box<u64>,
}

impl ReadBack {
    /// At most `most` data wait.
    pub(super) fn new(qp: Qp<Rts>, cq: Arc<Cq>, memory: ReadBackMemory, most: usize) -> Self {
        let ReadBackMemory { source, region, word } = memory;
        let waiting = VecDeque::with_capacity(most);
        Self { qp, cq, region, word, source, waiting, covered: 0, most }
    }

    /// The number of data that can be added.
    pub(super) fn room(&self) -> usize {
        self.most - self.waiting.len()
    }

    /// Whether data wait to be counted.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, datum: Datum) {
        debug_assert!(self.room() > 0);
        self.waiting.push_back(datum);
    }

    /// Passes the data whose payloads are visible to `count`, and posts a read for the others.
    pub(super) fn drive(&mut self, count: impl FnMut(Datum)) -> Result<(), Fault> {
        if self.covered > 0 {
            let mut completion = [Wc::default()];
            if self.cq.poll(&mut completion).map_err(|e| queue_fault(&e))? == 0 {
                return Ok(());
            }
            let [Wc { status, vendor_err: vendor, .. }] = completion;
            if status != WC_SUCCESS {
                return Err(Fault::ReadBack { status, vendor });
            }
            let covered = std::mem::take(&mut self.covered);
            self.waiting.drain(..covered).for_each(count);
        }
        if self.waiting.is_empty() { Ok(()) } else { self.read() }
    }

    fn read(&mut self) -> Result<(), Fault> {
        let addr = &raw mut *self.word as u64;
        let mut sge = Sge { addr, length: 8, lkey: self.region.lkey() };
        let mut wr = SendWr {
            sg_list: &mut sge,
            num_sge: 1,
            opcode: WR_RDMA_READ,
            send_flags: SEND_SIGNALED,
            wr: WrTarget { rdma: self.source },
            ..SendWr::BLANK
        };
        // SAFETY: a list of one; the word is registered, lives beside the queue pair, and no code
        // reads it.
        let posted = unsafe { self.qp.post(&mut wr) };
        posted.map_err(|(error, _)| Fault::Post {
            errno: error.source.raw_os_error().unwrap_or(0),
        })?;
        self.covered = self.waiting.len();
        Ok(())
    }
}
