//! The link to some ranks, as operations beside MoE use it: those of a domain, or those of a rail. Bytes are stored to
//! a peer's window where it is mapped, and put where it is not.

use std::rc::Rc;

use tokenyard_core::domains::{Domains, Member, TeamRanks};
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::transport::{Command, NO_COMMAND, Window};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::commands::Raise;
use crate::engine::control::{Header, Signal};
use crate::engine::order::{SlotOrder, Traffic, Wait};
use crate::engine::places::Area;

/// The only window.
pub(crate) const WINDOW: u16 = 0;

/// The window of this rank, and its lines: inside the domain, then on the rail, where there are several domains.
#[derive(Debug)]
pub(crate) struct Lines {
    pub(crate) window: Area,
    pub(crate) all: Vec<Line>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) order: SlotOrder,
    /// The windows of its peers, where they are mapped.
    mapped: Vec<Area>,
    window: Area,
}

/// The place of bytes in the slot of an operation, and their way: from an offset of this rank's window to one of the
/// peer's. `signal` with `place` rises there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passage {
    pub(crate) peer: u32,
    pub(crate) slot: usize,
    pub(crate) number: u64,
    pub(crate) signal: Signal,
    pub(crate) place: u32,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Lines {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the lines.
    pub(crate) unsafe fn new(
        shape: &KernelShape,
        members: Vec<Member>,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        let (traffic, windows): (_, &[Window]) = unsafe {
            (
                Rc::new(Traffic::new(shape, members.iter(), plan)?),
                std::slice::from_raw_parts(plan.windows, plan.window_count),
            )
        };
        let window = Area::own(windows, WINDOW)?;
        let line = |(number, member): (usize, Member)| {
            let order = SlotOrder::new(member, &traffic, shape.in_flight, number);
            let peers = if order.channel.link.is_load_store() { member.peers() } else { 0 };
            let map = |peer| window.of_peer(&order.channel, WINDOW, peer);
            let mapped = (0..peers).map(map).collect::<Result<_>>()?;
            Ok(Line { order, mapped, window })
        };
        let all = members.into_iter().enumerate().map(line).collect::<Result<_>>()?;
        Ok(Self { window, all })
    }
}

/// This rank inside its domain, then on its rail. `inside`: the level of the first. `has_groups`: inside, bytes of
/// other domains come from their forwarders, too, so each rank of the world has a place there.
pub(crate) fn members(shape: &KernelShape, inside: u64, has_groups: bool) -> Vec<Member> {
    let domains = Domains::new(shape);
    let [in_domain, on_rail] = Member::levels(domains, inside);
    // A domain of its own: places are its ranks alone.
    let alone = Domains::of(domains.index, domains.size, 1);
    let places = if has_groups { domains } else { alone };
    let mut all = vec![Member { domains: places, ..in_domain }];
    if domains.count > 1 {
        all.push(on_rail);
    }
    all
}

impl Line {
    /// The number of a rank on this link, if it is there.
    pub(crate) fn peer(&self, rank: u32) -> Option<u32> {
        let member = &self.order.member;
        let TeamRanks { first, step } = member.team;
        let ahead = rank.checked_sub(first)?;
        (ahead % step == 0 && ahead / step < member.peers()).then(|| ahead / step)
    }

    /// This rank's own number.
    pub(crate) fn own(&self) -> u32 {
        self.order.member.domains.index
    }

    /// The window of a peer, where it is mapped.
    pub(crate) fn mapped(&self, peer: u32) -> Option<&Area> {
        self.mapped.get(peer as usize)
    }

    /// Whether the windows of its peers are mapped.
    pub(crate) fn is_mapped(&self) -> bool {
        !self.mapped.is_empty()
    }

    /// How often the signal of so many bytes rises at a peer. The record beside them says it: a peer may cut its own
    /// into pieces of another length.
    pub(crate) fn pieces(&self, bytes: u64) -> u64 {
        if self.is_mapped() { 0 } else { bytes.div_ceil(self.order.channel.largest_put) }
    }

