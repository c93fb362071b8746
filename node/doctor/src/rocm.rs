//! ROCm's libraries, and the architectures that there are kernels for.

use tokenyard_machine::{Gpu, GpuVendor};

use crate::versions::{at_least, library, numbers};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    HIP = "hip-runtime",
    HIPRTC = "hiprtc",
    ARCHITECTURE = "amd-architecture",
    RCCL = "rccl",
}

/// The oldest ROCm whose structures the bindings know.
const HIP_FLOOR: [u32; 1] = [6];
/// The first whose physical memory may be uncached.
const UNCACHED: [u32; 2] = [7, 1];
/// Architectures that the kernels are compiled for in tests.
const ARCHITECTURES: [&str; 2] = ["gfx942", "gfx950"];

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let gpus: Vec<&Gpu> =
        report.machine.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Amd).collect();
    if gpus.is_empty() && !report.job.asks(Facility::Hip) {
        return;
    }
    hip(report);
    hiprtc(report);
    for gpu in gpus {
        architecture(report, gpu);
    }
    let rccl = library(report, "librccl.so").map(|library| library.version.clone());
    if let Some(version) = rccl {
        let version = version.unwrap_or_else(|| "version unknown".to_owned());
        let found = format!("{version}, serves no component");
        report.note(&RCCL, Facility::Hip, "RCCL", Verdict::Ok.on(found)).needed = false;
    }
}

/// The verdict where a library is not seen: a loader may have other folders than this tool.
fn unseen(report: &DoctorReport<'_>) -> Verdict {
    if report.job.asks(Facility::Hip) { Verdict::Broken } else { Verdict::Unknown }
}

fn hip(report: &mut DoctorReport<'_>) {
    let library = library(report, "libamdhip64.so");
    let version = library.and_then(|library| library.version.as_deref());
    let (verdict, found) = match (library, version.map(numbers)) {
        (None, _) => (unseen(report), "libamdhip64 is not in the usual folders".to_owned()),
        (Some(_), Some(numbers)) if at_least(&numbers, &HIP_FLOOR) => {
            let by = if at_least(&numbers, &UNCACHED) { "descriptors" } else { "hipIpc" };
            let version = version.unwrap_or_default();
            (Verdict::Ok, format!("libamdhip64 {version}; memory crosses by {by}"))
        }
        (Some(_), Some(_)) => {
            (Verdict::Broken, format!("libamdhip64 {}", version.unwrap_or_default()))
        }
        (Some(_), None) => (Verdict::Unknown, "libamdhip64, version unknown".to_owned()),
    };
    let asked = report.job.asks(Facility::Hip);
    report.note(&HIP, Facility::Hip, "ROCm", verdict.on(found)).needed = asked;
}

fn hiprtc(report: &mut DoctorReport<'_>) {
    let (verdict, found) = match library(report, "libhiprtc.so") {
        Some(library) => {
            let version = library.version.as_deref().unwrap_or("version unknown");
            (Verdict::Ok, format!("libhiprtc {version}"))
        }
        None => (unseen(report), "libhiprtc is not in the usual folders".to_owned()),
    };
    let asked = report.job.asks(Facility::Hip);
    report.note(&HIPRTC, Facility::Hip, "hiprtc", verdict.on(found)).needed = asked;
}

fn architecture(report: &mut DoctorReport<'_>, gpu: &Gpu) {
    let (verdict, found) = match gpu.gfx.known() {
        Some(name) if ARCHITECTURES.contains(&name.as_str()) => (Verdict::Ok, name.clone()),
        Some(name) => (Verdict::Broken, name.clone()),
        None => (Verdict::Unknown, "the kernel does not say".to_owned()),
    };
    let asked = report.job.asks(Facility::Hip);
    let subject = format!("GPU {}", gpu.index);
    report.note(&ARCHITECTURE, Facility::Hip, subject, verdict.on(found)).needed = asked;
}
