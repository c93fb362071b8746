//! The totals of this rank's signals, and their counting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use tokenyard_core::Result;
use tokenyard_sys_verbs::ffi::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, WC_RECV_RDMA_WITH_IMM, WC_SUCCESS, Wc,
};
use tokenyard_sys_verbs::{Context, Cq, Mr, Pd, RECEIVE_BATCH, Srq};

use super::commands::Datum;
use super::fault::Fault;
use super::memory::refused;
use super::read_back::ReadBack;
use crate::endpoint::{Key, SignalArea};

/// The most receives that are posted again at once; fewer where there are few.
const AGAIN: usize = RECEIVE_BATCH;
/// The most completions of receives that one poll takes, in units of [`AGAIN`], so that commands
/// advance too.
const ROUNDS: usize = 8;

/// This rank's signals.
#[derive(Debug)]
pub(super) struct Signals {
    /// Field order is drop order: the access of peers ends before the totals.
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
        // and the device adds to whole words.
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

    /// The description of the signals for peers.
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
    /// Acquire order, INV-1. A device reports the completion of immediate data when the payload is there, and
    /// the thread that saw the completion counts with release order. A total to which the device adds is
    /// written after the payload, because both come on one connection in order.
    #[inline]
    pub(super) fn read(&self, id: u32) -> Option<u64> {
        self.totals.get(id as usize).map(|total| total.load(Ordering::Acquire))
    }

    /// Counts the signals that have arrived; returns whether there were any. If another thread is
    /// counting, the work is left to it.
    #[inline]
    pub(super) fn drive(&self, tell: &mut dyn FnMut(Bad)) -> bool {
        let Some(receiver) = &self.receiver else { return false };
        receiver.enter().is_some_and(|mut inbox| inbox.take(receiver, &self.totals, tell))
    }
}

/// A fault of an arrived signal, and the number of its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bad {
    pub(super) fault: Fault,
    pub(super) number: Option<u32>,
}

impl Bad {
    fn here(fault: Fault) -> Self {
        Self { fault, number: None }
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

/// Signals that have arrived and are not counted yet.
#[derive(Debug)]
struct Inbox {
    completions: Box<[Wc; AGAIN]>,
    /// Receives to be posted again.
    owed: usize,
    /// The number that is posted at once.
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
        // At most a quarter of the receives is ever not posted.
        let again = AGAIN.min(depth as usize / 4).max(1);
        let completions = Box::new([Wc::default(); AGAIN]);
        let inbox = Mutex::new(Inbox { completions, owed: 0, again, read_back: None });
        Ok(Self { cq, srq, inbox })
    }

    fn enter(&self) -> Option<MutexGuard<'_, Inbox>> {
        match self.inbox.try_lock() {
            Ok(inbox) => Some(inbox),
            // A panic leaves the inbox in a valid state.
            Err(TryLockError::Poisoned(inbox)) => Some(inbox.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

type CallResult<T> = std::result::Result<T, tokenyard_sys_verbs::CallError>;

impl Inbox {
    /// Valid signals count, even if others fail. Returns whether a signal has come.
    fn take(
        &mut self,
        receiver: &Receiver,
        totals: &[AtomicU64],
        tell: &mut dyn FnMut(Bad),
    ) -> bool {
        let mut moved = false;
        for _ in 0..ROUNDS {
            let room = self.read_back.as_ref().map_or(AGAIN, |it| it.room().min(AGAIN));
            let found = match receiver.cq.poll(&mut self.completions[..room]) {
                Ok(found) => found,
                Err(error) => {
                    tell(Bad::here(queue_fault(&error)));
                    return moved;
                }
            };
            self.settle(found, totals, tell);
            moved |= found > 0;
            // A failed completion has used up its receive too.
            self.owed += found;
            while self.owed >= self.again {
                if let Err(error) = receiver.srq.post(self.again) {
                    tell(Bad::here(queue_fault(&error)));
                    return moved;
                }
                self.owed -= self.again;
            }
            if found < AGAIN {
                break;
            }
        }
        if let Some(read_back) = &mut self.read_back {
            moved |= read_back.is_waiting();
            if let Err(fault) = read_back.drive(|datum| add(totals, datum)) {
                tell(Bad::here(fault));
            }
        }
        moved
    }

    /// Counts the first `found` completions, or lets them wait for a read-back.
    fn settle(&mut self, found: usize, totals: &[AtomicU64], tell: &mut dyn FnMut(Bad)) {
        for completion in &self.completions[..found] {
            match (datum(completion, totals.len()), &mut self.read_back) {
                (Ok(datum), None) => add(totals, datum),
                (Ok(datum), Some(read_back)) => read_back.push(datum),
                (Err(fault), _) => tell(Bad { fault, number: Some(completion.qp_num) }),
            }
        }
    }
}

/// The datum of a completion; an error if it is not this transport's, or names none of `signals`
/// signals.
fn datum(completion: &Wc, signals: usize) -> Result<Datum, Fault> {
    let (status, vendor) = (completion.status, completion.vendor_err);
    if status != WC_SUCCESS || completion.opcode != WC_RECV_RDMA_WITH_IMM {
        return Err(Fault::Receive { status, vendor });
    }
    let datum = Datum::from_word(u32::from_be(completion.imm_data));
    if datum.id as usize >= signals {
        return Err(Fault::UnknownSignal { id: datum.id });
    }
    Ok(datum)
}

/// Only the thread that has locked the inbox adds, so a load and a store are enough.
fn add(totals: &[AtomicU64], datum: Datum) {
    let Some(total) = totals.get(datum.id as usize) else { return };
    let sum = total.load(Ordering::Relaxed).wrapping_add(u64::from(datum.add));
    total.store(sum, Ordering::Release);
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
            add(&totals, Datum { id: 2, add: 65_535 });
        }
        let found: Vec<_> = totals.iter().map(|t| t.load(Ordering::Relaxed)).collect();
        assert_eq!(found, [0, 0, 196_605]);
    }

    #[test]
    fn a_receive_that_failed_or_is_none_of_ours_is_a_fault() {
        let word = Datum { id: 7, add: 9 }.to_word().to_be();
        let good = Wc { opcode: WC_RECV_RDMA_WITH_IMM, imm_data: word, ..Wc::default() };
        assert_eq!(datum(&good, 8).unwrap(), Datum { id: 7, add: 9 });
        assert_eq!(datum(&good, 7), Err(Fault::UnknownSignal { id: 7 }));
        assert!(datum(&Wc { status: 5, ..good }, 8).is_err());
        assert!(datum(&Wc { opcode: 128, ..good }, 8).is_err(), "a send, not a write");
    }
}
