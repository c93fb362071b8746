//! Rails: which NIC each GPU has near, and whether all have the same.

use tokenyard_machine::{Distance, Gpu, GpuVendor, LinkLayer, Nic, PciAddress, PciFunction};

use crate::nics::{function, has_link, is_active, majority};
use crate::{Facility, Finding, Report, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&NEAR, &EQUAL, &LAYER];

static NEAR: Rule = Rule {
    id: "rail-distance",
    title: "How far a GPU's NIC is",
    wanted: "as near as that of the other GPUs",
    why: "Rows go from GPU memory to the NIC over PCI Express. Under one switch they cross nothing else; \
          through the root complex, or from socket to socket, they share the way with everything. Where a \
          card is near and no RDMA device of it is there, its driver did not take it. Where no card is near a \
          GPU, and most GPUs have one, it is missing; where few have one, the node may be wired so.",
    cost: "this GPU's rail is slower than the others, and all ranks wait for it",
    fix: "lspci -s BUS for the card under the GPU's switch; if it is listed: its driver (modprobe mlx5_ib, bnxt_re, ionic_rdma or irdma, dmesg); \
          if not: reseat or replace it",
    source: "NVIDIA, GPUDirect RDMA documentation, Supported Systems (distance between devices)",
};

static EQUAL: Rule = Rule {
    id: "rail-count",
    title: "NICs of each GPU",
    wanted: "equally many for all GPUs",
    why: "A rail is the ranks with the same index in their domains. Ranks whose GPUs have no NIC of \
          their own share one with a neighbour.",
    cost: "two ranks on one NIC get half of the bandwidth each, and all ranks wait for them",
    fix: "bring up the port of the missing NIC, or give the container that device",
    source: "docs/topology.md (the rule of this project); NVIDIA DGX H100 User Guide (one ConnectX-7 \
             for each GPU)",
};

static LAYER: Rule = Rule {
    id: "rail-layer",
    title: "What the rails speak",
    wanted: "InfiniBand on all, or Ethernet on all",
    why: "A ConnectX port can be set to either. A queue pair connects ports of one kind only.",
    cost: "ranks of that rail do not connect to ranks of the others: the job does not start",
    fix: "mlxconfig -d DEVICE set LINK_TYPE_P1=1 (InfiniBand) or =2 (Ethernet), then restart the node (NVIDIA); cards of \
          others speak Ethernet only: look which cards the node has",
    source: "NVIDIA MFT, mlxconfig (LINK_TYPE_P1)",
};

/// Class of network controllers.
const NETWORK: u32 = 0x02;

/// The nearest NICs of a GPU.
struct Nearest<'a> {
    gpu: &'a Gpu,
    distance: Distance,
    nics: Vec<&'a Nic>,
}

pub(crate) fn judge(report: &mut Report<'_>) {
    let machine = report.machine;
    let all = machine.rail_nics();
    // Those without a link too: that is said of their ports, and is no matter of distance.
    // In a container `sys` shows GPUs and cards that others were given.
    let some_are_given = machine.gpus.iter().any(|gpu| gpu.is_visible);
    let given = machine.gpus.iter().filter(|gpu| gpu.is_visible || !some_are_given);
    let nearest: Vec<Nearest<'_>> = given.filter_map(|gpu| nearest(report, gpu, &all)).collect();
    // One GPU has nothing to be compared with.
    if nearest.len() < 2 {
        return;
    }
    distances(report, &nearest);
    counts(report, &nearest);
    layers(report, &nearest);
}

fn nearest<'a>(report: &Report<'a>, gpu: &'a Gpu, nics: &[&'a Nic]) -> Option<Nearest<'a>> {
    let far = |nic: &Nic| nic.pci.get().map(|at| report.machine.distance(gpu.pci, at));
    let distance = nics.iter().filter_map(|nic| far(nic)).min()?;
    let nics = nics.iter().copied().filter(|nic| far(nic) == Some(distance)).collect();
    Some(Nearest { gpu, distance, nics })
}

fn words(distance: Distance) -> &'static str {
    match distance {
        Distance::SameSwitch => "under one switch",
        Distance::SameRootPort => "under one root port",
        Distance::SameHostBridge => "under one host bridge",
        Distance::SameNumaNode => "on its NUMA node",
        Distance::Across => "on another NUMA node",
        Distance::Unknown => "at an unknown distance",
    }
}

fn names(nics: &[&Nic]) -> String {
    let names: Vec<&str> = nics.iter().take(4).map(|nic| nic.name.as_str()).collect();
    let more = if nics.len() > 4 { ", ..." } else { "" };
    format!("{}{more}", names.join(", "))
}

/// Notes what it found of a rail, which matters to jobs that use both GPUs and NICs of these kinds.
fn note<'r>(
    report: &'r mut Report<'_>,
    (rule, one): (&'static Rule, &Nearest<'_>),
    subject: String,
    told: (Verdict, String),
) -> &'r mut Finding {
    let gpus = match one.gpu.vendor {
        GpuVendor::Nvidia => Facility::Cuda,
        GpuVendor::Amd => Facility::Hip,
    };
    let uses_gpus = report.job.needs(gpus);
    let nics = one.nics.first().map_or(Facility::Verbs, |nic| Facility::of(nic));
    let finding = report.note((rule, nics), subject, told);
    finding.needed &= uses_gpus;
    finding
}

