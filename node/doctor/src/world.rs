//! Compares the nodes of a world and names the odd one out.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tokenyard_machine::gid::{Preference, choose};
use tokenyard_machine::{Bound, LinkLayer, Machine, Nic, PciFunction, switches};

use crate::nics::{has_link, majority, rate};
use crate::versions::numbers;
use crate::{DoctorReport, Facility, Finding, Job, Rule, Verdict, rules};

rules! {
    PROGRAM = "world-program",
    SOFTWARE = "world-software",
    TRANSPORT = "world-transport",
    RANKS = "world-ranks",
    NICS = "world-nics",
    FABRIC = "world-fabric",
    SETTINGS = "world-settings",
    CLOCK = "world-clock",
    LOCAL = "world-node",
}

/// The item of the transport that a node would take.
const TAKEN: &str = "transport of several";

/// The item of the ranks on a node.
const RANKS_HERE: &str = "ranks of the node";

/// Skews smaller than this are everyday, in microseconds.
const SKEW: i64 = 100_000;
/// Modules whose versions are compared.
const MODULES: [&str; 9] = [
    "amdgpu",
    "bnxt_en",
    "bnxt_re",
    "efa",
    "gdrdrv",
    "ionic",
    "ionic_rdma",
    "mlx5_core",
    "nvidia_peermem",
];
/// Words of the kernel's command line that change how NICs and GPUs reach memory.
const BOOT: [&str; 9] = [
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "pci",
    "hugepages",
    "hugepagesz",
    "default_hugepagesz",
    "numa_balancing",
    "mitigations",
];

/// A rank's summary of its node, for the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The node's name.
    pub host: String,
    /// Versions, counts and settings, by name.
    pub items: BTreeMap<String, String>,
    /// The rank's clock against rank 0's.
    pub clock: Option<Skew>,
    /// Slow and broken findings there: verdict, finding, subject.
    pub faults: Vec<(Fault, String, String)>,
}

/// A verdict that travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// [`Verdict::Unknown`], if the unknown facts may hide a broken thing.
    Unknown,
    /// [`Verdict::Slow`].
    Slow,
    /// [`Verdict::Broken`].
    Broken,
}

/// A clock against another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skew {
    /// Microseconds by which this one is ahead.
    pub ahead: i64,
    /// The true value differs by no more than this.
    pub error: i64,
}

impl Skew {
    /// The skew from one stamp of the other clock, which was taken between two stamps of this
    /// clock. All values are in microseconds.
    pub fn of(stamp: i64, before: i64, after: i64) -> Self {
        let half = after.saturating_sub(before) / 2;
        // One is added for the half that the division drops.
        Self { ahead: before.saturating_add(half).saturating_sub(stamp), error: half + 1 }
    }

    /// Surely more than everyday.
    fn is_large(self) -> bool {
        self.ahead.saturating_abs().saturating_sub(self.error) > SKEW
    }
}

impl Summary {
    /// The summary of those facts that the job may use: `program` is the version of this program.
    pub fn of(machine: &Machine, job: &Job, host: &str, program: &str) -> Self {
        let mut items = BTreeMap::new();
        let mut put = |name: &str, value: String| items.insert(name.to_owned(), value);
        put("tokenyard", program.to_owned());
        let unknown = || "unknown".to_owned();
        put("kernel", machine.kernel.release.known().cloned().unwrap_or_else(unknown));
        let driver = machine.nvidia.as_ref();
        if let Some(driver) = driver {
            put("NVIDIA driver", driver.version.known().cloned().unwrap_or_else(unknown));
        }
        for name in MODULES {
            if let Some(module) = machine.modules.get(name) {
                let version = module.version.known().cloned().unwrap_or_else(|| "loaded".into());
                put(&format!("module {name}"), version);
            }
        }
        for name in ["libfabric.so", "libibverbs.so", "libnccl.so", "librccl.so"] {
            let found = machine.libraries.found.iter().filter(|library| library.name == name);
            let newest = found.max_by_key(|library| library.version.as_deref().map(numbers));
            if let Some(library) = newest {
                let short = name.trim_end_matches(".so");
                put(short, library.version.clone().unwrap_or_else(unknown));
            }
        }
        let uses_nics = job.may_need(Facility::Verbs) || job.may_need(Facility::Efa);
        // Ranks take NICs by their GPUs, whether or not these hold the rows.
        if uses_nics || job.may_need(Facility::Cuda) || job.may_need(Facility::Hip) {
            put("GPUs", machine.gpus.len().to_string());
            let all = switches(machine);
            put("GPUs of each switch", counted(all.iter().map(|one| one.gpus.len().to_string())));
            put("NVSwitches", machine.pci.iter().filter(|f| is_nvswitch(f)).count().to_string());
        }
        let summary = Self { host: host.to_owned(), items, ..Self::default() };
        let summary = if uses_nics { summary.with_nics(machine) } else { summary };
        summary.with_settings(machine)
    }

