//! PCI Express: speed, width, and the bridges between NIC and GPU.

use std::collections::BTreeSet;

use tokenyard_errors::words::first_names;
use tokenyard_machine::{Fact, Nic, PciAddress, PciFunction, PcieLink};

use crate::nics::{function, hardware, model, rails, rate};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    SPEED = "pcie-speed",
    WIDTH = "pcie-width",
    ROOM = "pcie-room",
    ACS = "acs",
    IOMMU = "iommu",
    BAR = "gpu-bar",
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    for nic in hardware(report) {
        if let Some(function) = function(report, nic).filter(|f| !f.is_virtual_function) {
            let sum: u64 = nic
                .ports
                .iter()
                .filter(|port| port.is_active())
                .filter_map(|port| Some(port.rate.known()?.megabits))
                .sum();
            report.judge_nic(nic, |report| {
                link(report, nic, function, sum);
                room(report, Facility::of(nic), &nic.name, function, sum);
            });
        }
    }
    gpus(report);
    access_control(report);
    translation(report);
}

/// Megatransfers a second in words: `generation 5`.
fn generation(speed: u32) -> String {
    match speed {
        2500 => "generation 1".into(),
        5000 => "generation 2".into(),
        8000 => "generation 3".into(),
        16000 => "generation 4".into(),
        32000 => "generation 5".into(),
        64000 => "generation 6".into(),
        other => format!("{other} MT/s"),
    }
}

/// Judges a link that did not train to the card's best. It is slow if the card's ports together carry more (`ports`
/// megabits a second), or if a NIC of the same model has a faster link. Else the impact is unknown; the text then
/// compares link and ports.
fn lost(
    report: &DoctorReport<'_>,
    nic: &Nic,
    function: &PciFunction,
    ports: u64,
) -> (Verdict, String) {
    let carried = |link: PcieLink| Some(capacity(link.speed.get()?, link.width.get()?));
    let Some(own) = carried(function.link) else { return (Verdict::Unknown, String::new()) };
    let same = model(report, nic);
    let others = hardware(report).into_iter().filter(|other| model(report, other) == same);
    let best = others.filter_map(|other| carried(self::function(report, other)?.link)).max();
    if own < ports || (same.is_some() && best.is_some_and(|best| best > own)) {
        return (Verdict::Slow, String::new());
    }
    let room = format!("; {} for {} of its ports", rate(own / 1000 * 1000), rate(ports));
    (Verdict::Unknown, room)
}

fn link(report: &mut DoctorReport<'_>, nic: &Nic, function: &PciFunction, ports: u64) {
    let (facility, name, link) = (Facility::of(nic), nic.name.as_str(), function.link);
    let (less, room) = lost(report, nic, function, ports);
    if let (Fact::Known(found), Fact::Known(most)) = (link.speed, link.max_speed) {
        let verdict = if found < most { less } else { Verdict::Ok };
        let finding = report.note(&SPEED, facility, name, verdict.on(generation(found)));
        finding.expected(match verdict {
            Verdict::Unknown => format!("{}, as the card can{room}", generation(most)),
            _ => format!("{}, as the card can", generation(most)),
        });
    }
    if let (Fact::Known(found), Fact::Known(most)) = (link.width, link.max_width) {
        let verdict = if found < most { less } else { Verdict::Ok };
        let slot = function
            .bridges
            .last()
            .and_then(|bridge| at(report, *bridge))
            .and_then(|bridge| bridge.link.max_width.get());
        let finding = report.note(&WIDTH, facility, name, verdict.on(format!("{found} lanes")));
        finding.expected(match verdict {
            Verdict::Unknown => format!("{most} lanes, as the card has{room}"),
            _ => format!("{most} lanes, as the card has"),
        });
        if let Some(slot) = slot.filter(|slot| *slot < most) {
            finding.fix(format!("move the card: its slot has {slot} lanes"));
        }
    }
}

fn at<'a>(report: &DoctorReport<'a>, address: PciAddress) -> Option<&'a PciFunction> {
    report.machine.pci_at(address)
}

/// Megabits a second that a link carries in one direction.
pub(crate) fn capacity(speed: u32, width: u32) -> u64 {
    let lane = match speed {
        // 8b/10b.
        ..8000 => u64::from(speed) * 8 / 10,
        // 128b/130b, and the same order for the flits of generation 6.
        _ => u64::from(speed) * 128 / 130,
    };
    lane * u64::from(width)
}

fn room(
    report: &mut DoctorReport<'_>,
    facility: Facility,
    name: &str,
    function: &PciFunction,
    ports: u64,
) {
    let (Fact::Known(speed), Fact::Known(width)) = (function.link.speed, function.link.width)
    else {
        return;
    };
    if ports == 0 {
        return;
    }
    let capacity = capacity(speed, width);
    // Another rule reports a link that did not train to its best, so this rule leaves such links out.
    let trained = function.link.max_speed.get().is_none_or(|most| speed >= most)
        && function.link.max_width.get().is_none_or(|most| width >= most);
    // Packet headers need a part of the link's rate. 400 Gb/s of ports fit on a link of 504, 200 on 252, 100 on 126.
    let verdict = if capacity < ports && trained { Verdict::Slow } else { Verdict::Ok };
    let finding = report.note(&ROOM, facility, name, verdict.on(rate(capacity / 1000 * 1000)));
    finding.expected(format!("{} of its ports", rate(ports)));
}

