//! The node as such: kernel, limits, processors, where ranks meet.

use serde::Serialize;
use tokenyard_machine::{Bound, bytes};

use crate::components;
use crate::versions::{at_least, kernel};
use crate::{DoctorReport, Facility, Rule, Verdict, rules};

rules! {
    COMPONENT = "component",
    PLUGIN = "plugin-file",
    KERNEL = "kernel",
    MEMFD = "shared-memory",
    SOCKETS = "unix-sockets",
    FILES = "open-files",
    PROCESSORS = "processors",
    MEMORY = "memory",
    SHM = "dev-shm",
    CLOCK = "clock-source",
    RENDEZVOUS = "rendezvous",
    SECRET = "job-secret",
}

/// The launcher needs pidfd_open.
const OLDEST_KERNEL: [u32; 2] = [5, 3];
/// Windows of the cpu kernel set.
const WINDOWS: u64 = 2;
/// Descriptors that a process has open for itself.
const OWN_FILES: u64 = 32;
/// Clocks whose reading is a system call or a slow device.
const SLOW_CLOCKS: [&str; 3] = ["hpet", "acpi_pm", "jiffies"];

/// Facts that only a process on the node can find out, most of it by trying.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Logical processors that this process may run on.
    pub processors: usize,
    /// Processors' worth of time that the container may use.
    pub processor_quota: Option<f64>,
    /// Bytes that the container may still use.
    pub container_available: Option<u64>,
    /// Free bytes of /dev/shm.
    pub posix_shm_free: Option<u64>,
    /// Why memory cannot be shared by descriptor and sealed.
    pub memfd_error: Option<String>,
    /// Why processes cannot meet at an abstract Unix socket.
    pub socket_error: Option<String>,
    /// The clock that the kernel reads.
    pub clock_source: Option<String>,
    /// How ranks will find each other.
    pub meeting: Meeting,
    /// Whether there is a job secret.
    pub secret: Secret,
}

/// How ranks will find each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Meeting {
    /// No launcher's variables are set here.
    NoLauncher,
    /// The variables or the config cannot be used.
    Wrong(String),
    /// At a TCP port of a host whose name did not resolve in time.
    Unresolved {
        /// Host and port.
        address: String,
        /// How long it was waited for.
        milliseconds: u64,
    },
    /// At a TCP port.
    Tcp {
        /// Host and port.
        address: String,
        /// Only processes of this host reach it.
        loopback: bool,
        /// Whether rank 0 could listen there.
        port: PortState,
    },
    /// Through a file.
    File {
        /// The file.
        path: String,
        /// The fault of its folder.
        folder_error: Option<String>,
    },
}

/// Whether rank 0 could listen at its port here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PortState {
    /// It could.
    Free,
    /// The address belongs to another node.
    Elsewhere,
    /// It could not, and why.
    Refused(String),
}

/// Whether there is a job secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Secret {
    /// There is none.
    None,
    /// There is one.
    Set,
    /// There is one that cannot be used, and why.
    Unusable(String),
}

pub(crate) fn judge(report: &mut DoctorReport<'_>) {
    components::judge(report);
    release(report);
    let tried = report.tried;
    if let Some(tried) = tried {
        attempt(report, &MEMFD, &tried.memfd_error);
        attempt(report, &SOCKETS, &tried.socket_error);
    }
    open_files(report);
    processors(report, tried);
    memory(report, tried);
    if let Some(tried) = tried {
        posix_shm(report, tried);
        clock(report, tried);
        rendezvous(report, tried);
        secret(report, tried);
    }
}

fn release(report: &mut DoctorReport<'_>) {
    let (verdict, found) = match report.machine.kernel.release.known() {
        None => (Verdict::Unknown, "an unknown release".to_owned()),
        Some(release) if at_least(&kernel(release), &OLDEST_KERNEL) => {
            (Verdict::Ok, format!("Linux {release}"))
        }
        Some(release) => (Verdict::Broken, format!("Linux {release}")),
    };
    report.note(&KERNEL, Facility::Node, "kernel", verdict.on(found));
}

fn attempt(report: &mut DoctorReport<'_>, rule: &'static Rule, error: &Option<String>) {
    let (verdict, found) = match error {
        None => (Verdict::Ok, "tried, it works"),
        Some(error) => (Verdict::Broken, error.as_str()),
    };
    let subject = if rule.id == MEMFD.id { "memfd" } else { "abstract sockets" };
    report.note(rule, Facility::Node, subject, verdict.on(found));
}

fn open_files(report: &mut DoctorReport<'_>) {
    // Peers' windows and signals on their way, and the bootstrap's connections at rank 0.
    let need = report.job.ranks * (WINDOWS + 2) + OWN_FILES;
    let (verdict, found) = match report.machine.limits.open_files.get().map(|limit| limit.soft) {
        None => (Verdict::Unknown, "the kernel shows no limit".to_owned()),
        Some(Bound::Unlimited) => (Verdict::Ok, "no limit".to_owned()),
        Some(Bound::At(limit)) if limit < need => (Verdict::Broken, format!("at most {limit}")),
        Some(Bound::At(limit)) => (Verdict::Ok, format!("at most {limit}")),
    };
    let ranks = report.job.ranks;
    let finding = report.note(&FILES, Facility::Node, "open files", verdict.on(found));
    finding
        .expected(format!("{need} for {ranks} ranks"))
        .fix(format!("ulimit -n {}", need.max(65_536)));
}

