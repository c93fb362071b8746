//! The device API's source, and the structures that a host fills in for it. Layouts are those of
//! `ibgda.cuh`, byte for byte; kernels and a test check their sizes.

use tokenyard_sys_mlx5::wqe::BLOCK;

/// The source of `DeviceApi`, for version 2 of the contract (`transport.cuh`).
pub const SOURCE: &str = include_str!("ibgda.cuh");

/// Bits of [`Params::flags`].
pub mod flags {
    /// Additions wait for earlier reads and additions of their queue pair (the requests' fence field).
    pub const FENCE_SIGNALS: u32 = 1;
    /// Kernels store the index to a word of host memory, and a thread of the host rings.
    pub const HOST_RINGS: u32 = 2;
}

/// Depths of a send queue, in requests: powers of two in this range. The index in completions has 16 bits,
/// and at most half of its range may be under way.
pub const DEPTHS: std::ops::RangeInclusive<u32> = 64..=32_768;

/// One queue pair, in device memory: addresses as kernels see them.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceQueue {
    /// The send queue: [`BLOCK`] bytes times the depth.
    pub requests: u64,
    /// The doorbell record, 8 bytes; the send queue's word is the second.
    pub record: u64,
    /// The register; with [`flags::HOST_RINGS`] a word of host memory, one for each queue pair.
    pub doorbell: u64,
    /// The last 4 bytes of the collapsed completion.
    pub completion: u64,
    /// Number of the queue pair, 24 bits.
    pub number: u32,
    /// The depth less 1.
    pub mask: u32,
    /// Not used.
    pub unused: [u64; 3],
    /// Requests that were reserved, that are ready (times 2, with two bits of the threads that ring) and that are done;
    /// all 0 at first.
    pub counts: [u64; 3],
    /// Not 0 once a thread has seen an error completion.
    pub failed: u64,
    /// Not used.
    pub unused_too: [u64; 4],
}

/// Memory, in the form in which requests name it.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryKey {
    address: u64,
    /// Big-endian, as in a request.
    key: u32,
    unused: u32,
}

impl MemoryKey {
    /// Names memory under a key. A request addresses its first byte by `address`.
    pub fn new(address: u64, key: u32) -> Self {
        Self { address, key: key.to_be(), unused: 0 }
    }
}

/// A holder of a key may use the memory, so the key is never printed.
impl std::fmt::Debug for MemoryKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryKey").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The parameters that a kernel gets by value. Addresses are as kernels see them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// [`DeviceQueue`]s, by peer and queue.
    pub queues: u64,
    /// [`MemoryKey`]s of this rank's windows.
    pub local: u64,
    /// [`MemoryKey`]s of all ranks' windows, by peer and window.
    pub remote: u64,
    /// [`MemoryKey`]s of all ranks' signals, by peer.
    pub tables: u64,
    /// This rank's signals, 8 bytes each, by queue and id.
    pub totals: u64,
    /// 8 bytes of this rank for the values that additions return. No code reads them.
    pub sink: MemoryKey,
    /// A [`FaultRecord`](crate::FaultRecord) in host memory.
    pub fault: u64,
    /// Ranks of the team, this one included.
    pub peers: u32,
    /// Queues.
    pub queue_count: u32,
    /// Windows.
    pub windows: u32,
    /// Signals of a queue.
    pub signals: u32,
    /// See [`flags`].
    pub flags: u32,
    /// Not used.
    pub unused: u32,
}

const _: () = assert!(size_of::<DeviceQueue>() == 128 && size_of::<Params>() == 88);
const _: () = assert!(BLOCK == 64, "the device API writes blocks of 64 bytes");
