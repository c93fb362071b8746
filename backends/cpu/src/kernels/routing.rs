//! The memory of handles: where rows go, and how many come.

use std::ops::Range;

use tokenyard_core::Result;
use tokenyard_core::kernels::KernelShape;

use super::channel::no_rail;
use super::control::Verdict;
use super::entry::{Agreed, Enter, Gathered, NO_ENTRY, Terms};
use super::handle::{HandleState, OwnerBlock};
use super::moves::{Carried, Move, Via};
use super::operation::{CombineOp, DispatchOp, Output, Widths};
use super::rail::{Heard, Rail};
use super::record::{Body, Record};
use super::sums::Partial;
use super::world::World;

/// The memory of handles, and the entries of all ranks in the operation that is being entered or received.
#[derive(Debug)]
pub(super) struct RoutingTable {
    pub(super) world: World,
    /// As many as were in use at once: each takes its memory when it is first needed.
    pub(super) handles: Vec<HandleState>,
    most_handles: u32,
    pub(super) gathered: Gathered,
    /// By slot, the first refusal that all have agreed on, where that was found out before the operation
    /// is received: a packed dispatch whose entries have arrived.
    pub(super) agreed: Vec<Option<Agreed>>,
    /// This rank's state as a forwarder; none where there is one domain.
    pub(super) rail: Option<Rail>,
    /// `[R]`: where combine finds the partial rows of each place.
    pub(super) partials: Vec<Partial>,
}

impl RoutingTable {
    pub(super) fn new(world: World, shape: &KernelShape) -> Self {
        let moe = world.shape;
        Self {
            world,
            handles: Vec::new(),
            most_handles: shape.handles,
            gathered: Gathered::new(&moe),
            agreed: vec![None; shape.in_flight as usize],
            rail: Rail::new(&world),
            partials: vec![Partial::default(); moe.ranks as usize],
        }
    }

    /// Makes room for a handle of this communicator; a call that the host refuses may name another's. The host gives
    /// the lowest slots first, so few are made that stay unused.
    pub(super) fn open_handle(&mut self, slot: u32) {
        let World { shape, domains, .. } = &self.world;
        let needed = if slot < self.most_handles { slot as usize + 1 } else { 0 };
        let missing = needed.saturating_sub(self.handles.len());
        self.handles.extend((0..missing).map(|_| HandleState::new(shape, domains)));
    }

    /// A source without rows: it refuses, or was lost.
    pub(super) fn forget_entry(&mut self, source: u32) {
        let local = self.world.shape.local_experts() as usize;
        self.gathered.entries[source as usize] = NO_ENTRY;
        self.gathered.rows[source as usize] = 0;
        self.gathered.counts[source as usize * local..][..local].fill(0);
    }

    /// Keeps where the rows of the source in a place's domain go at its peer. Checked when they are sent there.
    pub(super) fn accept_grant(&mut self, place: u32, record: Record, handle: usize) {
        let (domain, peer) =
            (self.world.domains.domain_of(place), self.world.domains.peer_of(place));
        let header = record.header();
        let granted = OwnerBlock { tokens: header.0[3], rows: header.0[4], first: header.0[5] };
        let local = self.world.shape.local_experts() as usize;
        let leg = &mut self.handles[handle].legs[domain as usize];
        leg.places[peer as usize] = granted;
        record.copy_counts(0, &mut leg.expert_bases[peer as usize * local..][..local]);
        self.gathered.regions[place as usize] = header.0[2];
    }

    pub(super) fn widths(&self, op: &CombineOp) -> Widths {
        Widths { x: op.partial.bytes as u64, weights: 4 * u64::from(self.world.shape.topk) }
    }

    /// Partial rows that owners owe this rank for the rows of the domains before this one.
    pub(super) fn landed_before(&self, handle: usize, domain: u32) -> u64 {
        let legs = self.handles[handle].legs.iter().take(domain as usize);
        legs.map(|leg| leg.send.tokens().len() as u64).sum()
    }

