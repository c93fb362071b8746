//! The totals of this rank's signals, and how they come to be.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use tokenyard_core::Result;
use tokenyard_sys_verbs::ffi::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, Wc,
};
use tokenyard_sys_verbs::{Context, Cq, Mr, Pd, RECEIVE_BATCH, Srq};

use super::commands::Datum;
use super::failure::Fault;
use super::memory::refused;
use super::read_back::ReadBack;
use crate::endpoint::{Key, SignalArea};

/// Receives that are posted again at once, at most; fewer where there are few.
const AGAIN: usize = RECEIVE_BATCH;
/// Completions of receives that one poll takes at most, times [`AGAIN`]: commands must move too.
const ROUNDS: usize = 8;

/// This rank's signals.
#[derive(Debug)]
pub(super) struct Signals {
    /// Field order is drop order: peers' access ends before the totals do.
    region: Option<Mr>,
    receiver: Option<Receiver>,
    totals: Box<[AtomicU64]>,
}

impl Signals {
    /// Totals that peers' additions change.
    pub(super) fn atomic(pd: &Arc<Pd>, count: u32) -> Result<Self> {
        let totals = zeroed(count);
        let (address, bytes) = (totals.as_ptr().cast_mut().cast(), size_of_val(&*totals));
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_ATOMIC;
        // SAFETY: the totals live as long as the region, beside it. They are only read, as atomics,
        // and the device adds to whole ones.
        let region = unsafe { Mr::new(pd, address, bytes, access) };
        let region = region.map_err(|e| refused(e, bytes as u64))?;
        Ok(Self { region: Some(region), receiver: None, totals })
    }

    /// Totals that this rank counts up from `depth` receives.
    pub(super) fn immediate(receiver: Receiver, count: u32) -> Self {
        Self { region: None, receiver: Some(receiver), totals: zeroed(count) }
    }

    /// From here on, payloads are read back before their signals count.
    pub(super) fn read_back_first(&mut self, read_back: ReadBack) {
        if let Some(receiver) = &mut self.receiver {
            let inbox = receiver.inbox.get_mut().unwrap_or_else(PoisonError::into_inner);
            inbox.read_back = Some(read_back);
        }
    }

    pub(super) fn receiver(&self) -> Option<&Receiver> {
        self.receiver.as_ref()
    }

    /// What peers are told.
    pub(super) fn area(&self) -> SignalArea {
        match &self.region {
            None => SignalArea::Immediate,
            Some(region) => {
                SignalArea::Atomic { address: self.totals.as_ptr() as u64, key: Key(region.rkey()) }
            }
        }
    }

    /// The total of a signal.
    ///
    /// Acquire order, INV-1: immediate data are counted with release order by whoever saw the
    /// completion, which a device gives when the payload is there; a total that the device adds to
    /// is written behind the payload, as both come on one connection in order.
    #[inline]
    pub(super) fn read(&self, id: u32) -> Option<u64> {
        self.totals.get(id as usize).map(|total| total.load(Ordering::Acquire))
    }

    /// Counts what has arrived; whether there was something. Where another thread is at it, that one
    /// does.
    #[inline]
    pub(super) fn drive(&self) -> Result<bool, Fault> {
        match &self.receiver {
            None => Ok(false),
            Some(receiver) => match receiver.enter() {
                None => Ok(false),
                Some(mut inbox) => inbox.take(receiver, &self.totals),
            },
        }
    }
}

fn zeroed(count: u32) -> Box<[AtomicU64]> {
    // At least one: an empty region cannot be registered.
    (0..count.max(1)).map(|_| AtomicU64::new(0)).collect()
}

/// The receives that peers' immediate data arrive in.
#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) cq: Arc<Cq>,
    pub(super) srq: Arc<Srq>,
    inbox: Mutex<Inbox>,
}

/// What has arrived and is not settled yet.
#[derive(Debug)]
struct Inbox {
    completions: Box<[Wc; AGAIN]>,
    /// Receives to be posted again.
    owed: usize,
    /// So many are posted at once.
    again: usize,
    read_back: Option<ReadBack>,
}

