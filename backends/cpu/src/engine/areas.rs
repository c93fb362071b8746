//! The windows, and the areas of the control window.

use tokenyard_core::moe::ControlLayout;

/// Window of records, staging and landing places.
pub(crate) const CONTROL: u16 = 0;
/// Window of outputs.
pub(crate) const ARENA: u16 = 1;

/// Larger puts are cut into pieces.
pub(crate) const LARGEST_PUT: u64 = 1 << 30;

/// The areas of one exchange in the control window: they repeat with each slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLayout {
    pub(crate) records: ControlLayout,
    /// Where the areas start in slot 0.
    pub(crate) first: u64,
    pub(crate) groups: u32,
    pub(crate) sources: u32,
    pub(crate) stage_bytes: u64,
    pub(crate) landing_pitch: u64,
    pub(crate) slot_bytes: u64,
}

impl SlotLayout {
    /// Where the records from peers of a slot start.
    pub(crate) fn records_in(&self, slot: usize) -> u64 {
        self.first + self.slot_bytes * slot as u64
    }

    /// Where the records to peers of a slot start.
    pub(crate) fn records_out(&self, slot: usize) -> u64 {
        self.records_in(slot) + self.records.bytes
    }

    /// Where the rows of a group of a slot wait to be put.
    pub(crate) fn stage(&self, slot: usize, group: u32) -> u64 {
        self.records_out(slot) + self.records.bytes + self.stage_bytes * u64::from(group)
    }

    /// Where the rows of a place land: packed and rank-major ones, or those that go on.
    pub(crate) fn landing(&self, slot: usize, place: u32) -> u64 {
        self.stage(slot, self.groups) + self.landing_pitch * u64::from(place)
    }

    /// The first byte behind the areas of slot 0.
    pub(crate) fn end(&self) -> u64 {
        self.landing(0, self.sources)
    }
}