    /// Adds which transport of several the node's findings say that it would take.
    pub fn with_transport(mut self, findings: &[Finding]) -> Self {
        let taken = findings.iter().find(|f| f.id == "alternative" && f.needed);
        if let Some(taken) = taken.filter(|finding| finding.verdict == Verdict::Ok) {
            self.put(TAKEN, taken.subject.trim_start_matches("transport ").to_owned());
        }
        self
    }

    /// Adds how many ranks of the world are on the node.
    pub fn with_ranks(mut self, count: u32) -> Self {
        self.put(RANKS_HERE, count.to_string());
        self
    }

    fn put(&mut self, name: &str, value: String) {
        self.items.insert(name.to_owned(), value);
    }

    fn with_nics(mut self, machine: &Machine) -> Self {
        // Nodes may differ in their NICs for storage.
        let nics: Vec<&Nic> = machine.rail_nics();
        let working = nics.iter().filter(|nic| has_link(nic)).count();
        self.put("NICs with a link", working.to_string());
        let ports = || nics.iter().flat_map(|nic| nic.ports.iter().map(move |port| (*nic, port)));
        let active = || ports().filter(|(_, port)| port.is_active());
        let rates = active().filter_map(|(_, port)| Some(rate(port.rate.known()?.megabits)));
        self.put("port rates", counted(rates));
        let layers = active().filter_map(|(_, port)| {
            Some(match port.link_layer.get()? {
                LinkLayer::InfiniBand => "InfiniBand".to_owned(),
                LinkLayer::Ethernet => "Ethernet".to_owned(),
                LinkLayer::Unspecified => "unspecified".to_owned(),
            })
        });
        // Their number has a finding of its own, above.
        self.put("link layers", distinct(layers));
        let kinds = active()
            .filter(|(_, port)| port.link_layer.get() == Some(LinkLayer::Ethernet))
            .map(|(_, port)| match choose(LinkLayer::Ethernet, &port.gids) {
                None => "none".to_owned(),
                Some(gid) => format!("{:?}", Preference::of(&gid.address)),
            });
        self.put("RoCE addresses", distinct(kinds));
        let mtus = nics
            .iter()
            .flat_map(|nic| &nic.interfaces)
            .filter_map(|name| machine.interfaces.iter().find(|i| i.name == *name)?.mtu.get())
            .map(|mtu| mtu.to_string());
        self.put("interface mtu", distinct(mtus));
        self.put(
            "NIC firmware",
            distinct(nics.iter().filter_map(|nic| nic.firmware.known().cloned())),
        );
        self
    }

    fn with_settings(mut self, machine: &Machine) -> Self {
        let locked = match machine.limits.locked_memory.get().map(|limit| limit.soft) {
            Some(Bound::Unlimited) => "no limit".to_owned(),
            Some(Bound::At(bytes)) => bytes.to_string(),
            None => "unknown".to_owned(),
        };
        self.put("locked memory", locked);
        let words = machine.kernel.command_line.known().map_or(&[][..], Vec::as_slice);
        let matters = |word: &&String| BOOT.contains(&word.split('=').next().unwrap_or_default());
        self.put("boot parameters", distinct(words.iter().filter(matters).cloned()));
        self
    }
}

