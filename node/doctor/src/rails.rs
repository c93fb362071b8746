//! Rails: which NIC each GPU has near, and whether all have the same.

use tokenyard_machine::rails::{ONE_NIC, share_in_words};
use tokenyard_machine::{
    Distance, Gpu, GpuVendor, Lack, LinkLayer, MissingRail, Nic, NicFamily, Port, RailShare,
    gpu_of_rank,
};

use tokenyard_errors::words::first_names;

use crate::finding::Judgement;
use crate::nics::{has_link, majority, rails};
use crate::{DoctorReport, Facility, Finding, Rule, Verdict, rules};

rules! {
    NEAR = "rail-distance",
    EQUAL = "rail-count",
    LAYER = "rail-layer",
}

/// The impact of a missing rail where the topology refuses it.
pub(crate) const REFUSED: &str = "the job does not start where its transport goes by the topology's NICs: \
                                  the topology refuses this node (docs/topology.md)";
/// How to go on with the NICs that are there.
const GO_ON: &str = "to go on with the NICs that can be used, name them in `nics` of [topology.auto] on \
                     every node, or set rails = \"any\" there";

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    // NICs without a link count too: other findings cover their ports, and distance does not depend on
    // links. In a container, `sys` also shows GPUs and cards of other containers.
    let shares = report.machine.rail_shares();
    // A single GPU cannot be compared with others.
    if shares.len() < 2 {
        return;
    }
    let missing = report.machine.missing_rails();
    distances(report, &shares, &missing);
    counts(report, &shares, &missing);
    layers(report, &shares);
}

/// The verdict on a missing rail is that of the topology. It refuses the node, unless the config says which
/// NICs to use, or how many, or NICs of all names reach each other.
fn of_missing(report: &DoctorReport<'_>, nics: &[&Nic], missing: &[&MissingRail<'_>]) -> Verdict {
    if !missing.iter().any(|missing| is_driven(report, missing.gpu)) {
        return Verdict::Unknown;
    }
    let reach_all = nics.iter().all(|nic| nic.family == NicFamily::Efa);
    let asks = &report.job.asks;
    let is_free = reach_all || asks.any_rails || asks.counted_rails || !asks.nics.is_empty();
    if is_free { Verdict::Slow } else { Verdict::Broken }
}

/// The GPU whose rank the topology refuses because of this NIC, which cannot be used, in its words; and what to
/// do about it.
pub(crate) fn refused_for(report: &DoctorReport<'_>, nic: &Nic) -> Option<(String, String)> {
    let is_of = |missing: &MissingRail<'_>| {
        let Lack::Idle { nics, .. } = &missing.lack else { return false };
        nics.iter().any(|idle| idle.name == nic.name)
            && of_missing(report, &[nic], &[missing]) == Verdict::Broken
    };
    let missing = report.machine.missing_rails();
    let one = missing.iter().find(|missing| is_of(missing))?;
    Some((one.to_string(), format!("{}; {GO_ON}", one.fix())))
}

/// The impact of a port that cannot carry where all GPUs have equally many that can.
pub(crate) const SPARE: &str = "nothing, if the node is cabled so: all GPUs have equally many ports that \
                                can carry; else what the port could carry, on each of them";

/// The verdict on a NIC that ranks would use and that cannot be used; and how the topology refuses the node
/// for it, where it does.
pub(crate) fn of_unusable(
    report: &DoctorReport<'_>,
    nic: &Nic,
) -> (Verdict, Option<(String, String)>) {
    let serves = |other: &&Nic| {
        Facility::of(other) == Facility::of(nic) && other.ports.iter().any(Port::can_carry)
    };
    let named = &report.job.asks.nics;
    // If no rail NIC can be used, the topology may choose NICs for other purposes.
    let others = if named.is_empty() { report.machine.serving_nics() } else { Vec::new() };
    if named.contains(&nic.name) {
        return (Verdict::Broken, None);
    }
    match (refused_for(report, nic), rails(report).iter().chain(&others).any(serves)) {
        (Some(refused), _) => (Verdict::Broken, Some(refused)),
        // No GPU has less than another: nodes whose cards have a port to spare are cabled so.
        (None, true) if report.machine.has_even_links() => (Verdict::Unknown, None),
        // Another port of the NIC, of its card or of the node is used instead.
        (None, true) => (Verdict::Slow, None),
        (None, false) => (Verdict::Broken, None),
    }
}

