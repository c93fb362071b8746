//! Questions about NICs that several rules share.

use tokenyard_machine::{Nic, NicFamily, PciFunction, Port};

use crate::DoctorReport;

/// The fix where a command was not run, as of a node that is read below a root.
pub(crate) const NOT_RUN: &str = "run the doctor on the node itself, or put what the command prints into the folder \
                                  tokenyard below the root (node/machine/trees/README.md)";

/// NICs whose hardware is here: soft-RoCE and soft-iWARP are no fault.
pub(crate) fn hardware<'a>(report: &DoctorReport<'a>) -> Vec<&'a Nic> {
    report.machine.nics.iter().filter(|nic| nic.is_hardware()).collect()
}

/// NICs that ranks use: those that the config names, else those that the topology takes.
pub(crate) fn rails<'a>(report: &DoctorReport<'a>) -> Vec<&'a Nic> {
    let is_named = |nic: &&Nic| report.job.asks.nics.contains(&nic.name);
    let named: Vec<&Nic> = report.machine.nics.iter().filter(is_named).collect();
    if named.is_empty() { report.machine.rail_nics() } else { named }
}

/// `mlx5_3`, or `mlx5_bond_0 port 2` where a NIC has several ports.
pub(crate) fn port_name(nic: &Nic, port: &Port) -> String {
    match nic.ports.len() {
        1 => nic.name.clone(),
        _ => format!("{} port {}", nic.name, port.number),
    }
}

/// Ports of a NIC that the config does not rule out.
pub(crate) fn used_ports<'a>(report: &DoctorReport<'_>, nic: &'a Nic) -> Vec<&'a Port> {
    let named = &report.job.asks.ports;
    nic.ports.iter().filter(|port| named.is_empty() || named.contains(&port.number)).collect()
}

/// Some port of it carries traffic.
pub(crate) fn has_link(nic: &Nic) -> bool {
    nic.ports.iter().any(Port::is_active)
}

/// The key by which NICs are compared: its family, model, and board.
pub(crate) type Model = (NicFamily, String, Option<String>);

/// NICs of one model and board can be compared.
pub(crate) fn model(report: &DoctorReport<'_>, nic: &Nic) -> Option<Model> {
    let pci = function(report, nic).and_then(|f| f.device.get()).map(|id| format!("{id:04x}"));
    let model = nic.hca_type.known().cloned().or(pci)?;
    Some((nic.family, model, nic.board_id.known().cloned()))
}

/// The PCI function of a NIC.
pub(crate) fn function<'a>(report: &DoctorReport<'a>, nic: &Nic) -> Option<&'a PciFunction> {
    report.machine.pci_at(nic.pci.get()?)
}

/// The value that most of `values` have; `None` where no value is more frequent than every other.
pub(crate) fn majority<T: Clone + Eq>(values: &[T]) -> Option<T> {
    let count = |value: &T| values.iter().filter(|other| *other == value).count();
    let best = values.iter().max_by_key(|value| count(value))?;
    let tie = values.iter().any(|other| other != best && count(other) == count(best));
    (!tie).then(|| best.clone())
}

/// Megabits a second in words: `400 Gb/s`.
pub(crate) fn rate(megabits: u64) -> String {
    match megabits {
        0..1000 => format!("{megabits} Mb/s"),
        _ if megabits.is_multiple_of(1000) => format!("{} Gb/s", megabits / 1000),
        _ => format!("{:.1} Gb/s", megabits as f64 / 1000.0),
    }
}
