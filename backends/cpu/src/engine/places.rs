//! The places of windows, records, landing places and the arena.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use tokenyard_core::domains::Member;
use tokenyard_core::moe::Arena;
use tokenyard_core::transport::Window;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::areas::{ARENA, CONTROL, SlotLayout};
use crate::engine::channel::Channel;
use crate::engine::control::Signal;
use crate::engine::record::{Record, span_of};

/// Window memory that is mapped here: this rank's, or a peer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area {
    base: *mut u8,
    bytes: u64,
}

impl Area {
    /// The address of `offset`.
    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.bytes, "{offset} is outside {} bytes", self.bytes);
        self.base.wrapping_add(offset as usize)
    }

    /// The offset of an address inside the area.
    pub(crate) fn offset_of(&self, address: *const u8, bytes: u64) -> Option<u64> {
        let offset = (address as usize).checked_sub(self.base as usize)? as u64;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A window of this rank.
    pub(crate) fn own(windows: &[Window], id: u16) -> Result<Self> {
        windows.get(id as usize).map(|w| Self { base: w.pointer, bytes: w.bytes }).ok_or_else(
            || Error::new(ErrorKind::Internal, "plan kernels", format!("window {id} is missing")),
        )
    }

    /// The same window of a peer, which is mapped here. An absent rank has none, and is never written to.
    pub(crate) fn of_peer(self, channel: &Channel, id: u16, peer: u32) -> Result<Self> {
        let Some(number) = channel.number_of(peer) else {
            return Ok(Self { base: std::ptr::null_mut(), bytes: 0 });
        };
        let base = channel.link.peer_address(id.into(), number)?;
        Ok(Self { base, bytes: self.bytes })
    }
}

/// This rank's windows, and its arena: one for all exchanges.
#[derive(Debug)]
pub(crate) struct Windows {
    control: Area,
    arena_area: Area,
    arena: Rc<RefCell<Arena>>,
}

impl Windows {
    pub(crate) fn new(windows: &[Window], arena_bytes: u64) -> Result<Self> {
        let arena = Arena::new(arena_bytes, "[kernels.cpu] arena_mib");
        Ok(Self {
            control: Area::own(windows, CONTROL)?,
            arena_area: Area::own(windows, ARENA)?,
            arena: Rc::new(RefCell::new(arena)),
        })
    }
}

/// The mappings of the peers' windows; nothing if they cannot be mapped.
fn map_peers(channel: &Channel, peers: u32, own: [Area; 2]) -> Result<Vec<[Area; 2]>> {
    if !channel.link.is_load_store() {
        return Ok(Vec::new());
    }
    let [control, arena] = own;
    let map =
        |peer| Ok([control.of_peer(channel, CONTROL, peer)?, arena.of_peer(channel, ARENA, peer)?]);
    (0..peers).map(map).collect()
}

/// The places of an exchange, in this rank's windows and in those of its peers.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) member: Member,
    pub(crate) slots: SlotLayout,
    pub(crate) control: Area,
    pub(crate) arena_area: Area,
    /// Every peer's control window and arena, where peers can be loaded from and stored to.
    pub(crate) peers: Vec<[Area; 2]>,
    arena: Rc<RefCell<Arena>>,
}

impl Places {
    pub(crate) fn new(
        member: Member,
        slots: SlotLayout,
        windows: &Windows,
        channel: &Channel,
    ) -> Result<Self> {
        let Windows { control, arena_area, arena } = windows;
        let (control, arena_area) = (*control, *arena_area);
        Ok(Self {
            member,
            slots,
            control,
            arena_area,
            peers: map_peers(channel, member.peers(), [control, arena_area])?,
            arena: Rc::clone(arena),
        })
    }

    /// The arena of outputs.
    pub(crate) fn arena(&self) -> RefMut<'_, Arena> {
        self.arena.borrow_mut()
    }

    /// The record that arrived in a place. Read it only after its signal was seen.
    pub(crate) fn record_from(&self, signal: Signal, slot: usize, place: u32) -> Record {
        let records = &self.slots.records;
        let start = self.slots.records_in(slot) + span_of(records, signal);
        Record::at(self.control.at(start + records.pitch * u64::from(place)))
    }

    /// Whether rows are stored straight into the arenas of this rank's domain.
    pub(crate) fn stores(&self) -> bool {
        !self.peers.is_empty()
    }

    /// The windows of a peer to which rows are stored. Rows are stored to every peer, or to this
    /// rank alone.
    pub(crate) fn reachable(&self, peer: u32) -> Option<[Area; 2]> {
        let own = peer == self.member.domains.index;
        self.peers
            .get(peer as usize)
            .copied()
            .or_else(|| own.then_some([self.control, self.arena_area]))
    }
}
