//! Bindings to NCCL, opened at run time: communicators, windows, and the device communicators of its GPU-Initiated
//! Networking (GIN). Nothing of NCCL is linked.
//!
//! Structures begin with their size, a magic number and a version, and only grow at their end. The structures here
//! are of [`consts::LEAST_VERSION`]; the library fills in the fields that later versions have added. `ncclDevComm` is
//! not among them: it changes with every release, and device code fits only the library of its own version. So its
//! memory has the size [`CommProperties::dev_comm_runtime_version_size`], and only kernels look into it.
//!
//! Types and numbers are NCCL's, from `nccl.h` and `nccl_device/core.h` (`host.h` from 2.32 on). A test
//! compares them with the headers of 2.31.2 and 2.32.3.

pub mod consts;
mod library;
mod types;

pub use library::Nccl;
pub use tokenyard_sys_load::LoadError;
pub use types::{CommProperties, Config, DevCommRequirements, UniqueId};
