//! GPUs: enough for the ranks, all of them used, and equally many below each switch.

use tokenyard_machine::{GpuPlace, GpuVendor, Machine, NicFamily, gpu_of_rank, missing_gpus};

use crate::{DoctorReport, Facility, Rule, Verdict};

pub(crate) const RULES: &[&Rule] = &[&RANKS, &UNUSED, &MISSING];

static RANKS: Rule = Rule {
    id: "gpu-ranks",
    title: "GPUs for the ranks",
    expected: "a GPU for each rank of the node",
    why: "A rank drives one GPU: local rank i takes the GPU with ordinal i. Ranks of the node are those of --ranks, \
          else those that the launcher starts here (the hosts of a world; LOCAL_WORLD_SIZE, \
          OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS, PMI_LOCAL_SIZE, SLURM_STEP_TASKS_PER_NODE, \
          SLURM_TASKS_PER_NODE, SLURM_NTASKS_PER_NODE, where they start more than one), else one for each GPU. \
          Where the config names the GPU (`device`), several ranks may share one.",
    impact: "the ranks without a GPU do not start, and the others wait for them in vain",
    fix: "start one rank for each GPU (--nproc-per-node, --ntasks-per-node), or give the container more GPUs",
    source: "backends/cuda/docs.md and backends/rocm/docs.md (device); docs/topology.md (which GPU a rank drives)",
};

static UNUSED: Rule = Rule {
    id: "gpu-unused",
    title: "GPUs that no rank drives",
    expected: "a config that uses them, and a rank for each",
    why: "The kernel set `cpu` moves rows of host memory by processors, on a node with GPUs too. And a launcher may \
          start fewer ranks than there are GPUs. Both work, and leave GPUs and NVLink or xGMI idle. With --ranks, \
          fewer ranks than GPUs count as intended. A config with `cpu` may be intended, too: to try the network alone.",
    impact: "rows cross host memory and the processors: many times slower than between the GPUs",
    fix: "take a config for these GPUs: docs/which-config.md has all",
    source: "backends/cuda/docs.md, backends/rocm/docs.md",
};

static MISSING: Rule = Rule {
    id: "gpu-missing",
    title: "GPUs of each switch",
    expected: "equally many below each switch",
    why: "A node has 2, 4, 8 or 16 GPUs, equally many below each of its PCI Express switches. A GPU that has failed \
          may be on no bus, in no driver and in no list of devices: then only its empty place shows it. Where GPUs \
          of one board (NVLink, xGMI) have no switch, NUMA nodes are compared. A number of GPUs that is a power of \
          two gives no finding: it may be meant so.",
    impact: "jobs that want a rank for each GPU of every node do not start here; others leave a NIC unused",
    fix: "lspci for the GPU, dmesg for the driver's messages (NVIDIA: Xid 79, fallen off the bus); switch the node \
          off and on; if the GPU is still missing, have the board looked at",
    source: "NVIDIA DGX H100/H200 User Guide (a GPU and a NIC for each switch); NVIDIA, XID Errors (Xid 79)",
};

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
