//! Programs that run under the stand-in, and use our own bindings.

mod gpu;
mod kernels;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokenyard_ibgda::{KernelBell, QueueFault, QueuePair, Ringer, Steps};
use tokenyard_sys_mlx5::cqe::syndrome;
use tokenyard_sys_mlx5::mailbox::{Init2Rtr, QueryHcaCap, QueryHcaCapOut, Rst2Init, Rtr2Rts};
use tokenyard_sys_mlx5::wqe::{Control, Local, Remote, Request};
use tokenyard_sys_mlx5::{Devx, Library, Uar, UarKind};
use tokenyard_sys_verbs::{self as verbs, Devices, Mr, Pd};

/// Requests that the queue pair has room for.
const DEPTH: u32 = 64;

pub(crate) fn run(guest: &str) {
    match guest {
        "devices" => devices(),
        "devx" => devx(),
        "failure" => failure(),
        "rings" => rings(),
        "kernels" => kernels::run(),
        "violation" => {
            let mut guest = Guest::new();
            // An addition returns 8 bytes.
            let sink = Local { bytes: 16, ..guest.local(1) };
            guest.queue.post(&Request::FetchAdd { to: guest.to(0), add: 1, sink }, true);
            guest.queue.ring();
            let _ = guest.wait();
        }
        other => panic!("found guest {other}"),
    }
}

fn devices() {
    let library = verbs::Library::get().unwrap();
    Devices::list(library).unwrap().names().iter().for_each(|name| println!("{name}"));
}

/// A queue pair, made by our bindings and connected to itself, and a window.
struct Guest {
    queue: QueuePair,
    window: &'static [AtomicU64],
    key: u32,
    name: String,
}

/// The path of a queue pair to itself, on the port with local id 1.
fn to_itself(number: u32) -> Steps {
    let init = Rst2Init {
        qpn: 0,
        atomic_mode: 3,
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        pkey_index: 0,
        port: 1,
    };
    let receive = Init2Rtr {
        mtu: 5,
        log_msg_max: 30,
        remote_qpn: number,
        log_rra_max: 4,
        remote_lid: 1,
        port: 1,
        ..Init2Rtr::default()
    };
    let send = Rtr2Rts {
        qpn: 0,
        ack_timeout: 18,
        log_sra_max: 4,
        retry_count: 7,
        rnr_retry: 7,
        next_send_psn: 0,
    };
    Steps { init, receive, send }
}

impl Guest {
    fn new() -> Self {
        let library = Library::get().unwrap();
        let devices = Devices::list(verbs::Library::get().unwrap()).unwrap();
        let name = devices.names().remove(0);
        assert_eq!(library.is_supported(&devices, &name), Some(true));
        assert_eq!(library.is_supported(&devices, "other"), None);
        let devx = Devx::open(library, &devices, &name).unwrap().unwrap();
        let pd = Pd::new(devx.context()).unwrap();
        let capabilities: QueryHcaCapOut = devx.command(&QueryHcaCap::default()).unwrap();
        assert_eq!(capabilities.cqe_version, 1);
        let window: &'static [AtomicU64] = Vec::leak((0..512).map(|_| AtomicU64::new(0)).collect());
        let at = window.as_ptr().cast_mut().cast();
        // SAFETY: the window stays, and is accessed by atomics only.
        let mr = unsafe { Mr::new(&pd, at, size_of_val(window), 15) }.unwrap();
        let (key, pdn) = (mr.lkey(), devx.pd_number(&pd).unwrap());
        // They stay to the end of the program.
        std::mem::forget((mr, pd));
        // rdma-core 44 does not know the kind that a GPU needs.
        assert!(Uar::new(&devx, UarKind::Dedicated).is_err());
        let uar = Arc::new(Uar::new(&devx, UarKind::Uncached).unwrap());
        assert_eq!(uar.register() as usize - uar.base() as usize, 0x800);
        for depth in [0, 32, 65, 1 << 16] {
            let refused = QueuePair::new(&devx, &uar, pdn, depth).unwrap_err().to_string();
            assert!(refused.contains("make queue pair"), "{refused}");
        }
        let queue = QueuePair::new(&devx, &uar, pdn, DEPTH).unwrap();
        queue.connect(&to_itself(queue.number())).unwrap();
        Self { queue, window, key, name }
    }

