//! What a kernel set counts for reports, and tells tools.

/// What passed between this rank and another one over one level, since `plan`. Every field only grows,
/// and is read by the host at any time: one thread stores it, atomically.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyPeerCounters {
    /// Commands to the peer that the transport has accepted.
    pub posted: u64,
    /// Those of them that have ended (INV-4), also with an error.
    pub done: u64,
    /// How far this rank has raised the peer's signals, all in all: the sum of `add`.
    pub raised: u64,
    /// How far it has waited, or waits, for the peer to raise its own.
    pub expected: u64,
    /// How far it has seen those rise: up to the end of its last wait on the peer that succeeded.
    pub received: u64,
}

/// How far this rank has raised one signal of a peer. As in [`TyPeerCounters`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyRaised {
    /// Signal id on the peer, plus one; 0 where it was never raised.
    pub signal: u64,
    /// The sum of `add`; equals the peer's total once all of it has arrived.
    pub total: u64,
}

/// What a kernel set counts for reports, in memory of its own that stays valid until `close`.
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

/// When things happened in an operation on this rank, for tools: nanoseconds of the device's clock,
/// which starts anywhere and is not that of another device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TyTrace {
    /// `sizeof(TyTrace)`.
    pub size: usize,
    /// Its first kernel began.
    pub begun: u64,
    /// This rank's routing was counted, and its records were sent; where nothing is counted, as `begun`.
    pub counted: u64,
    /// The records of all ranks were there.
    pub heard: u64,
    /// Rows had left; of a combine: sums were made.
    pub moved: u64,
    /// The rows of all ranks had arrived; of a combine: all had read this rank's.
    pub arrived: u64,
}
