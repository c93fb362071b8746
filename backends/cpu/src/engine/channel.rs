//! One link as the runner uses it: its signals, and the ranks behind its peer numbers.

use std::cell::Cell;

use tokenyard_core::domains::TeamRanks;
use tokenyard_core::link::Link;
use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, Result, abi};

use crate::engine::areas::LARGEST_PUT;
use crate::engine::control::{Ids, Signal};
use crate::engine::losses::Losses;

/// A link to a team: a domain (or the whole world, where one link reaches it), or a rail.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) link: Link,
    /// One of `TY_LEVEL_*`.
    pub(crate) level: u64,
    /// World rank of peer 0, and from one peer to the next.
    ranks: TeamRanks,
    /// By peer, its number in the link's team; none for a rank that was absent when it was made.
    numbers: Vec<Option<u32>>,
    pub(crate) ids: Ids,
    /// Totals expected so far, by signal id (INV-2: counted, never reset).
    expected: Vec<Cell<u64>>,
    pub(crate) largest_put: u64,
    /// Most commands to one peer that may be under way where losses are masked. A lost peer may
    /// hold its commands for ever, and must leave room for those to other peers.
    pub(crate) share: u32,
}

/// Commands that a queue of a link has room for.
pub(crate) fn queue_depth(limits: &Capabilities) -> u32 {
    limits.max_queue_depth.min(1024)
}

/// The ranks at the ends of a link.
pub(crate) struct Team<'a> {
    pub(crate) ranks: TeamRanks,
    pub(crate) peers: u32,
    pub(crate) losses: &'a Losses,
}

impl Team<'_> {
    /// By peer, its number in the team that the transport knows. Before the first operation, only
    /// absent ranks are given up.
    fn numbers(&self) -> Vec<Option<u32>> {
        let mut next = 0..;
        let number = |peer| {
            if self.losses.is_given_up(self.ranks.rank(peer)) { None } else { next.next() }
        };
        (0..self.peers).map(number).collect()
    }
}

impl Channel {
    /// # Safety
    /// As [`Link::from_abi`].
    pub(crate) unsafe fn new(
        raw: &abi::TyLink,
        level: u64,
        team: &Team<'_>,
        ids: Ids,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        let link = unsafe { Link::from_abi(raw)? };
        Ok(Self {
            link,
            level,
            ranks: team.ranks,
            numbers: team.numbers(),
            ids,
            expected: vec![Cell::new(0); ids.count() as usize],
            largest_put: link.capabilities().largest_put.min(LARGEST_PUT),
            share: (queue_depth(link.capabilities()) / team.peers).max(1),
        })
    }

    /// The world rank of a peer.
    pub(crate) fn rank_of(&self, peer: u32) -> u32 {
        self.ranks.rank(peer)
    }

    /// The number of a peer in the link's team, if it is in there.
    pub(crate) fn number_of(&self, peer: u32) -> Option<u32> {
        self.numbers.get(peer as usize).copied().flatten()
    }

    /// The world rank behind a number in the link's team.
    pub(crate) fn rank_behind(&self, number: u32) -> u32 {
        let peer = self.numbers.iter().position(|known| *known == Some(number));
        self.rank_of(peer.map_or(number, |peer| peer as u32))
    }

    /// The number of a signal among those that this rank raises on one peer.
    pub(crate) fn index_of(&self, signal: u32) -> usize {
        let Ids { places, .. } = self.ids;
        let peers = self.numbers.len() as u32;
        ((signal / places) * (places / peers) + (signal % places) / peers) as usize
    }

    /// The link's failure about a rank; the link reports those of several ranks in turn. If there is
    /// none, its failure about another rank.
    #[cold]
    pub(crate) fn health_of(&self, rank: u32) -> Option<Error> {
        let first = self.link.health().err()?;
        if first.rank() == Some(rank) {
            return Some(first);
        }
        let others = self.numbers.iter().map_while(|_| self.link.health().err());
        let mut others = others.take_while(|error| error.rank() != first.rank());
        let found = others.find(|error| error.rank() == Some(rank));
        found.or(Some(first))
    }

    /// Expects `add` more raises of a signal. Returns its id and the total that shows them.
    pub(crate) fn expect(&self, signal: Signal, slot: usize, writer: u32, add: u64) -> (u32, u64) {
        let id = self.ids.id(signal, slot, writer);
        let expected = &self.expected[id as usize];
        expected.set(expected.get().wrapping_add(add));
        (id, expected.get())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;

    use super::*;

    fn numbers(losses: &Losses) -> Vec<Option<u32>> {
        let ranks = TeamRanks { first: 0, step: 1 };
        Team { ranks, peers: 4, losses }.numbers()
    }

    #[test]
    fn a_rank_that_is_lost_after_the_team_was_made_keeps_its_number() {
        static LOST: [AtomicU8; 4] = [const { AtomicU8::new(0) }; 4];
        LOST[1].store(abi::TY_RANK_LOST, std::sync::atomic::Ordering::Release);
        let losses = Losses::of(Some(&LOST), 4);
        assert_eq!(numbers(&losses), [Some(0), Some(1), Some(2), Some(3)]);
    }

    #[test]
    fn an_absent_rank_has_no_number_and_the_others_are_counted_without_it() {
        static LOST: [AtomicU8; 4] = [const { AtomicU8::new(0) }; 4];
        LOST[1].store(abi::TY_RANK_ABSENT, std::sync::atomic::Ordering::Release);
        let losses = Losses::of(Some(&LOST), 4);
        assert_eq!(numbers(&losses), [Some(0), None, Some(1), Some(2)]);
    }
}
