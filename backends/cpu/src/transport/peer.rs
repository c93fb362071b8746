//! What this rank shares with its peers, and what it has mapped of each.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tokenyard_core::transport::{Team, TransportNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use super::memory::{self, Mapping, Span};
use super::signals::Signals;
use super::socket::{DESCRIPTOR_FIX, RawRecord};
use super::wire::{Endpoint, Extent, Introduction, Record, Secret};

/// A rank whose memory can be reached: another one, or this one itself.
#[derive(Debug)]
pub(super) struct Peer {
    /// The token that the rank introduced itself with.
    pub(super) token: Secret,
    /// In order of registration.
    pub(super) windows: Vec<Span>,
    pub(super) signals: Signals,
    /// Keeps the spans above mapped; nothing for this rank itself.
    _mappings: Vec<Mapping>,
}

/// This rank's own memory and identity.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) team: Team,
    pub(super) endpoint: Endpoint,
    pub(super) windows: Vec<Span>,
    pub(super) signals: Signals,
    signal_count: u32,
    shared_windows: Vec<(BorrowedFd<'static>, Extent)>,
    signal_fd: OwnedFd,
    /// Keeps `signals` mapped.
    _signal_mapping: Mapping,
}

impl Local {
    pub(super) fn new(team: &Team, needs: &TransportNeeds) -> Result<Self> {
        let bytes = Signals::bytes(needs.signals);
        let signal_fd = memory::create("tokenyard-signals", bytes as u64)?;
        let mapping = Mapping::new(signal_fd.as_fd(), 0, bytes)?;
        Ok(Self {
            team: team.clone(),
            endpoint: Endpoint::draw()?,
            windows: Vec::with_capacity(needs.windows as usize),
            // SAFETY: the mapping has these bytes, is page-aligned and is kept beside the signals;
            // nothing but totals is in it.
            signals: unsafe { Signals::new(mapping.span(), needs.signals) },
            signal_count: needs.signals,
            shared_windows: Vec::with_capacity(needs.windows as usize),
            signal_fd,
            _signal_mapping: mapping,
        })
    }

    pub(super) fn ranks(&self) -> usize {
        self.team.world_ranks.len()
    }

    /// Keeps a window for the introductions.
    ///
    /// # Safety
    /// Memory and descriptor of the window stay valid until `self` is dropped.
    pub(super) unsafe fn add_window(&mut self, window: &Window) -> Result<()> {
        debug_assert_eq!(window.id as usize, self.windows.len(), "windows come in order");
        let refused = |message: String| {
            Error::new(ErrorKind::InvalidInput, "register", message)
                .with_context("window", window.id)
                .with_fix("allocate the window as `memory_needs` says: a page-aligned memfd")
        };
        if window.fd < 0 {
            return Err(refused("found no descriptor; expected a memfd".into()));
        }
        let page = rustix::param::page_size() as u64;
        if window.bytes == 0 || !window.fd_offset.is_multiple_of(page) {
            return Err(refused(format!(
                "found {} bytes at offset {}; expected at least 1 at a multiple of {page}",
                window.bytes, window.fd_offset
            )));
        }
        // SAFETY: open until `self` is dropped, by this function's contract.
        let fd = unsafe { BorrowedFd::borrow_raw(window.fd) };
        let (found, end) = (memory::length(fd)?, window.fd_offset.saturating_add(window.bytes));
        if found < end {
            return Err(refused(format!(
                "found {found} bytes behind the descriptor; expected at least {end}"
            )));
        }
        memory::seal(fd).map_err(|e| e.with_context("window", window.id))?;
        self.windows.push(Span::new(window.pointer, window.bytes as usize));
        let extent = Extent { offset: window.fd_offset, bytes: window.bytes };
        self.shared_windows.push((fd, extent));
        Ok(())
    }

