//! Transports that declare more than they can do. The table of claims names them, and the case that catches
//! each; so one test runs the table.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use tokenyard_conformance::claims::{CLAIMS, Proof};
use tokenyard_conformance::transport;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, NO_WINDOW, Transport as _, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::faulty_shm::{Below, Fault, Hot};
use crate::l0::{Intact, IntactLoadStore, Turn, caught, is_put, run};
use crate::{assert_caught, config};

/// The cases of the table whose ranks are not lost.
fn rows() -> Vec<(&'static str, &'static str, &'static str)> {
    let all = CLAIMS.iter().flat_map(|claim| claim.proofs);
    all.filter_map(|proof| match proof {
        Proof::Case { case, mutant, says } => Some((*case, *mutant, *says)),
        Proof::Cannot(_) => None,
    })
    .filter(|(case, ..)| !case.contains("_peer_"))
    .collect()
}

#[test]
fn every_claim_is_proved_by_its_mutant() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let rows = rows();
    assert!(rows.len() > 10, "the table is read: {rows:?}");
    // Most wait for an event that never comes, so a few run at the same time.
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((case, mutant, says)) =
                    rows.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    proves(case, mutant, says);
                }
            });
        }
    });
}

fn proves(case: &str, mutant: &str, says: &str) {
    let capabilities = transport::probe(&config("cpu", mutant)).unwrap();
    let declares = |flag: u64| capabilities.flags & flag != 0;
    let intact = match () {
        () if declares(abi::TY_CAP_LOAD_STORE) => IntactLoadStore::NAME,
        () if declares(abi::TY_CAP_MANUAL_PROGRESS) => IntactDriven::NAME,
        () => Intact::NAME,
    };
    // The largest world that the case has.
    let tests = transport::tests(&capabilities);
    let of_case = |name: &&str| name.split('/').nth(1) == Some(case);
    let mut names = tests.iter().map(|test| test.name.as_str());
    let test = names.rfind(of_case).unwrap();
    assert_caught(mutant, test, says, |broken| run(if broken { mutant } else { intact }, test));
}

/// Commands that wait until the caller drives the transport.
#[derive(Default)]
struct Waiting(Mutex<VecDeque<(u32, Command)>>);

impl Waiting {
    fn accept(&self, queue: u32, command: &Command) -> Hot {
        let mut waiting = self.0.lock().unwrap();
        if waiting.iter().filter(|(other, _)| *other == queue).count() >= 64 {
            return Ok(0);
        }
        waiting.push_back((queue, *command));
        Ok(1)
    }

    /// Executes the waiting commands, and then polls if there is room for events; the lock excludes other
    /// threads.
    fn drive(&self, below: &Below, poll: Option<(u32, &mut [Event])>) -> Hot {
        let mut waiting = self.0.lock().unwrap();
        // A full queue stops no other.
        let (mut full, mut stopped) = (Vec::new(), VecDeque::new());
        while let Some((queue, command)) = waiting.pop_front() {
            // SAFETY: an accepted command, whose source does not change until it is done; no other thread
            // is in a queue of `shm` while the lock is held.
            if full.contains(&queue) || unsafe { below.post(queue, command)? } == 0 {
                full.push(queue);
                stopped.push_back((queue, command));
            }
        }
        *waiting = stopped;
        poll.map_or(Ok(0), |(queue, events)| below.shm.poll(queue, events))
    }
}

/// The unbroken transport with manual progress, which it declares.
#[derive(Default)]
pub(crate) struct IntactDriven(Waiting);
impl Fault for IntactDriven {
    const NAME: &'static str = "intact_driven";
    const KEEPS: u64 = abi::TY_CAP_GET | abi::TY_CAP_MANUAL_PROGRESS;

    unsafe fn post(&self, _: &Below, queue: u32, command: &Command) -> Hot {
        self.0.accept(queue, command)
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        self.0.drive(below, Some((queue, events)))
    }

    fn progress(&self, below: &Below) -> std::result::Result<bool, i32> {
        self.0.drive(below, None).map(|_| false)
    }
}

