//! The commands in flight on one connection, from the post to their end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::Command;

/// Bits of a work request's id for the number of the command; the bits above are the peer.
const SEQUENCE_BITS: u32 = 48;
const SEQUENCE: u64 = (1 << SEQUENCE_BITS) - 1;

/// The id of the work requests of command `sequence` to `peer`.
pub(super) fn request_id(peer: u32, sequence: u64) -> u64 {
    u64::from(peer) << SEQUENCE_BITS | sequence & SEQUENCE
}

/// The peer, and the number of the command, of a work request.
pub(super) fn of_request(id: u64) -> (usize, u64) {
    ((id >> SEQUENCE_BITS) as usize, id & SEQUENCE)
}

/// The data of a command until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// The tag.
    pub tag: u64,
    /// Bytes of its payload.
    pub bytes: u64,
    /// The signal that it raises.
    pub signal: u32,
    /// The window that it writes.
    pub window: u16,
    /// The operation.
    pub op: u8,
    /// Whether its end is an event.
    pub notify: bool,
}

impl Pending {
    /// The data of this command.
    pub fn of(command: &Command) -> Self {
        Self {
            tag: command.tag,
            bytes: command.bytes,
            signal: command.signal,
            window: command.dst_window,
            op: command.op,
            notify: command.flags & abi::TY_FLAG_NOTIFY != 0,
        }
    }
}

/// Commands in the order in which they were posted, which is the order in which they end.
#[derive(Debug)]
pub struct Flight<T> {
    pending: VecDeque<T>,
    /// Number of the first of `pending`.
    head: u64,
    /// The value of `head` at the last check of the watchdog, and the time since which it is so.
    watched: Option<(u64, Instant)>,
}

impl<T: Copy> Flight<T> {
    /// Room for `depth` commands; it is never exceeded, so nothing is allocated later.
    pub fn new(depth: usize) -> Self {
        Self { pending: VecDeque::with_capacity(depth), head: 0, watched: None }
    }

    /// Adds a command and returns its number.
    pub fn push(&mut self, pending: T) -> u64 {
        debug_assert!(self.pending.len() < self.pending.capacity());
        self.pending.push_back(pending);
        self.head + self.pending.len() as u64 - 1
    }

    /// Ends the oldest command.
    pub fn pop(&mut self) -> Option<T> {
        let pending = self.pending.pop_front()?;
        self.head += 1;
        Some(pending)
    }

    /// Ends the oldest command if `done` says so.
    pub fn pop_if(&mut self, done: impl FnOnce(&T) -> bool) -> Option<T> {
        if done(self.pending.front()?) { self.pop() } else { None }
    }

    /// Whether no command is in flight.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// A command in flight.
    pub fn get(&self, sequence: u64) -> Option<T> {
        let ahead = sequence.wrapping_sub(self.head) & SEQUENCE;
        self.pending.get(usize::try_from(ahead).ok()?).copied()
    }

    /// The command that ends next.
    pub fn oldest(&self) -> Option<T> {
        self.pending.front().copied()
    }

    /// Restarts the time of [`Flight::is_stalled`].
    pub fn watch_anew(&mut self) {
        self.watched = None;
    }

    /// The number of commands that end with a completion of command `sequence`, which is the last of them.
    /// Completions of a queue pair come in order, and a command without a completion ends with the next
    /// command that has one. The number is 0 if the command has already ended: when a connection breaks, both
    /// work requests of a command complete.
    pub fn ended_by(&self, sequence: u64) -> usize {
        let ahead = sequence.wrapping_sub(self.head) & SEQUENCE;
        if ahead < self.pending.len() as u64 { ahead as usize + 1 } else { 0 }
    }

    /// Whether commands are in flight and none has ended for `limit` or longer, by the checks of
    /// the watchdog.
    pub fn is_stalled(&mut self, now: Instant, limit: Duration) -> bool {
        if self.pending.is_empty() {
            self.watched = None;
            return false;
        }
        match self.watched {
            Some((head, since)) if head == self.head => now.duration_since(since) >= limit,
            _ => {
                self.watched = Some((self.head, now));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(tag: u64) -> Pending {
        Pending { tag, bytes: 8, signal: 0, window: 0, op: abi::TY_OP_PUT, notify: true }
    }

    fn flight(commands: u64) -> Flight<Pending> {
        let mut flight = Flight::new(16);
        for tag in 0..commands {
            assert_eq!(flight.push(command(tag)), tag);
        }
        flight
    }

    #[test]
    fn ids_name_peer_and_command() {
        for (peer, sequence) in [(0, 0), (1023, SEQUENCE), (5, 77)] {
            assert_eq!(of_request(request_id(peer, sequence)), (peer as usize, sequence));
        }
    }

    #[test]
    fn a_completion_ends_the_unreported_commands_before_it() {
        let mut flight = flight(4);
        assert_eq!(flight.ended_by(2), 3);
        let tags: Vec<_> = (0..3).map(|_| flight.pop().unwrap().tag).collect();
        assert_eq!(tags, [0, 1, 2]);
        assert_eq!(flight.ended_by(3), 1);
    }

    #[test]
    fn a_second_completion_of_a_command_ends_nothing() {
        let mut flight = flight(2);
        assert_eq!(flight.ended_by(0), 1);
        flight.pop();
        assert_eq!(flight.ended_by(0), 0);
        assert_eq!(flight.ended_by(2), 0, "nor does one of a command that was never posted");
    }

    #[test]
    fn numbers_wrap_at_the_bits_of_an_id() {
        let mut flight = Flight::new(4);
        flight.head = SEQUENCE;
        let (last, first) = (flight.push(command(1)), flight.push(command(2)));
        assert_eq!(of_request(request_id(3, first)), (3, 0));
        assert_eq!(flight.ended_by(of_request(request_id(3, last)).1), 1);
        assert_eq!(flight.ended_by(0), 2);
    }

    #[test]
    fn a_command_is_found_by_its_number_while_it_is_under_way() {
        let mut flight = flight(3);
        flight.pop();
        assert_eq!(flight.get(2).map(|p| p.tag), Some(2));
        assert_eq!(flight.oldest().map(|p| p.tag), Some(1));
        assert_eq!((flight.get(0), flight.get(3)), (None, None));
    }

    #[test]
    fn a_command_that_is_not_done_stays_the_oldest() {
        let mut flight = flight(3);
        let ended: Vec<_> =
            std::iter::from_fn(|| flight.pop_if(|it| it.tag < 2)).map(|it| it.tag).collect();
        assert_eq!(ended, [0, 1]);
        assert_eq!(flight.pop_if(|it| it.tag < 2), None);
        assert_eq!(flight.pop().map(|it| it.tag), Some(2));
        assert!(flight.is_empty());
    }

    #[test]
    fn a_flight_is_stalled_when_nothing_ends_for_the_limit() {
        let (start, limit) = (Instant::now(), Duration::from_secs(30));
        let mut flight = flight(2);
        assert!(!flight.is_stalled(start, limit));
        assert!(!flight.is_stalled(start + limit / 2, limit));
        flight.pop();
        assert!(!flight.is_stalled(start + limit, limit), "a command has ended meanwhile");
        assert!(!flight.is_stalled(start + limit + limit / 2, limit));
        assert!(flight.is_stalled(start + 2 * limit, limit));
        flight.pop();
        assert!(!flight.is_stalled(start + 9 * limit, limit), "nothing is under way");
    }
}