    /// Where to write bytes that go this way: to the peer itself, or to where they are put from.
    pub(crate) fn start(&self, way: &Passage) -> *mut u8 {
        match self.mapped.get(way.peer as usize) {
            Some(window) => window.at(way.to),
            None => self.window.at(way.from),
        }
    }

    /// Puts bytes that were written at [`start`](Self::start), if that is here.
    pub(crate) fn put(&self, way: &Passage, bytes: u64) -> Result<()> {
        if self.is_mapped() {
            return Ok(());
        }
        let Passage { peer, slot, number, signal, place, from, to } = *way;
        let signal = self.order.channel.ids.id(signal, slot, place);
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(self.order.channel.largest_put);
            let command = Command {
                op: abi::TY_OP_PUT_SIGNAL,
                peer,
                signal,
                add: 1,
                src_window: WINDOW,
                src_offset: from + done,
                dst_window: WINDOW,
                dst_offset: to + done,
                bytes: piece,
                ..NO_COMMAND
            };
            self.order.post(slot, &command, number)?;
            done += piece;
        }
        Ok(())
    }

    /// Writes a record on its way, and raises its signal. All bytes that were stored before are there then.
    pub(crate) fn write(&self, way: &Passage, header: Header, text: &[u8]) -> Result<()> {
        let bytes = self.fill(way, header, text);
        self.announce(way, bytes)
    }

    /// Writes a record where its way starts. Returns its length.
    pub(crate) fn fill(&self, way: &Passage, header: Header, text: &[u8]) -> u64 {
        let text = &text[..text.len().min(RECORD_TEXT as usize)];
        let at = self.start(way);
        // SAFETY: a record's room, in a part that only this rank writes now: the peer has given the slot back, and
        // commands that were posted from it are done. Records are aligned to 64 bytes.
        unsafe {
            at.cast::<Header>().write(header.with_text(text.len() as u64));
            let behind = at.add(RECORD_HEADER as usize);
            std::ptr::copy_nonoverlapping(text.as_ptr(), behind, text.len());
        }
        RECORD_HEADER + text.len() as u64
    }

    /// Raises the signal of a record, behind its bytes.
    pub(crate) fn announce(&self, way: &Passage, bytes: u64) -> Result<()> {
        if !self.is_mapped() {
            return self.put(way, bytes);
        }
        let Passage { peer, slot, number, signal, place, .. } = *way;
        let signal = self.order.channel.ids.id(signal, slot, place);
        self.order.raise(slot, Raise { operation: number, peer, signal, add: 1 })
    }

    /// Waits until a signal of a place has risen `add` more times. `phase`: one of `TY_PHASE_*`.
    pub(crate) fn wait(&self, way: &Passage, add: u64, phase: u64) -> Result<()> {
        let Passage { slot, number, signal, place, .. } = *way;
        let rank = self.order.member.forwarder(place);
        let wait = Wait { operation: number, add, phase, rank };
        if add == 0 || self.order.wait(signal, slot, place, wait)? {
            return Ok(());
        }
        let text = format!("rank {rank} is lost");
        Err(Error::new(ErrorKind::PeerLost, "wait for bytes", text).with_rank(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_reaches_its_domain_and_its_rail() {
        let world =
            tokenyard_core::moe::Shape { ranks: 6, experts: 6, topk: 1, hidden: 1, max_tokens: 1 };
        let shape = tokenyard_core::kernels::kernel_shape(&world, 3, 2, 1);
        let shape = KernelShape { rank: 3, ..shape };
        let all = members(&shape, abi::TY_LEVEL_SCALE_UP, false);
        assert_eq!(all.len(), 2);
        assert_eq!([0, 1].map(|peer| all[0].rank_of(peer)), [2, 3]);
        assert_eq!([0, 1, 2].map(|peer| all[1].rank_of(peer)), [1, 3, 5]);
        let inside = members(&shape, abi::TY_LEVEL_SCALE_UP, true)[0];
        assert_eq!((inside.peers(), inside.places()), (2, 6));
        assert_eq!([0, 1, 4, 5].map(|place| inside.forwarder(place)), [2, 3, 2, 3]);
    }
}
