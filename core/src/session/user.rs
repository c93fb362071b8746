//! A user of an open session: the kernel set that runs operations on it.

use std::sync::{Arc, MutexGuard};

use super::Session;
use super::reporter::Looking;
use super::stuck::Kept;
use super::watchdog::Watchdog;
use super::watched_kernels::WatchedKernels;
use crate::host::OpenKernels;

/// See the [module](self). The fields are dropped in this order.
pub(crate) struct User {
    /// Ends before everything else: reports read all components.
    pub(super) looking: Looking,
    /// The last user of a session closes the transports, while the memory of all windows is there.
    pub(super) session: Arc<Session>,
    pub(super) kernels: Arc<WatchedKernels>,
    /// The transports of both levels, in words.
    pub(crate) transports: String,
    /// The device whose memory the kernel set works on; none where it works on host memory.
    pub(crate) device: Option<i32>,
    /// The calls that the kernel set takes beyond plain ones: bits `TY_KERNELS_CAP_*`.
    pub(crate) capabilities: u32,
}

impl Drop for User {
    fn drop(&mut self) {
        if !self.looking.end() {
            self.session.stuck.set("a transport has not answered a report");
        }
    }
}

impl User {
    /// See [`Session::rail_link`].
    pub(crate) fn rail_link(&self) -> Option<String> {
        self.session.rail_link()
    }

    /// True if the kernel set has one of these bits `TY_KERNELS_CAP_*`.
    pub(crate) fn takes(&self, capability: u32) -> bool {
        self.capabilities & capability != 0
    }

    /// The kernel set. An operation takes the lock, and so does a copy from device memory or its release: those wait
    /// for a running operation.
    pub(crate) fn kernels(&self) -> MutexGuard<'_, Kept<OpenKernels>> {
        self.kernels.kernels()
    }

    /// Watches this user's waits.
    pub(crate) fn watchdog(&self) -> &Watchdog {
        &self.kernels.watchdog
    }
}

impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("User").field("session", &self.session).finish_non_exhaustive()
    }
}
