//! Whether NICs reach GPU memory.

use tokenyard_machine::{GpuVendor, NicFamily};

use crate::nics::hardware;
use crate::versions::{at_least, kernel};
use crate::{Facility, Report, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&PEER, &GDRCOPY];

/// The first kernel whose RDMA core registers memory by dmabuf.
const DMABUF_KERNEL: [u32; 2] = [5, 12];

static PEER: Rule = Rule {
    id: "peer-memory",
    title: "GPU memory for NICs",
    wanted: "dmabuf (Linux 5.12, open driver) or nvidia_peermem",
    why: "A NIC reads and writes GPU memory only where the kernel introduces them to each other: by \
          dmabuf, which needs Linux 5.12 and the open kernel modules of NVIDIA's driver, or by the older \
          module nvidia_peermem, which needs the driver of MLNX_OFED or DOCA.",
    cost: "registration of GPU memory fails at start: transports on which the NIC reads GPU memory do \
           not open",
    fix: "modprobe nvidia_peermem, or install the open kernel modules (nvidia-open)",
    source: "NVIDIA, GPUDirect RDMA documentation (dmabuf, nvidia-peermem); NVIDIA GPU Operator, GPUDirect \
             RDMA: https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html",
};

static GDRCOPY: Rule = Rule {
    id: "gdrcopy",
    title: "GPU memory for the processor",
    wanted: "the module gdrdrv",
    why: "With GDRCopy the processor reads and writes small words of GPU memory directly. \
          GPU-initiated RDMA and EFA's device interface keep their flags there.",
    cost: "small words cross by a copy of some microseconds, and parts that insist on GDRCopy do not open",
    fix: "install GDRCopy's driver (package gdrdrv-dkms) and `modprobe gdrdrv`",
    source: "NVIDIA GDRCopy, README: https://github.com/NVIDIA/gdrcopy; NVSHMEM Installation Guide, \
             Software Requirements",
};

pub(crate) fn judge(report: &mut Report<'_>) {
    let machine = report.machine;
    let nvidia = machine.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia);
    let nics = hardware(report);
    if !nvidia || nics.is_empty() {
        return;
    }
    let efa = nics.iter().any(|nic| nic.family == NicFamily::Efa);
    let loaded = |name: &str| machine.modules.contains_key(name);
    let driver = machine.nvidia.as_ref();
    let release = machine.kernel.release.known().map(|release| kernel(release));
    let new_enough = release.as_ref().map(|release| at_least(release, &DMABUF_KERNEL));
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
        _ => {
            (Verdict::Unknown, "no nvidia_peermem; whether there is dmabuf is not told".to_owned())
        }
    };
    report.note((&PEER, Facility::GpuMemory), "NVIDIA GPUs", (verdict, found));
    let (mut verdict, found) = match loaded("gdrdrv") {
        true => (Verdict::Ok, "gdrdrv is loaded"),
        false => (Verdict::Slow, "gdrdrv is not loaded"),
    };
    // Without a config nobody has asked for it.
    if report.job.uses.is_none() {
        verdict = Verdict::Ok;
    }
    let wanted = if efa { "gdrdrv 2.5, for EFA's device interface" } else { GDRCOPY.wanted };
    report.note((&GDRCOPY, Facility::GpuInitiated), "GDRCopy", (verdict, found)).wanted(wanted);
}