fn distances(report: &mut Report<'_>, all: &[Nearest<'_>]) {
    let best = all.iter().map(|one| one.distance).min().unwrap_or(Distance::Unknown);
    let far = all.iter().filter(|one| one.distance > best).count();
    for one in all {
        let card = (one.distance > best).then(|| idle_card(report, one.gpu, best)).flatten();
        let verdict = match one.distance {
            Distance::Unknown => Verdict::Unknown,
            distance if distance == best => Verdict::Ok,
            // Nodes with fewer NICs than GPUs are built too.
            _ if card.is_none() && 2 * far >= all.len() => Verdict::Unknown,
            _ => Verdict::Slow,
        };
        let down = if one.nics.iter().any(|nic| has_link(nic)) { "" } else { ", without a link" };
        let found = format!("{} {}{down}", names(&one.nics), words(one.distance));
        let subject = format!("GPU {}", one.gpu.index);
        let finding = note(report, (&NEAR, one), subject, (verdict, found));
        finding.wanted(format!("a NIC {}, as other GPUs have", words(best)));
        finding.fix(match (card, verdict) {
            (Some(card), _) => format!(
                "the card {card} is near and has no RDMA device: lspci -k -s {card} shows its driver; \
                 modprobe mlx5_ib (efa, ionic_rdma), dmesg"
            ),
            (None, Verdict::Unknown) => "nothing, if the node is wired so; else reseat the card \
                                         that lspci does not list"
                .to_owned(),
            (None, _) => format!(
                "no RDMA device {} with {}: lspci does not list the card; reseat or replace it, or give \
                 the container that device",
                words(best),
                one.gpu.pci
            ),
        });
        if verdict == Verdict::Unknown {
            finding.cost("where it is not meant so, this GPU's rail is slower than the others");
        }
    }
}

/// A network card that is as near to the GPU as other GPUs' NICs are, and is no RDMA device.
fn idle_card(report: &Report<'_>, gpu: &Gpu, best: Distance) -> Option<PciAddress> {
    let machine = report.machine;
    let rails: Vec<_> =
        machine.rail_nics().iter().filter_map(|nic| function(report, nic)).collect();
    let is_model = |card: &PciFunction| {
        rails.iter().any(|rail| (rail.vendor, rail.device) == (card.vendor, card.device))
    };
    let is_idle = |card: &&PciFunction| {
        card.class.get().is_some_and(|class| class >> 16 == NETWORK)
            && is_model(card)
            && machine.nics.iter().all(|nic| nic.pci.get() != Some(card.address))
            && machine.distance(gpu.pci, card.address) <= best
    };
    machine.pci.iter().find(is_idle).map(|card| card.address)
}

/// GPUs that are farther from any NIC than others are named by their distance, and do not count here.
fn counts(report: &mut Report<'_>, all: &[Nearest<'_>]) {
    let best = all.iter().map(|one| one.distance).min();
    let all: Vec<&Nearest<'_>> = all.iter().filter(|one| Some(one.distance) == best).collect();
    let sharers = |nic: &Nic| {
        all.iter().filter(|other| other.nics.iter().any(|own| own.name == nic.name)).count()
    };
    // In thousandths: where NICs are shared, each counts for a part.
    let share = |one: &Nearest<'_>| -> u64 {
        one.nics.iter().map(|nic| 1000 / sharers(nic).max(1) as u64).sum()
    };
    let shares: Vec<u64> = all.iter().map(|one| share(one)).collect();
    let usual = majority(&shares).or(shares.iter().max().copied()).unwrap_or(0);
    let less: Vec<String> = all
        .iter()
        .zip(&shares)
        .filter(|(_, share)| **share < usual)
        .map(|(one, _)| one.gpu.index.to_string())
        .collect();
    let text = |share: u64| match share {
        // A third of three NICs is 999.
        995..=1000 => "one NIC for each".to_owned(),
        share if share > 1000 => format!("{:.0} NICs for each", share as f64 / 1000.0),
        share => format!("one NIC for {:.0}", 1000.0 / share.max(1) as f64),
    };
    let (verdict, found) = match less.is_empty() {
        true => (Verdict::Ok, text(usual)),
        false => (Verdict::Slow, format!("fewer for GPU {}", less.join(", "))),
    };
    if let Some(first) = all.first() {
        note(report, (&EQUAL, first), "GPUs".to_owned(), (verdict, found)).wanted(text(usual));
    }
}

fn layers(report: &mut Report<'_>, all: &[Nearest<'_>]) {
    let mut nics: Vec<&Nic> = all.iter().flat_map(|one| one.nics.iter().copied()).collect();
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    nics.dedup_by(|a, b| a.name == b.name);
    let layer = |nic: &Nic| {
        nic.ports.iter().filter(|port| is_active(port)).find_map(|port| port.link_layer.get())
    };
    let known: Vec<LinkLayer> = nics.iter().filter_map(|nic| layer(nic)).collect();
    let Some(any) = known.first() else { return };
    let usual = majority(&known);
    let odd: Vec<&str> = nics
        .iter()
        .filter(|nic| layer(nic).is_some_and(|layer| layer != usual.unwrap_or(*any)))
        .map(|nic| nic.name.as_str())
        .collect();
    let word = |layer: LinkLayer| match layer {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::Unspecified => "the adapters' own",
    };
    let (verdict, found) = match odd.is_empty() {
        true => (Verdict::Ok, format!("{} on all", word(*any))),
        false => (Verdict::Broken, format!("another than the rest: {}", odd.join(", "))),
    };
    if let Some(first) = all.first() {
        note(report, (&LAYER, first), "rails".to_owned(), (verdict, found));
    }
}
