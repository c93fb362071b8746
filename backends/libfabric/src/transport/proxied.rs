//! Threads of the transport. Each proxy thread posts and polls for its queues, on its own rails.
//! The thread of a ring of kernels uses all rails.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::gpu_ring::{Fabric, GpuRing, RingToServe};
use tokenyard_core::proxy::{FabricShare, Proxy, ProxyOptions};
use tokenyard_core::transport::{Command, Event};

use super::instance::Instance;

/// The queues and rails of one thread.
#[derive(Debug)]
struct Share {
    instance: Arc<Instance>,
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
    /// A proxy drops a failed share before it reports the commands as failed: afterwards their
    /// sources must not be read, and windows must not be written through these rails (INV-8).
    /// Otherwise the instance closes the rails once it has flushed.
    fn drop(&mut self) {
        if !self.sound {
            self.rails.iter().for_each(|rail| self.instance.close(*rail));
        }
    }
}

impl FabricShare for Share {
    unsafe fn post(&mut self, queue: u32, commands: &[Command]) -> Result<usize, i32> {
        self.sound = false;
        // SAFETY: by this function's contract; queues of a proxy belong to one thread.
        let posted = unsafe { self.instance.post(queue, commands, &self.rails) };
        self.sound = posted.is_ok();
        posted
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        self.sound = false;
        self.instance.progress(&self.rails);
        self.turn += 1;
        let mut count = 0;
        for index in 0..self.queues.len() {
            let queue = self.queues[(self.turn + index) % self.queues.len()];
            self.instance.post_backlog(queue, &self.rails)?;
            count += self.instance.take_events(queue, &mut events[count..])?;
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
pub(super) fn start(instance: &Arc<Instance>, threads: u32) -> Result<Proxy> {
    let threads = (threads as usize).min(instance.all_rails().len());
    let (queues, depth) = instance.queues();
    let shares = (0..threads).map(|thread| {
        let rails: Vec<_> = (thread..instance.all_rails().len()).step_by(threads).collect();
        Share {
            cpus: rails.iter().flat_map(|rail| instance.cpus(*rail)).collect(),
            instance: Arc::clone(instance),
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
    instance: Arc<Instance>,
    queue: u32,
}

impl Fabric for RingQueue {
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32> {
        // SAFETY: by this function's contract; the queue belongs to this thread.
        unsafe { self.instance.post(self.queue, commands, self.instance.all_rails()) }
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        let rails = self.instance.all_rails();
        self.instance.progress(rails);
        self.instance.post_backlog(self.queue, rails)?;
        self.instance.take_events(self.queue, events)
    }

    fn read_signal(&mut self, id: u32) -> u64 {
        self.instance.shared.total(id)
    }

    fn is_healthy(&mut self) -> bool {
        self.instance.shared.health().is_ok()
    }
}

/// Starts the thread that serves a ring of kernels, beside the NICs.
pub(super) fn serve(instance: &Arc<Instance>, ring: RingToServe) -> Result<GpuRing> {
    let cpus: Vec<_> = instance.all_rails().iter().flat_map(|rail| instance.cpus(*rail)).collect();
    let queue = RingQueue { instance: Arc::clone(instance), queue: ring.queue() };
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

    fn share(instance: &Arc<Instance>) -> Share {
        let (instance, rails, queues) = (Arc::clone(instance), vec![0], vec![0, 1]);
        Share { instance, rails, queues, turn: 0, cpus: Vec::new(), sound: true }
    }

    #[test]
    fn a_share_that_fails_closes_its_endpoint_and_one_that_ends_leaves_that_to_the_flush() {
        let mut ranks = connected_for(2, 1);
        let (mut first, _peer) = (ranks.remove(0), ranks.remove(0));
        first.instance.farewell = Duration::ZERO;
        let instance = Arc::new(first.instance);
        let mut sound = share(&instance);
        sound.poll(&mut [NO_EVENT; 4]).unwrap();
        drop(sound);
        assert!(instance.rail(0).outbound.objects.ep().is_some());
        let mut failing = share(&instance);
        let inside = instance.queue(1).unwrap();
        failing.poll(&mut [NO_EVENT; 4]).unwrap_err();
        drop(inside);
        drop(failing);
        assert!(
            instance.rail(0).outbound.objects.ep().is_none(),
            "no peer writes through it any more"
        );
        drop(instance);
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
        let instance = Arc::new(sender.instance);
        let mut share = share(&instance);
        let mut events = [NO_EVENT; 16];
        let (mut posted, mut ended) = (0, 0);
        until("a command waits for the dead peer", || {
            posted += u64::from(offer(&mut share, 0, signal(1)));
            ended += share.poll(&mut events).unwrap() as u64;
            instance.queue(0).unwrap().backlog().is_some()
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
            alive.instance.shared.total(1) == 2 * EACH
        });
        let waiting =
            [0, 1].map(|queue| instance.queue(queue).unwrap().backlog().map_or(0, |b| b.len()));
        assert!(waiting.iter().all(|count| *count as u64 >= EACH), "{waiting:?} commands wait");
        instance.rail(0).outbound.patience = Duration::ZERO;
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
            let own = instance.queue(queue).unwrap();
            assert!(own.is_idle() && own.has_room(), "queue {queue} has its places back");
        }
        assert_eq!(instance.shared.health().unwrap_err().rank(), Some(1));
        drop((share, instance, sender.memory));
    }

    #[test]
    fn health_tells_of_all_peers_in_turn_unless_a_thread_has_ended() {
        let mut ranks = connected_for(3, 1);
        let rank = ranks.remove(0);
        let instance = Arc::new(rank.instance);
        for peer in [2, 1] {
            let (message, interface) = ("a link".to_owned(), "eth0".to_owned());
            instance.shared.fail(Failure { peer: Some(peer), message, interface });
        }
        let component = Component::<AnyProvider> {
            served: None,
            proxy: Some(start(&instance, 1).unwrap()),
            instance: Arc::clone(&instance),
            proxy_threads: 1,
            missing: 0,
            kinds: abi::TY_MEMORY_HOST,
            preset: PhantomData,
        };
        let blamed = [(); 4].map(|()| component.health().unwrap_err().rank());
        assert_eq!(blamed, [1, 2, 1, 2].map(Some));
        // The thread finds another thread in its queue, which breaks the queue rule.
        let inside = loop {
            if let Ok(inside) = instance.queue(0) {
                break inside;
            }
        };
        until("the thread ends", || component.health().unwrap_err().rank().is_none());
        drop(inside);
        for _ in 0..3 {
            let error = component.health().unwrap_err();
            assert!(error.rank().is_none() && error.message().contains("poll failed"), "{error}");
        }
        drop((component, instance, rank.memory));
    }
}
