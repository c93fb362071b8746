//! The ring that kernels post into, where a transport has no device API.

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
    /// What to add to the signal: 1 to 65,535.
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
    /// Number of the command + 1, stored last, with release order at system scope: the slot then
    /// belongs to the host until the command is done.
    pub sequence: u64,
}

/// What the host tells kernels about a ring. Every field is stored with release order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyGpuRingStatus {
    /// Commands that are done (INV-4, INV-5), all before it included: only grows.
    pub done: u64,
    /// Not 0: the ring is dead, and no command ends any more; 1 + the number of the command that
    /// failed, or all ones where none is to blame. The transport's `health` says more (INV-7).
    pub failed: u64,
    /// Status below zero of the failure.
    pub status: i64,
}

/// Memory that a kernel set gives the host, so that its kernels may use a transport that has no device
/// device API: they write commands, and a thread of the host posts them and tells what came of it.
///
/// Command number n is in slot n mod `capacity`. A kernel may write it once `done` + `capacity` > n.
/// Everything starts as zeros and is written by both sides, so it is accessed by atomic loads and
/// stores, but for a command whose `sequence` was seen.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyGpuRing {
    /// `sizeof(TyGpuRing)`.
    pub size: usize,
    /// The level whose transport is used: one of `TY_LEVEL_*`. The host writes which it asks for.
    pub level: u64,
    /// The queue that commands are posted on, which nobody else uses.
    pub queue: u32,
    /// Number of slots, a power of two.
    pub capacity: u32,
    /// `capacity` slots.
    pub commands: *mut TyGpuRingCommand,
    /// One.
    pub status: *mut TyGpuRingStatus,
    /// `signals` words: the totals of the signals on this rank, stored after what came with them is
    /// visible to the device (INV-1).
    pub totals: *mut u64,
    /// Signals that are told, from 0 on.
    pub signals: u32,
    /// Zero.
    pub reserved: u32,
}
