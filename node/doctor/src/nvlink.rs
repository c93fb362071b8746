//! NVLink: links, the fabric beyond the node, and what keeps GPUs apart.

use std::collections::BTreeSet;

use tokenyard_machine::{Gpu, GpuVendor, Silence};

use crate::nics::{NOT_RUN, majority};
use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    SMI = "nvidia-smi",
    LINKS = "nvlink-links",
    FABRIC = "nvlink-fabric",
    CLIQUE = "nvlink-clique",
    IMEX = "imex-channel",
    MIG = "mig",
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    let gpus: Vec<&Gpu> =
        report.machine.gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia).collect();
    if !gpus.is_empty() {
        smi(report);
    }
    links(report, &gpus);
    fabric(report, &gpus);
    clique(report, &gpus);
    imex(report, &gpus);
    for gpu in &gpus {
        if let Some(mig) = gpu.mig.get() {
            let (verdict, found) = if mig { (Verdict::Broken, "on") } else { (Verdict::Ok, "off") };
            report.note(&MIG, Facility::NvLink, name(gpu), verdict.on(found));
        }
    }
}

fn name(gpu: &Gpu) -> String {
    format!("GPU {}", gpu.index)
}

/// The commands, as `Machine::silent` has them.
const SMI_ALL: &str = "nvidia-smi -q";
const SMI_LINKS: &str = "nvidia-smi nvlink -s";

fn smi(report: &mut DoctorReport<'_>) {
    let Some(driver) = &report.machine.nvidia else { return };
    let silent = &report.machine.silent;
    let is_seen = |gpu: &&Gpu| gpu.vendor == GpuVendor::Nvidia && gpu.is_visible;
    let seen = report.machine.gpus.iter().filter(is_seen).count() as u64;
    let links = silent.get(SMI_LINKS).filter(|why| matches!(why, Silence::Late { .. }));
    let (verdict, found) = match (silent.get(SMI_ALL), links, driver.smi_gpus.get()) {
        (Some(why @ Silence::Failed { .. }), ..) => (Verdict::Broken, why.in_words(SMI_ALL)),
        (Some(why), ..) => (Verdict::Unknown, why.in_words(SMI_ALL)),
        (None, Some(why), _) => (Verdict::Unknown, why.in_words(SMI_LINKS)),
        (None, None, Some(count)) if count < seen => {
            (Verdict::Slow, format!("lists {count} of {seen} GPUs: the driver has lost the others"))
        }
        (None, None, Some(count)) => (Verdict::Ok, format!("lists {count} GPUs")),
        (None, None, None) => (Verdict::Unknown, "nothing that can be read".to_owned()),
    };
    let fix = silent.get(SMI_ALL).and_then(|why| match why {
        Silence::NotFound { .. } => Some(
            "install the driver's tools (apt install nvidia-utils-VERSION; in a container \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility), or add their folder to PATH",
        ),
        Silence::NotRun => Some(NOT_RUN),
        _ => None,
    });
    let finding = report.note(&SMI, Facility::Cuda, "NVIDIA GPUs", verdict.on(found));
    fix.map(|fix| finding.fix(fix));
}

/// Links that are active on most GPUs of this one's model that have any: a card without a bridge lists
/// its links too, as inactive.
fn usual_links(gpus: &[&Gpu], model: &Gpu) -> usize {
    let of_model = gpus.iter().filter(|gpu| gpu.device_id == model.device_id);
    let active = |gpu: &&&Gpu| {
        let links = gpu.nvlinks.known()?.iter();
        Some(links.filter(|link| link.megabytes.is_some_and(|rate| rate > 0)).count())
    };
    let counts: Vec<usize> = of_model.filter_map(|gpu| active(&gpu)).filter(|n| *n > 0).collect();
    majority(&counts).or(counts.iter().max().copied()).unwrap_or(0)
}

/// NVLinks are known to be wired: the fabric lists the GPU, or the config counts on them.
fn is_wired(report: &DoctorReport<'_>, gpu: &Gpu) -> bool {
    let state = gpu.fabric.known().and_then(|fabric| fabric.state.known());
    report.job.asks(Facility::NvLink) || state.is_some_and(|state| state != "N/A")
}

