//! The `auto` topology: where this process is, as the operating system tells.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use tokenyard_core::topology::{Discover, Place, Topology};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::config::TopologyConfig;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NETWORK: &str = "/proc/self/ns/net";
const STATUS: &str = "/proc/self/status";
const NODES: &str = "/sys/devices/system/node";

/// Finds the machine, the NUMA node and the number of processors of a rank without a device.
///
/// Two ranks are on one machine if they run under the same boot of the same kernel and in the same
/// network namespace: the `shm` transport finds its peers by socket names of that namespace.
#[derive(Debug)]
pub struct HostTopology;

impl Topology for HostTopology {
    const NAME: &'static str = "auto";
    const ABOUT: &'static str = "places from the operating system; ranks without a device";
    type Config = TopologyConfig;

    fn discover(config: &TopologyConfig, _: &Discover) -> Result<Place> {
        let host = match &config.host {
            Some(name) => named_host(name)?,
            None => found_host()?,
        };
        let allowed = allowed_processors();
        Ok(Place {
            host,
            device: None,
            numa_node: allowed.as_ref().and_then(|cpus| single_node(cpus, Path::new(NODES))),
            processors: allowed.map_or(0, |cpus| cpus.len() as u32),
        })
    }
}

fn named_host(name: &str) -> Result<String> {
    if name.is_empty() || name.len() >= abi::TY_HOST_BYTES {
        return Err(Error::new(
            ErrorKind::Config,
            "discover",
            format!("`host` has {} bytes; expected 1 to {}", name.len(), abi::TY_HOST_BYTES - 1),
        )
        .with_fix("shorten `host` in [topology.auto]"));
    }
    Ok(name.to_owned())
}

fn found_host() -> Result<String> {
    let unreadable = |path: &str, error: std::io::Error| {
        Error::system("discover", format!("the machine's identity is unknown: {path}"), error)
            .with_fix("set `host` in [topology.auto] to a name that is unique to this machine")
    };
    let boot = fs::read_to_string(BOOT_ID).map_err(|e| unreadable(BOOT_ID, e))?;
    let network = fs::read_link(NETWORK).map_err(|e| unreadable(NETWORK, e))?;
    let network = network.to_string_lossy();
    let inode: String = network.chars().filter(char::is_ascii_digit).collect();
    named_host(&format!("{}-{inode}", boot.trim()))
}

/// The logical processors this process may run on; nothing if the system does not say.
fn allowed_processors() -> Option<BTreeSet<u32>> {
    let status = fs::read_to_string(STATUS).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    parse_cpu_list(list)
}

/// The NUMA node that has all of `cpus`, if there is one.
fn single_node(cpus: &BTreeSet<u32>, nodes: &Path) -> Option<u32> {
    fs::read_dir(nodes).ok()?.flatten().find_map(|entry| {
        let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
        let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
        cpus.is_subset(&parse_cpu_list(&list)?).then_some(node)
    })
}

/// Reads the kernel's list format: `0-3,8`. Nothing for an empty or a malformed list.
fn parse_cpu_list(list: &str) -> Option<BTreeSet<u32>> {
    /// More processors than any machine has: the file is not what it should be.
    const MOST: u32 = 1 << 20;
    let mut cpus = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MOST {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASK: Discover = Discover { rank: 0, ranks: 1, local_rank: 0 };

    fn with_host(host: &str) -> TopologyConfig {
        TopologyConfig { host: Some(host.into()) }
    }

    #[test]
    fn the_found_host_is_stable_and_fits_the_abi() {
        let first = HostTopology::discover(&TopologyConfig::default(), &ASK).unwrap();
        let second = HostTopology::discover(&TopologyConfig::default(), &ASK).unwrap();
        assert_eq!(first, second);
        assert!((38..abi::TY_HOST_BYTES).contains(&first.host.len()), "{}", first.host);
        assert_eq!(first.device, None);
    }

    #[test]
    fn processors_are_those_of_the_affinity() {
        let place = HostTopology::discover(&TopologyConfig::default(), &ASK).unwrap();
        let affinity = rustix::thread::sched_getaffinity(None).unwrap();
        assert_eq!(place.processors, affinity.count());
    }

    #[test]
    fn a_named_host_overrides_and_is_bounded() {
        let place = HostTopology::discover(&with_host("yard-7"), &ASK).unwrap();
        assert_eq!(place.host, "yard-7");
        for bad in ["", &"x".repeat(64)] {
            let error = HostTopology::discover(&with_host(bad), &ASK).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("expected 1 to 63"), "{error}");
        }
    }

    #[test]
    fn cpu_lists_are_read_and_nonsense_is_not() {
        assert_eq!(parse_cpu_list(" 0-2,8\n"), Some(BTreeSet::from([0, 1, 2, 8])));
        for bad in ["", "3-1", "a", "1,", "0-4294967295"] {
            assert_eq!(parse_cpu_list(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_numa_node_is_named_only_if_it_holds_every_processor() {
        let nodes = std::env::temp_dir().join(format!("tokenyard-nodes-{}", std::process::id()));
        for (node, cpus) in [("node0", "0-3\n"), ("node1", "4-7\n")] {
            fs::create_dir_all(nodes.join(node)).unwrap();
            fs::write(nodes.join(node).join("cpulist"), cpus).unwrap();
        }
        let found = [
            single_node(&BTreeSet::from([5, 6]), &nodes),
            single_node(&BTreeSet::from([3, 4]), &nodes),
        ];
        fs::remove_dir_all(&nodes).unwrap();
        assert_eq!(found, [Some(1), None]);
    }
}
