//! The state that all rails and queues of an instance share: totals of signals, windows, failures.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tokenyard_core::abi;
use tokenyard_core::transport::{Team, Window};
use tokenyard_core::{Error, ErrorKind};

use super::datum::{Mailbox, VALUES_PER_PEER};
use super::queue::Slots;

/// Bytes between two records.
pub(super) const RECORD_STRIDE: usize = 32;

/// A value in transit (INV-3): peers write it into a mailbox, and the receiver's CPU stores it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) value: u64,
    pub(super) offset: u64,
    pub(super) window: u64,
}

const _: () = assert!(size_of::<Record>() <= RECORD_STRIDE);

/// Zeroed memory of whole pages.
#[derive(Debug)]
pub(super) struct Pages {
    base: NonNull<u8>,
    layout: std::alloc::Layout,
}

// SAFETY: plain memory; access is by pointer, and each user states why it is allowed.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    const PAGE: usize = 4096;

    pub(super) fn new(bytes: usize) -> Self {
        let bytes = bytes.max(1).next_multiple_of(Self::PAGE);
        let Ok(layout) = std::alloc::Layout::from_size_align(bytes, Self::PAGE) else {
            unreachable!("sizes of mailboxes are bounded")
        };
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { std::alloc::handle_alloc_error(layout) };
        Self { base, layout }
    }

    pub(super) fn bytes(&self) -> usize {
        self.layout.size()
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The place of record `index`.
    pub(super) fn record(&self, index: usize) -> *mut Record {
        debug_assert!((index + 1) * RECORD_STRIDE <= self.bytes());
        self.base().wrapping_add(index * RECORD_STRIDE).cast()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { std::alloc::dealloc(self.base(), self.layout) }
    }
}

/// A window of this rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalWindow {
    base: *mut u8,
    bytes: u64,
    kind: u32,
}

// SAFETY: an address; each access states why it is allowed.
unsafe impl Send for LocalWindow {}
// SAFETY: as above.
unsafe impl Sync for LocalWindow {}

impl LocalWindow {
    pub(super) fn new(window: &Window) -> Self {
        Self { base: window.pointer, bytes: window.bytes, kind: window.kind }
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_host(&self) -> bool {
        self.kind == abi::TY_MEMORY_HOST
    }

    /// The address of an offset that core has checked.
    pub(super) fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        debug_assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        self.base.wrapping_add(offset as usize)
    }
}

/// The state that all rails and queues share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) team: Team,
    pub(super) slots: Slots,
    pub(super) windows: Vec<LocalWindow>,
    totals: Box<[AtomicU64]>,
    /// For each rail, [`VALUES_PER_PEER`] records of each peer. Peers write them.
    pub(super) mailboxes: Pages,
    /// The first failure of each peer; the last place is for failures that are about no known peer.
    failures: Box<[OnceLock<Failure>]>,
    is_well: AtomicBool,
    /// The place at which `health` starts, so that it reports the failures in turn.
    turn: AtomicUsize,
}

/// A failure.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// Index in the team, where it is known.
    pub(super) peer: Option<u32>,
    pub(super) message: String,
    pub(super) interface: String,
}

impl Shared {
    pub(super) fn new(team: &Team, slots: Slots, signals: u32, rails: usize) -> Self {
        let records = rails * team.world_ranks.len() * VALUES_PER_PEER as usize;
        Self {
            team: team.clone(),
            slots,
            windows: Vec::new(),
            totals: (0..signals).map(|_| AtomicU64::new(0)).collect(),
            mailboxes: Pages::new(records * RECORD_STRIDE),
            failures: (0..=team.world_ranks.len()).map(|_| OnceLock::new()).collect(),
            is_well: AtomicBool::new(true),
            turn: AtomicUsize::new(0),
        }
    }

    pub(super) fn ranks(&self) -> u32 {
        self.team.world_ranks.len() as u32
    }

    /// The place of a mailbox, counted in records from the first.
    pub(super) fn mailbox(&self, rail: usize, place: Mailbox) -> usize {
        rail * (self.ranks() * VALUES_PER_PEER) as usize + place.index() as usize
    }

    /// Adds to a total, ordered after all payloads that are visible to this thread (INV-1). `false`
    /// if there is no such signal.
    #[inline]
    pub(super) fn raise(&self, id: u32, add: u32) -> bool {
        match self.totals.get(id as usize) {
            Some(total) => {
                total.fetch_add(u64::from(add), Ordering::Release);
                true
            }
            None => false,
        }
    }

    /// A total; payloads that were written before it was raised are visible after this call
    /// (INV-1).
    #[inline]
    pub(super) fn total(&self, id: u32) -> u64 {
        let total = self.totals.get(id as usize);
        debug_assert!(total.is_some(), "signal {id} is out of range");
        total.map_or(0, |total| total.load(Ordering::Acquire))
    }