    /// The counts that the forwarder in a domain needs before rows come: how many each rank and expert gets.
    pub(super) fn counts_of_domain(&self, handle: usize, domain: u32) -> Terms<'_> {
        let Some(outward) = &self.handles[handle].outward else { return Terms::rows(0) };
        let (domain, ranks) = (domain as usize, self.world.inside.ranks as usize);
        let experts = self.world.inside.experts as usize;
        let body = Body::Counts([
            &outward.rank_rows[domain * ranks..][..ranks],
            &outward.send.expert_counts()[domain * experts..][..experts],
        ]);
        Terms { body, ..Terms::rows(outward.send.rank_counts()[domain]) }
    }

    /// The output that a combine of this handle will read: the first output, not that of a replay.
    pub(super) fn remember_output(&mut self, handle: usize, output: &Output) {
        let shape = self.world.shape;
        let state = &mut self.handles[handle];
        state.is_made = true;
        state.output_rows = state.rows_of_output(&shape, &output.rows);
    }

    /// How many rows this rank sends to a domain.
    pub(super) fn rows_of_domain(&self, handle: usize, domain: u32) -> Terms<'_> {
        let outward = self.handles[handle].outward.as_ref();
        Terms::rows(outward.map_or(0, |outward| outward.send.rank_counts()[domain as usize]))
    }

    /// The part of an entry about its handle; a refused call names none.
    pub(super) fn origin(&self, handle: usize, refused: bool) -> u64 {
        if refused { 0 } else { self.handles[handle].origin }
    }

    /// The rank that a flat row came from.
    pub(super) fn source_of_row(&self, handle: usize, row: usize) -> u32 {
        let recv = &self.handles[handle].recv;
        (0..self.world.shape.ranks).rfind(|r| recv.row_base(*r) as usize <= row).unwrap_or(0)
    }

    /// Rows that this rank owes the other domains before this one.
    pub(super) fn outgoing_before(&self, handle: usize, domain: u32) -> u64 {
        let legs = self.handles[handle].legs.iter().zip(0..).take(domain as usize);
        let others = legs.filter(|(_, from)| *from != self.world.domains.mine);
        others.map(|(leg, _)| u64::from(leg.send.num_tokens())).sum()
    }

    /// How many rows of a domain's source a peer gets.
    pub(super) fn rows_of_leg(&self, handle: usize, domain: u32, peer: u32) -> Terms<'_> {
        let send = &self.handles[handle].legs[domain as usize].send;
        Terms::rows(send.rank_counts()[peer as usize])
    }

    /// How this rank entered a packed dispatch, as far as others' entries are compared with it.
    pub(super) fn packed_enter(&self, op: &DispatchOp) -> Enter<'static> {
        let refusal = op.output.is_none().then_some((Verdict::Refused, &[][..]));
        let origin = self.origin(op.handle, refusal.is_some());
        Enter { operation: op.operation, signature: op.signature, origin, refusal }
    }

    /// The rows of a peer in the list of a move.
    pub(super) fn rows_for(&self, m: &Move, peer: u32) -> Range<usize> {
        let offsets = self.plan(m).send.rank_offsets();
        offsets[peer as usize] as usize..offsets[peer as usize + 1] as usize
    }

    /// The partial rows of a place's source, in flat order.
    pub(super) fn partials_of(&self, op: &CombineOp, source: u32) -> Range<usize> {
        let recv = &self.handles[op.handle].recv;
        let first = recv.row_base(source) as usize;
        first..first + recv.rows_from(source) as usize
    }

    /// The entry of the source of a domain.
    pub(super) fn heard(&self, domain: u32) -> Result<Heard> {
        self.rail.as_ref().map(|rail| rail.heard[domain as usize]).ok_or_else(no_rail)
    }

    /// Whether the source in another domain, for which this rank forwards, is lost.
    pub(super) fn is_source_gone(&self, domain: u32) -> bool {
        let rail = self.rail.as_ref().filter(|_| domain != self.world.domains.mine);
        rail.is_some_and(|rail| rail.heard[domain as usize].gone)
    }

    /// Notes that the source of a domain was lost before all its rows had come.
    #[cold]
    pub(super) fn lose_source(&mut self, domain: u32) {
        if let Some(rail) = &mut self.rail {
            rail.heard[domain as usize].gone = true;
        }
    }

    /// The load of a move.
    pub(super) fn plan(&self, m: &Move) -> Carried<'_> {
        let state = &self.handles[m.handle];
        match (m.via, &state.outward) {
            (Via::Leg(domain), _) => {
                let leg = &state.legs[domain as usize];
                Carried { send: &leg.send, topk: &leg.topk }
            }
            (Via::Rail, Some(outward)) => Carried { send: &outward.send, topk: &outward.topk },
            (Via::Rail, None) => Carried { send: &state.legs[0].send, topk: &[] },
        }
    }

    /// The routing of a fresh dispatch came with its rows, or not at all. One that this rank refused has no
    /// handle.
    pub(super) fn forget_leg(&mut self, op: &DispatchOp, domain: u32) {
        if op.signature.is_fresh() && op.output.is_some() {
            self.handles[op.handle].legs[domain as usize].route(&[]);
        }
    }

    /// How many rows of a domain's source were announced to a peer in its entry.
    pub(super) fn announced(&self, op: &DispatchOp, domain: u32, peer: u32) -> u64 {
        match &self.rail {
            Some(rail) if op.signature.is_fresh() => rail.announced(domain, peer).0.into(),
            _ => self.handles[op.handle].legs[domain as usize].send.rank_counts()[peer as usize]
                .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_takes_memory_when_its_slot_is_first_used() {
        let shape = KernelShape {
            size: size_of::<KernelShape>(),
            rank: 0,
            ranks: 2,
            domains: 1,
            experts: 4,
            topk: 2,
            hidden: 64,
            max_tokens: 4096,
            in_flight: 2,
            handles: 1024,
            reserved: 0,
        };
        let mut routing = RoutingTable::new(World::new(&shape), &shape);
        let mut made = |slot| {
            routing.open_handle(slot);
            routing.handles.len()
        };
        assert_eq!([2, 0, 1024, 1023].map(&mut made), [3, 3, 3, 1024]);
    }
}
