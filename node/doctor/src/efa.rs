//! Elastic Fabric Adapters.

use tokenyard_machine::{Nic, NicFamily, Silence};

use crate::nics::{NOT_RUN, rails};
use crate::versions::{at_least, numbers};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    DRIVER = "efa-driver",
    PROVIDER = "efa-provider",
    INSTALLER = "efa-installer",
}

/// The first driver with the GPU's doorbells.
const DOORBELL_DRIVER: [u32; 2] = [3, 3];

/// fi_info ends with the error of fi_getinfo: here that no provider has anything to offer (FI_ENODATA).
const NO_DATA: i32 = 61;

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let adapters: Vec<&Nic> =
        rails(report).into_iter().filter(|nic| nic.family == NicFamily::Efa).collect();
    if adapters.is_empty() && !report.job.asks(Facility::Efa) {
        return;
    }
    driver(report);
    provider(report, adapters.len());
    installer(report);
}

fn driver(report: &mut DoctorReport<'_>) {
    let module = report.machine.modules.get("efa");
    let version = module.and_then(|module| module.version.known());
    let (verdict, found) = match (module, version) {
        (None, _) => (Verdict::Broken, "not loaded".to_owned()),
        (Some(_), None) => (Verdict::Ok, "the kernel's own".to_owned()),
        (Some(_), Some(version)) => (Verdict::Ok, version.clone()),
    };
    report.note(&DRIVER, Facility::Efa, "efa", verdict.on(found));
    if let (Some(version), true) = (version, report.job.asks(Facility::GpuInitiated)) {
        let new = at_least(&numbers(version), &DOORBELL_DRIVER);
        let verdict = if new { Verdict::Ok } else { Verdict::Broken };
        let finding = report.note(
            &DRIVER,
            Facility::GpuInitiated,
            "efa, for the GPU's doorbells",
            verdict.on(version.as_str()),
        );
        finding.expected("3.3 or later");
    }
}

fn provider(report: &mut DoctorReport<'_>, adapters: usize) {
    let Some(fabrics) = report.machine.fabrics.known() else {
        let silent = report.machine.silent.get("fi_info");
        let found = silent.map_or("fi_info prints nothing that can be read".to_owned(), |w| {
            w.in_words("fi_info")
        });
        let verdict = match silent {
            Some(Silence::Failed { code: NO_DATA, .. }) => Verdict::Broken,
            _ => Verdict::Unknown,
        };
        let fix = match silent {
            Some(Silence::NotFound { .. }) => {
                "install the EFA installer of AWS: efa_installer.sh -y"
            }
            Some(Silence::NotRun) => NOT_RUN,
            _ => {
                "FI_LOG_LEVEL=info /opt/amazon/efa/bin/fi_info -p efa says why; then put /opt/amazon/efa/lib \
                 first in LD_LIBRARY_PATH"
            }
        };
        report.note(&PROVIDER, Facility::Efa, "libfabric", verdict.on(found)).fix(fix);
        return;
    };
    // Each adapter is offered as -rdm and -dgrm.
    let domains = fabrics
        .iter()
        .filter(|fabric| fabric.provider == "efa" && fabric.domain.ends_with("-rdm"))
        .map(|fabric| &fabric.domain)
        .collect::<std::collections::BTreeSet<_>>()
        .len();
    let verdict = match domains {
        0 => Verdict::Broken,
        found if found < adapters => Verdict::Slow,
        _ => Verdict::Ok,
    };
    let finding = report.note(
        &PROVIDER,
        Facility::Efa,
        "libfabric",
        verdict.on(format!("{domains} domains")),
    );
    if adapters > 0 {
        finding.expected(format!("{adapters} domains, one for each adapter"));
    }
}

fn installer(report: &mut DoctorReport<'_>) {
    let libraries = &report.machine.libraries;
    let (verdict, found) = match libraries.efa_installer.known() {
        Some(version) => (Verdict::Ok, version.clone()),
        None => (Verdict::Unknown, "no list of installed packages".to_owned()),
    };
    let finding = report.note(&INSTALLER, Facility::Efa, "EFA installer", verdict.on(found));
    finding.expected("there; the same on all nodes");
}
