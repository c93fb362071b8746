//! Rights of this process, the container around it, and the device nodes that it sees.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Bound, Fact};

/// What this process may do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Container {
    /// What seems to be around the process; known and `None` where nothing is seen.
    pub runtime: Fact<Option<String>>,
    /// Effective user.
    pub user: Fact<u32>,
    /// Effective capabilities.
    pub capabilities: Fact<Capabilities>,
    /// System call filter.
    pub seccomp: Fact<Seccomp>,
    /// The process is in a user namespace of its own, so that its capabilities say little.
    pub in_user_namespace: Fact<bool>,
    /// Limits of its control group.
    pub cgroup: Cgroup,
    /// Variables of the process that select devices, libraries or fabrics: `LD_LIBRARY_PATH`,
    /// `CUDA_VISIBLE_DEVICES`, those that begin with `NCCL_`, `NVSHMEM_`, `FI_`, `NVIDIA_` …
    pub environment: BTreeMap<String, String>,
}

/// A set of capabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Number of `CAP_NET_RAW`.
    pub const NET_RAW: u32 = 13;
    /// Number of `CAP_IPC_LOCK`.
    pub const IPC_LOCK: u32 = 14;
    /// Number of `CAP_SYS_PTRACE`.
    pub const SYS_PTRACE: u32 = 19;
    /// Number of `CAP_SYS_ADMIN`.
    pub const SYS_ADMIN: u32 = 21;
    /// Number of `CAP_SYS_RESOURCE`.
    pub const SYS_RESOURCE: u32 = 24;

    /// Whether the capability of that number is in the set.
    pub fn has(self, number: u32) -> bool {
        self.0.checked_shr(number).is_some_and(|bits| bits & 1 == 1)
    }
}

/// State of the system call filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Seccomp {
    /// None.
    Off,
    /// The four calls of strict mode.
    Strict,
    /// A filter, whose rules no file tells.
    Filter,
}

/// Limits of a control group. What devices it may open no file tells: see [`Devices`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cgroup {
    /// 1 or 2.
    pub version: Fact<u32>,
    /// Bytes of memory.
    pub memory: Fact<Bound>,
    /// Processors, in thousandths.
    pub millicpus: Fact<Bound>,
}

/// Device nodes below `dev`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Devices {
    /// The nodes that matter here and are there, by path below `dev` (`infiniband/uverbs0`,
    /// `infiniband/rdma_cm`, `nvidia0`, `nvidiactl`, `nvidia-uvm`, `gdrdrv`, `kfd`,
    /// `dri/renderD128`, `nvidia-caps-imex-channels/channel0`), and whether the file's mode lets
    /// this process read and write. A control group may still refuse; only opening tells.
    pub nodes: BTreeMap<String, Access>,
}

/// What a file's mode grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Read and write.
    Granted,
    /// Not both.
    Refused,
}
