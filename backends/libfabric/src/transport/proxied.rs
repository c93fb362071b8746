//! Proxy threads: each posts and polls for its lanes, on rails of its own.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::proxy::{Engine as Driven, Proxy, ProxyOptions};
use tokenyard_core::transport::{Command, Event};

use super::engine::Engine;

/// What one thread drives.
#[derive(Debug)]
struct Share {
    engine: Arc<Engine>,
    rails: Vec<usize>,
    lanes: Vec<u32>,
    /// Where the next look for events starts: no lane waits for another to fall silent.
    turn: usize,
    cpus: Vec<u32>,
}

impl Driven for Share {
    unsafe fn post(&mut self, lane: u32, commands: &[Command]) -> Result<usize, i32> {
        // SAFETY: by this function's contract; lanes of a proxy belong to one thread.
        unsafe { self.engine.post(lane, commands, &self.rails) }
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        self.engine.progress(&self.rails);
        self.turn += 1;
        let mut count = 0;
        for index in 0..self.lanes.len() {
            let lane = self.lanes[(self.turn + index) % self.lanes.len()];
            count += self.engine.take_events(lane, &mut events[count..])?;
        }
        Ok(count)
    }

    fn cpus(&self) -> &[u32] {
        &self.cpus
    }
}

/// Starts at most `threads` threads, and no more than there are rails: a rail is used by one thread
/// at a time.
pub(super) fn start(engine: &Arc<Engine>, threads: u32) -> Result<Proxy> {
    let threads = (threads as usize).min(engine.all_rails().len());
    let (lanes, depth) = engine.lanes();
    let shares = (0..threads).map(|thread| {
        let rails: Vec<_> = (thread..engine.all_rails().len()).step_by(threads).collect();
        Share {
            cpus: rails.iter().flat_map(|rail| engine.cpus(*rail)).collect(),
            engine: Arc::clone(engine),
            rails,
            // The proxy gives lane l to thread l mod n.
            lanes: (thread as u32..lanes).step_by(threads).collect(),
            turn: 0,
        }
    });
    Proxy::start(shares.collect(), &ProxyOptions::new(lanes.max(1), depth.max(1)))
}