fn gpus(report: &mut DoctorReport<'_>) {
    let has_nic = !rails(report).is_empty();
    for gpu in &report.machine.gpus {
        let facility = match gpu.vendor {
            tokenyard_machine::GpuVendor::Nvidia => Facility::Cuda,
            tokenyard_machine::GpuVendor::Amd => Facility::Hip,
        };
        let name = format!("GPU {}", gpu.index);
        if let Some(function) = at(report, gpu.pci) {
            let PciFunction { link, .. } = function;
            if let (Fact::Known(found), Fact::Known(most)) = (link.width, link.max_width) {
                let verdict = if found < most { Verdict::Slow } else { Verdict::Ok };
                let finding =
                    report.note(&WIDTH, facility, &name, verdict.on(format!("{found} lanes")));
                finding.expected(format!("{most} lanes, as the card has"));
            }
            if let (Fact::Known(found), Fact::Known(most)) = (link.speed, link.max_speed) {
                // Some GPUs lower their link while they are idle.
                let verdict = if found < most { Verdict::Unknown } else { Verdict::Ok };
                let finding = report.note(&SPEED, facility, &name, verdict.on(generation(found)));
                finding.expected(format!("{}, as the card can", generation(most)));
                finding.fix("look again while the GPU works: some lower their link while idle");
            }
        }
        // The size of the BAR matters only where a NIC reaches the GPU's memory.
        let bar = gpu.largest_bar.get().filter(|bar| *bar > 0 && has_nic);
        if let Some(bar) = bar {
            let verdict = match (bar < 1 << 30, report.job.asks(Facility::GpuMemory)) {
                (true, true) => Verdict::Broken,
                // Without a config it is unknown whether a job needs GPU memory that NICs reach.
                (true, false) => Verdict::Unknown,
                (false, _) => Verdict::Ok,
            };
            let found = format!("{} MiB", bar >> 20);
            report.note(&BAR, Facility::GpuMemory, &name, verdict.on(found));
        }
    }
}

/// Bridges below the root that lie between some NIC and some GPU of one switch.
fn between(report: &DoctorReport<'_>) -> BTreeSet<PciAddress> {
    let paths = |addresses: Vec<PciAddress>| -> Vec<Vec<PciAddress>> {
        addresses.into_iter().filter_map(|a| Some(at(report, a)?.bridges.clone())).collect()
    };
    let nics = paths(rails(report).iter().filter_map(|nic| nic.pci.get()).collect());
    let gpus = paths(report.machine.gpus.iter().map(|gpu| gpu.pci).collect());
    let mut bridges = BTreeSet::new();
    for nic in &nics {
        for gpu in &gpus {
            let shared = nic.iter().zip(gpu).take_while(|(a, b)| a == b).count();
            // If they share no bridge, packets cross the root complex anyway.
            if shared > 0 {
                bridges.extend(nic.iter().skip(shared).chain(gpu.iter().skip(shared)));
            }
        }
    }
    bridges
}

fn access_control(report: &mut DoctorReport<'_>) {
    let bridges = between(report);
    if bridges.is_empty() {
        return;
    }
    let mut redirecting = Vec::new();
    let mut unknown = 0;
    for address in &bridges {
        match at(report, *address).map(|bridge| &bridge.acs) {
            Some(Fact::Known(Some(acs))) if acs.request_redirect || acs.completion_redirect => {
                redirecting.push(address.to_string());
            }
            Some(Fact::Known(_)) => {}
            _ => unknown += 1,
        }
    }
    let is_virtual = report.machine.kernel.is_virtual.get() == Some(true);
    let all = bridges.len();
    let (verdict, found) = match (redirecting.len(), unknown) {
        (0, 0) => (Verdict::Ok, format!("none of {all} bridges redirects")),
        (0, unknown) => {
            (Verdict::Unknown, format!("{unknown} of {all} bridges have an unknown setting"))
        }
        (some, _) => {
            let first = first_names(&redirecting);
            let verdict = if is_virtual { Verdict::Unknown } else { Verdict::Slow };
            (verdict, format!("{some} of {all} bridges redirect: {first}"))
        }
    };
    let finding = report.note(&ACS, Facility::GpuMemory, "PCI bridges", verdict.on(found));
    if unknown > 0 && redirecting.is_empty() {
        finding.fix("run this as root, which may read the extended configuration space");
    }
}

fn translation(report: &mut DoctorReport<'_>) {
    let units = report.machine.iommu.units.len();
    let translated: Vec<&str> = rails(report)
        .iter()
        .filter(|nic| {
            let domain = function(report, nic).and_then(|f| f.iommu_domain.known());
            domain.is_some_and(|domain| domain.starts_with("DMA"))
        })
        .map(|nic| nic.name.as_str())
        .collect();
    if rails(report).is_empty() {
        return;
    }
    // Arm's IOMMUs always translate, and peer-to-peer traffic passes them without loss.
    let smmu = report.machine.iommu.units.iter().any(|unit| unit.starts_with("smmu"));
    let (verdict, found) = match (units, translated.len()) {
        (0, _) => (Verdict::Ok, "off".to_owned()),
        (_, 0) => (Verdict::Ok, "passes through".to_owned()),
        (_, _) if smmu => (Verdict::Ok, "translates (Arm SMMU)".to_owned()),
        (_, count) => {
            (Verdict::Slow, format!("translates for {count} NICs: {}", translated.join(", ")))
        }
    };
    report.note(&IOMMU, Facility::GpuMemory, "IOMMU", verdict.on(found));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_carry_what_their_coding_leaves() {
        assert_eq!(capacity(32_000, 16) / 1000, 504);
        assert_eq!(capacity(16_000, 16) / 1000, 252);
        assert_eq!(capacity(2_500, 1), 2_000);
    }
}
