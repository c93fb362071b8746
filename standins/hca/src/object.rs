//! The objects of a device: regions, queues, queue pairs.

use std::collections::VecDeque;

use crate::parse::{Limits, Work};
use crate::wire::{End, Packet};

/// Rights to memory, with the bits of libibverbs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access(pub u32);

impl Access {
    /// This device may write.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may write.
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    /// Peers may read.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// Peers may ask for atomics.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// All of them.
    pub const ALL: Self = Self(15);

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether this has all rights of `other`.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its protection domain.
    pub pd: u32,
    /// The first address, as requests name it.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// The address of its first byte in memory.
    pub memory: u64,
    /// The rights that requests have to it.
    pub access: Access,
}

/// Memory that commands can name.
#[derive(Clone, Debug)]
pub(crate) struct UserMemory {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// A completion queue.
#[derive(Clone, Debug)]
pub(crate) struct CompletionQueue {
    pub(crate) buffer: u64,
    pub(crate) log_size: u8,
    /// Bytes of an entry: 64, or 128 with only the second half in use.
    pub(crate) stride: u64,
    pub(crate) collapsed: bool,
    /// The record shows how far the program has read. Where this flag is off, more unread completions than entries
    /// are a violation.
    pub(crate) overrun_ignored: bool,
    pub(crate) record: u64,
    pub(crate) umems: Vec<u32>,
    /// Completions so far.
    pub(crate) written: u32,
    /// Completions that a fault holds back, with the time at which they come.
    pub(crate) held: VecDeque<Held>,
}

#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) due: u64,
    pub(crate) cqe: tokenyard_sys_mlx5::cqe::Cqe,
    /// Index behind the request.
    pub(crate) behind: Option<u16>,
}

/// A receive queue, of a queue pair or shared.
#[derive(Clone, Debug)]
pub(crate) struct ReceiveQueue {
    pub(crate) buffer: u64,
    pub(crate) stride: u64,
    pub(crate) entries: u32,
    pub(crate) record: u64,
    /// Receives that were taken, modulo 2^16.
    pub(crate) taken: u16,
    /// The entry of the next receive: shared queues are lists.
    pub(crate) at: u16,
    pub(crate) linked: bool,
    pub(crate) pd: u32,
}

/// The source of a queue pair's receives.
#[derive(Clone, Debug)]
pub(crate) enum Inlet {
    None,
    Shared(u32),
    Own(ReceiveQueue),
}

/// States of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Made, and nothing else.
    Reset,
    /// Has its port and rights.
    Init,
    /// Receives.
    ReadyToReceive,
    /// Receives and sends.
    ReadyToSend,
    /// Broken: posted requests complete as flushed.
    Error,
}

/// The peer of a queue pair, and how both ends behave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    /// The peer.
    pub peer: End,
    /// Number of the first message that is received.
    pub receive_number: u32,
    /// The wait of a peer that found no receive, a code of 0 to 31.
    pub rnr_timer: u8,
    /// Number of the first message that is sent.
    pub send_number: u32,
    /// The longest wait for an answer: 4.096 us times two to this power; 0 is without end.
    pub timeout: u8,
    /// Repetitions without an answer.
    pub retries: u8,
    /// Repetitions while the peer has no receive; 7 is without end.
    pub rnr_retries: u8,
    /// Reads and atomics under way at once.
    pub reads: u32,
}

/// A request that was sent, and how it ended.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) work: Work,
    pub(crate) number: u32,
    pub(crate) done: bool,
    /// The request fails with this syndrome, once earlier ones are done.
    pub(crate) fails: Option<u8>,
}

/// Bytes of a write that have been received, and are not in memory yet.
#[derive(Clone, Debug)]
pub(crate) struct Landing {
    pub(crate) memory: u64,
    pub(crate) data: Vec<u8>,
    pub(crate) number: u32,
}

/// A queue pair.
#[derive(Clone, Debug)]
pub(crate) struct QueuePair {
    pub(crate) pd: u32,
    pub(crate) page: u32,
    pub(crate) user_index: u32,
    pub(crate) limits: Limits,
    pub(crate) sq: u64,
    pub(crate) blocks: u32,
    pub(crate) record: u64,
    /// The record's receive word when the queue pair was made.
    pub(crate) receive_word: [u8; 4],
    pub(crate) umems: Vec<u32>,
    pub(crate) send_cq: u32,
    pub(crate) receive_cq: u32,
    pub(crate) inlet: Inlet,
    pub(crate) state: State,
    pub(crate) access: Access,
    pub(crate) to: Connection,
    /// Blocks that were taken, modulo 2^16.
    pub(crate) taken: u16,
    /// Blocks that the device has reported to the program as done, modulo 2^16.
    pub(crate) reported: u16,
    /// A request that was taken and is not poisoned yet: its first block and its blocks.
    pub(crate) unpoisoned: Option<(u16, u16)>,
    pub(crate) waiting: VecDeque<Work>,
    pub(crate) sent: VecDeque<Sent>,
    pub(crate) next_number: u32,
    pub(crate) tries: u8,
    pub(crate) rnr_tries: u8,
    /// The time at which an answer is overdue.
    pub(crate) due: Option<u64>,
    /// Nothing is sent before this time: the peer has no receive.
    pub(crate) pause: Option<u64>,
    pub(crate) most_reads_seen: u32,
    pub(crate) expected: u32,
    pub(crate) answers: VecDeque<Packet>,
    /// Requests of the peer with the time from which they may be served.
    pub(crate) inbox: VecDeque<(u64, Packet)>,
    pub(crate) landing: Vec<Landing>,
}

impl QueuePair {
    /// Whether requests are under way.
    pub(crate) fn is_busy(&self) -> bool {
        !self.sent.is_empty() || !self.waiting.is_empty()
    }

    /// Whether it takes requests: to send them, or to complete them as flushed.
    pub(crate) fn takes(&self) -> bool {
        matches!(self.state, State::ReadyToSend | State::Error)
    }

    pub(crate) fn reads_under_way(&self) -> u32 {
        let reads = self.sent.iter().filter(|sent| !sent.done && sent.work.operation.reads());
        reads.count() as u32
    }
}
