//! Bindings to NCCL, opened at run time: communicators, windows, and the device communicators of its GPU-Initiated
//! Networking (GIN). Nothing of NCCL is linked.
//!
//! Structures begin with their size, a magic number and a version, and only grow at their end: those here are of
//! [`consts::LEAST_VERSION`], and the library fills in what later versions have added. `ncclDevComm` is not among
//! them: it changes with every release, and device code fits the library of its own version alone. So its memory
//! is as long as [`CommProperties::dev_comm_runtime_version_size`] says, and only kernels look into it.
//!
//! Types and numbers are NCCL's, from `nccl.h` and `nccl_device/core.h` (`host.h` from 2.32 on). A test compares them with
//! the headers of 2.31.2 and 2.32.3.

pub mod consts;
mod library;
mod types;

pub use library::{LoadError, Nccl};
pub use types::{CommProperties, Config, DevCommRequirements, UniqueId};
