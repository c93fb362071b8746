//! The board on which a kernel set shows its current wait.

/// The current wait of a kernel set, for the host to read, and the word by which the host stops it
/// (INV-6). Shared by both sides while the communicator lives. Every field is accessed with atomic
/// loads and stores of 8 bytes. A waiter writes `phase` last when it starts to wait, and 0 when it
/// ends.
#[repr(C)]
#[derive(Debug)]
pub struct TyWaitBoard {
    /// Not 0: stop waiting now and return `TY_ABORTED`. Written by the host.
    pub abort: u64,
    /// One of `TY_PHASE_*`, or 0 while no wait runs.
    pub phase: u64,
    /// The world rank that is waited for.
    pub peer: u64,
    /// The signal id that is waited for.
    pub signal: u64,
    /// The total that ends the wait.
    pub expected: u64,
    /// The total last seen.
    pub found: u64,
    /// `CLOCK_MONOTONIC` in nanoseconds when the wait began.
    pub since_ns: u64,
    /// Operation number, or `TY_OPERATION_OF_GRAPH`.
    pub operation: u64,
    /// The level whose transport raises the signal: one of `TY_LEVEL_*`.
    pub level: u64,
    /// The phase of the last wait that ended without its signal; else 0. A waiter writes it before
    /// `phase` becomes 0, and leaves the fields above unchanged: so the host can still report the wait.
    pub gave_up: u64,
    /// Null, or `ranks` totals, one per world rank: nanoseconds that waits on it took. A waiter adds
    /// the time of a wait at its end. Set by the host.
    pub waited_ns: *mut u64,
    /// Length of `waited_ns`. Set by the host.
    pub ranks: u64,
}

/// In [`TyWaitBoard`]: an operation without a number: a graph launched it, so no host knows whether all
/// ranks have begun it.
pub const TY_OPERATION_OF_GRAPH: u64 = u64::MAX;

/// Waiting for a peer to enter the operation at all: bounded by `late_ms`.
pub const TY_PHASE_ENTRY: u64 = 1;
/// Waiting for an owner's grant (base offsets): bounded by `deadline_ms`, as are those below.
pub const TY_PHASE_GRANT: u64 = 2;
/// Waiting for the rows of a dispatch.
pub const TY_PHASE_ROWS: u64 = 3;
/// Waiting for the rows of a combine.
pub const TY_PHASE_COMBINE_ROWS: u64 = 4;
/// Waiting until a peer has read this rank's rows.
pub const TY_PHASE_DONE: u64 = 5;
/// Waiting for room in a command queue.
pub const TY_PHASE_QUEUE: u64 = 6;
/// Waiting until a peer sends a message, or takes one: bounded by `late_ms`.
pub const TY_PHASE_MESSAGE: u64 = 7;
