//! AMD GPUs and Pollara NICs.

use tokenyard_machine::{Access, Gpu, GpuVendor, KfdLinkKind, Machine, NicFamily};

use crate::nics::{hardware, majority};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    DRIVER = "amdgpu-driver",
    KFD = "kfd",
    XGMI = "xgmi-links",
    IONIC = "ionic-driver",
}

const PENSANDO: u16 = 0x1dd8;
const NETWORK: u32 = 0x02;

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let gpus: Vec<&Gpu> =
        report.machine.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Amd).collect();
    if !gpus.is_empty() {
        drivers(report, gpus.len());
        xgmi(report, &gpus);
    }
    ionic(report);
}

fn drivers(report: &mut DoctorReport<'_>, gpus: usize) {
    let machine = report.machine;
    let (verdict, found) = match machine.modules.get("amdgpu") {
        Some(module) => {
            let version = module.version.known().map_or("of the kernel", String::as_str);
            (Verdict::Ok, format!("amdgpu {version}"))
        }
        None => (Verdict::Broken, "not loaded".to_owned()),
    };
    report.note(&DRIVER, Facility::Hip, "AMD GPUs", verdict.on(found));
    let (verdict, found) = rights(machine, gpus);
    report.note(&KFD, Facility::Hip, "AMD GPUs", verdict.on(found));
}

/// The access of this process to the GPUs of its node.
fn rights(machine: &Machine, gpus: usize) -> (Verdict, String) {
    let nodes = &machine.devices.nodes;
    match nodes.get("kfd") {
        None => return (Verdict::Broken, "no /dev/kfd".to_owned()),
        Some(Access::Refused) => return (Verdict::Broken, "/dev/kfd is refused".to_owned()),
        Some(Access::Granted) => {}
    }
    let renders = || nodes.iter().filter(|(name, _)| name.starts_with("dri/renderD"));
    let granted = renders().filter(|(_, access)| **access == Access::Granted).count();
    let refused: Vec<String> = renders()
        .filter(|(_, access)| **access == Access::Refused)
        .map(|(name, _)| format!("/dev/{name}"))
        .collect();
    let but = match refused.as_slice() {
        [] => String::new(),
        some => format!("; {} refused", some.join(", ")),
    };
    match granted {
        0 => (Verdict::Broken, format!("/dev/kfd, and no render node{but}")),
        _ if granted < gpus => {
            (Verdict::Slow, format!("/dev/kfd, and {granted} render nodes for {gpus} GPUs{but}"))
        }
        _ => (Verdict::Ok, format!("/dev/kfd, {granted} render nodes{but}")),
    }
}

fn xgmi(report: &mut DoctorReport<'_>, gpus: &[&Gpu]) {
    let count = |gpu: &Gpu| {
        gpu.kfd_links.iter().filter(|l| l.kind == KfdLinkKind::Xgmi && l.to.is_some()).count()
    };
    let counts: Vec<usize> = gpus.iter().map(|gpu| count(gpu)).collect();
    let most = counts.iter().max().copied().unwrap_or(0);
    if gpus.len() < 2 {
        return;
    }
    // Cards without xGMI, or a kernel that shows no topology.
    if most == 0 {
        if report.job.asks(Facility::Xgmi) {
            let found = "no links: traffic takes PCI Express, if it passes at all";
            let finding = report.note(&XGMI, Facility::Xgmi, "AMD GPUs", Verdict::Slow.on(found));
            finding.fix("use transport.scale_up.use = \"none\" and a transport of the host, or GPUs with xGMI");
        }
        return;
    }
    let usual = majority(&counts).unwrap_or(most);
    for (gpu, count) in gpus.iter().zip(counts) {
        let verdict = if count < usual { Verdict::Slow } else { Verdict::Ok };
        let finding = report.note(
            &XGMI,
            Facility::Xgmi,
            format!("GPU {}", gpu.index),
            verdict.on(format!("links to {count} GPUs")),
        );
        finding.expected(format!("links to {usual} GPUs"));
    }
}

fn ionic(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let cards = machine.pci.iter().filter(|function| {
        function.vendor.get() == Some(PENSANDO)
            && function.class.get().is_some_and(|class| class >> 16 == NETWORK)
    });
    if cards.count() == 0 {
        return;
    }
    let nics = hardware(report).iter().filter(|nic| nic.family == NicFamily::Ionic).count();
    let loaded = machine.modules.contains_key("ionic_rdma");
    let (verdict, found) = match (nics, loaded) {
        (0, false) => (Verdict::Broken, "ionic_rdma is not loaded".to_owned()),
        (0, true) => {
            (Verdict::Broken, "ionic_rdma is loaded, and there is no RDMA device".to_owned())
        }
        (nics, _) => (Verdict::Ok, format!("{nics} RDMA devices")),
    };
    report.note(&IONIC, Facility::Verbs, "Pollara NICs", verdict.on(found));
}
