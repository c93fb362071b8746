//! The needs of the component ibgda: of a ConnectX, and of its own keys.

use tokenyard_machine::NicFamily;

use crate::nics::rails;
use crate::versions::{at_least, kernel};
use crate::{Components, DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&DEVX, &SIGNALS];

/// The first kernel that passes commands of any program to a ConnectX.
const DEVX_KERNEL: [u32; 2] = [4, 20];

static DEVX: Rule = Rule {
    id: "devx",
    title: "Commands of programs to a ConnectX (DEVX)",
    expected: "a ConnectX, Linux 4.20 or later, firmware that takes commands",
    why: "The component ibgda makes queue pairs by commands to the device itself: only so can their memory \
          lie on a GPU, and their completions collapse into one. libibverbs has no call for either. \
          Whether firmware and the host of a virtual function allow it shows only when the device is \
          opened; the probe of the component tries.",
    impact: "the transport ibgda does not open",
    fix: "on ConnectX: load mlx5_ib of Linux 4.20 or later, set UCTX_EN=1 with mlxconfig and reset the \
          device; for a virtual function, on its host. On other NICs choose `verbs` or `libfabric`, over \
          which kernels post through the host",
    source: "Linux kernel, drivers/infiniband/hw/mlx5/devx.c; rdma-core, mlx5dv_open_device(3); NVIDIA MFT, mlxconfig",
};

static SIGNALS: Rule = Rule {
    id: "ibgda-signals",
    title: "How ibgda raises signals",
    expected: "\"auto\" or \"atomic\"",
    why: "A signal says that its payload is there. A total that is written may reach memory before an \
          earlier write of the same connection: the InfiniBand Architecture gives two writes no order at \
          the responder, and fabrics with adaptive routing do reorder them. An atomic addition waits for the \
          writes before it.",
    impact: "the config is refused: a receiver could read rows that have not arrived",
    fix: "leave `signals` of [transport.scale_out.ibgda] out, or set it to \"atomic\"; where the order of \
          atomics is in doubt, too, set `fence` to true",
    source: "backends/ibgda/docs.md; DeepEP issues 40 and 83; docs/invariants.md (INV-1)",
};

pub(crate) fn judge(report: &mut DoctorReport<'_>, components: Option<&Components>) {
    if !report.job.asks(Facility::Devx) {
        return;
    }
    devx(report, components);
    let (verdict, found) = match report.job.asks.writes_totals {
        true => (Verdict::Broken, "\"write\""),
        false => (Verdict::Ok, "by atomics"),
    };
    report.note(&SIGNALS, Facility::Devx, "signals of ibgda", verdict.on(found));
}

fn devx(report: &mut DoctorReport<'_>, components: Option<&Components>) {
    let families: Vec<NicFamily> = rails(report).iter().map(|nic| nic.family).collect();
    let release = report.machine.kernel.release.known().cloned();
    let is_new = release.as_ref().map(|release| at_least(&kernel(release), &DEVX_KERNEL));
    let probe = components
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
