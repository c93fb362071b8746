//! Other communication libraries on the node, and which component each serves.

use tokenyard_machine::GpuVendor;

use crate::versions::{at_least, library, numbers};
use crate::{DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&NCCL, &NVSHMEM, &RCCL];

/// The first NCCL with the device interface that GIN is part of.
const NCCL_GIN: [u32; 2] = [2, 28];

static NCCL: Rule = Rule {
    id: "nccl",
    title: "NCCL",
    expected: "2.28 or later, for the component gin",
    why: "The component gin, which is planned, calls NCCL's device interface, which 2.28 brought. No part of today \
          uses NCCL.",
    impact: "the transport gin does not open",
    fix: "pip install nvidia-nccl-cu13, and put its lib folder (it has libnccl.so.2) into LD_LIBRARY_PATH",
    source: "NVIDIA NCCL Release Notes 2.28 (device API, GIN)",
};

static NVSHMEM: Rule = Rule {
    id: "nvshmem",
    title: "NVSHMEM",
    expected: "nothing",
    why: "Other systems (DeepEP's first version) need it. The component ibgda, which is planned, writes the NIC's \
          work requests itself, and needs the same driver options.",
    impact: "none",
    fix: "nothing",
    source: "docs/architecture.md",
};

static RCCL: Rule = Rule {
    id: "rccl",
    title: "ROCm's libraries",
    expected: "libamdhip64 for the component rocm; RCCL serves no component",
    why: "The rocm kernels, which are planned, open libamdhip64 at run time. RCCL is what frameworks use beside.",
    impact: "the rocm kernels do not open",
    fix: "install ROCm's runtime (hip-runtime-amd), and put /opt/rocm/lib into LD_LIBRARY_PATH",
    source: "AMD ROCm installation for Linux",
};

const NOT_FOUND: &str = "not in the usual folders";

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let has = |vendor| report.machine.gpus.iter().any(|gpu| gpu.vendor == vendor);
    if has(GpuVendor::Nvidia) || report.job.asks(Facility::Gin) {
        nccl(report);
        let found = library(report, "libnvshmem_host.so").map_or(NOT_FOUND.to_owned(), |library| {
            let version = library.version.as_deref().unwrap_or("version unknown");
            format!("{version}, serves no component")
        });
        report.note(&NVSHMEM, Facility::Node, "NVSHMEM", Verdict::Ok.on(found)).needed = false;
    }
    if has(GpuVendor::Amd) || report.job.asks(Facility::Hip) {
        rocm(report);
    }
}

fn nccl(report: &mut DoctorReport<'_>) {
    let asked = report.job.asks(Facility::Gin);
    let found = library(report, "libnccl.so");
    let version = found.and_then(|library| library.version.as_deref());
    let (verdict, text) = match (found, version.map(numbers)) {
        // No config asks for it.
        (None, _) if !asked => (Verdict::Ok, NOT_FOUND.to_owned()),
        (None, _) => (Verdict::Broken, NOT_FOUND.to_owned()),
        (Some(_), Some(version)) if version.len() < 2 => {
            (Verdict::Unknown, "its file tells no version".to_owned())
        }
        (Some(_), Some(numbers)) if at_least(&numbers, &NCCL_GIN) => {
            let serves = if asked { "serves gin" } else { "would serve gin (planned)" };
            (Verdict::Ok, format!("{}, {serves}", version.unwrap_or_default()))
        }
        (Some(_), Some(_)) => (
            Verdict::Broken,
            format!(
                "{}, too old for gin (planned); serves no component",
                version.unwrap_or_default()
            ),
        ),
        (Some(_), None) => (Verdict::Unknown, "its file tells no version".to_owned()),
    };
    report.note(&NCCL, Facility::Gin, "NCCL", verdict.on(text));
}

fn rocm(report: &mut DoctorReport<'_>) {
    let text = |name: &str| {
        library(report, name)
            .map(|library| library.version.clone().unwrap_or_else(|| "version unknown".to_owned()))
    };
    let (hip, rccl) = (text("libamdhip64.so"), text("librccl.so"));
    let (verdict, found) = match hip {
        Some(version) => (Verdict::Ok, format!("libamdhip64 {version}")),
        None => (Verdict::Unknown, "libamdhip64 is not in the usual folders".to_owned()),
    };
    let asked = report.job.asks(Facility::Hip);
    report.note(&RCCL, Facility::Hip, "ROCm", verdict.on(found)).needed = asked;
    if let Some(version) = rccl {
        let found = format!("{version}, serves no component");
        let finding = report.note(&RCCL, Facility::Hip, "RCCL", Verdict::Ok.on(found));
        finding.expected("nothing").needed = false;
    }
}
