//! Settings of the driver that allow a GPU to ring a NIC's doorbell.

use tokenyard_machine::{NicFamily, NvidiaDriver};

use crate::nics::rails;
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    OPTIONS = "driver-options",
    DOORBELL = "gpu-doorbell",
    COMBINING = "write-combining",
}

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
