//! Judges what a node has.
//!
//! [`examine`] takes the facts that `tokenyard-machine` read and a [`Job`], and returns findings:
//! what was found, what was expected, its impact, and the fix. [`world::compare`] does the
//! same for the ranks of a world, and names the odd one out. All of it is pure: nothing is read,
//! opened or tried here, and the same facts give the same findings.
//!
//! Every check is a [`Rule`]. Its words (the expected state, the reason, the impact, the fix and the source) are
//! its entry in `docs/findings.md`, which the program carries; its condition is code here. A test holds that rules
//! and entries are the same ([`catalogue`]).
//!
//! A thing that does not matter to the job is never slow or broken: it is shown as not needed.
//!
//! Watched by `tests`. A new rule takes an entry in `docs/findings.md`, and a node in `node/machine/trees/faults` in
//! which it finds the fault.

mod amd;
mod bonds;
mod components;
mod container;
mod efa;
mod finding;
mod gids;
mod gpu_initiated;
mod gpus;
mod ibgda;
mod job;
mod ladder;
mod libraries;
mod memory;
mod nic_drivers;
mod nics;
mod node;
mod nvlink;
mod pci;
mod peer_memory;
mod ports;
mod rails;
mod rocm;
mod versions;
mod words;
pub mod world;

use tokenyard_machine::Machine;

pub use components::{Component, Components, MissingComponent, unanswered};
pub(crate) use finding::rules;
pub use finding::{DoctorReport, Finding, Rule, Verdict};
pub use job::{Alternative, Asks, Facility, Job};
pub use node::{Meeting, PortState, Secret, Tried};
pub use words::Words;

/// Judges a node for a job.
///
/// `tried` is what only a running process can find out, and `None` for a recorded node. `components` are
/// the parts of the program on this node, likewise. Where the job has alternatives, the findings are those
/// for the one that would be taken, with a word on each of the others.
pub fn examine(
    machine: &Machine,
    job: &Job,
    components: Option<&Components>,
    tried: Option<&Tried>,
) -> Vec<Finding> {
    match job.alternatives.is_empty() {
        true => judge(machine, job, components, tried),
        false => ladder::examine(machine, job, components, tried),
    }
}

/// Judges a node for a job without alternatives.
fn judge(
    machine: &Machine,
    job: &Job,
    components: Option<&Components>,
    tried: Option<&Tried>,
) -> Vec<Finding> {
    let mut report = DoctorReport::new(machine, job);
    (report.components, report.tried) = (components, tried);
    for (_, _, judge) in SUBJECTS {
        judge(&mut report);
    }
    report.finish()
}

/// A subject: its name, its rules, and the function that judges by them.
type Subject = (&'static str, &'static [&'static Rule], fn(&mut DoctorReport<'_>));

/// The subjects of one node, in the order of findings and of the page.
const SUBJECTS: [Subject; 19] = [
    ("Components and the node", node::RULES, node::judge),
    ("Memory", memory::RULES, memory::judge),
    ("Containers and rights", container::RULES, container::judge),
    ("Ports", ports::RULES, ports::judge),
    ("GIDs", gids::RULES, gids::judge),
    ("Bonds", bonds::RULES, bonds::judge),
    ("PCI Express", pci::RULES, pci::judge),
    ("GPUs", gpus::RULES, gpus::judge),
    ("Rails", rails::RULES, rails::judge),
    ("Peer memory", peer_memory::RULES, peer_memory::judge),
    ("GPU-initiated RDMA", gpu_initiated::RULES, gpu_initiated::judge),
    ("ibgda", ibgda::RULES, ibgda::judge),
    ("NVLink", nvlink::RULES, nvlink::judge),
    ("AMD", amd::RULES, amd::judge),
    ("EFA", efa::RULES, efa::judge),
    ("Versions", versions::RULES, versions::judge),
    ("Drivers of NICs", nic_drivers::RULES, nic_drivers::judge),
    ("Libraries", libraries::RULES, libraries::judge),
    ("ROCm", rocm::RULES, rocm::judge),
];

/// Every rule, by subject, in the order of the page.
pub fn catalogue() -> Vec<(&'static str, &'static [&'static Rule])> {
    let of_node = SUBJECTS.iter().map(|(name, rules, _)| (*name, *rules));
    let first = [("Alternatives", ladder::RULES)];
    first.into_iter().chain(of_node).chain([("Across nodes", world::RULES)]).collect()
}
