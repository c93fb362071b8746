//! The order that a model of an engine must keep, checked node by node.

use std::collections::BTreeSet;

use tokenyard_core::moe::{REGION_ALIGN, Region};

use crate::driver::RawStream;
use crate::driver::stream_model::{self as model, Order, Past};

/// A piece of the arena, as small as regions can be.
#[derive(Clone, Debug, Default)]
struct Unit {
    /// The work that uses it, or used it.
    uses: Past,
    /// Whether graphs write it.
    is_of_graphs: bool,
}

/// Kernels of operations in the order of calls, and the uses of the arena.
#[derive(Debug)]
pub(super) struct Ledger {
    units: Vec<Unit>,
    kernels: Vec<usize>,
}

/// The number of the node of a use that a new use does not run behind.
fn early(uses: &Past, node: usize) -> Option<usize> {
    let (capture, past) = model::node(node);
    let is_ahead = |other: usize| match (model::node(other).0, capture) {
        (None, None) => past.contains(other) || model::is_done(other),
        // A graph waits for nothing outside it, so the host has waited before.
        (None, Some(_)) => model::is_done(other),
        // Nothing but graphs writes there, at each launch.
        (Some(_), None) => false,
        // Launches run one after the other.
        (Some(other_s), Some(own)) => other_s != own || past.contains(other),
    };
    uses.iter().find(|other| !is_ahead(*other))
}

impl Ledger {
    pub(super) fn new(units: usize) -> Self {
        Self { units: vec![Unit::default(); units], kernels: Vec::new() }
    }

    fn of(&mut self, region: &Region) -> &mut [Unit] {
        let at = |bytes: u64| (bytes / REGION_ALIGN) as usize;
        &mut self.units[at(region.offset)..at(region.offset + region.bytes)]
    }

    /// A kernel that sends runs behind all kernels before it, in eager order and within its capture.
    pub(super) fn sends(&mut self, node: usize) {
        let (capture, past) = model::node(node);
        for kernel in &self.kernels {
            let is_other = model::node(*kernel).0 != capture;
            assert!(
                is_other || past.contains(*kernel),
                "(b) kernel {node} runs beside kernel {kernel}"
            );
        }
        self.kernels.push(node);
    }

    /// A kernel that receives runs behind the kernels of its send.
    pub(super) fn receives(&mut self, node: usize, sent: &[usize]) {
        let (capture, past) = model::node(node);
        for kernel in sent {
            assert_eq!(model::node(*kernel).0, capture, "(b) halves of two orders");
            assert!(past.contains(*kernel), "(b) receive {node} runs beside its send {kernel}");
        }
        self.kernels.push(node);
    }

    /// A region is given out: to a graph, or to eager work.
    pub(super) fn given(&mut self, region: &Region, is_captured: bool) {
        self.of(region).iter_mut().for_each(|unit| unit.is_of_graphs |= is_captured);
    }

    /// A node writes a region that was given out: behind everything that used the place before.
    pub(super) fn writes(&mut self, node: usize, region: &Region) {
        for unit in self.of(region) {
            let early = early(&unit.uses, node);
            assert_eq!(
                early, None,
                "(c) node {node} writes where another one is not known to have ended"
            );
        }
        self.uses(node, region);
    }

    /// The host lets any writer write a region: everything that used the place before has ended.
    pub(super) fn host_writes(&mut self, region: &Region) {
        for unit in self.of(region) {
            let early = unit.uses.iter().find(|node| !model::is_done(*node));
            assert_eq!(early, None, "(c) the host writes where a node has not ended");
        }
    }

    /// A node uses a region that its operation holds.
    pub(super) fn uses(&mut self, node: usize, region: &Region) {
        self.of(region).iter_mut().for_each(|unit| unit.uses.insert(node));
    }

    /// A region comes back: its next use runs behind the present work of its stream.
    pub(super) fn comes_back(&mut self, region: &Region, owner: Option<RawStream>, order: Order) {
        let Some(owner) = owner else { return };
        let end = model::end_of(owner, order);
        self.of(region).iter_mut().for_each(|unit| unit.uses.extend(&end));
    }

    /// The next use of every region runs behind the present work of a stream, in a capture within the graph.
    pub(super) fn released_after(&mut self, stream: RawStream) {
        let is_captured = model::capture_of(stream).is_some();
        let end = model::end_of(stream, if is_captured { Order::Graph } else { Order::Eager });
        let units = self.units.iter_mut().filter(|unit| !is_captured || unit.is_of_graphs);
        units.for_each(|unit| unit.uses.extend(&end));
    }

    /// All eager work has ended that used a place which is not held.
    pub(super) fn flushed<'a>(&mut self, held: impl Iterator<Item = &'a Region>) {
        let held: BTreeSet<usize> = held
            .flat_map(|r| r.offset / REGION_ALIGN..(r.offset + r.bytes) / REGION_ALIGN)
            .map(|unit| unit as usize)
            .collect();
        for (_, unit) in self.units.iter().enumerate().filter(|(index, _)| !held.contains(index)) {
            let runs = |node: &usize| model::node(*node).0.is_none() && !model::is_done(*node);
            assert_eq!(unit.uses.iter().find(runs), None, "(c) a flush ends before a node");
        }
    }
}
