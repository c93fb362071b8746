//! A model of the kernels' side (`backends/gpu/device/common/gpu_ring.cuh`) over a fabric in memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::check::Limits;
use super::thread::RingWorker;
use super::{Counts, Fabric, GpuRing, RingToServe};
use crate::abi;
use crate::transport::{Command, Event, NO_WINDOW, Window};

const CAPACITY: u32 = 16;
const SIGNALS: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) const BLANK: abi::TyGpuRingCommand = abi::TyGpuRingCommand {
    op: abi::TY_OP_SIGNAL as u32,
    peer: 0,
    signal: 0,
    add: 1,
    src_window: 0,
    dst_window: 0,
    src_offset: 0,
    dst_offset: 0,
    bytes: 0,
    value: 0,
    sequence: 0,
};

/// The memory of a ring, which lives as long as the test program.
#[derive(Clone, Copy)]
struct Device {
    ring: abi::TyGpuRing,
    /// Number of commands so far.
    head: &'static AtomicU64,
}

// SAFETY: addresses of memory that is never freed and accessed by the protocol.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    fn new() -> Self {
        let commands = Box::leak(vec![BLANK; CAPACITY as usize].into_boxed_slice());
        let ring = abi::TyGpuRing {
            size: size_of::<abi::TyGpuRing>(),
            level: 0,
            queue: 0,
            capacity: CAPACITY,
            commands: commands.as_mut_ptr(),
            status: Box::leak(Box::default()),
            totals: Box::leak(Box::new([0_u64; SIGNALS as usize])).as_mut_ptr(),
            signals: SIGNALS,
            reserved: 0,
        };
        Self { ring, head: Box::leak(Box::default()) }
    }

    fn word(&self, at: *mut u64) -> u64 {
        // SAFETY: a word of the ring.
        unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Acquire)
    }

    fn done(&self) -> u64 {
        // SAFETY: the ring's status.
        self.word(unsafe { &raw mut (*self.ring.status).done })
    }

    fn failed(&self) -> u64 {
        // SAFETY: the ring's status.
        self.word(unsafe { &raw mut (*self.ring.status).failed })
    }

    fn total(&self, id: u32) -> u64 {
        self.word(self.ring.totals.wrapping_add(id as usize))
    }

    /// As `DeviceApi::post` of the kernels.
    fn post(&self, command: abi::TyGpuRingCommand) -> u64 {
        let number = self.head.fetch_add(1, Ordering::Relaxed);
        until("room in the ring", || self.done() + u64::from(CAPACITY) > number);
        self.write(number, command);
        number
    }

    fn write(&self, number: u64, command: abi::TyGpuRingCommand) {
        let slot = self.ring.commands.wrapping_add(number as usize % CAPACITY as usize);
        // SAFETY: the slot is free: a thread that has numbered a command waits for room.
        unsafe {
            slot.write(abi::TyGpuRingCommand { sequence: (*slot).sequence, ..command });
            AtomicU64::from_ptr(&raw mut (*slot).sequence).store(number + 1, Ordering::Release);
        }
    }

    /// As `DeviceApi::flush` of the kernels.
    fn flush(&self) {
        let head = self.head.load(Ordering::Relaxed);
        until("done", || self.done() >= head);
    }
}

fn until(what: &str, ready: impl Fn() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < PATIENCE, "{what} never comes");
        std::thread::yield_now();
    }
}

/// A fabric that delivers to itself; it ends commands in an order of its own, and accepts few at a
/// time.
struct Loop {
    totals: [u64; SIGNALS as usize],
    /// Values of `TY_OP_PUT_VALUE`, in the order of posts.
    seen: std::sync::mpsc::Sender<u64>,
    posted: VecDeque<u64>,
    at_once: usize,
    fails: Option<u64>,
    sick: Arc<AtomicBool>,
}

impl Loop {
    fn new(at_once: usize) -> (Self, std::sync::mpsc::Receiver<u64>) {
        let (seen, values) = std::sync::mpsc::channel();
        let posted = VecDeque::with_capacity(CAPACITY as usize);
        let sick = Arc::default();
        (Self { totals: [0; 4], seen, posted, at_once, fails: None, sick }, values)
    }
}

