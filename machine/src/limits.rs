//! Limits of this process, and memory set aside.

use serde::Serialize;

use crate::Fact;

/// Limits of this process and memory of the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Limits {
    /// Bytes that may be locked in memory (`ulimit -l`).
    pub locked_memory: Fact<Limit>,
    /// Open files.
    pub open_files: Fact<Limit>,
    /// Memory of the node in bytes.
    pub memory_total: Fact<u64>,
    /// Memory that new processes may get, in bytes.
    pub memory_available: Fact<u64>,
    /// Pools of huge pages.
    pub huge_pages: Vec<HugePages>,
    /// `always`, `madvise` or `never`.
    pub transparent_huge_pages: Fact<String>,
    /// Size of `/dev/shm` in bytes where the mount says it; missing if it is not mounted.
    pub shared_memory: Fact<u64>,
    /// Where `hugetlbfs` is mounted.
    pub huge_mounts: Vec<String>,
}

/// A soft and a hard limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// What holds now.
    pub soft: Bound,
    /// Up to where the process may raise it.
    pub hard: Bound,
}

/// A limit's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// At most this.
    At(u64),
    /// No limit.
    Unlimited,
}

/// A pool of huge pages of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HugePages {
    /// Bytes of a page.
    pub page: u64,
    /// Pages of the pool.
    pub total: Fact<u64>,
    /// Pages that nobody uses.
    pub free: Fact<u64>,
}
