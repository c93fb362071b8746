//! Counters of a kernel set for reports, and times for tools.

/// Traffic between this rank and another one over one level, since `plan`. Every field only grows. One
/// thread stores a field, atomically; the host reads it at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyPeerCounters {
    /// Commands to the peer that the transport has accepted.
    pub posted: u64,
    /// Accepted commands that have ended (INV-4), also with an error.
    pub done: u64,
    /// The sum of `add` over all signals of the peer that this rank has raised.
    pub raised: u64,
    /// The total that this rank has waited for, or waits for, over its own signals that the peer
    /// raises.
    pub expected: u64,
    /// The total seen on those signals, at the end of the last wait on the peer that succeeded.
    pub received: u64,
    /// Bytes that this rank has put to the peer, records included; 8 for a value. Loads and stores are not counted.
    pub bytes: u64,
}

/// The total by which this rank has raised one signal of a peer. Stored and read as [`TyPeerCounters`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyRaised {
    /// Signal id on the peer, plus one; 0 where it was never raised.
    pub signal: u64,
    /// The sum of `add`; equals the peer's total once all of it has arrived.
    pub total: u64,
}

/// The counters of a kernel set for reports, in memory of its own that stays valid until `close`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCounters {
    /// `sizeof(TyCounters)`.
    pub size: usize,
    /// R.
    pub ranks: u32,
    /// Entries of `raised` per level and rank.
    pub signals: u32,
    /// Most commands of a queue that are not done, per level.
    pub queue_depth: [u32; 2],
    /// `2 * R`: by level, then world rank.
    pub peers: *const TyPeerCounters,
    /// `2 * R * signals`: by level, then world rank.
    pub raised: *const TyRaised,
}

/// Times of the steps of an operation on this rank, for tools, in nanoseconds of the device's clock.
/// The clock has an arbitrary start, and differs from the clock of another device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TyTrace {
    /// `sizeof(TyTrace)`.
    pub size: usize,
    /// The operation's first kernel began.
    pub begun: u64,
    /// This rank's routing was counted, and its records were sent; where nothing is counted, equal to
    /// `begun`.
    pub counted: u64,
    /// The records of all ranks had arrived.
    pub entered: u64,
    /// Rows had left; in a combine: the sums were computed.
    pub moved: u64,
    /// The rows of all ranks had arrived; in a combine: all ranks had read this rank's rows.
    pub arrived: u64,
}
