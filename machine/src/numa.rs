//! NUMA nodes.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::Fact;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// Number.
    pub node: u32,
    /// Its logical processors; empty for a node of memory only (a GPU's, say).
    pub processors: Fact<BTreeSet<u32>>,
    /// Its memory in bytes.
    pub memory: Fact<u64>,
    /// Distances to the nodes in order of number, 10 being its own.
    pub distances: Fact<Vec<u32>>,
}
