//! How data leaves over one level: read once from the transport's declaration, and stored.

use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::config::Windows;

/// The longest put of kernels, and the unit of its length.
const LONGEST_PUT: u64 = 1 << 30;
const PUT_UNIT: u64 = 16;

/// Queues that kernels spread their puts over. More do not help: a block uses one, and few blocks fill a
/// link.
const MOST_QUEUES: u32 = 8;

/// Signals of a transport, at most.
const MOST_SIGNALS: u32 = 65_536;

/// How data gets to its places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// Kernels store it into windows of peers, which are mapped here.
    Store,
    /// It is staged in a window of this rank and put from there.
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
    pub(crate) transfer: Transfer,
    pub(crate) poster: Poster,
    pub(crate) memory: WindowMemory,
    /// Queues that blocks spread their puts over; 1 is shared by all.
    pub(crate) queues: u32,
    /// Bytes; 0 where the path does not put.
    pub(crate) largest_put: u64,
    /// That the transport has for all who use it.
    pub(crate) most_signals: u32,
}

impl Path {
    /// Loads and stores.
    pub(crate) const STORE: Self = Self {
        transfer: Transfer::Store,
        poster: Poster::Kernel,
        memory: WindowMemory::Device,
        queues: 1,
        largest_put: 0,
        most_signals: MOST_SIGNALS,
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
            transfer: Transfer::Put,
            poster,
            memory,
            queues,
            largest_put,
            most_signals: limits.max_signals,
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

    /// Whether data is put, so staged first.
    pub(crate) fn puts(&self) -> bool {
        self.transfer == Transfer::Put
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

    pub(crate) const DEVICE_API: u64 = abi::TY_CAP_DEVICE_API;
    const STORES: u64 = abi::TY_CAP_LOAD_STORE;
    const HOST: u32 = abi::TY_MEMORY_HOST;
    pub(crate) const CUDA: u32 = abi::TY_MEMORY_CUDA;

    /// Over a ring, with windows in host memory.
    pub(crate) fn ring(largest_put: u64) -> Path {
        of(0, HOST, largest_put).unwrap()
    }

    pub(crate) fn of(flags: u64, memory_kinds: u32, largest_put: u64) -> Result<Path> {
        let limits = Capabilities {
            flags,
            memory_kinds,
            largest_put,
            max_queues: 4,
            max_signals: MOST_SIGNALS,
            ..NO_CAPABILITIES
        };
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
            transfer: Transfer::Put,
            poster: Poster::Kernel,
            memory: WindowMemory::Device,
            queues: 4,
            largest_put: LONGEST_PUT,
            most_signals: MOST_SIGNALS,
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
