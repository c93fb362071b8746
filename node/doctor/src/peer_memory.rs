//! Whether NICs reach GPU memory.

use tokenyard_machine::{GpuVendor, NicFamily};

use crate::nics::rails;
use crate::versions::{at_least, kernel, numbers};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    PEER = "peer-memory",
    AMD = "amd-peer-memory",
    GDRCOPY = "gdrcopy",
}

/// The first kernel whose RDMA core registers memory by dmabuf.
const DMABUF_KERNEL: [u32; 2] = [5, 12];
/// GDRCopy for EFA's device interface.
const GDRDRV_EFA: [u32; 2] = [2, 5];

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    if rails(report).is_empty() {
        return;
    }
    let has = |vendor| report.machine.gpus.iter().any(|gpu| gpu.vendor == vendor);
    let (nvidia, amd) = (has(GpuVendor::Nvidia), has(GpuVendor::Amd));
    if nvidia {
        of_nvidia(report);
    }
    if amd {
        of_amd(report);
    }
}

/// Whether the kernel is one whose RDMA core registers memory by dmabuf.
fn has_dmabuf_registration(report: &DoctorReport<'_>) -> Option<bool> {
    let release = report.machine.kernel.release.known()?;
    Some(at_least(&kernel(release), &DMABUF_KERNEL))
}

fn of_amd(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let options = [
        ("CONFIG_PCI_P2PDMA", machine.kernel.has_p2pdma.get()),
        ("CONFIG_DMABUF_MOVE_NOTIFY", machine.kernel.has_dmabuf_move_notify.get()),
    ];
    let off: Vec<&str> =
        options.iter().filter(|(_, has)| *has == Some(false)).map(|(name, _)| *name).collect();
    let all_on = options.iter().all(|(_, has)| *has == Some(true));
    let (verdict, found) = match (has_dmabuf_registration(report), all_on) {
        _ if machine.modules.contains_key("ib_peer_mem") => {
            (Verdict::Ok, "ib_peer_mem is loaded".to_owned())
        }
        (Some(true), true) => (Verdict::Ok, "dmabuf".to_owned()),
        (Some(false), _) => {
            (Verdict::Broken, "no ib_peer_mem, and a kernel without dmabuf for RDMA".to_owned())
        }
        _ if !off.is_empty() => (
            Verdict::Broken,
            format!("no ib_peer_mem, and the kernel is without {}", off.join(", ")),
        ),
        _ => (Verdict::Unknown, "no ib_peer_mem; the kernel's options are unknown".to_owned()),
    };
    report.note(&AMD, Facility::GpuMemory, "AMD GPUs", verdict.on(found));
}

fn of_nvidia(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let nics = rails(report);
    let efa = nics.iter().any(|nic| nic.family == NicFamily::Efa);
    let loaded = |name: &str| machine.modules.contains_key(name);
    let driver = machine.nvidia.as_ref();
    let new_enough = has_dmabuf_registration(report);
    let is_open = driver.and_then(|driver| driver.is_open.get());
    let (verdict, found) = match (new_enough, is_open) {
        _ if loaded("nvidia_peermem") => (Verdict::Ok, "nvidia_peermem is loaded".to_owned()),
        _ if efa && loaded("efa_nv_peermem") => {
            (Verdict::Ok, "efa_nv_peermem is loaded".to_owned())
        }
        (Some(true), Some(true)) => (Verdict::Ok, "dmabuf".to_owned()),
        (Some(false), _) => {
            (Verdict::Broken, "no nvidia_peermem, and a kernel without dmabuf for RDMA".to_owned())
        }
        (_, Some(false)) => {
            (Verdict::Broken, "no nvidia_peermem, and the closed driver has no dmabuf".to_owned())
        }
        _ => (Verdict::Unknown, "no nvidia_peermem; whether there is dmabuf is unknown".to_owned()),
    };
    report.note(&PEER, Facility::GpuMemory, "NVIDIA GPUs", verdict.on(found));
    let module = machine.modules.get("gdrdrv");
    let version = module.and_then(|module| module.version.known());
    let (verdict, found) = match (module, version) {
        (None, _) => (Verdict::Slow, "gdrdrv is not loaded".to_owned()),
        (Some(_), Some(version)) if efa && !at_least(&numbers(version), &GDRDRV_EFA) => {
            (Verdict::Slow, format!("gdrdrv {version}"))
        }
        (Some(_), version) => {
            (Verdict::Ok, version.map_or("gdrdrv".to_owned(), |v| format!("gdrdrv {v}")))
        }
    };
    let expected =
        if efa { "gdrdrv 2.5, for EFA's device interface" } else { &GDRCOPY.words().expected };
    report.note(&GDRCOPY, Facility::GpuInitiated, "GDRCopy", verdict.on(found)).expected(expected);
}