fn links(report: &mut DoctorReport<'_>, gpus: &[&Gpu]) {
    for gpu in gpus {
        let usual = usual_links(gpus, gpu);
        let Some(links) = gpu.nvlinks.known() else {
            // A single GPU has no peer, and cards without NVLink show no links.
            if gpus.len() > 1 && gpu.is_visible && report.job.asks(Facility::NvLink) {
                let found = match report.machine.silent.get(SMI_LINKS) {
                    Some(why) => why.in_words(SMI_LINKS),
                    None => format!("{SMI_LINKS} lists nothing of this GPU"),
                };
                report.note(&LINKS, Facility::NvLink, name(gpu), Verdict::Unknown.on(found));
            }
            continue;
        };
        // A single GPU has no peer.
        if links.is_empty() || gpus.len() < 2 {
            continue;
        }
        let down: Vec<String> = links
            .iter()
            .filter(|link| link.megabytes.is_none_or(|rate| rate == 0))
            .map(|link| link.link.to_string())
            .collect();
        let active = links.len() - down.len();
        let verdict = match active {
            0 if is_wired(report, gpu) => Verdict::Broken,
            0 => Verdict::Unknown,
            active if active < usual => Verdict::Slow,
            _ => Verdict::Ok,
        };
        let found = match down.is_empty() {
            true => format!("{active} active"),
            false => format!("{active} active, down: {}", down.join(", ")),
        };
        let finding = report.note(&LINKS, Facility::NvLink, name(gpu), verdict.on(found));
        if usual > 0 {
            finding.expected(format!("{usual} active"));
        }
        if verdict == Verdict::Unknown {
            finding.fix("nothing, if the card has no NVLink bridge; else reseat the bridge");
        }
        if verdict == Verdict::Slow {
            let share = 100 * (usual - active) / usual;
            finding.impact(format!("{share} % of this GPU's bandwidth, and all ranks wait for it"));
        }
    }
}

fn fabric(report: &mut DoctorReport<'_>, gpus: &[&Gpu]) {
    for gpu in gpus {
        let Some(fabric) = gpu.fabric.known() else { continue };
        let Some(state) = fabric.state.known().filter(|state| *state != "N/A") else { continue };
        let status = fabric.status.known().filter(|status| *status != "N/A");
        let completed = state == "Completed";
        let succeeded = status.is_none_or(|status| status == "Success");
        let verdict = if completed && succeeded { Verdict::Ok } else { Verdict::Broken };
        let status = status.map_or(String::new(), |status| format!(", {status}"));
        report.note(&FABRIC, Facility::Cuda, name(gpu), verdict.on(format!("{state}{status}")));
    }
}

/// Cluster and clique, where the fabric is more than a node.
fn place(gpu: &Gpu) -> Option<(String, u32)> {
    let fabric = gpu.fabric.known()?;
    let cluster = fabric.cluster.known()?;
    let spans_nodes = cluster.chars().any(|c| !matches!(c, '0' | '-')) && cluster != "N/A";
    spans_nodes.then_some((cluster.clone(), fabric.clique.get()?))
}

fn clique(report: &mut DoctorReport<'_>, gpus: &[&Gpu]) {
    let places: Vec<(String, u32)> = gpus.iter().filter_map(|gpu| place(gpu)).collect();
    let Some(first) = places.first() else { return };
    let usual = majority(&places).unwrap_or_else(|| first.clone());
    let odd: BTreeSet<String> = gpus
        .iter()
        .filter_map(|gpu| Some((gpu, place(gpu)?)))
        .filter(|(_, place)| *place != usual)
        .map(|(gpu, (_, clique))| format!("GPU {} in clique {clique}", gpu.index))
        .collect();
    let (verdict, found) = match odd.is_empty() {
        true => (Verdict::Ok, format!("clique {} of cluster {}", usual.1, usual.0)),
        false => (
            Verdict::Broken,
            format!(
                "{}; the others in {}",
                odd.into_iter().collect::<Vec<_>>().join(", "),
                usual.1
            ),
        ),
    };
    report.note(&CLIQUE, Facility::NvLink, "GPUs", verdict.on(found));
}

fn imex(report: &mut DoctorReport<'_>, gpus: &[&Gpu]) {
    if gpus.iter().all(|gpu| place(gpu).is_none()) {
        return;
    }
    let nodes = &report.machine.devices.nodes;
    let channels: Vec<&String> =
        nodes.keys().filter(|node| node.starts_with("nvidia-caps-imex-channels/")).collect();
    let (verdict, found) = match channels.as_slice() {
        [] => (Verdict::Slow, "no channel".to_owned()),
        [first, ..] => (Verdict::Ok, format!("/dev/{first}")),
    };
    report.note(&IMEX, Facility::NvLink, "IMEX", verdict.on(found));
}
