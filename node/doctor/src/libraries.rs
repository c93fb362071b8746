//! Other communication libraries on the node, and which component each serves.

use tokenyard_machine::{GpuVendor, NicFamily};

use crate::nics::rails;
use crate::versions::{at_least, library, numbers};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    NCCL = "nccl",
    GIN = "gin-type",
    NVSHMEM = "nvshmem",
}

/// The first NCCL whose waits on the device have an end.
const NCCL_GIN: [u32; 3] = [2, 31, 2];
/// The first whose GIN runs over sockets, too.
const NCCL_SOCKETS: [u32; 2] = [2, 32];

const NOT_FOUND: &str = "not in the usual folders";

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let has_gpu = report.machine.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia);
    if has_gpu || report.job.asks(Facility::Gin) {
        nccl(report);
        let found = library(report, "libnvshmem_host.so").map_or(NOT_FOUND.to_owned(), |library| {
            let version = library.version.as_deref().unwrap_or("version unknown");
            format!("{version}, serves no component")
        });
        report.note(&NVSHMEM, Facility::Node, "NVSHMEM", Verdict::Ok.on(found)).needed = false;
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
            (Verdict::Unknown, "its file names no version".to_owned())
        }
        (Some(_), Some(numbers)) if at_least(&numbers, &NCCL_GIN) => {
            let serves = if asked { "serves gin" } else { "would serve gin" };
            (Verdict::Ok, format!("{}, {serves}", version.unwrap_or_default()))
        }
        (Some(_), Some(_)) => (
            Verdict::Broken,
            format!("{}, too old for gin; serves no component", version.unwrap_or_default()),
        ),
        (Some(_), None) => (Verdict::Unknown, "its file names no version".to_owned()),
    };
    report.note(&NCCL, Facility::Gin, "NCCL", verdict.on(text));
    if asked {
        let has_sockets = version.is_some_and(|it| at_least(&numbers(it), &NCCL_SOCKETS));
        gin_type(report, has_sockets);
    }
}

/// By what NCCL's GIN would leave the node.
fn gin_type(report: &mut DoctorReport<'_>, has_sockets: bool) {
    let families: Vec<NicFamily> = rails(report).iter().map(|nic| nic.family).collect();
    let has_gdrcopy = report.machine.modules.contains_key("gdrdrv");
    let gdrcopy = if has_gdrcopy { "GDRCopy" } else { "no GDRCopy" };
    let (verdict, found) = match families.first() {
        Some(NicFamily::Mlx5) => (Verdict::Ok, "ConnectX: gdaki, or proxy"),
        Some(NicFamily::Efa) => (Verdict::Ok, "EFA: proxy, by aws-ofi-nccl"),
        Some(_) => (Verdict::Unknown, "another RDMA NIC: proxy, if NCCL has a plugin for it"),
        None if has_gdrcopy && has_sockets => (Verdict::Slow, "no RDMA NIC: proxy over sockets"),
        None if has_gdrcopy => (Verdict::Broken, "no RDMA NIC, and no NCCL 2.32 or later"),
        None => (Verdict::Broken, "no RDMA NIC"),
    };
    report.note(&GIN, Facility::Gin, "GIN", verdict.on(format!("{found}; {gdrcopy}")));
}
