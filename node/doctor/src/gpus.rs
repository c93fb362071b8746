//! GPUs: enough for the ranks, all of them used, and equally many below each switch.

use tokenyard_machine::{GpuPlace, GpuVendor, Machine, NicFamily, gpu_of_rank, missing_gpus};

use crate::{DoctorReport, Facility, Verdict, rules};

rules! {
    RANKS = "gpu-ranks",
    UNUSED = "gpu-unused",
    MISSING = "gpu-missing",
}

const ALL_CONFIGS: &str = "docs/which-config.md has all";

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    ranks(report);
    unused(report);
    missing(report);
}

/// The kind of GPU that ranks of this node drive.
fn facility(report: &DoctorReport<'_>) -> Option<Facility> {
    let machine = report.machine;
    let given = machine.given_gpus();
    let has = |vendor| given.iter().any(|gpu| gpu.vendor == vendor);
    match (has(GpuVendor::Nvidia), has(GpuVendor::Amd)) {
        (true, _) => Some(Facility::Cuda),
        (false, true) => Some(Facility::Hip),
        (false, false) => [Facility::Cuda, Facility::Hip].into_iter().find(|f| report.job.asks(*f)),
    }
}

/// Ranks of the node that find a GPU; nothing where that is not known. It is the first ones that do.
fn served(machine: &Machine, ranks: u64) -> Option<u64> {
    // No file shows how many instances there are.
    if machine.gpus.iter().any(|gpu| gpu.mig.get() == Some(true)) {
        return None;
    }
    let mut count = 0;
    for rank in 0..u32::try_from(ranks).unwrap_or(u32::MAX) {
        match gpu_of_rank(machine, rank) {
            Ok(Some(_)) => count += 1,
            Ok(None) => break,
            // The GPU that a rank drives is not known, but the number of GPUs is.
            Err(_) => return Some(ranks.min(machine.given_gpus().len() as u64)),
        }
    }
    Some(count)
}

fn ranks(report: &mut DoctorReport<'_>) {
    let Some(facility) = facility(report) else { return };
    let (machine, job) = (report.machine, report.job);
    let is_given = machine.gpus.iter().any(|gpu| gpu.is_visible);
    // Why the process sees none of its node's GPUs is judged by other rules.
    if !is_given && !machine.gpus.is_empty() {
        return;
    }
    let Some(count) = served(machine, job.ranks) else { return };
    let (verdict, found) = match job.ranks - count {
        0 => (Verdict::Ok, format!("{count} for {}", plural(job.ranks, "rank"))),
        _ if count == 0 => (Verdict::Broken, "none".to_owned()),
        lacking => {
            let without = match lacking {
                1 => format!("local rank {count}"),
                _ => format!("local ranks {count} to {}", job.ranks - 1),
            };
            (Verdict::Broken, format!("{}; none for {without}", plural(count, "GPU")))
        }
    };
    let is_shared = verdict == Verdict::Broken && count > 0 && job.asks.names_device;
    let verdict = if is_shared { Verdict::Slow } else { verdict };
    let finding = report.note(&RANKS, facility, "GPUs", verdict.on(found));
    let from = match job.ranks_from.as_str() {
        "" => String::new(),
        from => format!(" ({from})"),
    };
    finding.expected(format!("one for each of {}{from}", plural(job.ranks, "rank")));
    if is_shared {
        finding.impact("ranks that share a GPU take turns on it, unless they run under MPS");
    }
}

/// GPUs that the config, or the launcher's number of ranks, leaves idle. Without a config nothing is idle: whatever is
/// there counts.
fn unused(report: &mut DoctorReport<'_>) {
    let (machine, job) = (report.machine, report.job);
    // A container without GPUs shows those of its node.
    let count = machine.gpus.iter().filter(|gpu| gpu.is_visible).count() as u64;
    if job.asks.uses.is_none() || count == 0 {
        return;
    }
    let used = [Facility::Cuda, Facility::Hip].into_iter().find(|facility| job.asks(*facility));
    match used {
        None => {
            let is_amd =
                machine.given_gpus().first().is_some_and(|gpu| gpu.vendor == GpuVendor::Amd);
            let vendor = if is_amd { "AMD" } else { "NVIDIA" };
            let found =
                format!("the config uses none of {}", plural(count, &format!("{vendor} GPU")));
            report
                .note(&UNUSED, Facility::Node, "GPUs", Verdict::Slow.on(found))
                .fix(format!("take {} ({ALL_CONFIGS})", configs(machine, is_amd)));
        }
        // Fewer ranks may be meant so.
        Some(facility) if job.ranks < count && job.ranks_from != "--ranks" => {
            let found = format!("{} for {}", plural(job.ranks, "rank"), plural(count, "GPU"));
            report
                .note(&UNUSED, facility, "GPUs", Verdict::Unknown.on(found))
                .impact("the other GPUs of the node stay idle")
                .fix("start one rank for each GPU (--nproc-per-node, --ntasks-per-node), unless this is meant so");
        }
        Some(_) => {}
    }
}

/// The configs that use the GPUs of this node: on it alone, and between such nodes.
fn configs(machine: &Machine, is_amd: bool) -> &'static str {
    let has_efa = machine.nics.iter().any(|nic| nic.family == NicFamily::Efa);
    match (is_amd, has_efa) {
        (true, _) => "configs/rocm.toml, or between nodes configs/rocm-verbs.toml",
        (false, true) => "configs/nvlink.toml, or between nodes configs/nvlink-efa.toml",
        (false, false) => "configs/nvlink.toml, or between nodes configs/nvlink-verbs.toml",
    }
}

fn plural(count: u64, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

fn missing(report: &mut DoctorReport<'_>) {
    let machine = report.machine;
    let Some(facility) = facility(report) else { return };
    for one in missing_gpus(machine) {
        let word = match one.place {
            GpuPlace::NumaNode(_) => "on each NUMA node",
            GpuPlace::RootPort(_) => "below each root port",
            GpuPlace::Switch(_) => "below each switch",
        };
        let judgement = Verdict::Slow.on(one.to_string());
        let finding = report.note(&MISSING, facility, one.place.to_string(), judgement);
        finding.expected(format!("{} {word}", plural(one.usual as u64, "GPU")));
    }
}
