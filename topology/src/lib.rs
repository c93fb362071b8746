//! The `auto` topology: the place of this process, from the operating system.
//!
//! Watched by the tests in these files, and `tests/on_trees` on recorded nodes; `docs/topology.md` has its rules.

mod built_in;
mod config;
mod nics;
// In the folder of tests, and a module of this one: it calls what no other crate may call.
#[cfg(test)]
#[path = "../tests/on_trees/mod.rs"]
mod on_trees;

use std::collections::BTreeSet;
use std::fs;

use tokenyard_core::machine::identity;
use tokenyard_core::topology::{Discover, Place, Topology};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_machine::numa::cpu_list;
use tokenyard_machine::{Gpu, Machine, NicFamily, NumaNode, Seat, Tree, gpu_of_rank};

pub use built_in::link;
pub use config::{NicChoice, Rails, TopologyConfig};

const STATUS: &str = "/proc/self/status";

/// Finds the machine, the GPU, the NUMA node, the NICs and the number of processors of a rank.
///
/// Two ranks are on one machine if they run under the same boot of the same kernel and in the same network
/// namespace, because the `shm` transport finds its peers by socket names of that namespace.
#[derive(Debug)]
pub struct HostTopology;

impl Topology for HostTopology {
    const NAME: &'static str = "auto";
    const ABOUT: &'static str = "places from the operating system: GPU, NUMA node, nearest NICs";
    type Config = TopologyConfig;

    fn discover(config: &TopologyConfig, ask: &Discover) -> Result<Place> {
        let host = match &config.host {
            Some(name) => named_host(name)?,
            None => found_host()?,
        };
        let machine = Machine::read_places(&Tree::system());
        place(&machine, config, host, ask.local_rank, allowed_processors())
    }
}

/// The place of a rank on `machine`: on a host of that name, with that index, on those processors.
///
/// # Errors
/// A NIC that the config names is absent, or cannot be used.
pub(crate) fn place(
    machine: &Machine,
    config: &TopologyConfig,
    host: String,
    local_rank: u32,
    allowed: Option<BTreeSet<u32>>,
) -> Result<Place> {
    let driven = gpu_of_rank(machine, local_rank).unwrap_or_else(|why| {
        tracing::warn!("the GPU of local rank {local_rank} is unknown: {why}");
        None
    });
    let bound = allowed.as_ref().and_then(|cpus| single_node(cpus, &machine.numa));
    let numa_node = driven.and_then(|(_, gpu)| gpu.numa_node.get()).or(bound);
    let seat = Seat { gpu: driven.map(|(_, gpu)| gpu.pci), numa_node };
    let chosen = nics::choose(machine, config.nics.as_ref(), seat, local_rank)?;
    tracing::debug!("local rank {local_rank}: {seat:?} is nearest to {}", chosen.names.join(", "));
    Ok(Place {
        host,
        device: driven.map(|(ordinal, _)| ordinal),
        numa_node: bound.or(numa_node),
        processors: allowed.map_or(0, |cpus| cpus.len() as u32),
        any_rails: config.rails == Rails::Any || reach_all(machine, &chosen.names),
        missing_nic: match (driven, &config.nics) {
            (Some((_, gpu)), None) => missing_nic(machine, gpu),
            _ => None,
        },
        nics: chosen.names,
        nics_given: chosen.given,
    })
}

/// Text about the NIC that is missing near a GPU or cannot be used, with the fix, in the doctor's
/// words.
fn missing_nic(machine: &Machine, gpu: &Gpu) -> Option<String> {
    let missing = machine.missing_rails();
    let missing = missing.iter().find(|missing| missing.gpu.pci == gpu.pci)?;
    Some(format!("{missing}; to fix it: {}", missing.fix()))
}

/// True if the NICs of these names reach the NICs of all other names: EFA's fabric has no rails.
fn reach_all(machine: &Machine, names: &[String]) -> bool {
    let is_efa = |name: &String| {
        machine.nics.iter().any(|nic| nic.name == *name && nic.family == NicFamily::Efa)
    };
    !names.is_empty() && names.iter().all(is_efa)
}

fn named_host(name: &str) -> Result<String> {
    if name.is_empty() || name.len() >= abi::TY_HOST_BYTES {
        return Err(Error::new(
            ErrorKind::Config,
            "discover",
            format!("`host` has {} bytes; expected 1 to {}", name.len(), abi::TY_HOST_BYTES - 1),
        )
        .with_key("host")
        .with_fix("shorten `host` in [topology.auto]"));
    }
    Ok(name.to_owned())
}

fn found_host() -> Result<String> {
    let unreadable = |(path, error): (&str, std::io::Error)| {
        Error::system("discover", format!("the machine's identity is unknown: {path}"), error)
            .with_fix("set `host` in [topology.auto] to a name that is unique to this machine")
    };
    named_host(&identity().map_err(unreadable)?)
}

/// The logical processors that this process may run on; none if the system does not report them.
fn allowed_processors() -> Option<BTreeSet<u32>> {
    let status = fs::read_to_string(STATUS).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    cpu_list(list)
}

/// The NUMA node that has all of `cpus`, if there is one.
fn single_node(cpus: &BTreeSet<u32>, nodes: &[NumaNode]) -> Option<u32> {
    let has_all = |node: &&NumaNode| node.processors.known().is_some_and(|of| cpus.is_subset(of));
    nodes.iter().find(has_all).map(|node| node.node)
}

#[cfg(test)]
mod tests {
    use tokenyard_machine::Fact;

    use super::*;

    const ASK: Discover = Discover { rank: 0, ranks: 1, local_rank: 0 };

    fn with_host(host: &str) -> TopologyConfig {
        TopologyConfig { host: Some(host.into()), ..TopologyConfig::default() }
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
        let place = HostTopology::discover(&with_host("communicator-7"), &ASK).unwrap();
        assert_eq!(place.host, "communicator-7");
        for bad in ["", &"x".repeat(64)] {
            let error = HostTopology::discover(&with_host(bad), &ASK).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains("expected 1 to 63"), "{error}");
        }
    }

    #[test]
    fn a_numa_node_is_named_only_if_it_holds_every_processor() {
        let node = |node: u32, first: u32| NumaNode {
            node,
            processors: Fact::Known((first..first + 4).collect()),
            memory: Fact::Missing,
            distances: Fact::Missing,
        };
        let nodes = [node(0, 0), node(1, 4)];
        let found = [
            single_node(&BTreeSet::from([5, 6]), &nodes),
            single_node(&BTreeSet::from([3, 4]), &nodes),
        ];
        assert_eq!(found, [Some(1), None]);
    }
}