/// Whether a rank of the job may drive a GPU: they drive the first ones of those that the environment leaves.
fn is_driven(report: &DoctorReport<'_>, gpu: &Gpu) -> bool {
    let machine = report.machine;
    let ranks = report.job.drives.unwrap_or(u64::MAX).min(machine.gpus.len() as u64) as u32;
    (0..ranks).any(|rank| match gpu_of_rank(machine, rank) {
        Ok(driven) => driven.is_some_and(|(_, of)| of.pci == gpu.pci),
        // It is unknown which one.
        Err(_) => true,
    })
}

/// Fills in a finding on a missing rail.
fn explain(finding: &mut Finding, missing: &MissingRail<'_>, verdict: Verdict) {
    finding.fix(format!("{}; {GO_ON}", missing.fix()));
    match verdict {
        Verdict::Broken => finding.impact(REFUSED),
        Verdict::Unknown => {
            finding.impact("nothing to a job whose ranks drive other GPUs, as this one's")
        }
        _ => finding,
    };
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

/// Notes a finding about a rail. It matters to jobs that use both GPUs and NICs of these kinds.
fn note<'r>(
    report: &'r mut DoctorReport<'_>,
    rule: &'static Rule,
    one: &RailShare<'_>,
    subject: impl Into<String>,
    judgement: Judgement,
) -> &'r mut Finding {
    let gpus = match one.gpu.vendor {
        GpuVendor::Nvidia => Facility::Cuda,
        GpuVendor::Amd => Facility::Hip,
    };
    let uses_gpus = report.job.needs(gpus);
    let nics = one.nics.first().map_or(Facility::Verbs, |nic| Facility::of(nic));
    let finding = report.note(rule, nics, subject, judgement);
    // The topology goes by GPUs whether or not they hold the rows.
    finding.needed &= uses_gpus || finding.verdict == Verdict::Broken;
    finding
}

fn distances(report: &mut DoctorReport<'_>, all: &[RailShare<'_>], missing: &[MissingRail<'_>]) {
    let best = all.iter().map(|one| one.distance).min().unwrap_or(Distance::Unknown);
    let far = all.iter().filter(|one| one.distance > best).count();
    let machine = report.machine;
    for one in all {
        let none = missing.iter().find(|missing| {
            missing.gpu.pci == one.gpu.pci && matches!(missing.lack, Lack::NoNic { .. })
        });
        // A display card belongs to no rank.
        let is_odd =
            all.iter().all(|near| near.distance > best || near.gpu.device_id != one.gpu.device_id);
        let is_near = |card| machine.distance(one.gpu.pci, card) <= best;
        let idle = match one.distance > best {
            true => machine.idle_cards(is_near),
            false => Vec::new(),
        };
        let verdict = match (one.distance, none) {
            (Distance::Unknown, _) => Verdict::Unknown,
            (_, Some(none)) => of_missing(report, &one.nics, &[none]),
            (distance, None) if distance == best => Verdict::Ok,
            // Nodes with fewer NICs than GPUs are built too.
            _ if idle.is_empty() && (is_odd || 2 * far >= all.len()) => Verdict::Unknown,
            _ => Verdict::Slow,
        };
        let down = if one.nics.iter().any(|nic| has_link(nic)) { "" } else { ", without a link" };
        let nearest = format!(
            "{} {}{down}",
            first_names(one.nics.iter().map(|nic| &nic.name)),
            words(one.distance)
        );
        let found = none.map_or(nearest.clone(), |none| format!("{none}; nearest: {nearest}"));
        let subject = format!("GPU {}", one.gpu.index);
        let finding = note(report, &NEAR, one, subject, verdict.on(found));
        finding.expected(format!("a NIC {}, as other GPUs have", words(best)));
        match (none, idle.first(), verdict) {
            (Some(none), ..) => explain(finding, none, verdict),
            (None, Some(card), _) => {
                finding.fix(format!(
                    "the card {card} is near and has no RDMA device: lspci -k -s {card} shows its driver; \
                     modprobe mlx5_ib (bnxt_re, ionic_rdma, efa), dmesg"
                ));
            }
            (None, None, Verdict::Unknown) => {
                finding
                    .fix(
                        "nothing, if the node is wired so; else reseat the card that lspci does not list",
                    )
                    .impact("where it is not meant so, this GPU's rail is slower than the others");
            }
            (None, None, Verdict::Slow) => {
                finding.fix(
                    "lspci -tv shows the switches: put the card below the switch of its GPU, where the \
                     node is not built so",
                );
            }
            _ => {}
        }
    }
}

