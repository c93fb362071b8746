//! How rows leave over one level: read once from the transport's declaration, and stored.

use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::config::Windows;

/// The longest put of kernels, and the unit of its length.
const LONGEST_PUT: u64 = 1 << 30;
const PUT_UNIT: u64 = 16;

/// Queues that kernels spread their puts over. More do not help: a block uses one, and few blocks fill a
/// link.
const MOST_QUEUES: u32 = 8;

/// How rows get to their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// Kernels store them into windows of peers, which are mapped here.
    Store,
    /// Rows are staged in a window of this rank and put from there.
    Put,
}

/// The poster of the puts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poster {
    /// The kernels, through the transport's device API.
    Kernel,
    /// A host thread, which serves a ring that the kernels fill.
    HostRing,
}

/// Where windows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowMemory {
    Device,
    /// Pinned, so that kernels reach it.
    Host,
}

/// See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) rows: Transfer,
    pub(crate) poster: Poster,
    pub(crate) memory: WindowMemory,
    /// Queues that blocks spread their puts over; 1 is shared by all.
    pub(crate) queues: u32,
    /// Bytes; 0 where the path does not put.
    pub(crate) largest_put: u64,
}

impl Path {
    /// Loads and stores.
    pub(crate) const STORE: Self = Self {
        rows: Transfer::Store,
        poster: Poster::Kernel,
        memory: WindowMemory::Device,
        queues: 1,
        largest_put: 0,
    };

    /// The path over a transport, on devices whose memory is of the kind `device`, one of `TY_MEMORY_*`; `windows` is
    /// the config's.
    ///
    /// # Errors
    /// `Unsupported` if there is none.
    pub(crate) fn of(limits: &Capabilities, device: u32, windows: Windows) -> Result<Self> {
        let has = |flag| limits.flags & flag != 0;
        let in_device = limits.memory_kinds & device != 0;
        let in_host = limits.memory_kinds & abi::TY_MEMORY_HOST != 0;
        let largest_put = limits.largest_put.min(LONGEST_PUT) / PUT_UNIT * PUT_UNIT;
        let by_kernels = has(abi::TY_CAP_DEVICE_API);
        if by_kernels && has(abi::TY_CAP_LOAD_STORE) {
            return Ok(Self::STORE);
        }
        let put = |poster, memory, queues| Self {
            rows: Transfer::Put,
            poster,
            memory,
            queues,
            largest_put,
        };
        match (by_kernels, in_device, in_host) {
            _ if largest_put == 0 => {}
            (true, true, _) => {
                let queues = limits.max_queues.clamp(1, MOST_QUEUES);
                return Ok(put(Poster::Kernel, WindowMemory::Device, queues));
            }
            (false, true, _) if windows == Windows::Device => {
                return Ok(put(Poster::HostRing, WindowMemory::Device, 1));
            }
            (false, false, _) if windows == Windows::Device => {
                return unsupported(format!(
                    "found windows = \"device\" over a transport that takes memory kinds {:#x}; expected \
                     kind {device:#x} among them",
                    limits.memory_kinds
                ))
                .map_err(|e: Error| e.with_fix("leave `windows` out, or use efa or verbs"));
            }
            // Host memory first: whether a NIC reaches device memory shows only when a window is registered.
            (false, _, true) => return Ok(put(Poster::HostRing, WindowMemory::Host, 1)),
            (false, true, false) => return Ok(put(Poster::HostRing, WindowMemory::Device, 1)),
            _ => {}
        }
        let api = if by_kernels { "a device API that puts" } else { "no device API" };
        unsupported(format!(
            "found {api}, memory kinds {:#x} and largest put {}; expected a device API with device \
             memory (kind {device:#x}), or puts of at least {PUT_UNIT} bytes by the host with device or \
             host memory",
            limits.memory_kinds, limits.largest_put
        ))
        .map_err(|e: Error| e.with_fix("use nvlink, xgmi, shm or efa; or kernels = \"cpu\""))
    }

    /// Whether rows are put, so staged first.
    pub(crate) fn puts(&self) -> bool {
        self.rows == Transfer::Put
    }

    /// The kinds of calls that a communicator over these paths accepts, one path for each level: bits
    /// `TY_KERNELS_CAP_*`. Calls that no caller waits for need one level of loads and stores. Among several domains
    /// the host waits for the end of an operation. If rows are put, it waits until the staging may be written
    /// again (INV-4). Rank-major rows are stored at their places, and read there, so they need one such level, too.
    /// `decodes`: rows of the packed layout are sent without a request.
    pub(crate) fn capabilities(paths: &[Self], decodes: bool) -> u32 {
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

    /// Whether kernels fill a ring that the host serves.
    pub(crate) fn has_ring(&self) -> bool {
        self.puts() && self.poster == Poster::HostRing
    }

    /// Whether windows lie in pinned memory of the host.
    pub(crate) fn in_host_memory(&self) -> bool {
        self.memory == WindowMemory::Host
    }
}

#[cold]
pub(crate) fn unsupported<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "plan needs", message))
}

