//! NCCL's interface for RMA plugins, version 14: `src/include/plugin/rma/rma_v14.h` of NCCL 2.30.7. 2.31.2 and 2.32.3
//! load it, too.
#![allow(missing_docs, reason = "each is documented under its name in NCCL's headers")]

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// The symbol that NCCL looks for.
pub const SYMBOL: &str = "ncclRmaPlugin_v14";

// `ncclResult_t`.
pub const SUCCESS: c_int = 0;
pub const UNHANDLED_CUDA_ERROR: c_int = 1;
pub const SYSTEM_ERROR: c_int = 2;
pub const INTERNAL_ERROR: c_int = 3;
pub const INVALID_ARGUMENT: c_int = 4;
pub const INVALID_USAGE: c_int = 5;
pub const REMOTE_ERROR: c_int = 6;

// Kinds of memory.
pub const PTR_HOST: c_int = 1;
pub const PTR_CUDA: c_int = 2;

// The operation of a signal.
pub const SIGNAL_INC: u32 = 1;
pub const SIGNAL_ADD: u32 = 2;

/// `NCCL_NET_DEVICE_GIN_PROXY`: a thread of NCCL posts the commands of kernels.
pub const DEVICE_TYPE_PROXY: c_int = 2;
/// `NCCL_NET_HANDLE_MAXSIZE`.
pub const HANDLE_BYTES: usize = 128;
/// `NCCL_LOG_WARN`, and all of its subsystems.
pub const LOG_WARN: c_int = 2;
pub const LOG_ALL: c_ulong = !0;

/// `ncclDebugLogger_t`.
pub type Logger =
    unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...) -> ();

/// `ncclNetVDeviceProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VirtualDevice {
    pub count: c_int,
    pub devices: [c_int; 8],
}

/// `ncclNetProperties_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetProperties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub device_type: c_int,
    pub device_version: c_int,
    pub virtual_device: VirtualDevice,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
    pub rail: i16,
    pub plane: i16,
}

/// `ncclRmaConfig_v14_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaConfig {
    pub contexts: c_int,
    pub traffic_class: c_int,
    pub rank_stride: c_int,
}

macro_rules! table {
    ($($slot:ident($($arg:ty),* $(,)?);)*) => {
        /// `ncclRma_v14_t`.
        #[repr(C)]
        #[derive(Debug)]
        pub struct Plugin {
            pub name: *const c_char,
            $(pub $slot: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }
    };
}

table! {
    init(*mut *mut c_void, u64, Option<Logger>);
    devices(*mut c_int);
    get_properties(c_int, *mut NetProperties);
    listen(*mut c_void, c_int, *mut c_void, *mut *mut c_void);
    // Context, handles, ranks, rank, the listener from `listen`, the connected team.
    connect(*mut c_void, *mut *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void);
    create_context(*mut c_void, *mut RmaConfig, *mut *mut c_void);
    // Team, address, bytes, kind, flags, the region.
    reg_mr_sym(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void);
    // The same with the offset and the descriptor of a dmabuf.
    reg_mr_sym_dmabuf(*mut c_void, *mut c_void, usize, c_int, u64, c_int, u64, *mut *mut c_void);
    dereg_mr_sym(*mut c_void, *mut c_void);
    destroy_context(*mut c_void);
    close_coll(*mut c_void);
    close_listen(*mut c_void);
    // Context, its number, source offset and region, bytes, destination offset and region, rank, the request.
    iput(*mut c_void, c_int, u64, *mut c_void, usize, u64, *mut c_void, u32, *mut *mut c_void);
    // The same with the signal's offset and region, value, operation, and whether it settles all puts before it.
    iput_signal(
        *mut c_void, c_int, u64, *mut c_void, usize, u64, *mut c_void, u32,
        u64, *mut c_void, u64, u32, bool, *mut *mut c_void,
    );
    // Context, its number, remote offset and region, bytes, local offset and region, rank, the request.
    iget(*mut c_void, c_int, u64, *mut c_void, usize, u64, *mut c_void, u32, *mut *mut c_void);
    iflush(*mut c_void, c_int, *mut c_void, u32, *mut *mut c_void);
    test(*mut c_void, *mut c_void, *mut c_int);
    rma_progress(*mut c_void);
    query_last_error(*mut c_void, *mut bool);
    finalize(*mut c_void);
}

// SAFETY: a table of functions and a name, both static.
unsafe impl Sync for Plugin {}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structures_have_the_layout_that_nccl_2_32_3_has_read_and_filled() {
        assert_eq!(size_of::<Plugin>(), 21 * size_of::<usize>());
        assert_eq!(offset_of!(Plugin, iput), 13 * size_of::<usize>());
        assert_eq!(size_of::<RmaConfig>(), 12);
        assert_eq!(offset_of!(NetProperties, max_comms), 48);
        assert_eq!(offset_of!(NetProperties, virtual_device), 64);
        assert_eq!(offset_of!(NetProperties, max_p2p_bytes), 104);
        assert_eq!(size_of::<NetProperties>(), 128);
    }
}
