//! Kernel drivers of NICs.

use tokenyard_machine::NicFamily;

use crate::nics::rails;
use crate::{Facility, Report, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&DRIVER];

static DRIVER: Rule = Rule {
    id: "nic-driver",
    title: "Drivers of NICs",
    wanted: "modules of one release",
    why: "A NIC's driver is several modules: one drives the card, one adds RDMA, and ib_core serves both. \
          DOCA-OFED replaces all of them together; after an update without a restart some are of the old \
          release. Floors are judged where a source names one: `efa-driver` (3.3, doorbells), `ionic-driver` \
          (Linux 6.18, or AMD's package), `peer-memory` and `amd-peer-memory` (Linux 5.12, dmabuf), \
          `nvidia-driver` (580), `mlx5-provider` (1.25, gin). No source of this project names a floor of mlx5_core, \
          DOCA-OFED, bnxt_en or amdgpu: their versions are shown, and compared across nodes.",
    cost: "features of one release that the other half does not have; a module that is loaded later is refused",
    fix: "/etc/init.d/openibd restart (DOCA-OFED), or load the modules anew, or restart the node",
    source: "NVIDIA DOCA-Host Installation Guide (DOCA-OFED replaces the kernel's modules); floors: see the \
             entries named",
};

/// The modules that drive a family, the card's own first.
fn modules(family: NicFamily) -> &'static [&'static str] {
    match family {
        NicFamily::Mlx5 => &["mlx5_core", "mlx5_ib", "ib_core", "ib_uverbs"],
        NicFamily::Ionic => &["ionic", "ionic_rdma"],
        // Its RDMA module counts in another way.
        NicFamily::Broadcom => &["bnxt_en"],
        NicFamily::Efa => &["efa"],
        _ => &[],
    }
}

pub(crate) fn judge(report: &mut Report<'_>) {
    let mut families: Vec<NicFamily> = rails(report).iter().map(|nic| nic.family).collect();
    families.sort();
    families.dedup();
    for family in families {
        let facility = if family == NicFamily::Efa { Facility::Efa } else { Facility::Verbs };
        let names = modules(family);
        let told: Vec<(&str, &String)> = names
            .iter()
            .filter_map(|name| Some((*name, report.machine.modules.get(*name)?.version.known()?)))
            .collect();
        let Some(own) = names.first().filter(|name| report.machine.modules.contains_key(**name))
        else {
            continue;
        };
        let (verdict, found) = match told.split_first() {
            None => (Verdict::Ok, format!("{own} of the kernel")),
            Some(((name, version), rest)) if rest.iter().all(|(_, other)| other == version) => {
                (Verdict::Ok, format!("{name} {version}"))
            }
            Some(_) => {
                let all = told.iter().map(|(name, version)| format!("{name} {version}"));
                (Verdict::Unknown, all.collect::<Vec<_>>().join(", "))
            }
        };
        report.note((&DRIVER, facility), *own, (verdict, found));
    }
}
