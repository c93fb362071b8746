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
    /// The last call ended well: no panic left it, no error.
    sound: bool,
}

impl Drop for Share {
    /// A proxy drops an engine that failed before it reports the commands as failed: their sources
    /// must not be read afterwards, nor windows be written through these rails (INV-8). Else the
    /// engine closes them once it has flushed.
    fn drop(&mut self) {
        if !self.sound {
            self.rails.iter().for_each(|rail| self.engine.close(*rail));
        }
    }
}

impl Driven for Share {
    unsafe fn post(&mut self, lane: u32, commands: &[Command]) -> Result<usize, i32> {
        self.sound = false;
        // SAFETY: by this function's contract; lanes of a proxy belong to one thread.
        let posted = unsafe { self.engine.post(lane, commands, &self.rails) };
        self.sound = posted.is_ok();
        posted
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        self.sound = false;
        self.engine.progress(&self.rails);
        self.turn += 1;
        let mut count = 0;
        for index in 0..self.lanes.len() {
            let lane = self.lanes[(self.turn + index) % self.lanes.len()];
            count += self.engine.take_events(lane, &mut events[count..])?;
        }
        self.sound = true;
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
            sound: true,
        }
    });
    Proxy::start(shares.collect(), &ProxyOptions::new(lanes.max(1), depth.max(1)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::connected;
    use super::*;
    use tokenyard_core::transport::NO_EVENT;

    fn share(engine: &Arc<Engine>) -> Share {
        let (engine, rails, lanes) = (Arc::clone(engine), vec![0], vec![0, 1]);
        Share { engine, rails, lanes, turn: 0, cpus: Vec::new(), sound: true }
    }

    #[test]
    fn an_engine_that_fails_closes_its_endpoint_and_one_that_ends_leaves_that_to_the_flush() {
        let mut ranks = connected(2);
        let (mut first, _peer) = (ranks.remove(0), ranks.remove(0));
        first.engine.farewell = std::time::Duration::ZERO;
        let engine = Arc::new(first.engine);
        let mut sound = share(&engine);
        sound.poll(&mut [NO_EVENT; 4]).unwrap();
        drop(sound);
        assert!(engine.rail(0).objects.ep().is_some());
        let mut failing = share(&engine);
        let inside = engine.lane(1).unwrap();
        failing.poll(&mut [NO_EVENT; 4]).unwrap_err();
        drop(inside);
        drop(failing);
        assert!(engine.rail(0).objects.ep().is_none(), "nobody writes through it any more");
        drop(engine);
        drop(first.memory);
    }
}
