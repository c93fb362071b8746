//! How far each NIC is from each GPU.

use serde::Serialize;
use tokenyard_machine::{Distance, Fact, Machine};

use crate::output::{People, Table};

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
    let mut nics = machine.nics.iter().filter(|nic| nic.is_hardware()).peekable();
    if nics.peek().is_none() {
        return;
    }
    let gpus: Vec<String> = machine.gpus.iter().map(|gpu| format!("GPU {}", gpu.index)).collect();
    let heads: Vec<&str> =
        ["NIC", "NUMA"].into_iter().chain(gpus.iter().map(String::as_str)).collect();
    let mut table = Table::new(&heads);
    for nic in nics {
        let numa = nic.numa_node.known().map_or("?".to_owned(), u32::to_string);
        let own = pairs.iter().filter(|pair| pair.nic == nic.name);
        let words = own.map(|pair| word(pair.distance).into());
        table.row([nic.name.as_str().into(), numa.as_str().into()].into_iter().chain(words));
    }
    people.say(format_args!("\n{}", table.render(people)));
    if gpus.is_empty() {
        return;
    }
    people.say(
        "PIX below one switch, PXB below one root port, PHB below one host bridge, \
         NODE on one NUMA node, SYS on another",
    );
}

/// As other tools write it.
fn word(distance: Distance) -> &'static str {
    match distance {
        Distance::SameSwitch => "PIX",
        Distance::SameRootPort => "PXB",
        Distance::SameHostBridge => "PHB",
        Distance::SameNumaNode => "NODE",
        Distance::Across => "SYS",
        Distance::Unknown => "?",
    }
}
