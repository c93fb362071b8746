//! Numbers of NCCL's headers.
#![allow(missing_docs, reason = "each is documented under its name in NCCL's headers")]

use std::ffi::{c_int, c_uint};

/// `NCCL_VERSION(2, 31, 2)`: the oldest version with waits on the device that time out.
pub const LEAST_VERSION: c_int = 23102;
/// `NCCL_API_MAGIC`, the second field of every structure.
pub const API_MAGIC: c_uint = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`: NCCL chooses.
pub const UNDEFINED: c_int = c_int::MIN;

// `ncclResult_t`.
pub const SUCCESS: c_uint = 0;
pub const UNHANDLED_CUDA_ERROR: c_uint = 1;
pub const SYSTEM_ERROR: c_uint = 2;
pub const INTERNAL_ERROR: c_uint = 3;
pub const INVALID_ARGUMENT: c_uint = 4;
pub const INVALID_USAGE: c_uint = 5;
pub const REMOTE_ERROR: c_uint = 6;
/// The status of a communicator that does not block: ask again by `ncclCommGetAsyncError`.
pub const IN_PROGRESS: c_uint = 7;
pub const TIMEOUT: c_uint = 8;

// `ncclGinType_t`.
/// In a config or a requirement: any type.
pub const GIN_TYPE_NONE: c_uint = 0;
/// A thread of the host posts.
pub const GIN_TYPE_PROXY: c_uint = 2;
/// Kernels post to ConnectX.
pub const GIN_TYPE_GDAKI: c_uint = 3;
pub const GIN_TYPE_GPI: c_uint = 4;
/// Kernels post to EFA.
pub const GIN_TYPE_EFA_GDA: c_uint = 5;

// `ncclGinConnectionType_t`.
pub const GIN_CONNECTION_NONE: c_uint = 0;
/// Every rank reaches every other.
pub const GIN_CONNECTION_FULL: c_uint = 1;
/// Ranks reach those of their rail.
pub const GIN_CONNECTION_RAIL: c_uint = 2;

/// For `ncclCommWindowRegister`: the window has equal sizes on all ranks, which register it together.
pub const WIN_COLL_SYMMETRIC: c_int = 1;
