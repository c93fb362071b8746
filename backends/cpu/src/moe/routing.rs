//! The memory of handles: where rows go, and how many come.

use std::ops::Range;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::TopkScratch;
use tokenyard_core::refusal::CallRefusal;

use crate::engine::record::Record;
use crate::moe::combine::sums::Partial;
use crate::moe::entry::{Agreed, Enter, Gathered, NO_ENTRY, Terms};
use crate::moe::exchange::Exchange;
use crate::moe::handle::{HandleState, OwnerBlock};
use crate::moe::operation::{CombineOp, DispatchOp, Output, Widths};
use crate::moe::rows::moves::{Carried, Move};

/// The memory of handles, and the entries of all ranks in the operation that is being entered or received.
#[derive(Debug)]
pub(crate) struct RoutingTable {
    pub(crate) exchange: Exchange,
    /// As many as were in use at the same time. Each takes its memory when it is first needed.
    pub(crate) handles: Vec<HandleState>,
    most_handles: u32,
    pub(crate) gathered: Gathered,
    /// By slot, the first refusal that all ranks have agreed on, if it is known before the operation is
    /// received: for a dispatch whose rows land first, and whose entries have arrived.
    pub(crate) agreed: Vec<Option<Agreed>>,
    /// By place: where combine finds the partial rows.
    pub(crate) partials: Vec<Partial>,
    /// By group: whether the source of this rank's rail is lost, in the operation that is being sent.
    pub(crate) gone: Vec<bool>,
    /// On the rail, by world rank: whether the combine left the rank out of its domain's rows, which
    /// have arrived.
    pub(crate) left_out: Vec<u8>,
    /// Working memory for a routing, `[M, K]`, and for its check.
    pub(crate) topk: Vec<i64>,
    pub(crate) check: TopkScratch,
}

impl RoutingTable {
    pub(crate) fn new(exchange: Exchange, shape: &KernelShape) -> Self {
        let Exchange { member, regions, shape: team } = exchange;
        Self {
            exchange,
            handles: Vec::new(),
            most_handles: shape.handles,
            gathered: Gathered::new(&regions),
            agreed: vec![None; shape.in_flight as usize],
            partials: vec![Partial::default(); regions.ranks as usize],
            gone: vec![false; member.domains.count as usize],
            left_out: vec![0; if member.is_rail() { shape.ranks as usize } else { 0 }],
            topk: Vec::with_capacity(team.max_tokens as usize * team.topk as usize),
            check: TopkScratch::new(&team),
        }
    }

    /// Makes room for a handle of this communicator. A call that the host refuses may name a handle of another one.
    /// The host gives the lowest slots first, so few slots stay unused.
    pub(crate) fn open_handle(&mut self, slot: u32) {
        let needed = if slot < self.most_handles { slot as usize + 1 } else { 0 };
        let missing = needed.saturating_sub(self.handles.len());
        self.handles.extend((0..missing).map(|_| HandleState::new(&self.exchange)));
    }

    /// A source without rows: it refuses, or was lost.
    pub(crate) fn forget_entry(&mut self, source: u32) {
        let local = self.exchange.regions.local_experts() as usize;
        self.gathered.entries[source as usize] = NO_ENTRY;
        self.gathered.rows[source as usize] = 0;
        self.gathered.counts[source as usize * local..][..local].fill(0);
    }

    /// Stores the places at a peer for the rows of the source in a place's domain. They are checked when rows
    /// are sent there.
    pub(crate) fn accept_grant(&mut self, place: u32, record: Record, handle: usize) {
        let (domain, peer) = (
            self.exchange.member.domains.domain_of(place),
            self.exchange.member.domains.peer_of(place),
        );
        let header = record.header();
        let [tokens, rows, first, drops] = [3, 4, 5, 6].map(|word| header.0[word]);
        let granted = OwnerBlock { tokens, rows, first, drops: drops != 0 };
        let local = self.exchange.regions.local_experts() as usize;
        let layout = self.handles[handle].arrangement.layout;
        let leg = &mut self.handles[handle].legs[domain as usize];
        leg.accept(peer, granted, layout);
        record.copy_counts(0, &mut leg.expert_bases[peer as usize * local..][..local]);
        self.gathered.regions[place as usize] = header.0[2];
    }

