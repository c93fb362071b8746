//! Whether NICs reach GPU memory.

use tokenyard_machine::{GpuVendor, NicFamily};

use crate::nics::rails;
use crate::versions::{at_least, kernel, numbers};
use crate::{DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&PEER, &AMD, &GDRCOPY];

/// The first kernel whose RDMA core registers memory by dmabuf.
const DMABUF_KERNEL: [u32; 2] = [5, 12];
/// GDRCopy for EFA's device interface.
const GDRDRV_EFA: [u32; 2] = [2, 5];

static PEER: Rule = Rule {
    id: "peer-memory",
    title: "GPU memory for NICs",
    expected: "dmabuf (Linux 5.12, open driver) or nvidia_peermem",
    why: "A NIC reads and writes GPU memory only where the kernel introduces them to each other: by \
          dmabuf, which needs Linux 5.12 and the open kernel modules of NVIDIA's driver, or by the older \
          module nvidia_peermem, which needs the driver of MLNX_OFED or DOCA.",
    impact: "registration of GPU memory fails at start: transports on which the NIC reads GPU memory do \
           not open",
    fix: "modprobe nvidia_peermem, or install the open kernel modules (nvidia-open)",
    source: "NVIDIA, GPUDirect RDMA documentation (dmabuf, nvidia-peermem); NVIDIA GPU Operator, GPUDirect \
             RDMA: \
             https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html",
};

static AMD: Rule = Rule {
    id: "amd-peer-memory",
    title: "AMD GPU memory for NICs",
    expected: "dmabuf (Linux 5.12, CONFIG_PCI_P2PDMA and CONFIG_DMABUF_MOVE_NOTIFY) or ib_peer_mem",
    why: "A NIC reads and writes memory of an AMD GPU in one of two ways. The first is dmabuf, which needs \
          Linux 5.12 and a kernel with peer-to-peer DMA and notices of moved buffers. The second is the \
          older interface ib_peer_mem of amdgpu-dkms and the NIC vendor's driver. The file \
          /boot/config-RELEASE has the options of a kernel; containers often lack it. The transports verbs \
          and efa register such memory; this never ran on an AMD GPU.",
    impact: "registration of GPU memory fails: every row takes the way through host memory",
    fix: "boot a kernel with CONFIG_PCI_P2PDMA=y and CONFIG_DMABUF_MOVE_NOTIFY=y, \
          or install amdgpu-dkms beside the NIC's driver and modprobe ib_peer_mem; in a container, mount \
          /boot read-only so that this can be seen",
    source: "ROCm RCCL, src/misc/rocmwrap.cc (which options it asks of the kernel); Linux kernel, \
             drivers/dma-buf/Kconfig and drivers/pci/Kconfig; AMD ROCm, GPU-enabled MPI (peer memory)",
};

static GDRCOPY: Rule = Rule {
    id: "gdrcopy",
    title: "GPU memory for the processor",
    expected: "the module gdrdrv",
    why: "With GDRCopy the processor reads and writes small words of GPU memory directly. \
          GPU-initiated RDMA and EFA's device interface keep their flags there.",
    impact: "small words cross by a copy of some microseconds, and components that insist on GDRCopy do \
             not open",
    fix: "install GDRCopy's driver (package gdrdrv-dkms) and `modprobe gdrdrv`",
    source: "NVIDIA GDRCopy, README: https://github.com/NVIDIA/gdrcopy; NVSHMEM Installation Guide, \
             Software Requirements; aws-ofi-nccl 1.21 release notes (GDA mode: GDRCopy 2.5)",
};

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
    let expected = if efa { "gdrdrv 2.5, for EFA's device interface" } else { GDRCOPY.expected };
    report.note(&GDRCOPY, Facility::GpuInitiated, "GDRCopy", verdict.on(found)).expected(expected);
}
