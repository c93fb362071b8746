//! The kinds of calls that a communicator of dispatch and combine takes.

use tokenyard_core::abi;

use crate::engine::path::Path;

/// The kinds of calls that a communicator over these paths accepts, one path for each level: bits
/// `TY_KERNELS_CAP_*`. Calls that no caller waits for need one level: among several domains the host waits until these
/// agree. Rank-major rows are stored at their places, and read there, so they need one level of loads and stores.
/// `decodes`: rows of the packed layout are sent without a request.
pub(crate) fn capabilities(paths: &[Path], decodes: bool) -> u32 {
    let is_direct = matches!(paths, [path] if !path.puts());
    // Between domains each forwarder would have to sum first, and it has places for M of the communicator.
    let one_level = abi::TY_KERNELS_CAP_SUM_WEIGHTS
        | abi::TY_KERNELS_CAP_CALL_TOKENS
        | abi::TY_KERNELS_CAP_NO_SYNC;
    abi::TY_KERNELS_CAP_STREAMS
        | if paths.len() == 1 { one_level } else { 0 }
        | if is_direct { abi::TY_KERNELS_CAP_RANK_MAJOR } else { 0 }
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
    fn rank_major_rows_are_taken_over_one_level_of_loads_and_stores_alone() {
        let takes =
            |paths: &[Path]| capabilities(paths, false) & abi::TY_KERNELS_CAP_RANK_MAJOR != 0;
        let (ring, put) = (ring(1 << 20), of(DEVICE_API, CUDA, 1 << 20).unwrap());
        assert!(takes(&[Path::STORE]));
        for refused in [&[ring][..], &[put], &[Path::STORE, ring], &[Path::STORE, Path::STORE]] {
            assert!(!takes(refused), "{refused:?}");
            assert_ne!(capabilities(refused, false) & abi::TY_KERNELS_CAP_STREAMS, 0);
        }
    }

    #[test]
    fn some_forms_of_calls_are_taken_over_one_level_of_any_path_alone() {
        let (ring, put) = (ring(1 << 20), of(DEVICE_API, CUDA, 1 << 20).unwrap());
        let forms = [
            abi::TY_KERNELS_CAP_SUM_WEIGHTS,
            abi::TY_KERNELS_CAP_CALL_TOKENS,
            abi::TY_KERNELS_CAP_NO_SYNC,
        ];
        for bit in forms {
            let takes = |paths: &[Path]| capabilities(paths, false) & bit != 0;
            assert!(takes(&[Path::STORE]) && takes(&[ring]) && takes(&[put]));
            assert!(!takes(&[Path::STORE, ring]) && !takes(&[Path::STORE, Path::STORE]));
        }
    }
}
