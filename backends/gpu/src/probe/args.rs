//! The arguments of the probe's kernels. Mirrors `probe.cu`; the compiler of the kernels checks the
//! size.

use crate::compile::KernelSource;

/// The kernels.
pub(crate) const PROBE: KernelSource = KernelSource {
    name: "probe.cu",
    text: include_str!("probe.cu"),
    args_bytes: size_of::<ProbeArgs>(),
};

/// Bytes in front of the rooms of a window: entries, exits and counts of up to 72 ranks.
pub(super) const HEAD_BYTES: u64 = 1 << 20;
/// Most counts of a rank in one exchange.
pub(super) const MOST_WORDS: u32 = 1024;
/// Most warps of a block that copy in bulk, and threads of one that copies vectors.
const BULK_WARPS: u32 = 15;
pub(super) const VECTOR_THREADS: u32 = 1024;

/// As in `probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProbeArgs {
    pub(super) abort: u64,
    pub(super) report: u64,
    pub(super) cap_ns: u64,
    pub(super) times: u64,
    pub(super) local: u64,
    pub(super) wrong: u64,
    pub(super) rooms: u64,
    pub(super) room_bytes: u64,
    pub(super) left: u64,
    pub(super) rows: u32,
    pub(super) row_bytes: u32,
    pub(super) pitch: u32,
    pub(super) pull: u32,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) epoch: u32,
    pub(super) rounds: u32,
    pub(super) words: u32,
    pub(super) seed: u32,
}

/// The number of warps of a block that have space for a row of `row_bytes` each.
pub(super) fn bulk_warps(row_bytes: u32, shared: u32) -> u32 {
    (shared / row_bytes.next_multiple_of(128)).min(BULK_WARPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_warps_copy_as_have_room_for_a_row() {
        let warps = |row| bulk_warps(row, 226 << 10);
        assert_eq!([256, 14336, 16384, 100_000, 1 << 20].map(warps), [15, 15, 14, 2, 0]);
    }
}
