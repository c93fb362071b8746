//! What the probe's kernels are passed. Mirrors `probe.cu`; the compiler of the kernels checks the size.

/// Bytes in front of the rooms of a window: entries, exits and counts of up to 72 ranks.
pub(super) const HEAD_BYTES: u64 = 1 << 20;
/// Counts that a rank can tell in one exchange.
pub(super) const MOST_WORDS: u32 = 1024;
/// Rows in flight of a warp, and warps of a block, that copy in bulk.
pub(super) const MOST_STAGES: u32 = 4;
pub(super) const BULK_WARPS: u32 = 15;
pub(super) const VECTOR_WARPS: u32 = 32;

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
    pub(super) stages: u32,
    pub(super) pull: u32,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) epoch: u32,
    pub(super) rounds: u32,
    pub(super) words: u32,
    pub(super) seed: u32,
    pub(super) reserved: u32,
}

/// How many warps of a block copy rows of `row_bytes` in bulk, and how many rows each has in flight:
/// many shallow queues, for few deep ones reach little more than half.
pub(super) fn queues(row_bytes: u32, shared: u32) -> (u32, u32) {
    let pitch = row_bytes.next_multiple_of(128);
    let warps = (shared / pitch).clamp(1, BULK_WARPS);
    (warps, (shared / (warps * pitch)).clamp(1, MOST_STAGES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warps_come_before_depth_and_both_fit_shared_memory() {
        let shared = 226 << 10;
        assert_eq!(queues(14336, shared), (15, 1));
        assert_eq!(queues(7168, shared), (15, 2));
        assert_eq!(queues(16384, shared), (14, 1));
        assert_eq!(queues(256, shared), (15, MOST_STAGES));
        for row in [128, 5000, 32768, 100_000] {
            let (warps, stages) = queues(row, shared);
            assert!(warps * stages * row.next_multiple_of(128) <= shared, "{row}");
        }
    }
}
