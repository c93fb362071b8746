//! The needs of the component ibgda: of a ConnectX, and of its own keys.

use tokenyard_machine::NicFamily;

use crate::nics::rails;
use crate::versions::{at_least, kernel};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    DEVX = "devx",
    SIGNALS = "ibgda-signals",
}

/// The first kernel that passes commands of any program to a ConnectX.
const DEVX_KERNEL: [u32; 2] = [4, 20];

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    if !report.job.asks(Facility::Devx) {
        return;
    }
    devx(report);
    let (verdict, found) = match report.job.asks.writes_totals {
        true => (Verdict::Broken, "\"write\""),
        false => (Verdict::Ok, "by atomics"),
    };
    report.note(&SIGNALS, Facility::Devx, "signals of ibgda", verdict.on(found));
}

fn devx(report: &mut DoctorReport<'_>) {
    let families: Vec<NicFamily> = rails(report).iter().map(|nic| nic.family).collect();
    let release = report.machine.kernel.release.known().cloned();
    let is_new = release.as_ref().map(|release| at_least(&kernel(release), &DEVX_KERNEL));
    let probe = report
        .components
        .into_iter()
        .flat_map(|components| &components.components)
        .filter(|component| component.name == "ibgda")
        .find_map(|component| component.why_not.as_ref())
        .filter(|why| why.contains("(DEVX)"));
    let release = release.unwrap_or_else(|| "of unknown release".to_owned());
    let (verdict, found) = match (probe, is_new) {
        _ if !families.contains(&NicFamily::Mlx5) => {
            (Verdict::Broken, "no ConnectX among the NICs of ranks".to_owned())
        }
        (Some(why), _) => (Verdict::Broken, why.clone()),
        (None, Some(false)) => (Verdict::Broken, format!("Linux {release}")),
        (None, None) => (Verdict::Unknown, format!("ConnectX, Linux {release}")),
        (None, Some(true)) => (Verdict::Ok, format!("ConnectX, Linux {release}")),
    };
    report.note(&DEVX, Facility::Devx, "DEVX", verdict.on(found));
}