impl Receiver {
    /// Makes the queue and posts all its receives.
    pub(super) fn new(context: &Arc<Context>, pd: &Arc<Pd>, depth: u32) -> CallResult<Self> {
        // Each receive completes once, so the completions of all of them fit.
        let (cq, srq) = (Cq::new(context, depth)?, Srq::new(pd, depth)?);
        let mut left = depth as usize;
        while left > 0 {
            let count = left.min(RECEIVE_BATCH);
            srq.post(count)?;
            left -= count;
        }
        // A quarter at most is ever missing.
        let again = AGAIN.min(depth as usize / 4).max(1);
        let completions = Box::new([Wc::default(); AGAIN]);
        let inbox = Mutex::new(Inbox { completions, owed: 0, again, read_back: None });
        Ok(Self { cq, srq, inbox })
    }

    fn enter(&self) -> Option<MutexGuard<'_, Inbox>> {
        match self.inbox.try_lock() {
            Ok(inbox) => Some(inbox),
            // A panic cannot leave the inbox in a state that matters.
            Err(TryLockError::Poisoned(inbox)) => Some(inbox.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

type CallResult<T> = std::result::Result<T, tokenyard_sys_verbs::CallError>;

impl Inbox {
    fn take(&mut self, receiver: &Receiver, totals: &[AtomicU64]) -> Result<bool, Fault> {
        let mut moved = false;
        // What is good counts, whatever fails beside it; of what fails the first is told.
        let mut bad = Ok(());
        for _ in 0..ROUNDS {
            let room = self.read_back.as_ref().map_or(AGAIN, |it| it.room().min(AGAIN));
            let found = match receiver.cq.poll(&mut self.completions[..room]) {
                Ok(found) => found,
                Err(error) => return bad.and(Err(queue_fault(&error))),
            };
            bad = bad.and(self.settle(found, totals));
            moved |= found > 0;
            self.owed += found;
            while self.owed >= self.again {
                if let Err(error) = receiver.srq.post(self.again) {
                    return bad.and(Err(queue_fault(&error)));
                }
                self.owed -= self.again;
            }
            if found < AGAIN {
                break;
            }
        }
        if let Some(read_back) = &mut self.read_back {
            moved |= read_back.is_waiting();
            bad = bad.and(read_back.drive(|datum| add(totals, datum)));
        }
        bad.map(|()| moved)
    }

    /// Counts the first so many completions, or lets them wait for a read-back.
    fn settle(&mut self, found: usize, totals: &[AtomicU64]) -> Result<(), Fault> {
        let mut bad = Ok(());
        for completion in &self.completions[..found] {
            bad = bad.and(datum(completion).and_then(|datum| match &mut self.read_back {
                None => add(totals, datum),
                Some(read_back) => {
                    read_back.push(datum);
                    Ok(())
                }
            }));
        }
        bad
    }
}

fn datum(completion: &Wc) -> Result<Datum, Fault> {
    let (status, vendor) = (completion.status, completion.vendor_err);
    if status != WC_SUCCESS || completion.opcode != WC_RECV_RDMA_WITH_IMM {
        return Err(Fault::Receive { status, vendor });
    }
    Ok(Datum::from_word(u32::from_be(completion.imm_data)))
}

/// Only who holds the inbox adds, so a load and a store are enough.
fn add(totals: &[AtomicU64], datum: Datum) -> Result<(), Fault> {
    let total = totals.get(datum.id as usize).ok_or(Fault::UnknownSignal { id: datum.id })?;
    let sum = total.load(Ordering::Relaxed).wrapping_add(u64::from(datum.add));
    total.store(sum, Ordering::Release);
    Ok(())
}

pub(super) fn queue_fault(error: &tokenyard_sys_verbs::CallError) -> Fault {
    Fault::Queue { errno: error.source.raw_os_error().unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_add_to_their_totals_and_nothing_else() {
        let totals = zeroed(3);
        for _ in 0..3 {
            add(&totals, Datum { id: 2, add: 65_535 }).unwrap();
        }
        let found: Vec<_> = totals.iter().map(|t| t.load(Ordering::Relaxed)).collect();
        assert_eq!(found, [0, 0, 196_605]);
        assert_eq!(add(&totals, Datum { id: 3, add: 1 }), Err(Fault::UnknownSignal { id: 3 }));
    }

    #[test]
    fn a_receive_that_failed_or_is_none_of_ours_is_a_fault() {
        let word = Datum { id: 7, add: 9 }.to_word().to_be();
        let good = Wc { opcode: WC_RECV_RDMA_WITH_IMM, imm_data: word, ..Wc::default() };
        assert_eq!(datum(&good).unwrap(), Datum { id: 7, add: 9 });
        assert!(datum(&Wc { status: 5, ..good }).is_err());
        assert!(datum(&Wc { opcode: 128, ..good }).is_err(), "a send, not a write");
    }
}
