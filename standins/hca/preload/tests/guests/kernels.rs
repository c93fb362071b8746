//! The queues of kernels of the transport `ibgda`, on the stand-in of a GPU: this thread reads the parameters that a
//! kernel gets, and posts as a kernel does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::{
    NO_WINDOW, Team, Transport as _, TransportNeeds, TransportOpen, Window,
};
use tokenyard_gpu::Platform;
use tokenyard_gpu::driver::{Context, Device, Vmm};
use tokenyard_ibgda::device_api::{DeviceQueue, Params, flags};
use tokenyard_ibgda::{Doorbell, Ibgda, IbgdaConfig, Placement};
use tokenyard_sys_mlx5::cqe::{Kind, Word};
use tokenyard_sys_mlx5::doorbell::{Ring, record_word};
use tokenyard_sys_mlx5::wqe::{Control, InlineData, Local, Remote, Request};

use super::gpu::{PLATFORM, WITHOUT_REGISTERS};

const QUEUES: u32 = 2;
const SIGNALS: u32 = 4;
const DEPTH: u32 = 64;

/// A key as parameters have it: address and big-endian key.
#[repr(C)]
#[derive(Clone, Copy)]
struct Key {
    address: u64,
    key: u32,
    unused: u32,
}

/// A transport of one rank, connected to itself.
struct Rank {
    ibgda: Ibgda,
    params: Params,
    window: Vmm,
}

/// # Safety
/// There is a value of this type.
unsafe fn read<T: Copy>(address: u64, index: usize) -> T {
    // SAFETY: by this function's contract.
    unsafe { std::ptr::with_exposed_provenance::<T>(address as usize).add(index).read() }
}

fn word(address: u64) -> &'static AtomicU64 {
    // SAFETY: words of a transport that lives to the end of the program, accessed by atomics.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

impl Rank {
    fn new(platform: &'static Platform, config: IbgdaConfig) -> Self {
        let context = Context::retain(Device::choose(platform, Some(0)).unwrap()).unwrap();
        let team = Team::world(0, 1);
        let needs = TransportNeeds {
            windows: 1,
            queues: QUEUES,
            signals: SIGNALS,
            queue_depth: 32,
            largest_put: 4096,
            deadline: Duration::from_secs(30),
        };
        let open = TransportOpen::new(&team, &needs);
        let mut ibgda = Ibgda::open_on(config, &open, Some(Arc::clone(&context))).unwrap();
        assert_eq!(ibgda.memory_needs().kinds, abi::TY_MEMORY_CUDA);
        let window = Vmm::new(&context, 4096).unwrap();
        let described = Window {
            kind: abi::TY_MEMORY_CUDA,
            pointer: std::ptr::with_exposed_provenance_mut(window.address() as usize),
            bytes: window.bytes(),
            device: 0,
            ..NO_WINDOW
        };
        // SAFETY: the window lives as long as the transport.
        unsafe { ibgda.register(&described) }.unwrap();
        let endpoint = ibgda.endpoint(0).unwrap();
        ibgda.connect(0, &endpoint).unwrap();
        ibgda.commit().unwrap();
        let api = ibgda.device_api().unwrap();
        assert_eq!(api.param_bytes, size_of::<Params>());
        // SAFETY: parameters of this type, in a transport that lives.
        let params = unsafe { *api.params.cast::<Params>() };
        assert_eq!((params.peers, params.queue_count, params.windows), (1, QUEUES, 1));
        Self { ibgda, params, window }
    }

    fn queue(&self, queue: u32) -> DeviceQueue {
        // SAFETY: as many as the parameters say.
        unsafe { read(self.params.queues, queue as usize) }
    }

    /// Posts a request as number `number` of a queue, and rings.
    fn post(&self, queue: u32, number: u64, request: &Request) {
        let it = self.queue(queue);
        let control =
            Control { index: number as u16, qpn: it.number, signaled: true, fence: false };
        let slot = it.requests + 64 * (number & u64::from(it.mask));
        for (at, part) in request.to_block(control).chunks_exact(8).enumerate() {
            let part = u64::from_ne_bytes(part.try_into().unwrap());
            word(slot + 8 * at as u64).store(part, Ordering::Relaxed);
        }
        let next = number + 1;
        if self.params.flags & flags::HOST_RINGS != 0 {
            return word(it.doorbell).store(next, Ordering::Release);
        }
        let record = std::ptr::with_exposed_provenance_mut::<u32>(it.record as usize + 4);
        // SAFETY: the record's word of the send queue.
        let record = unsafe { AtomicU32::from_ptr(record) };
        record.store(u32::from_ne_bytes(record_word(next as u16)), Ordering::SeqCst);
        let ring = Ring::NextIndex { next: next as u16, qpn: it.number };
        word(it.doorbell).store(u64::from_ne_bytes(ring.to_bytes()), Ordering::SeqCst);
    }

