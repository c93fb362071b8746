//! The memory that the kernel reports, and checks whether a size fits into it.

use anyhow::{Result, ensure};
use tokenyard_machine::bytes;

/// The text of a small file of the kernel, without the white space around it.
pub(crate) fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A value of `/proc/meminfo`, in bytes.
pub(crate) fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Bytes that this process may still use: of the machine, and of its container.
pub(crate) fn available() -> Option<u64> {
    let machine = meminfo(&read("/proc/meminfo")?, "MemAvailable")?;
    let container = container_memory().map(|c| c.limit.saturating_sub(c.used));
    Some(container.map_or(machine, |c| c.min(machine)))
}

/// Refuses a need for more memory than there is, before anything is allocated. `what` names the
/// thing that needs it; `fix` names the remedy.
pub(crate) fn ensure_room(needed: u64, what: &str, fix: &str) -> Result<()> {
    let Some(available) = available() else { return Ok(()) };
    ensure!(
        needed <= available,
        "{what} takes about {} of memory; {} are available here. Fix: {fix}",
        bytes(needed),
        bytes(available)
    );
    Ok(())
}

/// Memory of the container that this process is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContainerMemory {
    /// Bytes it may use.
    pub(crate) limit: u64,
    /// Bytes that it uses and cannot reclaim.
    pub(crate) used: u64,
}

/// The memory limit of the control group, if it has one.
pub(crate) fn container_memory() -> Option<ContainerMemory> {
    let number = |path: &str| read(path)?.parse::<u64>().ok();
    // Version 2, then version 1, both as a container sees its own group.
    let (limit, current, stat) = match number("/sys/fs/cgroup/memory.max") {
        Some(limit) => (limit, "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
        None => (
            number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?,
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
            "/sys/fs/cgroup/memory/memory.stat",
        ),
    };
    // Version 1 writes "no limit" as a number near 2^63.
    if limit >= 1 << 60 {
        return None;
    }
    let cache = read(stat).and_then(|text| stat_value(&text, "inactive_file")).unwrap_or(0);
    Some(ContainerMemory { limit, used: number(current)?.saturating_sub(cache) })
}

fn stat_value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_kernel_are_read_in_bytes() {
        let text = "MemTotal:       16 kB\nMemAvailable:   2048 kB\n";
        assert_eq!(meminfo(text, "MemAvailable"), Some(2 << 20));
        assert_eq!(meminfo(text, "Mem"), None);
        assert_eq!(stat_value("anon 5\ninactive_file 77\n", "inactive_file"), Some(77));
    }
}
