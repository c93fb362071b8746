//! Flags and enumerations, with libfabric's names.

#![allow(missing_docs, reason = "libfabric's manual pages document them under the same names")]

/// `FI_VERSION(1, 17)`: the version of the API whose layouts this crate has.
pub const API_VERSION: u32 = 1 << 16 | 17;
/// `FI_VERSION(1, 20)`: the newest version of the API that is requested.
pub const NEWEST_API: u32 = 1 << 16 | 20;

pub const FI_RMA: u64 = 1 << 2;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_TRANSMIT: u64 = 1 << 11;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_MORE: u64 = 1 << 18;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_INJECT: u64 = 1 << 25;
pub const FI_INJECT_COMPLETE: u64 = 1 << 26;
pub const FI_HMEM: u64 = 1 << 47;

/// For `fi_ep_bind`: only operations with [`FI_COMPLETION`] have one, unless they fail.
pub const FI_SELECTIVE_COMPLETION: u64 = 1 << 59;

// Mode bits.
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_CONTEXT2: u64 = 1 << 52;

// `fi_domain_attr::mr_mode`.
pub const FI_MR_LOCAL: i32 = 1 << 2;
pub const FI_MR_VIRT_ADDR: i32 = 1 << 4;
pub const FI_MR_ALLOCATED: i32 = 1 << 5;
pub const FI_MR_PROV_KEY: i32 = 1 << 6;
pub const FI_MR_ENDPOINT: i32 = 1 << 9;
pub const FI_MR_HMEM: i32 = 1 << 10;

/// For `fi_mr_regattr`: `mr_iov` is a [`fi_mr_dmabuf`](crate::types::fi_mr_dmabuf). libfabric 1.20 and later, whose
/// `rdma/fi_domain.h` has both.
pub const FI_MR_DMABUF: u64 = 1 << 40;

// `enum fi_ep_type`.
pub const FI_EP_RDM: u32 = 3;

// `enum fi_threading`.
pub const FI_THREAD_DOMAIN: u32 = 3;

// `enum fi_progress`.
pub const FI_PROGRESS_MANUAL: u32 = 2;

// `enum fi_resource_mgmt`.
pub const FI_RM_ENABLED: u32 = 2;

// `enum fi_av_type`.
pub const FI_AV_TABLE: u32 = 2;

// `enum fi_cq_format`.
pub const FI_CQ_FORMAT_DATA: u32 = 3;

// `enum fi_hmem_iface`.
pub const FI_HMEM_CUDA: u32 = 1;
pub const FI_HMEM_ROCR: u32 = 2;

// Commands of `fi_control`.
pub const FI_ENABLE: i32 = 6;

// Levels and names of `fi_setopt`.
pub const FI_OPT_ENDPOINT: i32 = 0;
/// A `bool`; libfabric 1.18 and later.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: i32 = 11;

// Formats of addresses.
pub const FI_ADDR_STR: u32 = 9;

pub const FI_ADDR_NOTAVAIL: u64 = u64::MAX;

// Errors, positive as in `fi_errno.h`.
pub const FI_EAGAIN: i32 = 11;
pub const FI_EBUSY: i32 = 16;
pub const FI_EAVAIL: i32 = 259;
pub const FI_ENOKEY: i32 = 266;
