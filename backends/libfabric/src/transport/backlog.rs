//! Commands of a queue that wait for a peer that accepts nothing.
//!
//! Where the caller posts, a refused command returns to the caller. Behind a proxy thread the
//! command is already in a queue, and later commands may be for other peers, which a lost peer must
//! not hold up. So the command waits here, in its slot, and the queue goes on.

use std::collections::VecDeque;

use tokenyard_core::transport::{Command, NO_COMMAND};

/// The commands of one queue that wait, by peer. Sizes are fixed: nothing allocates after `new`.
#[derive(Debug)]
pub(super) struct Backlog {
    /// The waiting commands, by place in the queue.
    waiting: Box<[Waiting]>,
    /// The first and the last place of each peer's chain.
    chains: Box<[Option<(u32, u32)>]>,
    /// Peers with a chain, the next one first.
    turns: VecDeque<u32>,
    count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    command: Command,
    /// The next place in its chain; `NONE` for the last.
    next: u32,
}

impl Backlog {
    pub(super) fn new(depth: u32, peers: u32) -> Self {
        Self {
            waiting: (0..depth).map(|_| Waiting { command: NO_COMMAND, next: 0 }).collect(),
            chains: (0..peers).map(|_| None).collect(),
            turns: VecDeque::with_capacity(peers as usize),
            count: 0,
        }
    }

    /// Commands that wait.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Peers for which commands wait.
    pub(super) fn peers(&self) -> usize {
        self.turns.len()
    }

    /// Whether commands wait for a peer. Later commands for it are added after them.
    #[inline]
    pub(super) fn waits_for(&self, peer: u32) -> bool {
        self.count > 0 && self.chains.get(peer as usize).is_some_and(Option::is_some)
    }

    /// Adds the command of a place after those for the same peer, which must be in the team.
    pub(super) fn push(&mut self, place: u32, command: &Command) {
        self.waiting[place as usize].command = *command;
        let chain = &mut self.chains[command.peer as usize];
        match chain {
            Some((_, last)) => {
                self.waiting[*last as usize].next = place;
                *last = place;
            }
            None => {
                *chain = Some((place, place));
                self.turns.push_back(command.peer);
            }
        }
        self.count += 1;
    }

    /// The first command for the next peer, and its place.
    pub(super) fn first(&self) -> Option<(u32, Command)> {
        let (first, _) = self.chains[*self.turns.front()? as usize]?;
        Some((first, self.waiting[first as usize].command))
    }

    /// Removes the first command.
    pub(super) fn pop(&mut self) {
        let Some(peer) = self.turns.front() else { return };
        let chain = &mut self.chains[*peer as usize];
        let Some((first, last)) = *chain else { return };
        *chain = (first != last).then(|| (self.waiting[first as usize].next, last));
        if chain.is_none() {
            self.turns.pop_front();
        }
        self.count -= 1;
    }

    /// Moves on to the next peer.
    pub(super) fn pass(&mut self) {
        if let Some(peer) = self.turns.pop_front() {
            self.turns.push_back(peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(peer: u32, tag: u64) -> Command {
        Command { peer, tag, ..NO_COMMAND }
    }

    fn tags(backlog: &mut Backlog) -> Vec<u64> {
        let mut tags = Vec::new();
        while let Some((place, command)) = backlog.first() {
            assert_eq!(u64::from(place), command.tag, "a command stays in its place");
            tags.push(command.tag);
            backlog.pop();
        }
        tags
    }

    #[test]
    fn each_peers_commands_come_in_the_order_in_which_they_were_posted() {
        let mut backlog = Backlog::new(8, 3);
        for (place, peer) in [(5, 1), (0, 2), (3, 1), (7, 2), (1, 1)] {
            backlog.push(place, &command(peer, u64::from(place)));
        }
        assert_eq!((backlog.len(), backlog.peers()), (5, 2));
        assert!(backlog.waits_for(1) && backlog.waits_for(2) && !backlog.waits_for(0));
        assert_eq!(tags(&mut backlog), [5, 3, 1, 0, 7]);
        assert_eq!((backlog.len(), backlog.peers()), (0, 0));
        assert!(!backlog.waits_for(1) && !backlog.waits_for(2));
    }

    #[test]
    fn a_peer_that_passes_lets_the_others_go_first() {
        let mut backlog = Backlog::new(4, 3);
        for (place, peer) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
            backlog.push(place, &command(peer, u64::from(place)));
        }
        backlog.pass();
        assert_eq!(tags(&mut backlog), [1, 2, 0, 3]);
    }

    #[test]
    fn places_are_used_again() {
        let mut backlog = Backlog::new(2, 2);
        for round in 0..10 {
            let peer = round % 2;
            backlog.push(0, &command(peer, 0));
            backlog.push(1, &command(peer, 1));
            assert_eq!(tags(&mut backlog), [0, 1]);
        }
        assert_eq!(backlog.first().map(|(place, _)| place), None);
        assert!(!backlog.waits_for(7), "no command waits for a peer that is not in the team");
    }
}
