//! How far each NIC is from each GPU.

use serde::Serialize;
use tokenyard_machine::{Distance, Fact, Machine, Nic};

use super::columns::Matrix;
use crate::output::People;

/// One NIC and one GPU.
#[derive(Debug, Serialize)]
pub(super) struct Pair<'a> {
    nic: &'a str,
    /// The GPU's index on the node.
    gpu: u32,
    distance: Distance,
}

/// All pairs, by NIC and then by GPU.
pub(super) fn of(machine: &Machine) -> Vec<Pair<'_>> {
    let nics = machine.nics.iter().filter(|nic| nic.is_hardware());
    let pairs = nics.flat_map(|nic| {
        machine.gpus.iter().map(move |gpu| Pair {
            nic: &nic.name,
            gpu: gpu.index,
            distance: match nic.pci {
                Fact::Known(at) => machine.distance(gpu.pci, at),
                _ => Distance::Unknown,
            },
        })
    });
    pairs.collect()
}

/// Prints a line for each NIC, with its NUMA node, and a column for each GPU.
pub(super) fn print(machine: &Machine, pairs: &[Pair<'_>], people: People) {
    let nics: Vec<&Nic> = machine.nics.iter().filter(|nic| nic.is_hardware()).collect();
    let gpus = machine.gpus.len();
    if nics.is_empty() || gpus == 0 {
        return;
    }
    let numa = |nic: &Nic| nic.numa_node.known().map_or("?".to_owned(), u32::to_string);
    Matrix {
        heads: &["NIC", "NUMA"],
        rows: nics.iter().map(|nic| vec![nic.name.clone(), numa(nic)]).collect(),
        columns: machine.gpus.iter().map(|gpu| format!("GPU {}", gpu.index)).collect(),
        word: &|nic, gpu| {
            pairs.get(nic * gpus + gpu).map_or("?", |pair| word(pair.distance)).to_owned()
        },
    }
    .print(people);
    people.say(LEGEND);
}

/// The meanings of the words of distances.
pub(super) const LEGEND: &str = "\
PIX below one switch, PXB below one root port, PHB below one host bridge,
NODE on one NUMA node, SYS on another, ? not known";

/// The word that other tools, such as `nvidia-smi topo`, use for a distance.
pub(super) fn word(distance: Distance) -> &'static str {
    match distance {
        Distance::SameSwitch => "PIX",
        Distance::SameRootPort => "PXB",
        Distance::SameHostBridge => "PHB",
        Distance::SameNumaNode => "NODE",
        Distance::Across => "SYS",
        Distance::Unknown => "?",
    }
}
