//! Shared by all kinds of components: status codes, strings, errors, the export header.

/// First eight bytes of every export: `TOKNYARD` read as a little-endian integer.
pub const TY_MAGIC: u64 = 0x4452_4159_4e4b_4f54;

/// The call succeeded.
pub const TY_OK: i32 = 0;
/// The component cannot run here: a library, device, right or capability is missing.
pub const TY_UNAVAILABLE: i32 = -1;
/// The component does not support the request.
pub const TY_UNSUPPORTED: i32 = -2;
/// The component's own config table is wrong.
pub const TY_CONFIG: i32 = -3;
/// The operating system refused a call; `TyError.os_errno` has the reason.
pub const TY_SYSTEM: i32 = -4;
/// A peer could not be reached or is gone.
pub const TY_PEER_LOST: i32 = -5;
/// A command failed on the fabric (an error completion), or the fabric is unhealthy.
pub const TY_TRANSPORT: i32 = -6;
/// The call did not end within its deadline.
pub const TY_DEADLINE: i32 = -7;
/// The host raised the abort word of the wait board; the call stopped waiting.
pub const TY_ABORTED: i32 = -8;
/// A peer sent bytes that fail a check.
pub const TY_PROTOCOL: i32 = -9;
/// The arena or another fixed resource is full; nothing was moved.
pub const TY_FULL: i32 = -10;
/// This rank or a peer refused its input; nothing was moved.
pub const TY_REFUSED: i32 = -11;
/// The component broke its own contract.
pub const TY_INTERNAL: i32 = -12;
/// The component panicked; the instance must not be used again.
pub const TY_PANIC: i32 = -13;
/// Ranks disagree on a value that must be equal, for example on the next operation.
pub const TY_MISMATCH: i32 = -14;

/// A string, borrowed for the duration of a call: UTF-8, not terminated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyStr {
    /// First byte; may be null if `bytes` is 0.
    pub data: *const u8,
    /// Length in bytes.
    pub bytes: usize,
}

/// Bytes that fit an operation's name in a [`TyError`].
pub const TY_ERROR_OPERATION: usize = 32;
/// Bytes that fit a message in a [`TyError`].
pub const TY_ERROR_MESSAGE: usize = 464;

/// The details of a failure. The caller owns the structure and sets `size`; the component fills the rest
/// when it returns a negative status. Text is UTF-8, ended by a zero byte or the array's end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyError {
    /// `sizeof(TyError)` of the caller.
    pub size: usize,
    /// `errno` of a failed system call, or 0.
    pub os_errno: i32,
    /// The world rank that the error is about, or -1.
    pub rank: i32,
    /// The operation that failed, for example `connect`.
    pub operation: [u8; TY_ERROR_OPERATION],
    /// The value found, the value expected, and the fix.
    pub message: [u8; TY_ERROR_MESSAGE],
}

/// Log level of `TyHost::log`: an error.
pub const TY_LOG_ERROR: u32 = 1;
/// Something is wrong, but the component continues.
pub const TY_LOG_WARN: u32 = 2;
/// News for an operator, once.
pub const TY_LOG_INFO: u32 = 3;
/// Details for a developer of the component.
pub const TY_LOG_DEBUG: u32 = 4;

/// The first field of every export. The host checks it before any code of the plugin runs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyExportHeader {
    /// [`TY_MAGIC`].
    pub magic: u64,
    /// Major version: a new one breaks compatibility. Must be equal on both sides.
    pub major: u32,
    /// Minor version: a new one adds fields.
    pub minor: u32,
    /// The layout hash of this kind (`TY_TRANSPORT_LAYOUT`, ...). Until 1.0 the host accepts its own, and those of
    /// earlier minor versions that its structures only append to.
    pub layout: u64,
    /// `sizeof` of the whole export structure.
    pub size: usize,
}

/// Kind of memory, a bit: ordinary host memory.
pub const TY_MEMORY_HOST: u32 = 1;
/// CUDA device memory.
pub const TY_MEMORY_CUDA: u32 = 2;
/// HIP device memory.
pub const TY_MEMORY_HIP: u32 = 4;

/// Kind of handle, a bit: the type of a window's descriptor. Here a memfd of host memory, which other
/// processes map.
pub const TY_HANDLE_MEMFD: u32 = 1;
/// Device memory that its driver has exported to a POSIX descriptor, for the same driver in another process.
pub const TY_HANDLE_POSIX: u32 = 2;
/// Device memory that its driver has exported for other hosts of the same fabric. Reserved for NVLink
/// across hosts: it has no descriptor, and nothing uses it yet.
pub const TY_HANDLE_FABRIC: u32 = 4;
/// Device memory as a dmabuf, for NICs.
pub const TY_HANDLE_DMABUF: u32 = 8;

/// A transport's requirements on window memory. The host merges those of both levels: it intersects
/// kinds, unites handles and takes the larger alignment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyMemoryNeeds {
    /// `sizeof(TyMemoryNeeds)`.
    pub size: usize,
    /// Acceptable kinds: bits `TY_MEMORY_*`.
    pub kinds: u32,
    /// Handles that a window must have, where its kind of memory can have them: bits `TY_HANDLE_*`.
    pub handles: u32,
    /// Required alignment of address and length in bytes; a power of two.
    pub alignment: u64,
}

/// One window: registered memory of the same layout on every rank, addressed by (peer, offset).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyWindow {
    /// `sizeof(TyWindow)`.
    pub size: usize,
    /// Dense, in order of registration, from 0.
    pub id: u32,
    /// One of `TY_MEMORY_*`.
    pub kind: u32,
    /// First byte on this rank; a multiple of 128 where the host asked for the memory.
    pub pointer: *mut u8,
    /// Length in bytes; equal on all ranks.
    pub bytes: u64,
    /// A descriptor of the memory that stays open while the window lives, or -1.
    pub fd: i32,
    /// Device ordinal, or -1 for host memory.
    pub device: i32,
    /// Offset of the window in the file of `fd`, in bytes.
    pub fd_offset: u64,
    /// The type of `fd`: one of `TY_HANDLE_*`, or 0 where there is none.
    pub handle: u32,
    /// Zero.
    pub reserved: u32,
}
