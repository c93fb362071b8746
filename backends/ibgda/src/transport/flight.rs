//! The commands in flight on one connection, from the post to their end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::Command;

/// The data of a command until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) tag: u64,
    pub(super) bytes: u64,
    pub(super) signal: u32,
    pub(super) window: u16,
    pub(super) op: u8,
    pub(super) notify: bool,
    /// Requests of the queue pair up to this command's last one, counted since the beginning.
    pub(super) end: u64,
}

impl Pending {
    pub(super) fn of(command: &Command, end: u64) -> Self {
        Self {
            tag: command.tag,
            bytes: command.bytes,
            signal: command.signal,
            window: command.dst_window,
            op: command.op,
            notify: command.flags & abi::TY_FLAG_NOTIFY != 0,
            end,
        }
    }
}

/// Commands in the order in which they were posted, which is the order in which they end.
#[derive(Debug)]
pub(super) struct Flight {
    pending: VecDeque<Pending>,
    ended: u64,
    /// The value of `ended` at the last check of the watchdog, and the time since which it is so.
    watched: Option<(u64, Instant)>,
}

impl Flight {
    /// Room for `depth` commands; it is never exceeded, so nothing is allocated later.
    pub(super) fn new(depth: usize) -> Self {
        Self { pending: VecDeque::with_capacity(depth), ended: 0, watched: None }
    }

    pub(super) fn push(&mut self, pending: Pending) {
        debug_assert!(self.pending.len() < self.pending.capacity());
        self.pending.push_back(pending);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Ends the oldest command.
    pub(super) fn pop(&mut self) -> Option<Pending> {
        let pending = self.pending.pop_front()?;
        self.ended += 1;
        Some(pending)
    }

    /// Ends the oldest command if all its requests are among the first `done`.
    pub(super) fn pop_done(&mut self, done: u64) -> Option<Pending> {
        if self.pending.front()?.end <= done { self.pop() } else { None }
    }

    /// Whether commands are in flight and none has ended for `limit` or longer, by the checks of the watchdog.
    pub(super) fn is_stalled(&mut self, now: Instant, limit: Duration) -> bool {
        if self.pending.is_empty() {
            self.watched = None;
            return false;
        }
        match self.watched {
            Some((ended, since)) if ended == self.ended => now.duration_since(since) >= limit,
            _ => {
                self.watched = Some((self.ended, now));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::transport::NO_COMMAND;

    use super::*;

    fn flight(ends: &[u64]) -> Flight {
        let mut flight = Flight::new(ends.len());
        ends.iter().for_each(|end| flight.push(Pending::of(&NO_COMMAND, *end)));
        flight
    }

    #[test]
    fn a_command_ends_when_its_last_request_is_done() {
        let mut flight = flight(&[2, 3, 5]);
        assert_eq!(flight.pop_done(1), None);
        let ended: Vec<_> = std::iter::from_fn(|| flight.pop_done(4)).map(|it| it.end).collect();
        assert_eq!(ended, [2, 3]);
        assert_eq!(flight.pop().map(|it| it.end), Some(5));
    }

    #[test]
    fn a_flight_is_stalled_when_nothing_ends_for_the_limit() {
        let (start, limit) = (Instant::now(), Duration::from_secs(30));
        let mut flight = flight(&[1, 2]);
        assert!(!flight.is_stalled(start, limit));
        flight.pop();
        assert!(!flight.is_stalled(start + limit, limit), "a command has ended meanwhile");
        assert!(!flight.is_stalled(start + limit + limit / 2, limit));
        assert!(flight.is_stalled(start + 2 * limit, limit));
        flight.pop();
        assert!(!flight.is_stalled(start + 9 * limit, limit), "nothing is under way");
    }
}
