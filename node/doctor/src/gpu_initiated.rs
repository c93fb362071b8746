//! Settings of the driver that allow a GPU to ring a NIC's doorbell.

use tokenyard_machine::{NicFamily, NvidiaDriver};

use crate::nics::rails;
use crate::{DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&OPTIONS, &DOORBELL, &COMBINING];

static OPTIONS: Rule = Rule {
    id: "driver-options",
    title: "Driver options for GPU-initiated RDMA",
    expected: "PeerMappingOverride=1 and EnableStreamMemOPs=1",
    why: "The components that need it are gin and ibgda. A GPU that rings the NIC's doorbell needs the \
          NIC's registers mapped on the GPU, which NVIDIA's driver refuses to all but root unless \
          PeerMappingOverride is 1. Without it the processor rings the doorbell for the GPU (CPU-assisted \
          mode), which needs no option.",
    impact: "GPU-initiated RDMA falls back to CPU-assisted mode: a thread of the processor per GPU, and some \
           microseconds more per batch",
    fix: "write to /etc/modprobe.d/nvidia.conf: options nvidia NVreg_EnableStreamMemOPs=1 \
          NVreg_RegistryDwords=\"PeerMappingOverride=1;\" — then update-initramfs -u, and restart the node",
    source: "NVSHMEM Installation Guide, GPU-initiated RDMA; NVSHMEM 3.4.5 Release Notes (CPU-assisted \
             IBGDA): https://docs.nvidia.com/nvshmem/release-notes-install-guide/release-notes/release-3405.html; \
             libgdsync README (PeerMappingOverride)",
};

static DOORBELL: Rule = Rule {
    id: "gpu-doorbell",
    title: "NICs whose doorbell a GPU can ring",
    expected: "ConnectX-4 or later",
    why: "The kernels write work requests of mlx5 themselves. Other NICs have other formats.",
    impact: "the component does not open",
    fix: "choose `verbs` or `libfabric` as transport: the processor then posts for the GPU",
    source: "NVSHMEM Installation Guide, Hardware Requirements",
};

static COMBINING: Rule = Rule {
    id: "write-combining",
    title: "Write-combining memory",
    expected: "not switched off",
    why: "Doorbells with the request in them (mlx5's BlueFlame) and GDRCopy's mappings are written through \
          write-combining memory, which needs the processor's page attribute table.",
    impact: "each work request is fetched by the NIC over PCI Express, and GDRCopy writes word by word: some \
           microseconds more per batch",
    fix: "take `nopat` from the kernel's command line, and restart the node",
    source: "Linux kernel, Documentation/arch/x86/pat.rst (nopat)",
};

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    combining(report);
    let Some(driver) = report.machine.nvidia.as_ref() else { return };
    let families: Vec<NicFamily> = rails(report).iter().map(|nic| nic.family).collect();
    if families.is_empty() {
        return;
    }
    options(report, driver);
    let (verdict, found) = match families.iter().filter(|f| **f == NicFamily::Mlx5).count() {
        0 => (Verdict::Broken, "none"),
        _ => (Verdict::Ok, "mlx5"),
    };
    let asked = report.job.asks(Facility::GpuInitiated);
    let finding = report.note(&DOORBELL, Facility::GpuInitiated, "NICs", verdict.on(found));
    if !asked {
        finding.expected("ConnectX-4 or later, for the components gin and ibgda");
    }
}

fn combining(report: &mut DoctorReport<'_>) {
    let Some(words) = report.machine.kernel.command_line.known() else { return };
    let Some(facility) = rails(report).first().map(|nic| Facility::of(nic)) else { return };
    let (verdict, found) = match words.iter().any(|word| word == "nopat") {
        true => (Verdict::Slow, "switched off at boot (nopat)"),
        false => (Verdict::Ok, "not switched off"),
    };
    report.note(&COMBINING, facility, "kernel", verdict.on(found));
}

fn options(report: &mut DoctorReport<'_>, driver: &NvidiaDriver) {
    let (Some(registry), Some(params)) = (driver.registry.known(), driver.params.known()) else {
        let found = "the driver does not show its options";
        report.note(&OPTIONS, Facility::GpuInitiated, "NVIDIA driver", Verdict::Unknown.on(found));
        return;
    };
    let mapping = registry.get("PeerMappingOverride").copied().unwrap_or(0);
    let streams = params.get("EnableStreamMemOPs").map_or("0", String::as_str);
    let found = format!("PeerMappingOverride={mapping}, EnableStreamMemOPs={streams}");
    let (verdict, mode) = match (mapping, streams) {
        (1, "1") => (Verdict::Ok, "the GPU rings itself"),
        _ => (Verdict::Slow, "CPU-assisted mode"),
    };
    let found = format!("{found}: {mode}");
    let asked = report.job.asks(Facility::GpuInitiated);
    let finding = report.note(&OPTIONS, Facility::GpuInitiated, "NVIDIA driver", verdict.on(found));
    if !asked {
        finding.expected("both 1, for components whose GPU rings doorbells itself");
    }
}
