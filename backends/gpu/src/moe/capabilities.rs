//! The kinds of calls that a communicator of dispatch and combine takes.

use tokenyard_core::abi;

use crate::engine::path::Path;

/// The kinds of calls that a communicator over these paths accepts, one path for each level: bits
/// `TY_KERNELS_CAP_*`. Calls that no caller waits for need one level of loads and stores. Among several domains
/// the host waits for the end of an operation. If rows are put, it waits until the staging may be written
/// again (INV-4). Rank-major rows are stored at their places, and read there, so they need one such level, too.
/// `decodes`: rows of the packed layout are sent without a request.
pub(crate) fn capabilities(paths: &[Path], decodes: bool) -> u32 {
    let is_direct = matches!(paths, [path] if !path.puts());
    // Between domains each forwarder would have to sum first.
    let sums = if paths.len() == 1 { abi::TY_KERNELS_CAP_SUM_WEIGHTS } else { 0 };
    let direct = abi::TY_KERNELS_CAP_NO_SYNC | abi::TY_KERNELS_CAP_RANK_MAJOR;
    abi::TY_KERNELS_CAP_STREAMS
        | sums
        // Forwarders have places for M of the communicator.
        | if paths.len() == 1 { abi::TY_KERNELS_CAP_CALL_TOKENS } else { 0 }
        | if is_direct { direct } else { 0 }
        | if decodes {
            abi::TY_KERNELS_CAP_PACKED_SUMS
                | abi::TY_KERNELS_CAP_MASKING
                | abi::TY_KERNELS_CAP_MASKS
                | abi::TY_KERNELS_CAP_STATISTICS
                | abi::TY_KERNELS_CAP_PACKED_FORMS
        } else {
            0
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::path::tests::{CUDA, DEVICE_API, of, ring};

    #[test]
    fn rank_major_rows_and_calls_without_a_wait_are_taken_over_one_level_of_loads_and_stores_alone()
    {
        let has = |paths: &[Path], form| capabilities(paths, false) & form != 0;
        let no_sync = |paths: &[Path]| has(paths, abi::TY_KERNELS_CAP_NO_SYNC);
        let takes = |paths: &[Path]| has(paths, abi::TY_KERNELS_CAP_RANK_MAJOR);
        let (ring, put) = (ring(1 << 20), of(DEVICE_API, CUDA, 1 << 20).unwrap());
        assert!(no_sync(&[Path::STORE]) && takes(&[Path::STORE]));
        for refused in [&[ring][..], &[put], &[Path::STORE, ring], &[Path::STORE, Path::STORE]] {
            assert!(!no_sync(refused) && !takes(refused), "{refused:?}");
            assert_ne!(capabilities(refused, false) & abi::TY_KERNELS_CAP_STREAMS, 0);
        }
    }

    #[test]
    fn returned_weights_are_summed_and_calls_have_an_m_of_their_own_over_one_level_alone() {
        let ring = ring(1 << 20);
        for bit in [abi::TY_KERNELS_CAP_SUM_WEIGHTS, abi::TY_KERNELS_CAP_CALL_TOKENS] {
            let takes = |paths: &[Path]| capabilities(paths, false) & bit != 0;
            assert!(takes(&[Path::STORE]) && takes(&[ring]));
            assert!(!takes(&[Path::STORE, ring]) && !takes(&[Path::STORE, Path::STORE]));
        }
    }
}
