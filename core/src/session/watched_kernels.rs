//! A kernel set as a user of a session, with what its plan points to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::abi;
use crate::gpu_ring::Counts;
use crate::host::OpenKernels;
use crate::link::Link;
use crate::session::levels::Levels;
use crate::session::needs::{SessionNeeds, Share};
use crate::session::progress::Proxies;
use crate::session::reporter::RingCounts;
use crate::session::shared_link::SharedLink;
use crate::session::stuck::{Kept, Stuck};
use crate::session::transports::{Transports, WindowMemory};
use crate::session::watchdog::Watchdog;
use crate::transport::{MemoryNeeds, NO_CAPABILITIES, Window};
use crate::{Error, ErrorKind, Result};

/// An open kernel set. Its drop frees the windows, so the session owns it too. The fields are dropped in this order.
pub(crate) struct WatchedKernels {
    /// Behind a lock so that outputs may hold it from any thread.
    kernels: Mutex<Kept<OpenKernels>>,
    /// The kernel set points to its board.
    pub(crate) watchdog: Kept<Watchdog>,
    /// The kernel set points to them, where it has not the session alone. By level.
    links: Kept<[Option<Box<SharedLink>>; 2]>,
}

/// Arguments of [`WatchedKernels::plan`].
pub(crate) struct PlanWith<'a> {
    pub(crate) transports: &'a Transports,
    /// All windows of the session.
    pub(crate) windows: &'a [Window],
    /// The part of the session's resources that is this user's.
    pub(crate) share: &'a Share,
    /// True if there are other users.
    pub(crate) is_shared: bool,
    pub(crate) cap: Duration,
}

/// Arguments of [`WatchedKernels::start_proxies`].
pub(crate) struct ServeWith<'a> {
    pub(crate) transports: &'a mut Transports,
    pub(crate) windows: &'a [Window],
    pub(crate) needs: &'a SessionNeeds,
    pub(crate) levels: &'a Levels<'a>,
}

impl WatchedKernels {
    pub(crate) fn new(kernels: OpenKernels, watchdog: Watchdog, stuck: &Stuck) -> Self {
        Self {
            kernels: Mutex::new(stuck.keep(kernels)),
            watchdog: stuck.keep(watchdog),
            links: stuck.keep([None, None]),
        }
    }

    pub(crate) fn kernels(&self) -> MutexGuard<'_, Kept<OpenKernels>> {
        // A poisoned lock means a panic between two calls of the component; the component itself reports
        // its own panics.
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fixes sizes, offsets and buffers of the kernel set.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// No operation runs on the kernel set once the transports are dropped, and they are dropped before it.
    pub(crate) unsafe fn plan(&mut self, with: &PlanWith<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        let links = unsafe { with.transports.links() };
        if with.is_shared {
            for ((view, link), base) in self.links.iter_mut().zip(links).zip(with.share.bases) {
                *view = link.map(|link| SharedLink::new(&link, base));
            }
        }
        let as_abi = |level: usize| match (&self.links[level], links[level]) {
            (Some(view), _) => view.as_abi(),
            (None, link) => link.map_or(NO_LINK, |link: Link| link.as_abi()),
        };
        let windows = &with.windows[with.share.windows.clone()];
        let plan = abi::TyPlan {
            size: size_of::<abi::TyPlan>(),
            scale_up: as_abi(abi::TY_LEVEL_SCALE_UP as usize),
            scale_out: as_abi(abi::TY_LEVEL_SCALE_OUT as usize),
            windows: windows.as_ptr(),
            window_count: windows.len(),
            board: self.watchdog.board().as_abi(),
            lost: self.watchdog.lost_table(),
            cap_ns: with.cap.as_nanos().min(u128::from(u64::MAX)) as u64,
        };
        // SAFETY: links and watchdog are dropped after the kernel set; windows live as long as their owner; the list
        // itself is only read during the call.
        unsafe { self.kernels().plan(&plan) }
    }

    /// Finds threads for the command rings of kernels that post through the host: the transport's own, or core's,
    /// which are added to `proxies`.
    ///
    /// # Errors
    /// Errors of the component; a ring of a session with several users, whose numbers kernels do not know.
    ///
    /// # Safety
    /// `proxies` is dropped before the transports, and they before the kernel set; all are leaked if a thread is
    /// stuck then.
    pub(crate) unsafe fn start_proxies(
        &self,
        with: ServeWith<'_>,
        proxies: &mut Proxies,
    ) -> Result<[Option<RingCounts>; 2]> {
        let ServeWith { transports, windows, needs, levels } = with;
        let mut rings = [None, None];
        for level in [abi::TY_LEVEL_SCALE_UP, abi::TY_LEVEL_SCALE_OUT] {
            let Some(transport) = transports.of_level(level) else { continue };
            let largest_put = transport.capabilities().largest_put;
            let Some(ring) = self.kernels().gpu_ring(level)? else { continue };
            if needs.shares.len() > 1 {
                return Err(not_alone(self.kernels().name()));
            }
            let windows: Vec<_> = needs.windows_of(level).map(|index| windows[index]).collect();
            let ranks = levels.ranks(level);
            let counts = Arc::new(Counts::new(&ring, ranks.len() as u32));
            let (counters, raised) = counts.words();
            let serve = abi::TyServeRing {
                size: size_of::<abi::TyServeRing>(),
                ring: &raw const ring,
                counters,
                raised,
                windows: windows.as_ptr(),
                window_count: windows.len(),
                largest_put,
                peers: ranks.len() as u32,
                reserved: 0,
            };
            // SAFETY: by this function's contract; the kernel set holds the ring until it is closed, the
            // transports hold the counts.
            let own = unsafe { transports.serve_ring(&serve, Arc::clone(&counts))? };
            own.into_iter().for_each(|(name, proxy)| proxies.push(name, proxy));
            rings[level as usize] = Some(RingCounts { counts, ranks: ranks.to_vec() });
        }
        Ok(rings)
    }
}

impl WindowMemory for WatchedKernels {
    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        self.kernels().allocate(id, bytes, needs)
    }
}

#[cold]
fn not_alone(kernels: &str) -> Error {
    let text = format!(
        "found several users of one session; expected one: kernels of `{kernels}` post through a ring, and number \
         windows, queues and signals from 0"
    );
    Error::new(ErrorKind::Unsupported, "open session", text)
        .with_fix("open each alone (Communicator::open), or use kernels of the host")
}

const NO_LINK: abi::TyLink = abi::TyLink {
    table: std::ptr::null(),
    instance: std::ptr::null_mut(),
    capabilities: NO_CAPABILITIES,
};
