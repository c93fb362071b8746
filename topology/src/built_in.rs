//! Registers the topology in the program that links this crate.

use std::hint::black_box;

use tokenyard_core::abi;
use tokenyard_core::export::{Exported, TOPOLOGY_HEADER, TopologyComponent};
use tokenyard_core::host::BuiltIn;

use crate::HostTopology;

const TOPOLOGY_TABLES: &[*const abi::TyTopologyTable] =
    &[&raw const *TopologyComponent::<HostTopology>::TABLE];
static TOPOLOGIES: Exported<abi::TyTopologyExport> = Exported(abi::TyTopologyExport {
    header: TOPOLOGY_HEADER,
    components: TOPOLOGY_TABLES.as_ptr(),
    count: TOPOLOGY_TABLES.len(),
});

inventory::submit! { BuiltIn::Topology(&TOPOLOGIES) }

/// Keeps the topology in the calling program, so that
/// [`Registry::built_in`](tokenyard_core::host::Registry::built_in) finds them.
///
/// It registers itself before `main`; but the compiler drops a crate that a program
/// depends on and never names. A program that wants it built in calls this once, anywhere.
pub fn link() {
    black_box(&TOPOLOGIES);
}
