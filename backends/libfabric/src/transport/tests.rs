//! Instances over the provider `tcp` in one process: behaviour that is only visible from inside. One
//! thread drives all ranks, so a busy machine makes them slow but none of them silent.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::nics::Nics;
use tokenyard_core::transport::{
    Command, Event, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, TransportNeeds, Window,
};

use super::Settings;
use super::info;
use super::instance::Instance;
use crate::config::LibfabricConfig;

const WORDS: usize = 1024;
const LONG: Duration = Duration::from_secs(120);

/// One rank. Fields drop in order: the instance ends before its window.
pub(super) struct Rank {
    pub(super) instance: Instance,
    pub(super) memory: Box<[AtomicU64]>,
}

impl Rank {
    fn open(me: u32, ranks: u32, proxy_threads: u32) -> Self {
        let config = LibfabricConfig { proxy_threads, queue_depth: 64, ..Default::default() };
        let settings = Settings { config, hmem: false, nics: Nics::default() };
        let needs = TransportNeeds {
            windows: 1,
            queues: 2,
            signals: 16,
            queue_depth: 64,
            largest_put: 8 * WORDS as u64,
            deadline: LONG,
        };
        let infos = info::choose(&settings).unwrap();
        let team = Team::world(me, ranks);
        let mut instance = Instance::open(infos, &settings, &team, &needs).unwrap();
        let memory: Box<[AtomicU64]> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let window = Window {
            kind: abi::TY_MEMORY_HOST,
            pointer: memory.as_ptr().cast_mut().cast(),
            bytes: 8 * WORDS as u64,
            ..NO_WINDOW
        };
        // SAFETY: the memory is dropped after the instance.
        unsafe { instance.register(&window).unwrap() };
        Self { instance, memory }
    }

    pub(super) fn drive(&self) {
        self.instance.progress(self.instance.all_rails());
    }

    /// Offers one command to queue 0; whether it was accepted.
    pub(super) fn offer(&self, command: Command) -> bool {
        // SAFETY: the tests' commands are in range, and the windows outlive the instances.
        let posted = unsafe { self.instance.post(0, &[command], self.instance.all_rails()) };
        posted.unwrap() == 1
    }

    pub(super) fn event(&self) -> Option<Event> {
        let mut events = [NO_EVENT];
        (self.instance.take_events(0, &mut events).unwrap() == 1).then_some(events[0])
    }

    /// Ends like a killed process: without a message.
    pub(super) fn die(self) {
        self.instance.close(0);
    }
}

pub(super) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

/// Connected ranks, driven by their caller.
pub(super) fn connected(ranks: u32) -> Vec<Rank> {
    connected_for(ranks, 0)
}

/// Connected ranks for this number of proxy threads, which are not started.
pub(super) fn connected_for(ranks: u32, proxy_threads: u32) -> Vec<Rank> {
    let mut all: Vec<_> = (0..ranks).map(|me| Rank::open(me, ranks, proxy_threads)).collect();
    let endpoints: Vec<_> = all.iter_mut().map(|rank| rank.instance.endpoint().unwrap()).collect();
    std::thread::scope(|scope| {
        for rank in &mut all {
            let endpoints = &endpoints;
            scope.spawn(move || {
                for (peer, endpoint) in (0..).zip(endpoints) {
                    rank.instance.connect(peer, endpoint).unwrap();
                }
            });
        }
    });
    all
}

pub(super) fn signal(peer: u32) -> Command {
    Command { op: abi::TY_OP_SIGNAL, peer, signal: 1, add: 1, ..NO_COMMAND }
}

pub(super) fn value(peer: u32, place: u64) -> Command {
    Command { op: abi::TY_OP_PUT_VALUE, peer, dst_offset: 8 * place, value: place, ..NO_COMMAND }
}

#[test]
fn a_peer_that_takes_nothing_ends_as_an_error_of_its_own_and_others_go_on() {
    let mut ranks = connected(3);
    let [alive, dead, sender] = [2, 1, 0].map(|rank| ranks.remove(rank));
    dead.die();
    sender.instance.rail(0).outbound.patience = Duration::from_secs(2);
    let mut sent = 0;
    let mut error = None;
    until("the commands to the dead peer fail", || {
        sender.drive();
        alive.drive();
        sender.offer(signal(1));
        error = sender.event();
        error.is_some()
    });
    let error = error.unwrap();
    assert_eq!((error.kind, error.peer), (abi::TY_EVENT_ERROR, 1));
    let health = sender.instance.shared.health().unwrap_err();
    assert_eq!(health.rank(), Some(1), "{health}");
    until("the others go on", || {
        sender.drive();
        alive.drive();
        sent += u64::from(sent < 100 && sender.offer(signal(2)));
        alive.instance.shared.total(1) == 100
    });
    assert_eq!(sent, 100);
}

#[test]
fn who_closes_does_not_wait_for_a_peer_that_has_left() {
    let mut ranks = connected(2);
    ranks.iter_mut().for_each(|rank| rank.instance.farewell = LONG);
    let (mut stays, mut leaves) = (ranks.remove(0), ranks.remove(0));
    assert!(leaves.instance.flush(), "a peer that stays accepts commands");
    drop(leaves);
    assert!(stays.instance.flush(), "all has ended although the peer is gone");
}
