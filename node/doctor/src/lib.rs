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
    if let Some(components) = components {
        components::judge(&mut report, components);
    }
    node::judge(&mut report, tried);
    memory::judge(&mut report);
    container::judge(&mut report);
    ports::judge(&mut report);
    gids::judge(&mut report);
    bonds::judge(&mut report);
    pci::judge(&mut report);
    gpus::judge(&mut report);
    rails::judge(&mut report);
    peer_memory::judge(&mut report);
    gpu_initiated::judge(&mut report);
    ibgda::judge(&mut report, components);
    nvlink::judge(&mut report);
    amd::judge(&mut report);
    efa::judge(&mut report);
    versions::judge(&mut report);
    nic_drivers::judge(&mut report);
    libraries::judge(&mut report);
    rocm::judge(&mut report);
    report.finish()
}

/// Every rule, by subject, in the order of the page.
pub fn catalogue() -> Vec<(&'static str, &'static [&'static Rule])> {
    vec![
        ("Alternatives", ladder::RULES),
        ("Components and the node", node::RULES),
        ("Memory", memory::RULES),
        ("Containers and rights", container::RULES),
        ("Ports", ports::RULES),
        ("GIDs", gids::RULES),
        ("Bonds", bonds::RULES),
        ("PCI Express", pci::RULES),
        ("GPUs", gpus::RULES),
        ("Rails", rails::RULES),
        ("Peer memory", peer_memory::RULES),
        ("GPU-initiated RDMA", gpu_initiated::RULES),
        ("ibgda", ibgda::RULES),
        ("NVLink", nvlink::RULES),
        ("AMD", amd::RULES),
        ("EFA", efa::RULES),
        ("Versions", versions::RULES),
        ("Drivers of NICs", nic_drivers::RULES),
        ("Libraries", libraries::RULES),
        ("ROCm", rocm::RULES),
        ("Across nodes", world::RULES),
    ]
}
