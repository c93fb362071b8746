//! Floors of drivers and libraries, and versions that should be equal.

use tokenyard_machine::{GpuVendor, Library, Nic};

use crate::nics::{hardware, majority, model, rails};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    NVIDIA = "nvidia-driver",
    NVRTC = "nvrtc",
    LIBFABRIC = "libfabric-version",
    RDMA_CORE = "rdma-core",
    MLX5 = "mlx5-provider",
    FIRMWARE = "nic-firmware",
}

/// CUDA 13.0, which the bindings of the cuda backend are made for.
const NVIDIA_DRIVER: [u32; 1] = [580];
/// libfabric of the oldest API that is spoken.
const LIBFABRIC_FLOOR: [u32; 2] = [1, 17];
/// libfabric for EFA: shared memory within a node can be forbidden.
const LIBFABRIC_EFA: [u32; 2] = [1, 18];
/// rdma-core with what the verbs backend calls.
const RDMA_CORE_FLOOR: u32 = 32;
/// libfabric with EFA's doorbells for GPUs.
const LIBFABRIC_DOORBELL: [u32; 2] = [2, 6];
/// libmlx5 with what NCCL's GIN calls.
const MLX5_GIN: [u32; 2] = [1, 25];

/// The numbers of a version: `580.65.06` is 580, 65, 6.
pub(crate) fn numbers(version: &str) -> Vec<u32> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter(|component| !component.is_empty())
        .map_while(|component| component.parse().ok())
        .collect()
}

/// The numbers of a kernel's release, without what the distribution adds: `6.8.0-45-generic`.
pub(crate) fn kernel(release: &str) -> Vec<u32> {
    numbers(release.split(['-', '+']).next().unwrap_or(release))
}

/// Whether a version is `floor` or newer. A version without numbers is not.
pub(crate) fn at_least(version: &[u32], floor: &[u32]) -> bool {
    !version.is_empty() && version >= floor
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    nvidia(report);
    libfabric(report);
    rdma_core(report);
    if report.job.asks(Facility::Gin) {
        mlx5(report);
    }
    firmware(report);
}

/// The newest file of this name. The loader may find any of them.
pub(crate) fn library<'a>(report: &DoctorReport<'a>, name: &str) -> Option<&'a Library> {
    let found = report.machine.libraries.found.iter().filter(|library| library.name == name);
    found.max_by_key(|library| library.version.as_deref().map(numbers))
}

fn nvidia(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let has_gpu = machine.gpus.iter().any(|gpu| gpu.vendor == GpuVendor::Nvidia);
    if !has_gpu && !report.job.asks(Facility::Cuda) {
        return;
    }
    let version = machine.nvidia.as_ref().map(|driver| driver.version.known());
    let (verdict, found) = match version {
        None => (Verdict::Broken, "not loaded".to_owned()),
        Some(None) => (Verdict::Unknown, "loaded, version unknown".to_owned()),
        Some(Some(version)) if at_least(&numbers(version), &NVIDIA_DRIVER) => {
            (Verdict::Ok, version.clone())
        }
        Some(Some(version)) => (Verdict::Broken, version.clone()),
    };
    report.note(&NVIDIA, Facility::Cuda, "NVIDIA driver", verdict.on(found));
    let nvrtc = library(report, "libnvrtc.so");
    let major = nvrtc.and_then(|library| library.version.as_deref()).map(numbers);
    let asked = report.job.asks(Facility::Cuda);
    let (verdict, found) = match (nvrtc, major.as_deref()) {
        // The library may be in a folder that only the job's environment names.
        (None, _) if asked => (Verdict::Unknown, "not in the usual folders".to_owned()),
        (None, _) => (Verdict::Ok, "not in the usual folders".to_owned()),
        (Some(_), Some([13, ..])) => (Verdict::Ok, shown(nvrtc)),
        (Some(_), Some([_, ..])) => (Verdict::Unknown, shown(nvrtc)),
        (Some(_), _) => (Verdict::Ok, shown(nvrtc)),
    };
    let finding = report.note(&NVRTC, Facility::Cuda, "NVRTC", verdict.on(found));
    finding.needed &= asked || nvrtc.is_some();
}

fn shown(library: Option<&Library>) -> String {
    library.map_or("not found".to_owned(), |library| {
        let version = library.version.as_deref().unwrap_or("version unknown");
        format!("{version} (/{})", library.path.trim_start_matches('/'))
    })
}