/// Moves nothing unless it is polled, and does not declare so.
#[derive(Default)]
pub(crate) struct NeedsDriving(Waiting);
impl Fault for NeedsDriving {
    const NAME: &'static str = "needs_driving";

    unsafe fn post(&self, _: &Below, queue: u32, command: &Command) -> Hot {
        self.0.accept(queue, command)
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        self.0.drive(below, Some((queue, events)))
    }
}

/// Declares manual progress, and `progress` moves nothing.
#[derive(Default)]
pub(crate) struct IdleProgress(Waiting);
impl Fault for IdleProgress {
    const NAME: &'static str = "idle_progress";
    const KEEPS: u64 = IntactDriven::KEEPS;

    unsafe fn post(&self, _: &Below, queue: u32, command: &Command) -> Hot {
        self.0.accept(queue, command)
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        self.0.drive(below, Some((queue, events)))
    }
}

/// Holds back puts without a signal behind later commands, and declares itself ordered.
#[derive(Default)]
pub(crate) struct HeldPut(Waiting);
impl Fault for HeldPut {
    const NAME: &'static str = "held_put";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        if command.op == abi::TY_OP_PUT {
            return self.0.accept(queue, command);
        }
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        std::thread::sleep(Duration::from_millis(1));
        self.0.drive(below, Some((queue, events)))
    }
}

/// Hands out memory that no peer reaches.
#[derive(Default)]
pub(crate) struct PrivateMemory;
impl Fault for PrivateMemory {
    const NAME: &'static str = "private_memory";
    const KEEPS: u64 = abi::TY_CAP_GET | abi::TY_CAP_OWNS_MEMORY;

    fn alloc(&self, _: &Below, id: u32, bytes: u64) -> Result<Window> {
        Ok(leaked_window(id, bytes))
    }

    unsafe fn register(&self, below: &mut Below, window: &Window) -> Result<()> {
        // SAFETY: another window of the same size, which lives as long as the process.
        unsafe { below.shm.register(&leaked_window(window.id, window.bytes)) }
    }
}

/// Takes host memory, as it declares, and registers other memory instead.
#[derive(Default)]
pub(crate) struct UnregisteredMemory;
impl Fault for UnregisteredMemory {
    const NAME: &'static str = "unregistered_memory";

    unsafe fn register(&self, below: &mut Below, window: &Window) -> Result<()> {
        // SAFETY: as in `PrivateMemory`.
        unsafe { PrivateMemory.register(below, window) }
    }
}

/// Shared memory that lives until the process ends.
fn leaked_window(id: u32, bytes: u64) -> Window {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("tokenyard-mutant", flags).unwrap();
    let bytes = bytes.next_multiple_of(rustix::param::page_size() as u64);
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    let (prot, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { rustix::mm::mmap(null, bytes as usize, prot, MapFlags::SHARED, &fd, 0) };
    let raw = fd.as_raw_fd();
    let _ = fd.into_raw_fd();
    Window {
        id,
        kind: abi::TY_MEMORY_HOST,
        pointer: base.unwrap().cast(),
        bytes,
        fd: raw,
        handle: abi::TY_HANDLE_MEMFD,
        ..NO_WINDOW
    }
}

/// Connects two ranks and no more, and declares many.
#[derive(Default)]
pub(crate) struct TwoPeers;
impl Fault for TwoPeers {
    const NAME: &'static str = "two_peers";

    fn connect(&self, below: &mut Below, peer: u32, data: &[u8]) -> Result<()> {
        if peer >= 2 {
            let text = format!("peer {peer} is out of range");
            return Err(Error::new(ErrorKind::Unsupported, "connect", text));
        }
        below.shm.connect(peer, data)
    }
}

/// Takes commands on all queues and moves those of the first four.
#[derive(Default)]
pub(crate) struct FourQueues;
impl Fault for FourQueues {
    const NAME: &'static str = "four_queues";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        if queue < 4 { unsafe { below.post(queue, *command) } } else { Ok(1) }
    }
}