/// GPUs that are farther from any NIC than others are named by their distance, and do not count here.
fn counts(report: &mut DoctorReport<'_>, all: &[RailShare<'_>], missing: &[MissingRail<'_>]) {
    let near: Vec<&RailShare<'_>> = all.iter().filter(|one| one.own > 0).collect();
    let Some(first) = near.first() else { return };
    let shares: Vec<u64> = near.iter().map(|one| one.own).collect();
    let usual = majority(&shares).or(shares.iter().max().copied()).unwrap_or(0);
    let least = shares.iter().min().copied().unwrap_or(0);
    let with_own = |is_so: &dyn Fn(u64) -> bool| -> Vec<String> {
        let some = near.iter().filter(|one| is_so(one.own));
        some.map(|one| one.gpu.index.to_string()).collect()
    };
    let less = with_own(&|own| own < usual);
    let uneven: Vec<_> =
        missing.iter().filter(|one| matches!(one.lack, Lack::Uneven { .. })).collect();
    let (verdict, found) = match (uneven.as_slice(), less.is_empty()) {
        ([one], _) => (of_missing(report, &first.nics, &uneven), one.to_string()),
        ([one, rest @ ..], _) => {
            let others: Vec<String> = rest.iter().map(|one| one.gpu.index.to_string()).collect();
            (
                of_missing(report, &first.nics, &uneven),
                format!("{one}; likewise GPU {}", others.join(", ")),
            )
        }
        ([], true) => (Verdict::Ok, share_in_words(usual)),
        // Ranks use equally many, so a NIC that is left over changes nothing.
        ([], false) if report.machine.has_nics_to_spare() && least >= ONE_NIC => {
            let more = with_own(&|own| own > least);
            (
                Verdict::Ok,
                format!("{}, and more for GPU {}", share_in_words(least), more.join(", ")),
            )
        }
        ([], false) => (Verdict::Slow, format!("fewer for GPU {}", less.join(", "))),
    };
    let finding = note(report, &EQUAL, first, "GPUs", verdict.on(found));
    finding.expected(share_in_words(usual));
    if let Some(one) = uneven.first() {
        explain(finding, one, verdict);
    }
}

fn layers(report: &mut DoctorReport<'_>, all: &[RailShare<'_>]) {
    let mut nics: Vec<&Nic> = all.iter().flat_map(|one| one.nics.iter().copied()).collect();
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    nics.dedup_by(|a, b| a.name == b.name);
    let layer = |nic: &Nic| {
        nic.ports.iter().filter(|port| port.is_active()).find_map(|port| port.link_layer.get())
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
        let finding = note(report, &LAYER, first, "rails", verdict.on(found));
        if *any == LinkLayer::Unspecified {
            finding.expected("one kind of link on all");
        }
    }
}