fn libfabric(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let library = library(report, "libfabric.so");
    if library.is_none() && !report.job.asks(Facility::Libfabric) {
        return;
    }
    // The file's name shows the ABI only. The packages of the EFA installer show the version, and the
    // component's probe does.
    let package = machine.libraries.efa_packages.known().and_then(|packages| {
        let name = packages.iter().find(|name| name.contains("libfabric"))?;
        efa_libfabric(name)
    });
    let efa = report.job.asks(Facility::Efa)
        || rails(report).iter().any(|nic| Facility::of(nic) == Facility::Efa);
    let floor = match efa {
        true if report.job.asks(Facility::GpuInitiated) => LIBFABRIC_DOORBELL,
        true => LIBFABRIC_EFA,
        false => LIBFABRIC_FLOOR,
    };
    let (verdict, found) = match (library, package) {
        // The component's probe knows whether the loader finds it.
        (None, None) => (Verdict::Unknown, "not in the usual folders".to_owned()),
        (_, Some(package)) => {
            let words = package.iter().map(u32::to_string).collect::<Vec<_>>().join(".");
            let verdict = if at_least(&package, &floor) { Verdict::Ok } else { Verdict::Broken };
            (verdict, format!("{words}, of the EFA installer"))
        }
        (Some(library), None) => {
            (Verdict::Ok, format!("/{}", library.path.trim_start_matches('/')))
        }
    };
    let finding = report.note(&LIBFABRIC, Facility::Libfabric, "libfabric", verdict.on(found));
    finding.expected(format!("{}.{} or later", floor[0], floor[1]));
}

/// The version in the name of a package: `libfabric1-aws-2.1.0amzn5.0` is 2.1.0.
fn efa_libfabric(package: &str) -> Option<Vec<u32>> {
    let words = package.split(['-', '_', ' ']).skip(1);
    let version = words.into_iter().find(|w| w.starts_with(|c: char| c.is_ascii_digit()))?;
    let own = version.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    Some(numbers(own))
}

fn rdma_core(report: &mut DoctorReport<'_>) {
    let library = library(report, "libibverbs.so");
    let has_nic = rails(report).iter().any(|nic| Facility::of(nic) == Facility::Verbs);
    if !has_nic && !report.job.asks(Facility::Verbs) {
        return;
    }
    // libibverbs.so.1.14.50.0: the ABI, its minor version, then the version of rdma-core.
    let version = library
        .and_then(|library| library.version.as_deref())
        .and_then(|version| numbers(version).get(2).copied());
    let (verdict, found) = match (library, version) {
        (None, _) => (Verdict::Unknown, "libibverbs is not in the usual folders".to_owned()),
        (Some(_), None) => (Verdict::Unknown, shown(library)),
        (Some(_), Some(version)) if version < RDMA_CORE_FLOOR => {
            (Verdict::Broken, format!("rdma-core {version}"))
        }
        (Some(_), Some(version)) => (Verdict::Ok, format!("rdma-core {version}")),
    };
    report.note(&RDMA_CORE, Facility::Verbs, "libibverbs", verdict.on(found));
}

fn mlx5(report: &mut DoctorReport<'_>) {
    let library = library(report, "libmlx5.so");
    let version = library.and_then(|library| library.version.as_deref()).map(numbers);
    let verdict = match (library, version) {
        (None, _) => Verdict::Unknown,
        (Some(_), Some(version)) if at_least(&version, &MLX5_GIN) => Verdict::Ok,
        (Some(_), Some(version)) if version.len() > 1 => Verdict::Broken,
        (Some(_), _) => Verdict::Unknown,
    };
    report.note(&MLX5, Facility::Gin, "libmlx5", verdict.on(shown(library)));
}

fn firmware(report: &mut DoctorReport<'_>) {
    let nics = hardware(report);
    // NICs are compared per board too, because each maker of cards has firmware versions of its own.
    let kind = |nic: &Nic| model(report, nic);
    let mut judged = Vec::new();
    for nic in &nics {
        let (Some(kind_of), Some(version)) = (kind(nic), nic.firmware.known()) else { continue };
        let others: Vec<&String> = nics
            .iter()
            .filter(|other| kind(other).as_ref() == Some(&kind_of))
            .filter_map(|other| other.firmware.known())
            .collect();
        let usual = majority(&others).unwrap_or(version);
        // It is unknown whether two versions behave alike.
        let verdict = if usual == version { Verdict::Ok } else { Verdict::Unknown };
        judged.push((nic, verdict, version.clone(), usual.clone()));
    }
    for (nic, verdict, version, usual) in judged {
        let finding = report.note(&FIRMWARE, Facility::of(nic), &nic.name, verdict.on(version));
        finding.expected(format!("{usual}, as the others of its model"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(numbers("580.65.06"), [580, 65, 6]);
        assert_eq!(kernel("6.8.0-45-generic"), [6, 8, 0]);
        assert_eq!(kernel("5.12+"), [5, 12]);
        assert!(at_least(&kernel("5.12.0"), &[5, 12]));
        assert!(!at_least(&kernel("5.11.22-1"), &[5, 12]));
        assert!(!at_least(&numbers("unknown"), &[1]));
        assert_eq!(efa_libfabric("libfabric1-aws-2.1.0amzn5.0"), Some(vec![2, 1, 0]));
        assert_eq!(efa_libfabric("libfabric-aws-1.22.0amzn1.0-1"), Some(vec![1, 22, 0]));
        assert_eq!(efa_libfabric("libfabric1"), None);
    }
}