/// A bridge of NVIDIA's that is none of PCI Express: class 0x0680.
fn is_nvswitch(function: &PciFunction) -> bool {
    const NVIDIA: u16 = 0x10de;
    const OTHER_BRIDGE: u32 = 0x0680;
    function.vendor.get() == Some(NVIDIA)
        && function.class.get().is_some_and(|class| class >> 8 == OTHER_BRIDGE)
}

/// `8 x 400 Gb/s`, or `7 x 400 Gb/s, 1 x 200 Gb/s`.
fn counted(values: impl Iterator<Item = String>) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    let list: Vec<String> = counts.into_iter().map(|(v, count)| format!("{count} x {v}")).collect();
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

fn distinct(values: impl Iterator<Item = String>) -> String {
    let list: Vec<String> = values.collect::<BTreeSet<_>>().into_iter().collect();
    if list.is_empty() { "none".to_owned() } else { list.join(" ") }
}

/// The rule that an item falls under, and how bad it is where nodes differ in it.
fn rule(item: &str) -> (&'static Rule, Verdict) {
    match item {
        "tokenyard" => (&PROGRAM, Verdict::Broken),
        TAKEN => (&TRANSPORT, Verdict::Slow),
        RANKS_HERE => (&RANKS, Verdict::Broken),
        "GPUs" | "GPUs of each switch" | "NVSwitches" | "NICs with a link" | "port rates" => {
            (&NICS, Verdict::Slow)
        }
        "link layers" => (&FABRIC, Verdict::Broken),
        "interface mtu" => (&FABRIC, Verdict::Slow),
        // Whether they reach each other depends on the network.
        "RoCE addresses" => (&FABRIC, Verdict::Unknown),
        "locked memory" | "boot parameters" => (&SETTINGS, Verdict::Unknown),
        _ => (&SOFTWARE, Verdict::Unknown),
    }
}

/// Compares the summaries of all ranks, in order of rank. The majority of the ranks decides each item.
/// Without a majority, or with two hosts only, all ranks that differ are named.
pub fn compare(summaries: &[Summary]) -> Vec<Finding> {
    let (machine, job) = (Machine::default(), Job::default());
    let mut report = DoctorReport::new(&machine, &job);
    let names: BTreeSet<&String> = summaries.iter().flat_map(|one| one.items.keys()).collect();
    for name in names {
        item(&mut report, summaries, name);
    }
    clocks(&mut report, summaries);
    for (verdict, places) in faults(summaries) {
        let (fault, id, subject) = verdict;
        let verdict = match fault {
            Fault::Unknown => Verdict::Unknown,
            Fault::Slow => Verdict::Slow,
            Fault::Broken => Verdict::Broken,
        };
        let found = format!("{id} {subject}");
        report
            .note(&LOCAL, Facility::Node, places, verdict.on(found))
            .fix(format!("docs/findings.md#{id}"));
    }
    report.finish()
}

fn item(report: &mut DoctorReport<'_>, summaries: &[Summary], name: &str) {
    let values: Vec<Option<&String>> = summaries.iter().map(|one| one.items.get(name)).collect();
    let (rule, bad) = rule(name);
    let shown = |value: Option<&String>| value.map_or("none".to_owned(), Clone::clone);
    let facility = Facility::Node;
    if values.iter().all(|value| *value == values[0]) {
        report.note(rule, facility, name, Verdict::Ok.on(shown(values[0])));
        return;
    }
    let hosts: BTreeSet<&String> = summaries.iter().map(|one| &one.host).collect();
    let usual = if hosts.len() == 2 { None } else { majority(&values) };
    let mut odd = BTreeMap::<String, Vec<usize>>::new();
    for (rank, value) in values.iter().enumerate().filter(|(_, value)| usual != Some(**value)) {
        odd.entry(shown(*value)).or_default().push(rank);
    }
    let expected =
        usual.map_or("the same on all".to_owned(), |value| format!("{}, as on most", shown(value)));
    for (value, ranks) in odd {
        let subject = format!("{name} of {}", places(summaries, &ranks));
        report.note(rule, facility, subject, bad.on(value)).expected(expected.clone());
    }
}

