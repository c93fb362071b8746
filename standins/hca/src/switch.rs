//! Several devices of one process, and the cables between them.

use std::collections::BTreeMap;

use crate::hca::Hca;
use crate::violation::Violation;

/// Devices by local id. Nothing is lost between them, and time passes only when all wait for it.
#[derive(Debug, Default)]
pub struct Switch {
    devices: BTreeMap<u16, Hca>,
    now: u64,
}

impl Switch {
    /// A switch without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device, under its own local id.
    pub fn add(&mut self, device: Hca) {
        self.devices.insert(device.link.lid, device);
    }

    /// A device.
    pub fn device(&mut self, lid: u16) -> Option<&mut Hca> {
        self.devices.get_mut(&lid)
    }

    /// Nanoseconds since the beginning.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Lets every device do one step, and carries the packets. Returns whether there was work.
    pub fn step(&mut self) -> bool {
        let mut moved = false;
        let mut packets = Vec::new();
        for device in self.devices.values_mut() {
            moved |= device.step(self.now);
            packets.extend(device.take_packets());
        }
        moved |= !packets.is_empty();
        for packet in packets {
            if let Some(device) = self.devices.get_mut(&packet.to.lid) {
                device.receive(packet);
            }
        }
        moved
    }

    /// The time of the next work that waits for time alone, in nanoseconds.
    fn next_due(&self) -> Option<u64> {
        self.devices.values().filter_map(Hca::next_due).min()
    }

    /// Lets time pass until work is due; returns whether there is such work.
    pub fn skip(&mut self) -> bool {
        let due = self.next_due();
        self.now = due.unwrap_or(self.now);
        due.is_some()
    }

    /// Runs until nothing is under way, or until `until` nanoseconds have passed.
    pub fn run(&mut self, until: u64) {
        loop {
            if self.step() {
                continue;
            }
            match self.next_due() {
                Some(due) if due <= until => self.now = due,
                _ => return,
            }
        }
    }

    /// The first violation of any device.
    pub fn violation(&self) -> Option<&Violation> {
        self.devices.values().find_map(|device| device.violations().first())
    }
}
