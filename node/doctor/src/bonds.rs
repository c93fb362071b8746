//! Bonds of network interfaces.

use tokenyard_machine::{Bond, Interface};

use crate::nics::{rails, rate};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    MEMBERS = "bond-members",
    LACP = "bond-lacp",
    HASH = "bond-hash",
    RATE = "bond-rate",
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    for interface in &machine.interfaces {
        if let Some(bond) = &interface.bond
            && carries_rdma(report, interface, bond)
        {
            members(report, interface, bond);
            if bond.mode.known().is_some_and(|mode| mode.starts_with("802.3ad")) {
                lacp(report, interface, bond);
            }
            hash(report, interface, bond);
            bandwidth(report, interface, bond);
        }
    }
}

/// Whether a bond has an interface of an RDMA NIC. Rules judge no other bonds.
fn carries_rdma(report: &DoctorReport<'_>, interface: &Interface, bond: &Bond) -> bool {
    let nics = rails(report);
    nics.iter()
        .flat_map(|nic| &nic.interfaces)
        .any(|name| *name == interface.name || bond.members.contains(name))
}

fn member<'a>(report: &DoctorReport<'a>, name: &str) -> Option<&'a Interface> {
    report.machine.interfaces.iter().find(|interface| interface.name == name)
}

fn members(report: &mut DoctorReport<'_>, interface: &Interface, bond: &Bond) {
    let is_down = |name: &&String| {
        member(report, name).and_then(|m| m.operstate.known()).is_some_and(|state| state != "up")
    };
    let down: Vec<&str> = bond.members.iter().filter(is_down).map(String::as_str).collect();
    let all = bond.members.len();
    let (verdict, found) = match (all, down.len()) {
        (0, _) => (Verdict::Broken, "no members".to_owned()),
        (_, 0) => (Verdict::Ok, format!("{all} up")),
        (all, some) if all == some => (Verdict::Broken, format!("down: {}", down.join(", "))),
        _ => (Verdict::Slow, format!("down: {}", down.join(", "))),
    };
    report.note(&MEMBERS, Facility::Verbs, &interface.name, verdict.on(found));
}

fn lacp(report: &mut DoctorReport<'_>, interface: &Interface, bond: &Bond) {
    let up = |name: &&String| {
        member(report, name).and_then(|m| m.operstate.known()).is_none_or(|state| state == "up")
    };
    let up = bond.members.iter().filter(up).count();
    let answers =
        bond.partner.known().map(|partner| partner.chars().any(|c| !matches!(c, '0' | ':')));
    let ports = bond.aggregated_ports.get();
    let (verdict, found) = match (answers, ports) {
        (Some(false), _) => (Verdict::Slow, "no partner answers".to_owned()),
        (_, Some(ports)) if (ports as usize) < up => {
            (Verdict::Slow, format!("{ports} of {up} members in the aggregate"))
        }
        (None, None) => (Verdict::Unknown, "the kernel shows no partner".to_owned()),
        _ => (Verdict::Ok, format!("{up} members in one aggregate")),
    };
    report.note(&LACP, Facility::Verbs, &interface.name, verdict.on(found));
}

fn hash(report: &mut DoctorReport<'_>, interface: &Interface, bond: &Bond) {
    let balances = bond
        .mode
        .known()
        .is_some_and(|mode| mode.starts_with("802.3ad") || mode.starts_with("balance-xor"));
    let (true, Some(policy)) = (balances, bond.xmit_hash_policy.known()) else { return };
    let good = policy.contains("3+4") || policy.starts_with("vlan");
    let verdict = if good { Verdict::Ok } else { Verdict::Slow };
    let finding = report.note(&HASH, Facility::Verbs, &interface.name, verdict.on(policy.as_str()));
    finding.fix(format!("ip link set {} type bond xmit_hash_policy layer3+4", interface.name));
}

fn bandwidth(report: &mut DoctorReport<'_>, interface: &Interface, bond: &Bond) {
    let one_at_a_time = bond.mode.known().is_some_and(|mode| mode.starts_with("active-backup"));
    let speeds = bond.members.iter().filter_map(|name| member(report, name)?.megabits.get());
    let sum = if one_at_a_time { speeds.max() } else { Some(speeds.sum()) };
    let Some(sum) = sum.filter(|sum| *sum > 0) else { return };
    let mode = bond.mode.known().map_or("mode unknown", String::as_str);
    let found = format!("{} in mode {mode}, one rail", rate(sum));
    report.note(&RATE, Facility::Verbs, &interface.name, Verdict::Ok.on(found));
}
