//! `--topology`: how all GPUs and NICs are linked, as `nvidia-smi topo -m` shows it.

use std::time::Duration;

use anyhow::{Context, Result};
use tokenyard_machine::commands::{Answer, capture_topology, recorded_topology};
use tokenyard_machine::{Device, DeviceKind, Fact, Link, Machine, Topology, Tree};

use super::columns::{Matrix, Wrapped, wrapped_row};
use super::{DoctorArgs, distances};
use crate::output::{Cell, People, Table};

/// How long `nvidia-smi topo -m` may take, which asks the driver about each pair.
const PATIENCE: Duration = Duration::from_secs(10);
/// The command, as people write it.
const COMMAND: &str = "nvidia-smi topo -m";

/// The node, and the driver's own matrix.
pub(super) struct Linked {
    pub(super) topology: Topology,
    answer: Answer,
}

/// Reads the topology of a node that was read, with the driver's matrix where it has NVIDIA's GPUs.
pub(super) fn of(args: &DoctorArgs, machine: &Machine) -> Result<Linked> {
    let answer = match &args.root {
        Some(root) => {
            let tree = Tree::open(root).with_context(|| format!("--root: {}", root.display()))?;
            recorded_topology(&tree)
        }
        None => capture_topology(PATIENCE),
    };
    let topology = Topology::of(machine, answer.as_deref().ok());
    Ok(Linked { topology, answer })
}

/// Prints the devices, then blocks of the matrix.
pub(super) fn print(found: &Linked, people: People) {
    let Topology { devices, links } = &found.topology;
    if devices.is_empty() {
        people.say("this node has no GPU and no RDMA device");
        return;
    }
    print_devices(devices, people);
    let link = |a: &Device, b: &Device| match a.name == b.name {
        true => "X".to_owned(),
        false => found.topology.link(&a.name, &b.name).map_or("?".to_owned(), word),
    };
    for kind in [DeviceKind::Gpu, DeviceKind::Nic] {
        let columns: Vec<&Device> = devices.iter().filter(|device| device.kind == kind).collect();
        if !columns.is_empty() {
            Matrix {
                heads: &[""],
                rows: devices.iter().map(|device| vec![device.name.clone()]).collect(),
                columns: columns.iter().map(|device| device.name.clone()).collect(),
                word: &|row, column| link(&devices[row], columns[column]),
            }
            .print(people);
        }
    }
    people.say("\nX itself, NV# over # NVLinks, XGMI over xGMI; else by PCI Express:");
    people.say(distances::LEGEND);
    if links.iter().any(|link| link.nvlinks.known().is_none()) {
        people.say("With ? behind a word it is not known whether NVLinks are there, too:");
        match &found.answer {
            Ok(_) => {
                people.say(format_args!("{COMMAND} lists other GPUs, or nothing that can be read"))
            }
            Err(why) => people.say(why.in_words(COMMAND)),
        }
    }
}

fn print_devices(devices: &[Device], people: People) {
    let mut table = Table::new(&["device", "PCI", "NUMA", "cores", "name"]);
    fn shown<T: ToString>(fact: &Fact<T>) -> String {
        fact.known().map_or("?".to_owned(), T::to_string)
    }
    for device in devices {
        let heads = [device.name.clone(), shown(&device.pci), shown(&device.numa_node)];
        let (processors, name) = (shown(&device.processors), shown(&device.model));
        let heads = heads.into_iter().map(Cell::from).collect();
        wrapped_row(&mut table, heads, [Wrapped(&processors, 26), Wrapped(&name, 24)]);
    }
    people.say(table.render(people));
}

fn word(link: &Link) -> String {
    let distance = distances::word(link.distance);
    match link.nvlinks {
        Fact::Known(0) if link.xgmi => "XGMI".to_owned(),
        Fact::Known(0) => distance.to_owned(),
        Fact::Known(count) => format!("NV{count}"),
        _ if distance == "?" => distance.to_owned(),
        _ => format!("{distance}?"),
    }
}
