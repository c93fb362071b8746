//! Kernel drivers of NICs.

use tokenyard_machine::{NicFamily, PciFunction};

use crate::nics::rails;
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    DRIVER = "nic-driver",
    BNXT = "bnxt-driver",
}

const BROADCOM: u16 = 0x14e4;
/// BCM57508, 57504, 57502 (Thor), and BCM57608, 57604, 57602, 57601 (Thor2). Broadcom makes many cards
/// without RDMA.
const THOR: [u16; 7] = [0x1750, 0x1751, 0x1752, 0x1760, 0x1761, 0x1762, 0x1763];

/// The modules that drive a family, the card's own first.
fn modules(family: NicFamily) -> &'static [&'static str] {
    match family {
        NicFamily::Mlx5 => &["mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs"],
        NicFamily::Ionic => &["ionic", "ionic_rdma"],
        // The version numbers of its RDMA module follow another scheme.
        NicFamily::Broadcom => &["bnxt_en"],
        NicFamily::Efa => &["efa"],
        _ => &[],
    }
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    bnxt(report);
    let mut families: Vec<NicFamily> = rails(report).iter().map(|nic| nic.family).collect();
    families.sort();
    families.dedup();
    for family in families {
        let facility = if family == NicFamily::Efa { Facility::Efa } else { Facility::Verbs };
        let names = modules(family);
        let versions: Vec<(&str, &String)> = names
            .iter()
            .filter_map(|name| Some((*name, report.machine.modules.get(*name)?.version.known()?)))
            .collect();
        let Some(own) = names.first().filter(|name| report.machine.modules.contains_key(**name))
        else {
            continue;
        };
        let (verdict, found) = match versions.split_first() {
            None => (Verdict::Ok, format!("{own} of the kernel")),
            Some(((name, version), rest)) if rest.iter().all(|(_, other)| other == version) => {
                (Verdict::Ok, format!("{name} {version}"))
            }
            Some(_) => {
                let all = versions.iter().map(|(name, version)| format!("{name} {version}"));
                (Verdict::Unknown, all.collect::<Vec<_>>().join(", "))
            }
        };
        report.note(&DRIVER, facility, *own, verdict.on(found));
    }
}

/// Thor NICs beside rails of another family may serve any purpose.
fn bnxt(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let is_thor = |card: &&PciFunction| {
        card.vendor.get() == Some(BROADCOM)
            && card.device.get().is_some_and(|id| THOR.contains(&id))
    };
    let cards = machine.pci.iter().filter(is_thor).count();
    let rails = rails(report);
    let nics = rails.iter().filter(|nic| nic.family == NicFamily::Broadcom).count();
    if cards == 0 || nics == 0 && !rails.is_empty() {
        return;
    }
    let loaded = machine.modules.contains_key("bnxt_re");
    // A node without GPUs may have them for Ethernet alone.
    let is_wanted = !machine.gpus.is_empty() || report.job.asks(Facility::Verbs);
    let bad = if is_wanted { Verdict::Broken } else { Verdict::Unknown };
    let (verdict, found) = match (nics, loaded) {
        (0, false) => (bad, format!("bnxt_re is not loaded, for {cards} cards")),
        (0, true) => (bad, format!("bnxt_re is loaded, and {cards} cards have no RDMA device")),
        (nics, _) => (Verdict::Ok, format!("{nics} RDMA devices")),
    };
    report.note(&BNXT, Facility::Verbs, "Thor NICs", verdict.on(found));
}