impl Fabric for Loop {
    unsafe fn post(&mut self, commands: &[Command]) -> Result<usize, i32> {
        let room = CAPACITY as usize - self.posted.len();
        let count = commands.len().min(self.at_once).min(room);
        for command in &commands[..count] {
            assert_eq!((command.queue, command.flags), (0, abi::TY_FLAG_NOTIFY));
            match command.op {
                abi::TY_OP_SIGNAL => {
                    self.totals[command.signal as usize] += u64::from(command.add);
                }
                _ => drop(self.seen.send(command.value)),
            }
            self.posted.push_back(command.tag);
        }
        Ok(count)
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        let mut count = 0;
        while count < events.len().min(self.at_once) {
            let last_first = count.is_multiple_of(2);
            let tag = if last_first { self.posted.pop_back() } else { self.posted.pop_front() };
            let Some(tag) = tag else { break };
            let (kind, status) = match self.fails == Some(tag) {
                true => (abi::TY_EVENT_ERROR, abi::TY_PEER_LOST),
                false => (abi::TY_EVENT_DONE, 0),
            };
            events[count] = Event { kind, queue: 0, peer: 0, status, tag };
            count += 1;
        }
        Ok(count)
    }

    fn read_signal(&mut self, id: u32) -> u64 {
        self.totals[id as usize]
    }

    fn is_healthy(&mut self) -> bool {
        !self.sick.load(Ordering::Relaxed)
    }
}

/// The ring of a device, for a transport of two ranks, and its counts, which are never freed.
fn to_serve(device: &Device) -> (RingToServe, &'static Counts) {
    let counts: &Counts = Box::leak(Box::new(Counts::new(&device.ring, 2)));
    let (counters, raised) = counts.words();
    let windows = [128, 256].map(|bytes| Window { bytes, ..NO_WINDOW });
    let serve = abi::TyServeRing {
        size: size_of::<abi::TyServeRing>(),
        ring: &raw const device.ring,
        counters,
        raised,
        windows: windows.as_ptr(),
        window_count: windows.len(),
        largest_put: 64,
        peers: 2,
        reserved: 0,
    };
    // SAFETY: the ring's memory and the counts are never freed.
    (unsafe { RingToServe::new(&serve) }, counts)
}

fn worker(device: &Device, fabric: Loop) -> RingWorker<Loop> {
    RingWorker::new(fabric, to_serve(device).0)
}

fn served(device: &Device, fabric: Loop) -> GpuRing {
    GpuRing::serve(to_serve(device).0, fabric, &[]).unwrap()
}

fn value(value: u64) -> abi::TyGpuRingCommand {
    abi::TyGpuRingCommand { op: abi::TY_OP_PUT_VALUE.into(), value, ..BLANK }
}

#[test]
fn many_producers_lose_nothing_in_a_small_ring_and_flush_waits_for_all() {
    const EACH: u64 = 500;
    for at_once in [1, 3, 64] {
        let (device, (fabric, values)) = (Device::new(), Loop::new(at_once));
        let proxy = served(&device, fabric);
        std::thread::scope(|scope| {
            for producer in 0..4_u32 {
                scope.spawn(move || {
                    for i in 0..EACH {
                        device.post(value(u64::from(producer) << 32 | i));
                        device.post(abi::TyGpuRingCommand { signal: producer, add: 2, ..BLANK });
                    }
                    device.flush();
                });
            }
        });
        assert_eq!(device.done(), 8 * EACH);
        (0..SIGNALS).for_each(|id| until("a total", || device.total(id) == 2 * EACH));
        drop(proxy);
        let mut next = [0_u64; 4];
        for value in values {
            let (producer, i) = ((value >> 32) as usize, value & 0xffff_ffff);
            assert_eq!(i, next[producer], "the commands of one producer keep their order");
            next[producer] += 1;
        }
        assert_eq!(next, [EACH; 4]);
    }
}

#[test]
fn a_command_that_is_written_late_holds_up_only_those_after_it() {
    let (device, (fabric, values)) = (Device::new(), Loop::new(8));
    let mut worker = worker(&device, fabric);
    device.write(0, value(10));
    device.write(2, value(12));
    for _ in 0..3 {
        worker.round().unwrap();
    }
    assert_eq!((device.done(), values.try_iter().collect::<Vec<_>>()), (1, vec![10]));
    device.write(1, value(11));
    while worker.round().unwrap() {}
    assert_eq!((device.done(), values.try_iter().collect::<Vec<_>>()), (3, vec![11, 12]));
}