/// Remembers only 256 commands that are not polled yet, whatever it declares.
#[derive(Default)]
pub(crate) struct ShallowQueue(AtomicU64);
impl Fault for ShallowQueue {
    const NAME: &'static str = "shallow_queue";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let notify = command.flags & abi::TY_FLAG_NOTIFY;
        let room = self.0.load(Ordering::Relaxed) < 256;
        let flags = if room { command.flags } else { command.flags & !notify };
        // SAFETY: by this function's contract.
        let accepted = unsafe { below.post(queue, Command { flags, ..*command })? };
        if accepted == 1 && room && notify != 0 {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        Ok(accepted)
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        let count = below.shm.poll(queue, events)?;
        self.0.fetch_sub(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Distinguishes four windows, and declares more.
#[derive(Default)]
pub(crate) struct FourWindows;
impl Fault for FourWindows {
    const NAME: &'static str = "four_windows";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let dst_window = command.dst_window & 3;
        // SAFETY: the windows of cases with more than four are alike; the rest is this function's contract.
        unsafe { below.post(queue, Command { dst_window, ..*command }) }
    }
}

/// Sends as many bytes as a socket takes at once, and drops the rest.
#[derive(Default)]
pub(crate) struct CutAtABuffer;
impl Fault for CutAtABuffer {
    const NAME: &'static str = "cut_at_a_buffer";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let bytes = command.bytes.min(4 << 20);
        // SAFETY: by this function's contract; a shorter put is inside what a longer one is.
        unsafe { below.post(queue, Command { bytes, ..*command }) }
    }
}

/// Loses one put in 1,000, and its signal too.
#[derive(Default)]
pub(crate) struct RareLostPut(Turn);
impl Fault for RareLostPut {
    const NAME: &'static str = "rare_lost_put";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let mut command = *command;
        if is_put(&command) && self.0.of(1000) {
            (command.op, command.bytes) = (abi::TY_OP_PUT, 0);
        }
        // SAFETY: by this function's contract; nothing moves if it was cut to 0 bytes.
        unsafe { below.post(queue, command) }
    }
}

#[test]
fn one_lost_put_in_a_thousand_is_caught() {
    caught::<RareLostPut>("l0/no_put_is_lost/r2", "number i of them adds i + 1");
}

/// One put in 1,000 raises its signal and loses its payload.
#[derive(Default)]
pub(crate) struct RareLostPayload(Turn);
impl Fault for RareLostPayload {
    const NAME: &'static str = "rare_lost_payload";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let lost = is_put(command) && self.0.of(1000);
        let bytes = if lost { 0 } else { command.bytes };
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, Command { bytes, ..*command }) }
    }
}

#[test]
fn one_lost_payload_in_a_thousand_is_caught() {
    caught::<RareLostPayload>("l0/no_put_is_lost/r3", "lost their payload (INV-1)");
}

/// Sends signals without a payload to the neighbour, on every rank alike.
#[derive(Default)]
pub(crate) struct MisledSignal;
impl Fault for MisledSignal {
    const NAME: &'static str = "misled_signal";

    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        let misled = command.op == abi::TY_OP_SIGNAL;
        let peer = if misled { (command.peer + 1) % below.ranks } else { command.peer };
        // SAFETY: by this function's contract; signals are alike on all ranks.
        unsafe { below.post(queue, Command { peer, ..*command }) }
    }
}

#[test]
fn a_signal_to_the_wrong_peer_is_caught_although_all_ranks_do_alike() {
    caught::<MisledSignal>("l0/signals_count_exactly/r2", "found total");
}

/// Totals of 32 bits.
#[derive(Default)]
pub(crate) struct NarrowTotal;
impl Fault for NarrowTotal {
    const NAME: &'static str = "narrow_total";

    fn read_signal(&self, below: &Below, queue: u32, id: u32) -> u64 {
        below.shm.read_signal(queue, id) & 0xffff_ffff
    }
}

#[test]
fn totals_of_32_bits_are_caught() {
    caught::<NarrowTotal>("l0/totals_have_64_bits/r2", "found total");
}