    /// Stores a value that core or [`Shared::deliver`] has checked. INV-3: one aligned store.
    ///
    /// # Safety
    /// The window is host memory, and the place is inside it and aligned to 8 bytes.
    pub(super) unsafe fn store_value(&self, window: &LocalWindow, offset: u64, value: u64) {
        let place = window.at(offset, 8).cast::<u64>();
        // SAFETY: by this function's contract; peers and kernels access values atomically.
        unsafe { AtomicU64::from_ptr(place) }.store(value, Ordering::Release);
    }

    /// Stores the value that a peer has written into a mailbox. Returns an error if the value is
    /// invalid, as it comes from another process.
    pub(super) fn deliver(&self, rail: usize, place: Mailbox) -> Result<(), &'static str> {
        // SAFETY: the mailbox is inside the pages (`place` is of a rank of the team), and its
        // writer waits for a credit before it writes again. Any bytes are a valid record.
        let record = unsafe { self.mailboxes.record(self.mailbox(rail, place)).read_volatile() };
        let window = usize::try_from(record.window).ok().and_then(|id| self.windows.get(id));
        let Some(window) = window.filter(|window| window.is_host()) else {
            return Err("a value for a window that is not there");
        };
        let inside = record.offset.checked_add(8).is_some_and(|end| end <= window.bytes);
        if !inside || !(window.base as u64).wrapping_add(record.offset).is_multiple_of(8) {
            return Err("a value for a place outside its window, or not aligned");
        }
        // SAFETY: just checked.
        unsafe { self.store_value(window, record.offset, record.value) };
        Ok(())
    }

    /// Makes the transport unhealthy for good (INV-7). The first failure of a peer stays. The
    /// failure of another peer, without which ranks may go on, does not hide it.
    #[cold]
    pub(super) fn fail(&self, failure: Failure) {
        let rank = failure.peer.and_then(|peer| self.team.world_ranks.get(peer as usize));
        tracing::debug!(?rank, interface = failure.interface, "{}", failure.message);
        let unknown = self.failures.len() - 1;
        let place = failure.peer.map_or(unknown, |peer| unknown.min(peer as usize));
        if self.failures[place].set(failure).is_ok() {
            self.is_well.store(false, Ordering::Release);
        }
    }

    /// A failure that is about no peer; otherwise the failures of the peers in turn, so that none
    /// hides another.
    pub(super) fn health(&self) -> Result<(), Error> {
        if self.is_well.load(Ordering::Acquire) {
            return Ok(());
        }
        let unknown = self.failures.last().and_then(OnceLock::get);
        let Some(failure) = unknown.or_else(|| self.next_failure()) else { return Ok(()) };
        let Failure { peer, message, interface } = failure;
        let error = Error::new(ErrorKind::Transport, "transfer", message)
            .with_context("interface", interface);
        let rank = peer.and_then(|peer| self.team.world_ranks.get(peer as usize));
        Err(match rank {
            Some(rank) => error.with_context("peer", rank).with_rank(*rank),
            None => error,
        })
    }

    fn next_failure(&self) -> Option<&Failure> {
        let peers = self.team.world_ranks.len();
        let turn = self.turn.load(Ordering::Relaxed);
        let places = (turn..turn + peers).map(|place| place % peers);
        let (place, failure) =
            places.filter_map(|place| Some((place, self.failures[place].get()?))).next()?;
        self.turn.store(place + 1, Ordering::Relaxed);
        Some(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Shared {
        Shared::new(
            &Team { world_ranks: vec![4, 5, 6], ..Team::world(0, 3) },
            Slots::new(1, 1),
            1,
            1,
        )
    }

    fn fail(shared: &Shared, peer: Option<u32>, message: &str) {
        let (message, interface) = (message.to_owned(), "eth0".to_owned());
        shared.fail(Failure { peer, message, interface });
    }

    #[test]
    fn health_names_all_peers_that_failed_in_turn_each_with_its_first_failure() {
        let shared = shared();
        assert!(shared.health().is_ok());
        fail(&shared, Some(1), "first");
        fail(&shared, Some(1), "what came of it");
        let error = shared.health().unwrap_err();
        assert_eq!((error.rank(), error.message()), (Some(5), "first"));
        fail(&shared, Some(2), "another link");
        fail(&shared, Some(1), "the old one again");
        for _ in 0..2 {
            for expected in [(Some(6), "another link"), (Some(5), "first")] {
                let error = shared.health().unwrap_err();
                assert_eq!((error.rank(), error.message()), expected);
            }
        }
    }

    #[test]
    fn a_failure_that_is_about_no_peer_is_hidden_by_none() {
        let shared = shared();
        fail(&shared, None, "the queue is broken");
        fail(&shared, Some(1), "a link");
        let error = shared.health().unwrap_err();
        assert_eq!((error.rank(), error.message()), (None, "the queue is broken"));
    }
}
