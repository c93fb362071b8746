//! The resources of a transport that a case uses.

use std::time::Duration;

use tokenyard_core::transport::{Capabilities, TransportNeeds};

use super::teams::Teams;

/// The most queues that a case opens if it asks for all: communicators use no more.
const MOST_QUEUES: u32 = 64;

/// The resources of a transport that a case uses; the ranks multiply the signals.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Bytes of each window. With `fewer` set, there are fewer windows and queues if the transport has fewer.
    pub(super) windows: &'static [u64],
    /// The case works with fewer windows and queues.
    pub(super) fewer: bool,
    /// 0: as many as the transport has.
    pub(super) queues: u32,
    /// Signal ids per (queue, writer); 0: as many as the transport has.
    pub(super) kinds: u32,
    /// Smaller if the transport's limit is smaller.
    pub(super) queue_depth: u32,
    /// The teams that the ranks make; each rank opens the transport for its own.
    pub(super) teams: Teams,
}

impl Needs {
    /// Two queues, where the transport has them.
    pub(super) const TWO_QUEUES: Self = Self { fewer: true, queues: 2, ..Self::SMALL };

    /// One window of 64 KiB, one queue, two signals per writer.
    pub(super) const SMALL: Self = Self {
        windows: &[1 << 16],
        fewer: false,
        queues: 1,
        kinds: 2,
        queue_depth: 64,
        teams: Teams::World,
    };

    fn signals(&self, ranks: u32, capabilities: &Capabilities) -> u32 {
        match self.kinds {
            0 => capabilities.max_signals,
            kinds => kinds * self.queues(capabilities) * ranks,
        }
    }

    fn queues(&self, capabilities: &Capabilities) -> u32 {
        match self.queues {
            0 => capabilities.max_queues.min(MOST_QUEUES),
            queues if self.fewer => queues.min(capabilities.max_queues.max(1)),
            queues => queues,
        }
    }

    fn windows(&self, capabilities: &Capabilities) -> u32 {
        let windows = self.windows.len() as u32;
        if self.fewer { windows.min(capabilities.max_windows) } else { windows }
    }

    /// The declared limit that is too small for `ranks` ranks, if there is one.
    pub(super) fn lack(&self, ranks: u32, capabilities: &Capabilities) -> Option<String> {
        [
            ("max_peers", ranks, capabilities.max_peers),
            ("max_queues", self.queues(capabilities).max(1), capabilities.max_queues),
            ("max_signals", self.signals(ranks, capabilities).max(1), capabilities.max_signals),
            ("max_windows", self.windows(capabilities).max(1), capabilities.max_windows),
            ("max_queue_depth", 1, capabilities.max_queue_depth),
        ]
        .into_iter()
        .find(|(_, wanted, most)| wanted > most)
        .map(|(name, wanted, most)| format!("{name} is {most}; the case needs {wanted}"))
    }

    /// The needs that the transport is opened with.
    pub(super) fn of_transport(
        &self,
        ranks: u32,
        capabilities: &Capabilities,
        deadline: Duration,
    ) -> TransportNeeds {
        let largest = self.windows.iter().copied().max().unwrap_or(0);
        TransportNeeds {
            windows: self.windows(capabilities),
            queues: self.queues(capabilities),
            signals: self.signals(ranks, capabilities),
            queue_depth: self.queue_depth.min(capabilities.max_queue_depth),
            largest_put: largest.min(capabilities.largest_put),
            deadline,
        }
    }
}
