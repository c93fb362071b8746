//! Bonds of network interfaces.

use tokenyard_machine::{Bond, Interface};

use crate::nics::{rails, rate};
use crate::{DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&MEMBERS, &LACP, &HASH, &RATE];

static MEMBERS: Rule = Rule {
    id: "bond-members",
    title: "Members of a bond",
    expected: "all members up",
    why: "A bond continues when a member loses its link, and only its own file in /proc/net/bonding shows \
          the loss. An RDMA device on a bond (mlx5_bond_0) is one rail with the ports of all members.",
    impact: "the rail has the bandwidth of the members that are left: half of it with two ports",
    fix: "look at the member's cable and switch port; cat /proc/net/bonding/BOND",
    source: "Linux kernel, Documentation/networking/bonding.rst",
};

static LACP: Rule = Rule {
    id: "bond-lacp",
    title: "The switch's side of an 802.3ad bond",
    expected: "a partner, and all members in one aggregate",
    why: "In mode 802.3ad the switch must form the aggregate too. Where no partner answers, or members \
          end at switches that do not know of each other, only one member carries traffic.",
    impact: "half of the bandwidth with two ports",
    fix: "configure LACP (and MLAG, where members end at two switches) on the switch ports",
    source: "Linux kernel, Documentation/networking/bonding.rst (802.3ad)",
};

static HASH: Rule = Rule {
    id: "bond-hash",
    title: "How a bond spreads flows",
    expected: "layer3+4",
    why: "With xmit_hash_policy layer2 all packets between two hosts hash to one member. RoCE v2 packets \
          of different queue pairs differ in their UDP source port, which layer3+4 looks at.",
    impact: "between two hosts, half of the bandwidth with two ports",
    fix: "ip link set BOND type bond xmit_hash_policy layer3+4",
    source: "Linux kernel, Documentation/networking/bonding.rst (xmit_hash_policy)",
};

static RATE: Rule = Rule {
    id: "bond-rate",
    title: "Bandwidth of a bond",
    expected: "the sum of its members",
    why: "The RDMA device of a LACP bond has one port in /sys/class/infiniband, and tools read the rate \
          of one member there: half of what the two ports carry. Here a bond counts as one rail with the \
          sum of its members.",
    impact: "none by itself: other tools show half of the bandwidth",
    fix: "nothing; count the bond as one rail",
    source: "NVIDIA MLNX_EN User Manual, RoCE LAG; DeepEP issues 643 and 618 (bandwidth of bonds)",
};

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
