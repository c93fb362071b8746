//! Drives transports that have no thread of their own (`manual_progress`) while the ranks compute.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::stuck::{PATIENCE, Stuck, join_within};
use crate::gpu_ring::GpuRing;
use crate::link::Link;
use crate::{Error, Result};

/// The pause after a poll that moved something, and the longest pause.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(500);

/// One thread per session. A wait inside an operation drives the transport too, and faster: this thread
/// is for the time between operations, so it sleeps between its polls.
#[derive(Debug)]
pub(crate) struct Progress {
    shared: Arc<ProgressState>,
    thread: Option<std::thread::JoinHandle<()>>,
    names: Vec<String>,
    stuck: Stuck,
}

#[derive(Debug, Default)]
struct ProgressState {
    stop: AtomicBool,
    /// The link whose `progress` the thread called last.
    inside: AtomicUsize,
}

impl Progress {
    /// Starts the thread if one of `links` must be driven.
    ///
    /// # Safety
    /// The links are usable until the returned value is dropped, and after that for as long as the
    /// process lives if `stuck` is set then.
    pub(crate) unsafe fn start(
        links: impl Iterator<Item = Link>,
        stuck: &Stuck,
    ) -> Result<Option<Self>> {
        let links: Vec<Link> = links.filter(Link::needs_driving).collect();
        if links.is_empty() {
            return Ok(None);
        }
        let names = links.iter().map(|link| link.name().to_owned()).collect();
        let shared = Arc::new(ProgressState::default());
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("tokenyard-drive".into())
            .spawn(move || drive(&links, &of_thread))
            .map_err(|e| Error::system("start progress", "a thread cannot be made", e))?;
        let stuck = stuck.clone();
        Ok(Some(Self { shared, thread: Some(thread), names, stuck }))
    }
}

fn drive(links: &[Link], shared: &ProgressState) {
    let mut pause = SHORTEST;
    while !shared.stop.load(Ordering::Acquire) {
        let mut moved = false;
        for (number, link) in links.iter().enumerate() {
            shared.inside.store(number, Ordering::Relaxed);
            // A failure stays in the transport's health, which every wait reads (INV-7).
            moved |= link.progress().unwrap_or(false);
        }
        pause = if moved { SHORTEST } else { (2 * pause).min(LONGEST) };
        std::thread::park_timeout(pause);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        if self.stuck.is_set() || join_within(thread, PATIENCE) {
            return;
        }
        let name = self.names.get(self.shared.inside.load(Ordering::Relaxed));
        self.stuck.set(&format!(
            "transport `{}` has not come back from `progress` within {PATIENCE:?} of the request to end",
            name.map_or("?", String::as_str)
        ));
    }
}

/// The threads of one session that serve the rings of its kernel sets.
#[derive(Debug)]
pub(crate) struct Proxies {
    all: Vec<(String, GpuRing)>,
    stuck: Stuck,
}

impl Proxies {
    /// No threads yet. An added thread needs its transport and its ring for as long as
    /// [`Progress::start`] needs its links.
    pub(crate) fn new(stuck: &Stuck) -> Self {
        Self { all: Vec::new(), stuck: stuck.clone() }
    }

    /// Adds the thread that posts to the transport of this name.
    pub(crate) fn push(&mut self, transport: &str, proxy: GpuRing) {
        self.all.push((transport.to_owned(), proxy));
    }
}

impl Drop for Proxies {
    fn drop(&mut self) {
        let threads: Vec<_> =
            self.all.iter_mut().map(|(name, proxy)| (name, proxy.stop())).collect();
        for (name, thread) in threads {
            let Some(thread) = thread else { continue };
            if !self.stuck.is_set() && !join_within(thread, PATIENCE) {
                self.stuck.set(&format!(
                    "transport `{name}` has not come back from `post`, `poll`, `read_signal` or `health` \
                     within {PATIENCE:?} of the request to end"
                ));
            }
        }
    }
}
