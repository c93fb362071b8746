//! The memory that this rank offers, and the comparison with the memory that it receives.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::transport::Team;
use crate::{Error, ErrorKind, Result};

use super::socket::{DESCRIPTOR_FIX, RawRecord};
use super::wire::{Endpoint, Extent, Introduction, Record, Secret};

/// One piece of a peer's memory: its descriptor, and the piece's place in the descriptor's memory.
#[derive(Debug)]
pub struct Handed {
    /// Closed on drop.
    pub fd: OwnedFd,
    /// Sizes were compared with this rank's own; the offset is only the peer's claim.
    pub extent: Extent,
}

/// A transport's access to memory.
pub trait Memory {
    /// A rank whose memory can be reached.
    type Peer: std::fmt::Debug;

    /// This rank itself as a peer: its own memory, not mapped twice.
    fn own(&self) -> Self::Peer;

    /// Maps the memory of a peer: its windows in order of registration, then its signals. The
    /// descriptors come from another process: check their type.
    ///
    /// # Errors
    /// Memory of the wrong type or size, or that cannot be mapped.
    fn map(&self, memory: Vec<Handed>) -> Result<Self::Peer>;
}

/// The memory of this rank's signals, for its peers.
#[derive(Debug)]
pub struct SignalMemory {
    /// Closed on drop.
    pub fd: OwnedFd,
    /// The signals' place in it.
    pub extent: Extent,
}

/// This rank's identity and the descriptors that its peers get.
#[derive(Debug)]
pub struct Offer {
    /// The ranks that connect.
    pub team: Team,
    /// The endpoint that crosses the bootstrap.
    pub endpoint: Endpoint,
    signals: u32,
    windows: Vec<(BorrowedFd<'static>, Extent)>,
    signal_memory: SignalMemory,
}

impl Offer {
    /// An offer for a team; `memory` holds the totals of `signals` signals.
    ///
    /// # Errors
    /// The system has no random bits.
    pub fn new(team: &Team, signals: u32, memory: SignalMemory) -> Result<Self> {
        Ok(Self {
            team: team.clone(),
            endpoint: Endpoint::draw()?,
            signals,
            windows: Vec::new(),
            signal_memory: memory,
        })
    }

    /// Adds one window. Windows come in order of registration.
    pub fn add_window(&mut self, fd: BorrowedFd<'static>, extent: Extent) {
        self.windows.push((fd, extent));
    }

    pub(super) fn ranks(&self) -> usize {
        self.team.world_ranks.len()
    }

    /// The record and the descriptors that the rank with token `to` needs.
    pub(super) fn introduction(&self, to: Secret) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        let record = Record::Introduction(Introduction {
            to,
            from: self.endpoint.token,
            sender: self.team.me,
            ranks: self.ranks() as u32,
            signals: self.signals,
            windows: self.windows.iter().map(|(_, extent)| *extent).collect(),
        });
        let windows = self.windows.iter().map(|(fd, _)| *fd);
        (record.to_bytes(), windows.chain([self.signal_memory.fd.as_fd()]).collect())
    }

    /// Checks a raw record: that it is an introduction, meant for this rank, from another rank of
    /// the team. Its contents are checked by [`Offer::compare`].
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

    /// Everything that core promises to be equal on all ranks is compared, for the sizes decide
    /// what this rank may touch in the peer's memory. Returns the memory, whose offsets are inside
    /// 64 bits.
    pub(super) fn compare(&self, it: &Introduction, raw: RawRecord) -> Result<Vec<Handed>> {
        if it.ranks as usize != self.ranks() {
            return Err(mismatch("ranks in the team", it.ranks, self.ranks()));
        }
        if it.signals != self.signals {
            return Err(mismatch("signals", it.signals, self.signals));
        }
        if it.windows.len() != self.windows.len() {
            return Err(mismatch("windows", it.windows.len(), self.windows.len()));
        }
        for (theirs, (_, ours)) in it.windows.iter().zip(&self.windows) {
            if theirs.bytes != ours.bytes {
                return Err(mismatch("bytes of a window", theirs.bytes, ours.bytes));
            }
            if theirs.offset.checked_add(theirs.bytes).is_none() {
                return Err(mismatch("offset", theirs.offset, "one inside the memory"));
            }
        }
        if raw.fds.len() != it.windows.len() + 1 {
            let error = mismatch("descriptors", raw.fds.len(), it.windows.len() + 1);
            return Err(if raw.cut { error.with_fix(DESCRIPTOR_FIX) } else { error });
        }
        let extents = it.windows.iter().copied().chain([self.signal_memory.extent]);
        Ok(raw.fds.into_iter().zip(extents).map(|(fd, extent)| Handed { fd, extent }).collect())
    }
}

fn mismatch(
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