#[test]
fn a_failed_command_kills_the_ring_and_is_named() {
    let (device, (mut fabric, _values)) = (Device::new(), Loop::new(1));
    fabric.fails = Some(2);
    let proxy = served(&device, fabric);
    for i in 0..3 {
        device.post(value(i));
    }
    until("the failure", || device.failed() != 0);
    drop(proxy);
    assert_eq!((device.failed(), device.done()), (3, 2));
    // SAFETY: the thread has ended.
    assert_eq!(unsafe { (*device.ring.status).status }, i64::from(abi::TY_PEER_LOST));
}

#[test]
fn an_error_that_no_command_brings_is_reported_too() {
    let (device, (fabric, _values)) = (Device::new(), Loop::new(1));
    let sick = Arc::clone(&fabric.sick);
    let _proxy = served(&device, fabric);
    assert_eq!(device.failed(), 0);
    sick.store(true, Ordering::Relaxed);
    until("the failure", || device.failed() == u64::MAX);
}

#[test]
fn commands_that_leave_a_window_or_name_what_is_not_there_never_reach_the_transport() {
    let put = abi::TyGpuRingCommand {
        op: abi::TY_OP_PUT_SIGNAL.into(),
        dst_window: 1,
        bytes: 64,
        src_offset: 64,
        dst_offset: 192,
        ..BLANK
    };
    type Change = fn(&mut abi::TyGpuRingCommand);
    let changes: [(&str, Change); 12] = [
        ("op", |c| c.op = 77),
        ("a get", |c| c.op = abi::TY_OP_GET.into()),
        ("peer", |c| c.peer = 2),
        ("source window", |c| c.src_window = 2),
        ("destination window", |c| c.dst_window = 1 << 16),
        ("end of the source", |c| c.src_offset = 65),
        ("end of the destination", |c| c.dst_offset = 193),
        ("an offset that wraps", |c| c.dst_offset = u64::MAX - 3),
        ("a long put", |c| c.bytes = 65),
        ("signal", |c| c.signal = SIGNALS),
        ("nothing to add", |c| c.add = 0),
        ("a value across two words", |c| (c.op, c.dst_offset) = (abi::TY_OP_PUT_VALUE.into(), 12)),
    ];
    let limits = Limits { peers: 2, signals: SIGNALS, largest_put: 64, windows: vec![128, 256] };
    assert!(limits.translate(&put).is_some());
    for (what, change) in changes {
        let mut wrong = put;
        change(&mut wrong);
        assert!(limits.translate(&wrong).is_none(), "{what}");
    }
    let (device, (fabric, _values)) = (Device::new(), Loop::new(1));
    let mut worker = worker(&device, fabric);
    device.write(0, abi::TyGpuRingCommand { peer: 9, ..put });
    assert!(worker.round().is_err());
}

#[test]
fn what_the_ring_carries_is_counted_per_peer_and_signal() {
    let (device, (fabric, _values)) = (Device::new(), Loop::new(2));
    let (ring, counts) = to_serve(&device);
    let mut worker = RingWorker::new(fabric, ring);
    let to = |peer, signal, add| abi::TyGpuRingCommand { peer, signal, add, ..BLANK };
    // A value raises no signal, whatever its field `signal` holds.
    let value = abi::TyGpuRingCommand { signal: 99, add: 7, ..value(1) };
    for (number, command) in (0..).zip([to(1, 2, 3), to(0, 1, 1), value, to(1, 2, 4)]) {
        device.write(number, command);
    }
    worker.round().unwrap();
    assert_eq!(counts.of_all().posted, 2, "the transport takes two at once");
    while worker.round().unwrap() {}
    let carried = |peer| counts.of(peer).map(|c| (c.posted, c.done, c.raised));
    assert_eq!([carried(0), carried(1), carried(2)], [Some((2, 2, 1)), Some((2, 2, 7)), None]);
    assert_eq!((counts.raised(0), counts.raised(1)), (vec![(1, 1)], vec![(2, 7)]));
    assert_eq!((counts.of_all().done, counts.capacity()), (4, CAPACITY));
    assert!(counts.raised(2).is_empty());
}
