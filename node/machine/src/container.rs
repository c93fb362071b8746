//! Rights of this process, the container around it, and the device nodes that it sees.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::limits::bound;
use crate::tree::Tree;
use crate::{Bound, Fact};

/// The rights of this process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Container {
    /// The container runtime that seems to be around the process; known and `None` where there is
    /// no sign of one.
    pub runtime: Fact<Option<String>>,
    /// Effective user.
    pub user: Fact<u32>,
    /// Effective capabilities.
    pub capabilities: Fact<Capabilities>,
    /// System call filter.
    pub seccomp: Fact<Seccomp>,
    /// The process is in a user namespace of its own, so that its capabilities mean little.
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
    /// A filter; no file shows its rules.
    Filter,
}

/// Limits of a control group. No file shows which devices it may open: see [`Devices`].
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
    /// this process read and write. A control group may still refuse; only an attempt to open the
    /// node shows it.
    pub nodes: BTreeMap<String, Access>,
}

/// The access that a file's mode grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Read and write.
    Granted,
    /// Not both.
    Refused,
}

/// Variables that are recorded: those with these names, or with these as prefixes.
const VARIABLES: [&str; 7] = [
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "KUBERNETES_SERVICE_HOST",
    "container",
];
const PREFIXES: [&str; 7] = ["NCCL_", "NVSHMEM_", "FI_", "NVIDIA_", "UCX_", "RDMAV_", "MLX5_"];
/// Most device nodes that are read.
const MOST_NODES: usize = 1024;

pub(crate) fn read(tree: &Tree) -> Container {
    let status = tree.text("proc/self/status");
    let line = |name: &str| match &status {
        Fact::Known(text) => text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map_or(Fact::Missing, |value| Fact::Known(value.trim().to_owned())),
        other => other.clone(),
    };
    let environment = environment(&tree.text("proc/self/environ").get().unwrap_or_default());
    Container {
        runtime: runtime(tree, &environment),
        // Real, effective, saved, file system.
        user: line("Uid").and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok()),
        capabilities: line("CapEff")
            .and_then(|digits| u64::from_str_radix(&digits, 16).ok().map(Capabilities)),
        seccomp: line("Seccomp").and_then(|mode| match mode.as_str() {
            "0" => Some(Seccomp::Off),
            "1" => Some(Seccomp::Strict),
            "2" => Some(Seccomp::Filter),
            _ => None,
        }),
        in_user_namespace: tree.word("proc/self/uid_map", |text| {
            let words: Vec<&str> = text.split_whitespace().collect();
            Some(words != ["0", "0", "4294967295"])
        }),
        cgroup: cgroup(tree),
        environment,
    }
}

fn environment(text: &str) -> BTreeMap<String, String> {
    text.split('\0')
        .filter_map(|pair| pair.split_once('='))
        .filter(|(name, _)| {
            VARIABLES.contains(name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        })
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn runtime(tree: &Tree, environment: &BTreeMap<String, String>) -> Fact<Option<String>> {
    let group = tree.text("proc/self/cgroup");
    let named = |text: &str| group.known().is_some_and(|group| group.contains(text));
    let runtime = if environment.contains_key("KUBERNETES_SERVICE_HOST") || named("kubepods") {
        "kubernetes"
    } else if tree.has("run/.containerenv") {
        "podman"
    } else if tree.has(".dockerenv") || named("/docker") {
        "docker"
    } else if let Some(name) = environment.get("container") {
        name
    } else {
        return group.and_then(|_| Some(None));
    };
    Fact::Known(Some(runtime.to_owned()))
}

/// Limits of the group and of all groups above it; the tightest applies.
fn cgroup(tree: &Tree) -> Cgroup {
    let groups = tree.text("proc/self/cgroup").get().unwrap_or_default();
    if tree.has("sys/fs/cgroup/cgroup.controllers") {
        let own = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
        let tightest = |read: &dyn Fn(&str) -> Fact<Bound>| {
            above(own)
                .map(|group| read(&format!("sys/fs/cgroup{group}")))
                .filter_map(Fact::get)
                .min()
                .map_or(Fact::Missing, Fact::Known)
        };
        return Cgroup {
            version: Fact::Known(2),
            memory: tightest(&|group| tree.word(&format!("{group}/memory.max"), bound)),
            millicpus: tightest(&|group| tree.word(&format!("{group}/cpu.max"), cpu_max)),
        };
    }
    if !tree.has("sys/fs/cgroup/memory") {
        return Cgroup::default();
    }
    let quota = tree.value::<i64>("sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    let period = tree.value::<u64>("sys/fs/cgroup/cpu/cpu.cfs_period_us");
    Cgroup {
        version: Fact::Known(1),
        // Without a limit the kernel writes the largest multiple of a page.
        memory: tree.word("sys/fs/cgroup/memory/memory.limit_in_bytes", |text| {
            let bytes: u64 = text.parse().ok()?;
            Some(if bytes >= 1 << 62 { Bound::Unlimited } else { Bound::At(bytes) })
        }),
        millicpus: quota.and_then(|quota| match u64::try_from(quota) {
            Err(_) => Some(Bound::Unlimited),
            Ok(quota) => Some(Bound::At(quota.checked_mul(1000)?.checked_div(period.get()?)?)),
        }),
    }
}

/// A group's path, then those above it, ending at the empty one.
fn above(path: &str) -> impl Iterator<Item = &str> {
    let path = path.trim_end_matches('/');
    std::iter::successors(Some(path), |path| path.rsplit_once('/').map(|(above, _)| above))
}

/// `max 100000`, or `200000 100000`: microseconds of a period.
fn cpu_max(text: &str) -> Option<Bound> {
    let (quota, period) = text.split_once(' ')?;
    match bound(quota)? {
        Bound::Unlimited => Some(Bound::Unlimited),
        Bound::At(quota) => {
            Some(Bound::At(quota.checked_mul(1000)?.checked_div(period.trim().parse().ok()?)?))
        }
    }
}

pub(crate) fn read_devices(tree: &Tree) -> Devices {
    let mut names: Vec<String> = tree
        .list("dev")
        .into_iter()
        .filter(|name| {
            // `nvidia-caps-imex-channels` and the like are folders.
            matches!(name.as_str(), "gdrdrv" | "kfd" | "hugepages" | "knem" | "xpmem")
                || name.starts_with("nvidia") && !name.starts_with("nvidia-caps")
        })
        .collect();
    for folder in ["infiniband", "dri", "nvidia-caps", "nvidia-caps-imex-channels"] {
        let inside = tree.list(&format!("dev/{folder}")).into_iter();
        names.extend(
            inside.filter(|name| !name.starts_with("by-")).map(|name| format!("{folder}/{name}")),
        );
    }
    let nodes = names
        .into_iter()
        .take(MOST_NODES)
        .map(|name| {
            let access = tree.access(&format!("dev/{name}"));
            (name, access)
        })
        .collect();
    Devices { nodes }
}

#[cfg(test)]
#[path = "container_tests.rs"]
mod tests;
