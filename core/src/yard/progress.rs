//! Drives transports that nobody else drives (`manual_progress`) while the ranks compute.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::link::Link;
use crate::{Error, Result};

/// Pause after a look that moved something, and the longest one.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(500);

/// One thread per yard. Whoever waits inside an operation drives the transport too, and faster: this
/// one is for the time between operations, so it naps between its looks.
#[derive(Debug)]
pub(super) struct Progress {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Progress {
    /// Starts the thread if one of `links` must be driven.
    ///
    /// # Safety
    /// The links are usable until the returned value is dropped.
    pub(super) unsafe fn start(links: impl Iterator<Item = Link>) -> Result<Option<Self>> {
        let links: Vec<Link> = links.filter(Link::needs_driving).collect();
        if links.is_empty() {
            return Ok(None);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("tokenyard-drive".into())
            .spawn(move || drive(&links, &stopped))
            .map_err(|e| Error::system("start progress", "a thread cannot be made", e))?;
        Ok(Some(Self { stop, thread: Some(thread) }))
    }
}

fn drive(links: &[Link], stop: &AtomicBool) {
    let mut pause = SHORTEST;
    while !stop.load(Ordering::Acquire) {
        let mut moved = false;
        for link in links {
            // A failure stays in the transport's health, which every wait looks at (INV-7).
            moved |= link.progress().unwrap_or(false);
        }
        pause = if moved { SHORTEST } else { (2 * pause).min(LONGEST) };
        std::thread::park_timeout(pause);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the progress thread panicked");
            }
        }
    }
}