/// `node-3 (ranks 24-31)`.
fn places(summaries: &[Summary], ranks: &[usize]) -> String {
    let mut hosts = BTreeMap::<&str, Vec<usize>>::new();
    for rank in ranks {
        hosts.entry(&summaries[*rank].host).or_default().push(*rank);
    }
    let list: Vec<String> = hosts
        .into_iter()
        .map(|(host, ranks)| match ranks.as_slice() {
            [rank] => format!("{host} (rank {rank})"),
            ranks => {
                let ranks: Vec<String> = runs(ranks);
                format!("{host} (ranks {})", ranks.join(", "))
            }
        })
        .collect();
    list.join(", ")
}

/// Ascending numbers as people write them: `0-2`, `5`.
fn runs(ranks: &[usize]) -> Vec<String> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == *rank => *end = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect()
}

/// Compares the clock of each host with the clocks of most hosts; with three hosts or more, with the
/// clock in the middle. Of the ranks of a host, the one with the smallest error counts. Rank 0 is not
/// measured against itself.
fn clocks(report: &mut DoctorReport<'_>, summaries: &[Summary]) {
    let mut hosts = BTreeMap::<&str, (Skew, Vec<usize>)>::new();
    for (rank, summary) in summaries.iter().enumerate() {
        let itself = (rank == 0).then_some(Skew { ahead: 0, error: 0 });
        let Some(skew) = itself.or(summary.clock) else { continue };
        let (sharpest, ranks) = hosts.entry(&summary.host).or_insert((skew, Vec::new()));
        if skew.error < sharpest.error {
            *sharpest = skew;
        }
        ranks.push(rank);
    }
    let mut by_time: Vec<Skew> = hosts.values().map(|(skew, _)| *skew).collect();
    by_time.sort_by_key(|skew| skew.ahead);
    let first = summaries.first().map_or("", |summary| summary.host.as_str());
    let (of, usual) = match by_time.as_slice() {
        [] | [_] => return,
        [_, _] => (first, Skew { ahead: 0, error: 0 }),
        all => ("most", all[all.len() / 2]),
    };
    for (host, (skew, ranks)) in &hosts {
        if *host == of {
            continue;
        }
        let skew = Skew {
            ahead: skew.ahead.saturating_sub(usual.ahead),
            error: if *skew == usual { 0 } else { skew.error.saturating_add(usual.error) },
        };
        let verdict = if skew.is_large() { Verdict::Unknown } else { Verdict::Ok };
        let found = format!(
            "{:+.1} ms against {of}, within {:.1} ms",
            skew.ahead as f64 / 1e3,
            skew.error as f64 / 1e3
        );
        let subject = format!("clock of {}", places(summaries, ranks));
        let finding = report.note(&CLOCK, Facility::Node, subject, verdict.on(found));
        finding.expected(format!("within 100 ms of {of}"));
    }
}

type FaultText = (Fault, String, String);

/// Each fault once, with all nodes that have it.
fn faults(summaries: &[Summary]) -> Vec<(FaultText, String)> {
    let mut found: Vec<(FaultText, Vec<usize>)> = Vec::new();
    for (rank, summary) in summaries.iter().enumerate() {
        for fault in &summary.faults {
            match found.iter_mut().find(|(other, _)| other == fault) {
                Some((_, ranks)) => ranks.push(rank),
                None => found.push((fault.clone(), vec![rank])),
            }
        }
    }
    found.into_iter().map(|(fault, ranks)| (fault, places(summaries, &ranks))).collect()
}

#[cfg(test)]
#[path = "world_tests.rs"]
mod tests;