    pub(crate) fn widths(&self, op: &CombineOp) -> Widths {
        Widths { x: op.partial.bytes as u64, weights: 4 * u64::from(self.exchange.regions.topk) }
    }

    /// Partial rows that owners owe this rank for the rows of the domains before this one.
    pub(crate) fn landed_before(&self, handle: usize, domain: u32) -> u64 {
        let legs = self.handles[handle].legs.iter().take(domain as usize);
        legs.map(|leg| leg.send.tokens().len() as u64).sum()
    }

    /// The output that a combine of this handle will read: the first output, not that of a replay.
    pub(crate) fn remember_output(&mut self, handle: usize, output: &Output) {
        let shape = self.exchange.regions;
        let state = &mut self.handles[handle];
        state.is_made = true;
        state.output_rows = state.rows_of_output(&shape, &output.rows);
    }

    /// The part of an entry about its handle; a refused call names none.
    pub(crate) fn origin(&self, handle: usize, refused: bool) -> u64 {
        if refused { 0 } else { self.handles[handle].origin }
    }

    /// The rank that a flat row came from.
    pub(crate) fn source_of_row(&self, handle: usize, row: usize) -> u32 {
        let recv = &self.handles[handle].recv;
        (0..self.exchange.regions.ranks).rfind(|r| recv.row_base(*r) as usize <= row).unwrap_or(0)
    }

    /// How many rows of a domain's source a peer gets.
    pub(crate) fn rows_of_leg(&self, handle: usize, domain: u32, peer: u32) -> Terms<'_> {
        Terms::rows(self.handles[handle].legs[domain as usize].taken[peer as usize])
    }

    /// The values with which this rank entered a dispatch whose rows land first, as far as they are compared
    /// with other ranks' entries.
    pub(crate) fn landed_enter(&self, op: &DispatchOp) -> Enter<'static> {
        let none = CallRefusal { rank: self.exchange.member.rank, is_full: false, why: "" };
        let refusal = op.output.is_none().then_some(none);
        let origin = self.origin(op.handle, refusal.is_some());
        Enter { operation: op.operation, signature: op.signature, origin, refusal }
    }

    /// The rows of a peer in the list of a move, without those that it drops.
    pub(crate) fn rows_for(&self, m: &Move, peer: u32) -> Range<usize> {
        let Carried { send, taken, .. } = self.plan(m);
        let first = send.rank_offsets()[peer as usize] as usize;
        first..first + taken[peer as usize] as usize
    }

    /// The partial rows of a place's source, in flat order.
    pub(crate) fn partials_of(&self, op: &CombineOp, source: u32) -> Range<usize> {
        let recv = &self.handles[op.handle].recv;
        let first = recv.row_base(source) as usize;
        first..first + recv.rows_from(source) as usize
    }

    /// Whether the source of a group, whose rows this rank forwards, is lost.
    pub(crate) fn is_source_gone(&self, group: u32) -> bool {
        self.gone[group as usize]
    }

    /// The load of a move.
    pub(crate) fn plan(&self, m: &Move) -> Carried<'_> {
        let leg = &self.handles[m.handle].legs[m.group as usize];
        Carried { send: &leg.send, taken: &leg.taken, topk: &leg.topk }
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::kernel_shape;
    use tokenyard_core::moe::Shape;

    use super::*;

    #[test]
    fn a_handle_takes_memory_when_its_slot_is_first_used() {
        let world = Shape { ranks: 2, experts: 4, topk: 2, hidden: 64, max_tokens: 4096 };
        let shape = kernel_shape(&world, 1, 2, 1024);
        let mut routing = RoutingTable::new(Exchange::of(&shape, 0).0, &shape);
        let mut made = |slot| {
            routing.open_handle(slot);
            routing.handles.len()
        };
        assert_eq!([2, 0, 1024, 1023].map(&mut made), [3, 3, 3, 1024]);
    }
}
