//! The commands of one queue that a share has accepted and that are not done.

use crate::abi;
use crate::transport::Command;

/// The values that the poster gets back for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Posted {
    pub(super) tag: u64,
    pub(super) peer: u32,
    pub(super) notify: bool,
}

#[derive(Clone, Copy, Debug)]
struct CommandInFlight {
    posted: Posted,
    /// Counts the commands that had this entry, so that a ticket of an earlier command is not mistaken
    /// for the present one.
    generation: u32,
    live: bool,
}

/// Finds a command by its **ticket**, which is its tag while the share has it: the number of its
/// entry, below its generation.
#[derive(Debug)]
pub(super) struct InFlight {
    entries: Box<[CommandInFlight]>,
    /// A stack of the numbers of entries that are not live.
    unused: Vec<u32>,
}

impl InFlight {
    /// Room for `capacity` commands; allocates nothing later.
    pub(super) fn new(capacity: usize) -> Self {
        let posted = Posted { tag: 0, peer: 0, notify: false };
        let blank = CommandInFlight { posted, generation: 0, live: false };
        Self { entries: vec![blank; capacity].into(), unused: (0..capacity as u32).rev().collect() }
    }

    /// Commands that can be in flight together.
    pub(super) fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Commands that are not done.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.unused.len()
    }

    /// Replaces the tags of `commands` by tickets, for as many as there is room for, and returns their
    /// number. They are in flight from `add` on.
    pub(super) fn prepare(&mut self, commands: &mut [Command]) -> usize {
        let count = commands.len().min(self.unused.len());
        for (number, command) in self.unused.iter().rev().zip(&mut commands[..count]) {
            let entry = &mut self.entries[*number as usize];
            let notify = command.flags & abi::TY_FLAG_NOTIFY != 0;
            entry.posted = Posted { tag: command.tag, peer: command.peer, notify };
            command.tag = u64::from(entry.generation) << 32 | u64::from(*number);
            command.flags |= abi::TY_FLAG_NOTIFY;
        }
        count
    }

    /// Marks the first `count` of the commands prepared last as in flight; the others are not.
    pub(super) fn add(&mut self, count: usize) {
        debug_assert!(count <= self.unused.len());
        let kept = self.unused.len().saturating_sub(count);
        for number in self.unused.drain(kept..) {
            self.entries[number as usize].live = true;
        }
    }

    /// Removes the command of `ticket`, which is done; nothing if no such command is in flight.
    pub(super) fn remove(&mut self, ticket: u64) -> Option<Posted> {
        let number = ticket as u32 as usize;
        let generation = self.entries.get(number)?.generation;
        if u64::from(generation) == ticket >> 32 { self.remove_entry(number) } else { None }
    }

    /// Removes the command in entry `number`, which is done, with any ticket.
    pub(super) fn remove_entry(&mut self, number: usize) -> Option<Posted> {
        let entry = self.entries.get_mut(number).filter(|entry| entry.live)?;
        entry.live = false;
        entry.generation = entry.generation.wrapping_add(1);
        self.unused.push(number as u32);
        Some(entry.posted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::NO_COMMAND;

    fn commands(tags: std::ops::Range<u64>) -> Vec<Command> {
        tags.map(|tag| Command { tag, peer: 7, ..NO_COMMAND }).collect()
    }

    fn posted(tag: u64) -> Option<Posted> {
        Some(Posted { tag, peer: 7, notify: false })
    }

    #[test]
    fn commands_that_were_not_accepted_are_not_in_flight() {
        let mut in_flight = InFlight::new(4);
        let mut batch = commands(10..13);
        assert_eq!(in_flight.prepare(&mut batch), 3);
        in_flight.add(1);
        assert_eq!(in_flight.len(), 1);
        assert_eq!(in_flight.remove(batch[1].tag), None);
        assert_eq!(in_flight.remove(batch[0].tag), posted(10));
        assert_eq!(in_flight.len(), 0);
    }

    #[test]
    fn a_ticket_is_good_once() {
        let mut in_flight = InFlight::new(1);
        let mut batch = commands(1..3);
        assert_eq!(in_flight.prepare(&mut batch), 1);
        in_flight.add(1);
        let first = batch[0].tag;
        assert_eq!(in_flight.remove(first), posted(1));
        assert_eq!(in_flight.remove(first), None);
        assert_eq!(in_flight.prepare(&mut batch[1..]), 1);
        in_flight.add(1);
        assert_eq!(in_flight.remove(first), None, "the entry has another command now");
        assert_eq!(in_flight.remove(u64::MAX), None);
        assert_eq!(in_flight.remove(batch[1].tag), posted(2));
    }

    #[test]
    fn commands_of_which_nothing_was_heard_can_be_removed_too() {
        let mut in_flight = InFlight::new(4);
        in_flight.prepare(&mut commands(5..7));
        in_flight.add(2);
        let removed: Vec<_> = (0..4).filter_map(|entry| in_flight.remove_entry(entry)).collect();
        assert_eq!(removed, [posted(5), posted(6)].map(Option::unwrap));
        assert_eq!(in_flight.len(), 0);
    }
}
