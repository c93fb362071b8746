//! An open session.

use std::sync::Arc;

use super::progress::{Progress, Proxies};
use super::stuck::{Kept, Stuck};
use super::transports::Transports;
use crate::Result;

/// A user as its session sees it: alive, because the session's windows are its memory.
pub(crate) type Owned = Arc<dyn std::any::Any + Send + Sync>;

/// The transports of an open session, and what drives them, in the order in which they are dropped. The
/// communicators on it hold it, and so do their outputs, which point into windows.
pub(crate) struct Session {
    /// Uses the transports, so it is dropped before them.
    _progress: Option<Progress>,
    /// Uses the transports and the rings of the users.
    _proxies: Proxies,
    /// After its drop, no transport accesses windows.
    transports: Kept<Transports>,
    /// Their drop frees the windows.
    _users: Vec<Owned>,
    pub(crate) stuck: Stuck,
}

impl Session {
    /// Starts to drive the transports, which are connected.
    ///
    /// # Errors
    /// A thread cannot be made.
    pub(crate) fn new(
        users: Vec<Owned>,
        transports: Kept<Transports>,
        proxies: Proxies,
        stuck: &Stuck,
    ) -> Result<Self> {
        // SAFETY: the field is dropped before the transports, which are leaked where its thread is stuck.
        let links = unsafe { transports.links() };
        // SAFETY: as above.
        let progress = unsafe { Progress::start(links.into_iter().flatten(), stuck)? };
        let stuck = stuck.clone();
        Ok(Self { _progress: progress, _proxies: proxies, transports, _users: users, stuck })
    }

    /// The words of the transport between domains about its link to the first rank of this rank's team, as of now.
    pub(crate) fn rail_link(&self) -> Option<String> {
        self.transports.scale_out.as_ref().map(|transport| transport.link_name(0))
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("transports", &self.transports).finish_non_exhaustive()
    }
}