    fn remote(&self, table: u64, offset: u64) -> Remote {
        // SAFETY: one key for each window, and one for the signals.
        let key: Key = unsafe { read(table, 0) };
        Remote { address: key.address + offset, key: u32::from_be(key.key) }
    }

    /// A value of 8 bytes, and a signal behind it.
    fn put_and_signal(&self, queue: u32, round: u64) {
        let data = InlineData::new(&round.to_ne_bytes()).unwrap();
        let to = self.remote(self.params.remote, 8 * u64::from(queue));
        self.post(queue, 2 * (round - 1), &Request::WriteInline { to, data });
        // SAFETY: the sink is a key, too.
        let sink: Key =
            unsafe { read((&raw const self.params.sink).expose_provenance() as u64, 0) };
        let sink = Local { address: sink.address, key: u32::from_be(sink.key), bytes: 8 };
        let id = u64::from(queue * SIGNALS + 1);
        let to = self.remote(self.params.tables, 8 * id);
        self.post(queue, 2 * round - 1, &Request::FetchAdd { to, add: 1, sink });
    }

    fn wait(&self, what: &str, mut until: impl FnMut() -> bool) {
        let limit = Instant::now() + Duration::from_secs(60);
        while !until() {
            assert!(Instant::now() < limit, "{what}: {:?}", self.ibgda.health());
            std::thread::yield_now();
        }
    }
}

/// Puts and signals on both queues, more than their depth.
fn exchange(rank: &Rank) {
    for round in 1..=u64::from(DEPTH) {
        for queue in 0..QUEUES {
            rank.put_and_signal(queue, round);
            rank.wait("signal", || rank.ibgda.read_signal(queue, 1) == round);
            let value = word(rank.window.address() + 8 * u64::from(queue));
            assert_eq!(value.load(Ordering::SeqCst), round, "the payload before the signal");
        }
    }
    for queue in 0..QUEUES {
        // The last completion, as a kernel reads it.
        let at = rank.queue(queue).completion as usize;
        let at = std::ptr::with_exposed_provenance_mut::<u32>(at);
        rank.wait("completion", || {
            // SAFETY: the last 4 bytes of a completion, accessed by atomics.
            let bytes = unsafe { AtomicU32::from_ptr(at) }.load(Ordering::Acquire).to_ne_bytes();
            let word = Word::from_bytes(bytes);
            word.kind == Kind::Request && u32::from(word.counter) == 2 * DEPTH - 1
        });
    }
    rank.ibgda.health().unwrap();
}

/// A request with a wrong key, which `health` names.
fn fail(rank: &Rank) {
    let data = InlineData::new(&[1; 8]).unwrap();
    let request = Request::WriteInline { to: Remote { address: 8, key: 7 }, data };
    rank.post(1, 2 * u64::from(DEPTH), &request);
    rank.wait("failure", || rank.ibgda.health().is_err());
    let error = rank.ibgda.health().unwrap_err().to_string();
    let number = format!("queue pair {:#x} to peer 0 (queue 1)", rank.queue(1).number);
    assert!(error.contains(&number) && error.contains("does not cover"), "{error}");
}

pub(crate) fn run() {
    for (platform, doorbell, queues, expected) in [
        (&PLATFORM, Doorbell::Auto, Placement::Auto, "doorbell gpu, queues gpu"),
        (&PLATFORM, Doorbell::Auto, Placement::Host, "doorbell gpu, queues cpu"),
        (&PLATFORM, Doorbell::Cpu, Placement::Auto, "doorbell cpu, queues cpu"),
        (&WITHOUT_REGISTERS, Doorbell::Auto, Placement::Auto, "doorbell cpu, queues cpu"),
    ] {
        let config = IbgdaConfig { doorbell, queues, depth: DEPTH, ..IbgdaConfig::default() };
        let rank = Rank::new(platform, config);
        let link = rank.ibgda.link_name(0);
        assert!(link.contains(expected), "{link}");
        exchange(&rank);
        fail(&rank);
        println!("{expected}: {DEPTH} rounds");
    }
    let completions = Placement::Gpu;
    let config = IbgdaConfig { completions, depth: DEPTH, ..IbgdaConfig::default() };
    exchange(&Rank::new(&PLATFORM, config));
    println!("completions gpu: {DEPTH} rounds");
    refusals();
}

/// A doorbell that the driver does not allow is an error with its fix.
fn refusals() {
    let config = IbgdaConfig { doorbell: Doorbell::Gpu, ..IbgdaConfig::default() };
    let refused = std::panic::catch_unwind(|| Rank::new(&WITHOUT_REGISTERS, config));
    let Err(refused) = refused else { panic!("found a transport; expected a refusal") };
    let text = refused.downcast_ref::<String>().unwrap();
    assert!(text.contains("PeerMappingOverride=1"), "{text}");
    println!("doorbell gpu: refused");
}
