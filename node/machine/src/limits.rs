//! Limits of this process, and memory set aside.

use serde::Serialize;

use crate::Fact;
use crate::numa::kilobytes;
use crate::tree::Tree;

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
    /// Size of `/dev/shm` in bytes where the mount states it; missing if it is not mounted.
    pub shared_memory: Fact<u64>,
    /// The mount points of `hugetlbfs`.
    pub huge_mounts: Vec<String>,
}

/// A soft and a hard limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// The limit that applies now.
    pub soft: Bound,
    /// The value up to which the process may raise it.
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
    /// Pages that no process uses.
    pub free: Fact<u64>,
}

const POOLS: &str = "sys/kernel/mm/hugepages";

pub(crate) fn read(tree: &Tree) -> Limits {
    let limits = tree.text("proc/self/limits");
    let of = |name: &str| match &limits {
        Fact::Known(text) => limit(text, name),
        other => other.unknown(),
    };
    let mounts = tree.text("proc/self/mountinfo").get().unwrap_or_default();
    Limits {
        locked_memory: of("Max locked memory"),
        open_files: of("Max open files"),
        memory_total: tree.word("proc/meminfo", |text| kilobytes(text, "MemTotal:")),
        memory_available: tree.word("proc/meminfo", |text| kilobytes(text, "MemAvailable:")),
        huge_pages: tree.list(POOLS).iter().filter_map(|name| pool(tree, name)).collect(),
        transparent_huge_pages: tree.word("sys/kernel/mm/transparent_hugepage/enabled", |text| {
            let (_, rest) = text.split_once('[')?;
            Some(rest.split_once(']')?.0.to_owned())
        }),
        shared_memory: mounted(&mounts)
            .filter(|mount| mount.point == "/dev/shm")
            .last()
            .and_then(|mount| size_option(mount.options))
            .map_or(Fact::Missing, Fact::Known),
        huge_mounts: mounted(&mounts)
            .filter(|mount| mount.kind == "hugetlbfs")
            .map(|mount| mount.point.to_owned())
            .collect(),
    }
}

fn pool(tree: &Tree, name: &str) -> Option<HugePages> {
    let kilobytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    Some(HugePages {
        page: kilobytes.checked_mul(1024)?,
        total: tree.value(&format!("{POOLS}/{name}/nr_hugepages")),
        free: tree.value(&format!("{POOLS}/{name}/free_hugepages")),
    })
}

/// A line of `proc/self/limits`: name, soft, hard, unit, with many spaces between.
fn limit(text: &str, name: &str) -> Fact<Limit> {
    let Some(rest) = text.lines().find_map(|line| line.strip_prefix(name)) else {
        return Fact::Missing;
    };
    let mut words = rest.split_whitespace().map(bound);
    match (words.next().flatten(), words.next().flatten()) {
        (Some(soft), Some(hard)) => Fact::Known(Limit { soft, hard }),
        _ => Fact::Garbled,
    }
}

/// `unlimited` (of limits), `max` (of control groups), or a number.
pub(crate) fn bound(word: &str) -> Option<Bound> {
    match word {
        "unlimited" | "max" => Some(Bound::Unlimited),
        number => number.parse().ok().map(Bound::At),
    }
}

struct Mount<'a> {
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

/// Lines of `mountinfo`: the mount point is the fifth word; kind, source and options follow ` - `.
fn mounted(text: &str) -> impl Iterator<Item = Mount<'_>> {
    text.lines().filter_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let mut back = back.split_whitespace();
        let (kind, _, options) = (back.next()?, back.next()?, back.next()?);
        Some(Mount { point: front.split_whitespace().nth(4)?, kind, options })
    })
}

/// `size=65536k` in bytes.
fn size_option(options: &str) -> Option<u64> {
    let size = options.split(',').find_map(|option| option.strip_prefix("size="))?;
    let (number, unit) = match size.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1 << 10),
        None => match size.strip_suffix(['m', 'M']) {
            Some(number) => (number, 1 << 20),
            None => match size.strip_suffix(['g', 'G']) {
                Some(number) => (number, 1 << 30),
                None => (size, 1),
            },
        },
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_pools_and_mounts_are_read() {
        let tree = Tree::recorded(
            "proc/self/limits = Limit Soft Hard Units\\nMax locked memory         65536                unlimited            bytes\n\
             proc/meminfo = MemTotal:  1024 kB\\nMemAvailable: 512 kB\n\
             sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages = 16\n\
             sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages !denied\n\
             sys/kernel/mm/transparent_hugepage/enabled = always [madvise] never\n\
             proc/self/mountinfo = 27 20 0:22 / /dev/shm rw - tmpfs shm rw,size=65536k\\n28 20 0:23 / /dev/hugepages rw shared:2 - hugetlbfs hugetlbfs rw,pagesize=2M\n",
        )
        .unwrap();
        let limits = read(&tree);
        let locked = Limit { soft: Bound::At(65536), hard: Bound::Unlimited };
        assert_eq!(limits.locked_memory, Fact::Known(locked));
        assert_eq!(limits.open_files, Fact::Missing);
        assert_eq!(limits.memory_available, Fact::Known(512 << 10));
        let pool = HugePages { page: 2 << 20, total: Fact::Known(16), free: Fact::Denied };
        assert_eq!(limits.huge_pages, [pool]);
        assert_eq!(limits.transparent_huge_pages, Fact::Known("madvise".into()));
        assert_eq!(limits.shared_memory, Fact::Known(64 << 20));
        assert_eq!(limits.huge_mounts, ["/dev/hugepages"]);
    }

    #[test]
    fn a_limit_that_is_no_number_is_garbled() {
        assert_eq!(limit("Max open files  many  few  files", "Max open files"), Fact::Garbled);
    }
}
