//! Rows that a forwarder said would come, and that do not: their source was lost on the way.
//!
//! Their receivers gave places to them, and count them. So the forwarder has them counted like rows, and
//! writes in their places that they come from nowhere. Totals stay right (INV-2), and nothing is under
//! way to a place that its receiver has given up.

use tokenyard_core::Result;

use super::agree::bad_record;
use super::commands::{Block, Raise};
use super::dispatch::DispatchOp;
use super::engine::Engine;
use super::output::Output;
use super::rows::{Move, Via};
use super::windows::{ARENA, CONTROL};

/// Bytes of what a row is called.
const NAME: u64 = 4;
/// What a row is called that comes from nowhere: all its bits are set.
const VOID: i32 = -1;

impl Engine {
    /// Tells the peers that the rows of a domain's source will not come, where they were announced.
    #[cold]
    pub(super) fn hand_on_void(&mut self, slot: usize, op: &DispatchOp, domain: u32) -> Result<()> {
        self.forget_leg(op, domain);
        let m = Move { via: Via::Leg(domain), ..op.carry(slot) };
        for peer in self.domains.peers() {
            let rows = self.announced(op, domain, peer);
            if rows > 0 && !self.is_left_out(&m, peer) {
                self.void_rows(&m, (domain, peer), rows)?;
            }
        }
        Ok(())
    }

    /// The routing of a fresh dispatch came with its rows, or not at all. One that this rank refused has no
    /// handle.
    pub(super) fn forget_leg(&mut self, op: &DispatchOp, domain: u32) {
        if op.signature.is_fresh() && op.output.is_some() {
            self.handles[op.handle].legs[domain as usize].route(&[]);
        }
    }

    /// How many rows of a domain's source a peer was told of in its entry.
    fn announced(&self, op: &DispatchOp, domain: u32, peer: u32) -> u64 {
        match &self.rail {
            Some(rail) if op.signature.is_fresh() => rail.announced(domain, peer).0.into(),
            _ => self.handles[op.handle].legs[domain as usize].send.rank_counts()[peer as usize]
                .into(),
        }
    }

    fn void_rows(&self, m: &Move, (domain, peer): (u32, u32), rows: u64) -> Result<()> {
        let place = self.handles[m.handle].legs[domain as usize].places[peer as usize];
        if place.first.saturating_add(rows) > place.tokens {
            let owner = self.domains.place(self.domains.mine, peer);
            return Err(bad_record(owner, format!("{place:?} for {rows} rows")));
        }
        let at = self.spot_in_region(m, domain, peer)?.source;
        let bytes = (rows * NAME) as usize;
        let (channel, signal) = self.link_of(m);
        let stored = self.reachable(m, peer).map(|areas| areas[usize::from(ARENA)].at(at));
        let to = stored.unwrap_or_else(|| self.control.at(self.stage_offsets(m).x));
        // SAFETY: the places were granted to this source, and checked against the region; or the stage
        // has room for all rows of the source, and nothing else of the operation is staged there.
        unsafe { to.write_bytes(0xff, bytes) };
        let put = if stored.is_some() { 0 } else { 1 };
        let raise = Raise { operation: m.operation, add: rows * (m.arrays - put) };
        self.raise(channel, m.slot, (peer, signal), raise)?;
        if stored.is_some() {
            return Ok(());
        }
        let src = (CONTROL, self.stage_offsets(m).x);
        let (operation, dst) = (m.operation, (ARENA, at));
        self.put_rows(
            channel,
            m.slot,
            &Block { operation, peer, signal, rows, width: NAME, src, dst },
        )
    }

    /// Takes note of a source whose rows were all counted here, and are void.
    pub(super) fn find_void(&self, op: &DispatchOp, output: &Output, source: u32) {
        let recv = &self.handles[op.handle].recv;
        if !self.masks_domains() || recv.rows_from(source) == 0 {
            return;
        }
        let names = self.array(output, output.layout.source).cast::<i32>();
        // SAFETY: the rows of a source lie inside the arrays of this rank's region, and are complete.
        let name = unsafe { names.add(recv.row_base(source) as usize).read() };
        if name == VOID {
            self.losses.note_gone(source, op.operation + 1);
        }
    }
}
