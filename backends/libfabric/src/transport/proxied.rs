//! Threads of the transport. Each proxy thread posts and polls for its queues, on its own rails.
//! The thread of a ring of kernels uses all rails.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::gpu_ring::{Fabric, GpuRing, RingToServe};
use tokenyard_core::proxy::{Engine as Driven, Proxy, ProxyOptions};
use tokenyard_core::transport::{Command, Event};

use super::engine::Engine;

/// The queues and rails of one thread.
#[derive(Debug)]
struct Share {
    engine: Arc<Engine>,
    rails: Vec<usize>,
    queues: Vec<u32>,
    /// The queue at which the next poll for events starts, so that no queue waits for another to
    /// become idle.
    turn: usize,
    cpus: Vec<u32>,
    /// Whether the last call ended without a panic and without an error.
    sound: bool,
}

impl Drop for Share {
    /// A proxy drops a failed engine before it reports the commands as failed: afterwards their
    /// sources must not be read, and windows must not be written through these rails (INV-8).
    /// Otherwise the engine closes the rails once it has flushed.
    fn drop(&mut self) {
        if !self.sound {
            self.rails.iter().for_each(|rail| self.engine.close(*rail));
        }
    }
}

impl Driven for Share {
    unsafe fn post(&mut self, queue: u32, commands: &[Command]) -> Result<usize, i32> {
        self.sound = false;
        // SAFETY: by this function's contract; queues of a proxy belong to one thread.
        let posted = unsafe { self.engine.post(queue, commands, &self.rails) };
        self.sound = posted.is_ok();
        posted
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        self.sound = false;
        self.engine.progress(&self.rails);
        self.turn += 1;
        let mut count = 0;
        for index in 0..self.queues.len() {
            let queue = self.queues[(self.turn + index) % self.queues.len()];
            self.engine.post_backlog(queue, &self.rails)?;
            count += self.engine.take_events(queue, &mut events[count..])?;
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
    let (queues, depth) = engine.queues();
    let shares = (0..threads).map(|thread| {
        let rails: Vec<_> = (thread..engine.all_rails().len()).step_by(threads).collect();
        Share {
            cpus: rails.iter().flat_map(|rail| engine.cpus(*rail)).collect(),
            engine: Arc::clone(engine),
            rails,
            // The proxy assigns queue l to thread l mod n.
            queues: (thread as u32..queues).step_by(threads).collect(),
            turn: 0,
            sound: true,
        }
    });
    Proxy::start(shares.collect(), &ProxyOptions::new(queues.max(1), depth.max(1)))
}

/// One queue on all rails, for the thread of a ring.
struct RingQueue {
    engine: Arc<Engine>,
    queue: u32,
}

impl Fabric for RingQueue {
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32> {
        // SAFETY: by this function's contract; the queue belongs to this thread.
        unsafe { self.engine.post(self.queue, commands, self.engine.all_rails()) }
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        let rails = self.engine.all_rails();
        self.engine.progress(rails);
        self.engine.post_backlog(self.queue, rails)?;
        self.engine.take_events(self.queue, events)
    }

    fn read_signal(&mut self, id: u32) -> u64 {
        self.engine.shared.total(id)
    }

    fn is_healthy(&mut self) -> bool {
        self.engine.shared.health().is_ok()
    }
}

/// Starts the thread that serves a ring of kernels, beside the NICs.
pub(super) fn serve(engine: &Arc<Engine>, ring: RingToServe) -> Result<GpuRing> {
    let cpus: Vec<_> = engine.all_rails().iter().flat_map(|rail| engine.cpus(*rail)).collect();
    let queue = RingQueue { engine: Arc::clone(engine), queue: ring.queue() };
    GpuRing::serve(ring, queue, &cpus)
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;
    use std::time::Duration;

    use super::super::shared::Failure;
    use super::super::tests::{connected_for, signal, until};
    use super::super::{AnyProvider, Component};
    use super::*;
    use tokenyard_core::abi;
    use tokenyard_core::transport::{NO_EVENT, Transport};

    fn share(engine: &Arc<Engine>) -> Share {
        let (engine, rails, queues) = (Arc::clone(engine), vec![0], vec![0, 1]);
        Share { engine, rails, queues, turn: 0, cpus: Vec::new(), sound: true }
    }

    #[test]
    fn an_engine_that_fails_closes_its_endpoint_and_one_that_ends_leaves_that_to_the_flush() {
        let mut ranks = connected_for(2, 1);
        let (mut first, _peer) = (ranks.remove(0), ranks.remove(0));
        first.engine.farewell = Duration::ZERO;
        let engine = Arc::new(first.engine);
        let mut sound = share(&engine);
        sound.poll(&mut [NO_EVENT; 4]).unwrap();
        drop(sound);
        assert!(engine.rail(0).objects.ep().is_some());
        let mut failing = share(&engine);
        let inside = engine.queue(1).unwrap();
        failing.poll(&mut [NO_EVENT; 4]).unwrap_err();
        drop(inside);
        drop(failing);
        assert!(engine.rail(0).objects.ep().is_none(), "no peer writes through it any more");
        drop(engine);
        drop(first.memory);
    }

    /// Offers one command as the proxy does; whether it was accepted.
    fn offer(share: &mut Share, queue: u32, command: Command) -> bool {
        let command = Command { queue, flags: abi::TY_FLAG_NOTIFY, ..command };
        // SAFETY: the tests' commands are in range and read no memory.
        unsafe { share.post(queue, &[command]).unwrap() == 1 }
    }

    #[test]
    fn what_a_peer_does_not_take_holds_up_no_command_behind_it_and_ends_with_that_peer() {
        const EACH: u64 = 20;
        let mut ranks = connected_for(3, 1);
        let [alive, dead, sender] = [2, 1, 0].map(|rank| ranks.remove(rank));
        dead.die();
        let engine = Arc::new(sender.engine);
        let mut share = share(&engine);
        let mut events = [NO_EVENT; 16];
        let (mut posted, mut ended) = (0, 0);
        until("a command waits for the dead peer", || {
            posted += u64::from(offer(&mut share, 0, signal(1)));
            ended += share.poll(&mut events).unwrap() as u64;
            engine.queue(0).unwrap().backlog().is_some()
        });
        // No peer's patience ends here: the deadline is that of the test.
        for queue in [0, 1] {
            for _ in 0..EACH {
                assert!(offer(&mut share, queue, signal(1)) && offer(&mut share, queue, signal(2)));
            }
        }
        posted += 4 * EACH;
        until("all that is for the live peer arrives", || {
            ended += share.poll(&mut events).unwrap() as u64;
            alive.drive();
            alive.engine.shared.total(1) == 2 * EACH
        });
        let waiting =
            [0, 1].map(|queue| engine.queue(queue).unwrap().backlog().map_or(0, |b| b.len()));
        assert!(waiting.iter().all(|count| *count as u64 >= EACH), "{waiting:?} commands wait");
        engine.rail(0).patience = Duration::ZERO;
        let mut failed = 0;
        until("what is for the dead peer ends", || {
            let count = share.poll(&mut events).unwrap();
            let errors = events[..count].iter().filter(|event| event.kind == abi::TY_EVENT_ERROR);
            failed += errors.inspect(|event| assert_eq!(event.peer, 1)).count() as u64;
            ended += count as u64;
            ended == posted
        });
        assert!(failed >= 2 * EACH, "{failed} failed");
        for queue in [0, 1] {
            let own = engine.queue(queue).unwrap();
            assert!(own.is_idle() && own.has_room(), "queue {queue} has its places back");
        }
        assert_eq!(engine.shared.health().unwrap_err().rank(), Some(1));
        drop((share, engine, sender.memory));
    }

    #[test]
    fn health_tells_of_all_peers_in_turn_unless_a_thread_has_ended() {
        let mut ranks = connected_for(3, 1);
        let rank = ranks.remove(0);
        let engine = Arc::new(rank.engine);
        for peer in [2, 1] {
            let (message, interface) = ("a link".to_owned(), "eth0".to_owned());
            engine.shared.fail(Failure { peer: Some(peer), message, interface });
        }
        let component = Component::<AnyProvider> {
            served: None,
            proxy: Some(start(&engine, 1).unwrap()),
            engine: Arc::clone(&engine),
            proxy_threads: 1,
            missing: 0,
            kinds: abi::TY_MEMORY_HOST,
            preset: PhantomData,
        };
        let blamed = [(); 4].map(|()| component.health().unwrap_err().rank());
        assert_eq!(blamed, [1, 2, 1, 2].map(Some));
        // The thread finds another thread in its queue, which breaks the queue rule.
        let inside = loop {
            if let Ok(inside) = engine.queue(0) {
                break inside;
            }
        };
        until("the thread ends", || component.health().unwrap_err().rank().is_none());
        drop(inside);
        for _ in 0..3 {
            let error = component.health().unwrap_err();
            assert!(error.rank().is_none() && error.message().contains("poll failed"), "{error}");
        }
        drop((component, engine, rank.memory));
    }
}
