//! The ring into which kernels post commands, where a transport has no device API.

/// One command of a device, written by a kernel into a [`TyGpuRing`]: the fields of
/// [`TyCommand`](crate::TyCommand) that a kernel fills, then `sequence`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyGpuRingCommand {
    /// One of `TY_OP_*`, but not `TY_OP_GET`.
    pub op: u32,
    /// Index into the team of the level.
    pub peer: u32,
    /// Signal id on the peer.
    pub signal: u32,
    /// The amount to add to the signal: 1 to 65,535.
    pub add: u32,
    /// Window id on this rank.
    pub src_window: u32,
    /// Window id on the peer.
    pub dst_window: u32,
    /// Offset in the source window.
    pub src_offset: u64,
    /// Offset in the destination window.
    pub dst_offset: u64,
    /// Bytes to move.
    pub bytes: u64,
    /// The value of `TY_OP_PUT_VALUE`.
    pub value: u64,
    /// Number of the command + 1. The kernel stores it last, with release order at system scope: from
    /// then on the slot belongs to the host until the command is done.
    pub sequence: u64,
}

/// The host's report to kernels about a ring. Every field is stored with release order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyGpuRingStatus {
    /// Number of commands that are done (INV-4, INV-5): all commands below this number. It only grows.
    pub done: u64,
    /// Not 0: the ring has failed, and no command ends any more. The value is 1 + the number of the
    /// command that failed, or all ones where no single command caused the failure. The transport's
    /// `health` has the details (INV-7).
    pub failed: u64,
    /// Status of the failure, below zero.
    pub status: i64,
}

/// Memory that a kernel set gives the host, so that its kernels may use a transport that has no device
/// API. Kernels write commands, and a thread of the host posts them and reports the results.
///
/// Command number n is in slot n mod `capacity`. A kernel may write it once `done` + `capacity` > n.
/// All of it starts as zeros. Both sides write it, so both use atomic loads and stores, except for the
/// fields of a command after its `sequence` was seen.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyGpuRing {
    /// `sizeof(TyGpuRing)`.
    pub size: usize,
    /// The level whose transport is used: one of `TY_LEVEL_*`. The host sets it before the call.
    pub level: u64,
    /// The queue on which commands are posted. Only this ring uses it.
    pub queue: u32,
    /// Number of slots, a power of two.
    pub capacity: u32,
    /// `capacity` slots.
    pub commands: *mut TyGpuRingCommand,
    /// One status record.
    pub status: *mut TyGpuRingStatus,
    /// `signals` words: the totals of the signals on this rank, stored after the payload is visible to
    /// the device (INV-1).
    pub totals: *mut u64,
    /// Number of signals in `totals`: ids 0 to `signals` - 1.
    pub signals: u32,
    /// Zero.
    pub reserved: u32,
}
