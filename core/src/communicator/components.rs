//! The parts of a communicator, and the order in which they end.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::claims::Claims;
use super::progress::{Progress, Proxies};
use super::reporter::Looking;
use super::stuck::{Kept, Stuck};
use super::transports::Transports;
use super::watchdog::Watchdog;
use crate::host::OpenKernels;

/// The parts of a communicator. Outputs and handles keep them alive, because they point into windows.
pub(super) struct Components {
    /// Ends before everything else: reports look at all of it.
    pub(super) looking: Looking,
    pub(super) stuck: Stuck,
    pub(super) open: OpenComponents,
}

impl Drop for Components {
    fn drop(&mut self) {
        if !self.looking.end() {
            self.stuck.set("a transport has not answered a report");
        }
    }
}

impl Deref for Components {
    type Target = OpenComponents;

    fn deref(&self) -> &OpenComponents {
        &self.open
    }
}

/// The same, in the order in which they are dropped.
pub(super) struct OpenComponents {
    /// Uses the transports, so it goes before them.
    pub(super) _progress: Option<Progress>,
    /// The same, and the rings of the kernel set.
    pub(super) _proxies: Proxies,
    /// No access to windows after it.
    pub(super) _transports: Kept<Transports>,
    /// Its drop frees the windows. Behind a lock so that outputs may hold the components from
    /// any thread. The communicator takes it, and whoever copies from or frees a device's memory: that
    /// waits for an operation that runs.
    pub(super) kernels: Mutex<Kept<OpenKernels>>,
    /// Watches this communicator's waits; the kernel set points to its board, so it is dropped last.
    pub(super) watchdog: Kept<Watchdog>,
    pub(super) claims: Claims,
    /// The device that the kernel set works on the memory of; none where it works on the host's.
    pub(super) device: Option<i32>,
    /// Whether the kernel set takes calls in the order of a stream.
    pub(super) streams: bool,
    /// Whether it takes calls that nobody waits for.
    pub(super) no_sync: bool,
}

impl OpenComponents {
    pub(super) fn kernels(&self) -> MutexGuard<'_, Kept<OpenKernels>> {
        // A poisoned lock means a panic between two calls of the component; the component itself answers
        // for its own panics.
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Components {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Components").field("transports", &self._transports).finish_non_exhaustive()
    }
}
