//! ROCm's libraries, and the architectures that there are kernels for.

use tokenyard_machine::{Gpu, GpuVendor};

use crate::versions::{at_least, library, numbers};
use crate::{DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&HIP, &HIPRTC, &ARCHITECTURE, &RCCL];

/// The oldest ROCm whose structures the bindings know.
const HIP_FLOOR: [u32; 1] = [6];
/// The first whose physical memory may be uncached.
const UNCACHED: [u32; 2] = [7, 1];
/// Architectures that the kernels are compiled for in tests.
const ARCHITECTURES: [&str; 2] = ["gfx942", "gfx950"];

static HIP: Rule = Rule {
    id: "hip-runtime",
    title: "ROCm's runtime",
    expected: "libamdhip64 of ROCm 6 or newer",
    why: "The rocm backend opens libamdhip64 at run time. Uncached memory, which other GPUs look at while a kernel \
          runs, crosses to other processes by hipIpc up to ROCm 7.0, and by a descriptor from 7.1 on.",
    impact: "the kernel set rocm and the transport xgmi do not open: no rank starts",
    fix: "install ROCm's runtime (hip-runtime-amd, or a container image with ROCm), and put its lib folder into \
          LD_LIBRARY_PATH, or name it by `libraries` in the config",
    source: "backends/rocm/docs.md; AMD ROCm installation for Linux",
};

static HIPRTC: Rule = Rule {
    id: "hiprtc",
    title: "ROCm's run-time compiler",
    expected: "libhiprtc beside libamdhip64",
    why: "Kernels are compiled on the node, once, and stored. Where the config names a clang (`compiler`), \
          that program compiles them.",
    impact: "kernels that are not in the cache already do not compile: no rank starts",
    fix: "install hiprtc (it comes with hip-runtime-amd or hip-devel), or set `compiler` in [kernels.rocm] to ROCm's \
          clang",
    source: "backends/rocm/docs.md",
};

static ARCHITECTURE: Rule = Rule {
    id: "amd-architecture",
    title: "Architecture of AMD GPUs",
    expected: "gfx942 or gfx950",
    why: "The kernels are written for CDNA 3 and 4: MI300X, MI325X, MI350X, MI355X.",
    impact: "the kernel set rocm does not open on this GPU",
    fix: "use the cpu kernels, or other GPUs",
    source: "backends/rocm/docs.md; Linux kernel, amdkfd topology (gfx_target_version)",
};

static RCCL: Rule = Rule {
    id: "rccl",
    title: "RCCL",
    expected: "nothing",
    why: "No component uses RCCL; frameworks do.",
    impact: "none",
    fix: "nothing",
    source: "backends/rocm/docs.md (components)",
};

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
