//! The processors near a NIC, from sysfs.

use std::path::{Path, PathBuf};

use tokenyard_sys_fabric::types::fi_pci_attr;

/// The processors near a NIC; empty where they are unknown.
pub(super) fn cpus(pci: Option<fi_pci_attr>, interface: &str) -> Vec<u32> {
    let device: Option<PathBuf> = match pci {
        Some(at) => Some(Path::new("/sys/bus/pci/devices").join(format!(
            "{:04x}:{:02x}:{:02x}.{}",
            at.domain_id, at.bus_id, at.device_id, at.function_id
        ))),
        None if interface.contains('/') => None,
        None => Some(Path::new("/sys/class/net").join(interface).join("device")),
    };
    let list = device.and_then(|path| std::fs::read_to_string(path.join("local_cpulist")).ok());
    list.as_deref().and_then(parse).unwrap_or_default()
}

/// The processors that this thread may run on.
pub(super) fn allowed(cpu: u32) -> bool {
    let cpu = cpu as usize;
    let known = cpu < rustix::thread::CpuSet::MAX_CPU;
    rustix::thread::sched_getaffinity(None).map_or(true, |set| known && set.is_set(cpu))
}

/// Reads the kernel's list format: `0-3,8,10-11`.
fn parse(list: &str) -> Option<Vec<u32>> {
    const MOST: u32 = 65_536;
    let mut cpus = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_that_no_set_can_hold_is_not_allowed() {
        assert!(!allowed(1 << 20));
    }

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(parse("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse("\n"), Some(vec![]));
        for bad in ["a", "1-", "-1", "1-99999999"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_nic_that_is_not_there_has_no_processors() {
        assert!(cpus(None, "nothing0").is_empty());
        assert!(cpus(None, "../../etc").is_empty());
        let pci = fi_pci_attr { domain_id: 0xffff, bus_id: 0xff, device_id: 31, function_id: 7 };
        assert!(cpus(Some(pci), "x").is_empty());
    }
}