    fn at(&self, word: usize) -> u64 {
        self.window[word..].as_ptr() as u64
    }

    fn to(&self, word: usize) -> Remote {
        Remote { address: self.at(word), key: self.key }
    }

    fn local(&self, word: usize) -> Local {
        Local { address: self.at(word), key: self.key, bytes: 8 }
    }

    /// Waits until all that was posted is done.
    fn wait(&mut self) -> Result<(), QueueFault> {
        let limit = Instant::now() + Duration::from_secs(60);
        while self.queue.done()? < self.queue.posted() {
            assert!(Instant::now() < limit, "found {:?}", self.queue.done());
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// A thousand puts with signals, on a queue pair that our own mailboxes made.
fn devx() {
    let mut guest = Guest::new();
    let (source, target, total, sink) = (0, 100, 200, 201);
    for round in 1..=1000 {
        guest.window[source].store(round, Ordering::SeqCst);
        let write = Request::Write { to: guest.to(target), from: guest.local(source) };
        let add = Request::FetchAdd { to: guest.to(total), add: 1, sink: guest.local(sink) };
        assert!(guest.queue.post(&write, false) && guest.queue.post(&add, true));
        guest.queue.ring();
        guest.wait().unwrap();
        assert_eq!(guest.window[target].load(Ordering::SeqCst), round);
    }
    // Without a completion, there is room for `DEPTH` requests.
    let posted = (0..2 * DEPTH).filter(|_| guest.queue.post(&Request::Nop, true)).count();
    assert_eq!(posted, DEPTH as usize);
    guest.queue.ring();
    guest.wait().unwrap();
    let total = guest.window[total].load(Ordering::SeqCst);
    println!("{}: 1000 puts, total {total}", guest.name);
}

/// A thread of the host rings for this thread, which writes requests as a kernel does.
fn rings() {
    let guest = Guest::new();
    let word: &'static AtomicU64 = Box::leak(Box::default());
    let queue = guest.queue.to_device();
    let bells = vec![KernelBell { bell: guest.queue.bell(), word }];
    // SAFETY: the queue pair and the word live longer than the thread, and nothing else rings.
    let ringer = unsafe { Ringer::start(bells) }.unwrap();
    let (total, sink) = (200, 201);
    for round in 1..=200 {
        let add = Request::FetchAdd { to: guest.to(total), add: 1, sink: guest.local(sink) };
        let index = round - 1;
        let control =
            Control { index: index as u16, qpn: queue.number, signaled: true, fence: false };
        let slot = queue.requests + 64 * (index & u64::from(queue.mask));
        for (at, part) in add.to_block(control).chunks_exact(8).enumerate() {
            let part = u64::from_ne_bytes(part.try_into().unwrap());
            let to = std::ptr::with_exposed_provenance_mut::<u64>(slot as usize + 8 * at);
            // SAFETY: a slot of the queue, which the device does not read before the ring.
            unsafe { AtomicU64::from_ptr(to) }.store(part, Ordering::Relaxed);
        }
        word.store(round, Ordering::Release);
        let limit = Instant::now() + Duration::from_secs(60);
        while guest.window[total].load(Ordering::SeqCst) < round {
            assert!(Instant::now() < limit, "round {round}");
            std::thread::yield_now();
        }
        if round == 100 {
            // The thread naps by then.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    drop(ringer);
    println!(
        "{}: rung 200 times, total {}",
        guest.name,
        guest.window[total].load(Ordering::SeqCst)
    );
}

/// A plan of faults makes the second request fail.
fn failure() {
    let mut guest = Guest::new();
    for _ in 0..2 {
        guest.queue.post(&Request::Write { to: guest.to(1), from: guest.local(0) }, true);
        guest.queue.ring();
    }
    let fault = guest.wait().unwrap_err();
    let number = guest.queue.number();
    let expected = QueueFault { number, index: 1, syndrome: syndrome::RETRIES, ..fault };
    assert_eq!(fault, expected);
    println!("{}: {fault}", guest.name);
}
