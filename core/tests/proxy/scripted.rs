//! A share that follows a test's script.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokenyard_core::abi;
use tokenyard_core::proxy::FabricShare;
use tokenyard_core::transport::{Command, Event, NO_EVENT};

/// The way in which a share fails for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fatal {
    /// `post` answers with an error.
    Post,
    /// `poll` answers with an error.
    Poll,
    /// `post` panics.
    Panic,
    /// `poll` ends a command that is not in flight.
    Stranger,
}

/// The faults of a share, and their times, counted in commands that the share has accepted.
#[derive(Clone, Debug, Default)]
pub(super) struct Script {
    /// The seed of orders and sizes.
    pub(super) seed: u64,
    /// True if it accepts fewer, and completes late and out of order.
    pub(super) moody: bool,
    /// Completes nothing.
    pub(super) stuck: bool,
    /// The commands that fail, each alone.
    pub(super) failing: Vec<usize>,
    pub(super) fatal: Option<(usize, Fatal)>,
}

/// The test's view of a share.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// (queue, value) of the commands that it accepted, in order.
    pub(super) accepted: Vec<(u32, u64)>,
    pub(super) most_in_flight: usize,
    pub(super) thread: Option<String>,
    pub(super) polls: u64,
    pub(super) dropped: bool,
}

#[derive(Debug)]
pub(super) struct Scripted {
    script: Arc<Mutex<Script>>,
    seen: Arc<Mutex<Seen>>,
    random: u64,
    in_flight: VecDeque<Event>,
    pub(super) cpus: Vec<u32>,
}

/// The test's side of a [`Scripted`].
#[derive(Clone, Debug)]
pub(super) struct Remote {
    script: Arc<Mutex<Script>>,
    seen: Arc<Mutex<Seen>>,
}

impl Remote {
    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        lock(&self.script)
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Scripted {
    pub(super) fn new(script: Script) -> (Self, Remote) {
        let random = script.seed | 1;
        let (script, seen) = (Arc::new(Mutex::new(script)), Arc::default());
        let remote = Remote { script: Arc::clone(&script), seen: Arc::clone(&seen) };
        (Self { script, seen, random, in_flight: VecDeque::new(), cpus: Vec::new() }, remote)
    }

    /// A number below `bound`, or 0.
    fn random(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % bound.max(1) as u64) as usize
    }
}

impl FabricShare for Scripted {
    unsafe fn post(&mut self, queue: u32, commands: &[Command]) -> Result<usize, i32> {
        let script = lock(&self.script).clone();
        let most = if script.moody { self.random(commands.len() + 1) } else { commands.len() };
        let seen = Arc::clone(&self.seen);
        let mut seen = lock(&seen);
        for command in &commands[..most] {
            let number = seen.accepted.len();
            match script.fatal {
                Some((at, Fatal::Post)) if at == number => return Err(abi::TY_PEER_LOST),
                Some((at, Fatal::Panic)) if at == number => panic!("scripted"),
                _ => {}
            }
            assert!(command.flags & abi::TY_FLAG_NOTIFY != 0 && command.queue == queue);
            let failed = script.failing.contains(&number);
            let (kind, status) = match failed {
                true => (abi::TY_EVENT_ERROR, abi::TY_DEADLINE),
                false => (abi::TY_EVENT_DONE, abi::TY_OK),
            };
            // Without the peer, which the proxy knows.
            self.in_flight.push_back(Event { kind, queue, status, tag: command.tag, ..NO_EVENT });
            seen.accepted.push((queue, command.value));
        }
        seen.most_in_flight = seen.most_in_flight.max(self.in_flight.len());
        Ok(most)
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        let script = lock(&self.script).clone();
        let accepted = {
            let mut seen = lock(&self.seen);
            seen.polls += 1;
            if seen.thread.is_none() {
                seen.thread = std::thread::current().name().map(str::to_owned);
            }
            seen.accepted.len()
        };
        match script.fatal {
            Some((at, Fatal::Poll)) if at <= accepted => return Err(abi::TY_SYSTEM),
            Some((at, Fatal::Stranger)) if at <= accepted => {
                events[0] = Event { kind: abi::TY_EVENT_DONE, tag: 1 << 60, ..NO_EVENT };
                return Ok(1);
            }
            _ => {}
        }
        let most = events.len().min(self.in_flight.len());
        let count = match (script.stuck, script.moody) {
            (true, _) => 0,
            (_, true) => self.random(most + 1),
            (_, false) => most,
        };
        for event in &mut events[..count] {
            let which = if script.moody { self.random(self.in_flight.len()) } else { 0 };
            *event = self.in_flight.remove(which).unwrap();
        }
        Ok(count)
    }

    fn cpus(&self) -> &[u32] {
        &self.cpus
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        lock(&self.seen).dropped = true;
    }
}