#[cfg(test)]
pub(crate) mod tests {
    use tokenyard_core::ErrorKind;
    use tokenyard_core::transport::NO_CAPABILITIES;

    use super::*;

    const DEVICE_API: u64 = abi::TY_CAP_DEVICE_API;
    const STORES: u64 = abi::TY_CAP_LOAD_STORE;
    const HOST: u32 = abi::TY_MEMORY_HOST;
    const CUDA: u32 = abi::TY_MEMORY_CUDA;

    /// Over a ring, with windows in host memory.
    pub(crate) fn ring(largest_put: u64) -> Path {
        of(0, HOST, largest_put).unwrap()
    }

    fn of(flags: u64, memory_kinds: u32, largest_put: u64) -> Result<Path> {
        let limits =
            Capabilities { flags, memory_kinds, largest_put, max_queues: 4, ..NO_CAPABILITIES };
        Path::of(&limits, CUDA, Windows::Auto)
    }

    #[test]
    fn kernels_store_where_a_device_api_loads_and_stores() {
        assert_eq!(of(DEVICE_API | STORES, CUDA, 1 << 40).unwrap(), Path::STORE);
    }

    #[test]
    fn kernels_put_on_several_queues_where_a_device_api_only_puts() {
        let path = of(DEVICE_API, HOST | CUDA, 1 << 40).unwrap();
        let expected = Path {
            rows: Transfer::Put,
            poster: Poster::Kernel,
            memory: WindowMemory::Device,
            queues: 4,
            largest_put: LONGEST_PUT,
        };
        assert_eq!(path, expected);
        assert!(path.puts() && !path.has_ring());
    }

    #[test]
    fn the_host_puts_where_there_is_no_device_api_from_host_memory_if_it_can() {
        // Memory that the host can load and store does not help kernels.
        for (flags, kinds, memory) in [
            (STORES, HOST, WindowMemory::Host),
            (0, HOST, WindowMemory::Host),
            (0, HOST | CUDA, WindowMemory::Host),
            (0, CUDA, WindowMemory::Device),
        ] {
            let path = of(flags, kinds, 100).unwrap();
            assert_eq!((path.memory, path.queues, path.largest_put), (memory, 1, 96));
            assert!(path.has_ring());
        }
    }

    #[test]
    fn windows_of_a_ring_lie_in_device_memory_where_the_config_says_so_and_the_transport_takes_it()
    {
        let of = |flags, memory_kinds| {
            let limits = Capabilities {
                flags,
                memory_kinds,
                largest_put: 1 << 20,
                max_queues: 4,
                ..NO_CAPABILITIES
            };
            Path::of(&limits, CUDA, Windows::Device)
        };
        let path = of(0, HOST | CUDA).unwrap();
        assert!(path.has_ring() && !path.in_host_memory());
        let error = of(0, HOST).unwrap_err().to_string();
        assert!(error.contains("windows = \"device\""), "{error}");
        assert_eq!(of(DEVICE_API | STORES, CUDA).unwrap(), Path::STORE);
    }

    #[test]
    fn rank_major_rows_and_calls_without_a_wait_are_taken_over_one_level_of_loads_and_stores_alone()
    {
        let has = |paths: &[Path], form| Path::capabilities(paths, false) & form != 0;
        let no_sync = |paths: &[Path]| has(paths, abi::TY_KERNELS_CAP_NO_SYNC);
        let takes = |paths: &[Path]| has(paths, abi::TY_KERNELS_CAP_RANK_MAJOR);
        let (ring, put) = (ring(1 << 20), of(DEVICE_API, CUDA, 1 << 20).unwrap());
        assert!(no_sync(&[Path::STORE]) && takes(&[Path::STORE]));
        for refused in [&[ring][..], &[put], &[Path::STORE, ring], &[Path::STORE, Path::STORE]] {
            assert!(!no_sync(refused) && !takes(refused), "{refused:?}");
            assert_ne!(Path::capabilities(refused, false) & abi::TY_KERNELS_CAP_STREAMS, 0);
        }
    }

    #[test]
    fn returned_weights_are_summed_and_calls_have_an_m_of_their_own_over_one_level_alone() {
        let ring = ring(1 << 20);
        for bit in [abi::TY_KERNELS_CAP_SUM_WEIGHTS, abi::TY_KERNELS_CAP_CALL_TOKENS] {
            let takes = |paths: &[Path]| Path::capabilities(paths, false) & bit != 0;
            assert!(takes(&[Path::STORE]) && takes(&[ring]));
            assert!(!takes(&[Path::STORE, ring]) && !takes(&[Path::STORE, Path::STORE]));
        }
    }

    #[test]
    fn no_path_is_an_error_that_says_what_was_found_and_what_would_do() {
        for (flags, kinds, largest) in
            [(0, CUDA, 15), (0, HOST, 15), (0, 0, 1 << 40), (DEVICE_API, HOST, 1 << 40)]
        {
            let error = of(flags, kinds, largest).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(&format!("largest put {largest}")), "{error}");
            assert!(error.fix().is_some_and(|fix| fix.contains("nvlink")), "{error}");
        }
    }
}
