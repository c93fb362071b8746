//! Structures that NCCL takes and fills, as of [`LEAST_VERSION`].
#![allow(missing_docs, reason = "each field is documented under its name in NCCL's headers")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null;

use crate::consts::{API_MAGIC, LEAST_VERSION, UNDEFINED};

/// `ncclUniqueId`: the id that rank 0 makes, and by which all ranks join.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    /// Opaque. It names an address of rank 0 and a number that others cannot guess.
    pub internal: [c_char; 128],
}

impl std::fmt::Debug for UniqueId {
    /// Without the bytes: any process that knows them may join.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

/// `ncclConfig_t`: how a communicator is made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    /// 0: calls return at once with [`IN_PROGRESS`](crate::consts::IN_PROGRESS).
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub traffic_class: c_int,
    /// The name of the communicator in NCCL's own log.
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    pub n_channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
    pub graph_usage_mode: c_int,
    pub num_rma_ctx: c_int,
    pub max_p2p_peers: c_int,
    pub graph_stream_ordering: c_int,
    pub launch_order_implicit: c_int,
    pub num_rma_sig: c_int,
    pub rma_eager_init: c_int,
    pub host_cft_mode: c_int,
}

impl Default for Config {
    /// `NCCL_CONFIG_INITIALIZER`.
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: API_MAGIC,
            version: LEAST_VERSION as c_uint,
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            n_channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
            graph_usage_mode: UNDEFINED,
            num_rma_ctx: UNDEFINED,
            max_p2p_peers: UNDEFINED,
            graph_stream_ordering: UNDEFINED,
            launch_order_implicit: UNDEFINED,
            num_rma_sig: UNDEFINED,
            rma_eager_init: UNDEFINED,
            host_cft_mode: UNDEFINED,
        }
    }
}

/// `ncclCommProperties_t`: the properties of a communicator, which NCCL fills in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommProperties {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub rank: c_int,
    pub n_ranks: c_int,
    pub cuda_dev: c_int,
    pub nvml_dev: c_int,
    pub device_api_support: bool,
    pub multimem_support: bool,
    /// One of `GIN_TYPE_*`: the type between all ranks.
    pub gin_type: c_uint,
    pub n_lsa_teams: c_int,
    pub host_rma_support: bool,
    /// The type among the ranks of a rail.
    pub railed_gin_type: c_uint,
    pub comm_hash: u64,
    pub gin_min_stride: c_int,
    pub gin_connection_type: c_uint,
    /// By `GIN_TYPE_*`: whether the type is available.
    pub gin_support: [bool; 64],
    /// Bytes of an `ncclDevComm` of the library's version.
    pub dev_comm_runtime_version_size: usize,
}

impl Default for CommProperties {
    /// `NCCL_COMM_PROPERTIES_INITIALIZER`.
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: API_MAGIC,
            version: LEAST_VERSION as c_uint,
            // SAFETY: zeros are a value of every field; that of a `GIN_*` is its `NONE`.
            ..unsafe { std::mem::zeroed() }
        }
    }
}

/// `ncclDevCommRequirements_t`: the requirements of kernels on a device communicator.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DevCommRequirements {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub resource_requirements_list: *mut c_void,
    pub team_requirements_list: *mut c_void,
    pub lsa_multimem: bool,
    pub barrier_count: c_int,
    pub lsa_barrier_count: c_int,
    pub rail_gin_barrier_count: c_int,
    pub lsa_ll_a2a_block_count: c_int,
    pub lsa_ll_a2a_slot_count: c_int,
    pub gin_force_enable: bool,
    /// A hint.
    pub gin_context_count: c_int,
    /// Signals of each context; ids begin at 0.
    pub gin_signal_count: c_int,
    pub gin_counter_count: c_int,
    /// One of `GIN_CONNECTION_*`.
    pub gin_connection_type: c_uint,
    pub gin_exclusive_contexts: bool,
    pub gin_queue_depth: c_int,
    pub gin_traffic_class: c_int,
    pub world_gin_barrier_count: c_int,
    /// Whether a signal settles all puts before it, not its own alone.
    pub gin_strong_signals_required: bool,
    /// Whether signals are named by addresses.
    pub gin_va_signals_required: bool,
    pub gin_custom_stride: c_int,
    /// One of `GIN_TYPE_*`.
    pub gin_type: c_uint,
    /// The device code is of the library's own version, so the device communicator is as long as
    /// [`CommProperties::dev_comm_runtime_version_size`].
    pub use_runtime_version: bool,
    pub cft_caps: c_int,
    pub cft_barrier_count: c_int,
}

impl Default for DevCommRequirements {
    /// `NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER`.
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: API_MAGIC,
            version: LEAST_VERSION as c_uint,
            gin_context_count: 4,
            gin_traffic_class: UNDEFINED,
            gin_strong_signals_required: true,
            gin_va_signals_required: true,
            gin_custom_stride: 1,
            // SAFETY: zeros are a value of every field; that of a `GIN_*` is its `NONE`.
            ..unsafe { std::mem::zeroed() }
        }
    }
}