    /// The record and the descriptors that the rank with token `to` needs.
    pub(super) fn introduction(&self, to: Secret) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        let record = Record::Introduction(Introduction {
            to,
            from: self.endpoint.token,
            sender: self.team.me,
            ranks: self.ranks() as u32,
            signals: self.signal_count,
            windows: self.shared_windows.iter().map(|(_, extent)| *extent).collect(),
        });
        let windows = self.shared_windows.iter().map(|(fd, _)| *fd);
        (record.to_bytes(), windows.chain([self.signal_fd.as_fd()]).collect())
    }

    /// This rank as a peer of itself: its own memory, not mapped twice.
    pub(super) fn as_peer(&self) -> Peer {
        Peer {
            token: self.endpoint.token,
            windows: self.windows.clone(),
            signals: self.signals,
            _mappings: Vec::new(),
        }
    }

    /// Checks a raw record: that it is an introduction, meant for this rank, from another rank of
    /// the team. Its contents are checked by [`Local::admit`].
    pub(super) fn identify(&self, raw: &RawRecord) -> Result<Introduction> {
        let fail = |message: String| Err(Error::new(ErrorKind::Protocol, "meet peer", message));
        let it = match Record::parse(&raw.bytes)? {
            Record::Introduction(it) => it,
            Record::Refusal(text) => return fail(format!("the peer refused this rank: {text}")),
        };
        if it.to != self.endpoint.token {
            return fail("found a wrong access token; expected the one of this endpoint".into());
        }
        if it.sender == self.team.me || it.sender as usize >= self.ranks() {
            return fail(format!(
                "found index {} in the team; expected another one of {}",
                it.sender,
                self.ranks()
            ));
        }
        Ok(it)
    }

    /// Maps the memory of a peer whose introduction was identified. Its descriptors are closed.
    pub(super) fn admit(&self, it: &Introduction, raw: RawRecord) -> Result<Peer> {
        self.compare(it, &raw)
            .map_err(|e| e.with_rank(self.team.world_ranks[it.sender as usize]))?;
        let mut mappings = Vec::with_capacity(raw.fds.len());
        let signals = Extent { offset: 0, bytes: Signals::bytes(self.signal_count) as u64 };
        for (fd, extent) in raw.fds.iter().zip(it.windows.iter().copied().chain([signals])) {
            let Some(end) = extent.offset.checked_add(extent.bytes) else {
                return Err(self.mismatch("offset", extent.offset, "one inside the memory"));
            };
            memory::check(fd.as_fd(), end)?;
            mappings.push(Mapping::new(fd.as_fd(), extent.offset, extent.bytes as usize)?);
        }
        let mut spans: Vec<_> = mappings.iter().map(Mapping::span).collect();
        let Some(signals) = spans.pop() else {
            return Err(self.mismatch("descriptors", 0, "at least one"));
        };
        Ok(Peer {
            token: it.from,
            windows: spans,
            // SAFETY: the mapping has `Signals::bytes(signal_count)` bytes, is page-aligned and
            // kept beside the signals. What a peer writes there can only make totals wrong.
            signals: unsafe { Signals::new(signals, self.signal_count) },
            _mappings: mappings,
        })
    }

    /// Everything that core promises to be equal on all ranks is compared, for the sizes decide
    /// what this rank may touch in the peer's memory.
    fn compare(&self, it: &Introduction, raw: &RawRecord) -> Result<()> {
        if it.ranks as usize != self.ranks() {
            return Err(self.mismatch("ranks in the team", it.ranks, self.ranks()));
        }
        if it.signals != self.signal_count {
            return Err(self.mismatch("signals", it.signals, self.signal_count));
        }
        if it.windows.len() != self.windows.len() {
            return Err(self.mismatch("windows", it.windows.len(), self.windows.len()));
        }
        for (theirs, ours) in it.windows.iter().zip(&self.windows) {
            if theirs.bytes != ours.bytes() as u64 {
                return Err(self.mismatch("bytes of a window", theirs.bytes, ours.bytes()));
            }
        }
        if raw.fds.len() != it.windows.len() + 1 {
            let error = self.mismatch("descriptors", raw.fds.len(), it.windows.len() + 1);
            return Err(if raw.cut { error.with_fix(DESCRIPTOR_FIX) } else { error });
        }
        Ok(())
    }

    fn mismatch(
        &self,
        what: &'static str,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Error {
        Error::new(
            ErrorKind::Protocol,
            "meet peer",
            format!("{what}: found {found}; expected {expected}"),
        )
        .with_fix("run the same program with the same shapes on all ranks")
    }
}