fn processors(report: &mut DoctorReport<'_>, tried: Option<&Tried>) {
    let machine = report.machine;
    let of_nodes: usize =
        machine.numa.iter().filter_map(|node| Some(node.processors.known()?.len())).sum();
    let count = tried.map_or(of_nodes, |tried| tried.processors);
    let of_group = match machine.container.cgroup.millicpus.get() {
        Some(Bound::At(thousandths)) => Some(thousandths as f64 / 1000.0),
        _ => None,
    };
    let quota = tried.and_then(|tried| tried.processor_quota).or(of_group);
    if count == 0 {
        return;
    }
    let usable = (count as f64).min(quota.unwrap_or(f64::INFINITY));
    let (ranks, threads) = (report.job.ranks, report.job.threads);
    let verdict = if (ranks * threads) as f64 > usable { Verdict::Slow } else { Verdict::Ok };
    let found = match quota {
        Some(quota) => format!("{count} cores, {quota:.1} allowed"),
        None => format!("{count} cores"),
    };
    let finding = report.note(&PROCESSORS, Facility::Node, "cores", verdict.on(found));
    finding.expected(format!("{ranks} ranks * {threads} threads"));
}

fn memory(report: &mut DoctorReport<'_>, tried: Option<&Tried>) {
    let need = report.job.window_bytes.saturating_mul(report.job.ranks);
    let of_group = match report.machine.container.cgroup.memory.get() {
        Some(Bound::At(limit)) => Some(limit),
        _ => None,
    };
    let container = tried.map_or(of_group, |tried| tried.container_available);
    let free = report.machine.limits.memory_available.get();
    let available = [free, container].into_iter().flatten().min();
    let found = match available {
        None => "unknown".to_owned(),
        Some(free) if container == Some(free) => format!("{} left to the container", bytes(free)),
        Some(free) => format!("{} available", bytes(free)),
    };
    let verdict = match available {
        Some(free) if need <= free => Verdict::Ok,
        _ => Verdict::Unknown,
    };
    let finding = report.note(&MEMORY, Facility::Node, "memory", verdict.on(found));
    finding.expected(format!("{} in the worst case", bytes(need)));
}

fn posix_shm(report: &mut DoctorReport<'_>, tried: &Tried) {
    let need = report.job.window_bytes.saturating_mul(report.job.ranks);
    let found = tried.posix_shm_free.map_or("none".to_owned(), |free| bytes(free) + " free");
    let enough = tried.posix_shm_free.is_some_and(|free| free >= need);
    let plugin = report.job.plugin_transport;
    let verdict = if plugin && !enough { Verdict::Unknown } else { Verdict::Ok };
    let finding = report.note(&SHM, Facility::Node, "/dev/shm", verdict.on(found));
    finding.needed = plugin;
    if plugin {
        finding.expected(format!("{} in the worst case, if the plugin uses it", bytes(need)));
    }
}

fn clock(report: &mut DoctorReport<'_>, tried: &Tried) {
    let (verdict, found) = match tried.clock_source.as_deref() {
        None => (Verdict::Ok, "the kernel does not show it"),
        Some(name) if SLOW_CLOCKS.contains(&name) => (Verdict::Slow, name),
        Some(name) => (Verdict::Ok, name),
    };
    report.note(&CLOCK, Facility::Node, "clock source", verdict.on(found));
}

fn rendezvous(report: &mut DoctorReport<'_>, tried: &Tried) {
    let mut fix = None;
    let (verdict, found) = match &tried.meeting {
        Meeting::NoLauncher => (Verdict::Ok, "no launcher's variables here".to_owned()),
        Meeting::Wrong(error) => (Verdict::Broken, error.clone()),
        Meeting::File { path, folder_error: None } => (Verdict::Ok, path.clone()),
        Meeting::File { path, folder_error: Some(error) } => {
            fix = Some("make the folder on all nodes");
            (Verdict::Broken, format!("{path}: {error}"))
        }
        Meeting::Unresolved { address, milliseconds } => {
            fix = Some(
                "getent hosts NAME shows how long it takes; /etc/resolv.conf names the name \
                        servers; an address in place of the name needs none",
            );
            (Verdict::Unknown, format!("{address}: the name did not resolve in {milliseconds} ms"))
        }
        Meeting::Tcp { address, port: PortState::Free, .. } => {
            (Verdict::Ok, format!("{address}, free"))
        }
        Meeting::Tcp { address, port: PortState::Elsewhere, .. } => {
            (Verdict::Ok, format!("{address}, on another node"))
        }
        Meeting::Tcp { address, port: PortState::Refused(error), .. } => {
            fix = Some("choose another port (TOKENYARD_PORT under torchrun), or end what holds it");
            (Verdict::Broken, format!("{address}: {error}"))
        }
    };
    let finding = report.note(&RENDEZVOUS, Facility::Node, "rendezvous", verdict.on(found));
    if let Some(fix) = fix {
        finding.fix(fix);
    }
}

fn secret(report: &mut DoctorReport<'_>, tried: &Tried) {
    let off_loopback =
        matches!(tried.meeting, Meeting::Tcp { loopback: false, .. } | Meeting::Unresolved { .. });
    let (verdict, found) = match &tried.secret {
        Secret::Set => (Verdict::Ok, "set"),
        Secret::None if off_loopback => (Verdict::Broken, "none"),
        Secret::None => (Verdict::Ok, "none"),
        Secret::Unusable(error) => (Verdict::Broken, error.as_str()),
    };
    let finding = report.note(&SECRET, Facility::Node, "job secret", verdict.on(found));
    if off_loopback {
        finding.expected("one, because ranks meet off the loopback interface");
    }
}
