//! The fault, on the rank that has it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::transport::{Command, Team};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::{Fault, Kind};

/// The fate of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is passed to the inner transport.
    Pass,
    /// It ends as an error; a part of it may be passed on.
    Fail,
    /// It ends as an error and is not passed on.
    Refuse,
    /// It neither ends nor is passed on.
    Vanish,
    /// It does not end, and is passed on when the instance is dropped.
    Keep,
}

/// The fault of this rank, and its state.
#[derive(Debug)]
pub(crate) struct Breakage {
    kind: Kind,
    at: u64,
    /// Index into the team, and world rank.
    peer: Option<(u32, u32)>,
    /// Commands that were accepted.
    accepted: AtomicU64,
    /// The first command that failed, and the world rank of its peer.
    failed: OnceLock<(u64, u32)>,
}

impl Breakage {
    /// `None` where the fault happens on another rank.
    pub(crate) fn new(fault: &Fault, team: &Team) -> Result<Option<Self>> {
        if team.world_ranks.get(team.me as usize) != Some(&fault.rank) {
            return Ok(None);
        }
        let index = |rank: u32| {
            let found = (0..).zip(&team.world_ranks).find(|(_, member)| **member == rank);
            found.map(|(peer, _)| (peer, rank)).ok_or_else(|| {
                let message = format!(
                    "found fault.peer = {rank}; expected one of the ranks {:?}, which rank {} \
                     reaches by this transport",
                    team.world_ranks, fault.rank
                );
                Error::new(ErrorKind::Config, "open", message).with_key("fault.peer")
            })
        };
        Ok(Some(Self {
            kind: fault.kind,
            at: fault.at,
            peer: fault.peer.map(index).transpose()?,
            accepted: AtomicU64::new(0),
            failed: OnceLock::new(),
        }))
    }

    /// The fate of the next accepted command.
    pub(crate) fn fate(&self, command: &Command, team: &Team) -> Fate {
        let number = self.accepted.fetch_add(1, Ordering::Relaxed);
        let on_link = self.peer.is_none_or(|(peer, _)| peer == command.peer);
        let fate = match self.kind {
            Kind::Fail if number == self.at => Fate::Fail,
            Kind::Stop if number >= self.at => Fate::Vanish,
            Kind::Late if number >= self.at => Fate::Keep,
            Kind::LinkError if number >= self.at && on_link => Fate::Refuse,
            Kind::LinkSilent if number >= self.at && on_link => Fate::Vanish,
            _ => Fate::Pass,
        };
        if matches!(fate, Fate::Fail | Fate::Refuse) {
            let rank = team.world_ranks.get(command.peer as usize).copied().unwrap_or(u32::MAX);
            // Only the first failure is stored (INV-7).
            let _ = self.failed.set((number, rank));
        }
        fate
    }

    /// Whether no command of this rank moves any more.
    pub(crate) fn has_stopped(&self) -> bool {
        self.kind == Kind::Stop && self.accepted.load(Ordering::Relaxed) > self.at
    }

    /// Does not return any more, once the instance hangs.
    pub(crate) fn hang(&self) {
        while self.kind == Kind::Hang && self.accepted.load(Ordering::Relaxed) >= self.at {
            std::thread::park();
        }
    }

    /// The first failure.
    pub(crate) fn health(&self) -> Result<()> {
        let Some((number, rank)) = self.failed.get() else { return Ok(()) };
        let what = if self.kind == Kind::Fail { "command failed" } else { "link is down" };
        let message = format!("the {what} on purpose, as the config asks");
        Err(Error::new(ErrorKind::Transport, "complete command", message)
            .with_context("command", number)
            .with_context("to rank", rank)
            .with_rank(*rank))
    }
}
