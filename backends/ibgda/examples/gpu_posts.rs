//! The device API on a GPU, without a NIC: the bytes that kernels write, compared with Rust's, and how many requests
//! they post in a second. No device takes the requests, so queues are as deep as they are used.
//!
//! `gpu_posts` on a machine with an NVIDIA GPU and NVRTC. It fails if a byte differs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a tool for tests")]

#[path = "../tests/calls/mod.rs"]
mod calls;

use std::ffi::{CStr, c_void};
use std::sync::Arc;
use std::time::Instant;

use calls::{Call, hex};
use tokenyard_core::Result;
use tokenyard_cuda::{Nvrtc, PLATFORM};
use tokenyard_gpu::compile::{Compiler as _, Source, SourceFile};
use tokenyard_gpu::driver::{
    Buffer, Context, Device, Launch, Pinned, RawFunction, RawStream, copy,
};
use tokenyard_hca::Random;
use tokenyard_ibgda::device_api::{DeviceQueue, MemoryKey, Params, SOURCE, flags};
use tokenyard_sys_mlx5::doorbell::{Ring, record_word};
use tokenyard_sys_mlx5::wqe::BLOCK;

const KERNELS: SourceFile = SourceFile { name: "gpu_posts.cu", text: include_str!("gpu_posts.cu") };
const HEADERS: [(&str, &str); 4] = [
    ("arch.cuh", include_str!("../../gpu/device/common/arch.cuh")),
    ("arch_cuda.cuh", include_str!("../../gpu/device/common/arch_cuda.cuh")),
    ("transport.cuh", include_str!("../../gpu/device/common/transport.cuh")),
    ("ibgda.cuh", SOURCE),
];
const BLOCKS_OF_CALLS: usize = 200;
/// Requests of the queues of calls; more than a call makes.
const DEPTH_OF_CALLS: u32 = 64;
/// The largest number of requests that may be under way.
const DEPTH: u32 = 32_768;
/// The number of the queue pairs that are measured.
const NUMBER: u32 = 0x1234;
/// Each row of rates is measured this many times.
const TIMES: usize = 5;

/// As in `gpu_posts.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CallArgs {
    what: u64,
    bytes: u64,
    value: u64,
}

/// As in `gpu_posts.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Posting {
    each: u32,
    lanes: u32,
    own_queues: u32,
    unused: u32,
}

/// A GPU with the kernels.
struct Gpu {
    context: Arc<Context>,
    stream: RawStream,
    call: RawFunction,
    posts: RawFunction,
    mixed: RawFunction,
    abort: Pinned<u64>,
    report: Pinned<[u64; 32]>,
}

impl Gpu {
    fn new() -> Result<Self> {
        let driver = PLATFORM.driver;
        let device = Device::choose(&PLATFORM, Some(0))?;
        let context = Context::retain(device)?;
        let facts = driver.facts(driver.device(0)?)?;
        println!("{}, {}", driver.name(driver.device(0)?)?, facts.architecture.name());
        Nvrtc.load(None)?;
        let mut options = Nvrtc.options(facts.architecture);
        options.push("-DTY_ROWS_TMA=0".to_owned());
        let headers = HEADERS.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let source =
            Source { main: KERNELS, headers: headers.into(), options, include_folders: Vec::new() };
        let image = Nvrtc.compile(&source)?.image;
        let (stream, [call, posts, mixed]) = {
            let _entered = context.enter()?;
            // SAFETY: an image of the compiler, whose module is never unloaded.
            let module = unsafe { driver.module_load(&image)? };
            let find = |name: &CStr| {
                // SAFETY: a module that lives.
                unsafe { driver.module_function(module, name) }
            };
            (driver.stream_create()?, [c"ty_call", c"ty_posts", c"ty_mixed"].map(find))
        };
        let (call, posts, mixed) = (call?, posts?, mixed?);
        let (abort, report) = (Pinned::new(&context, 1)?, Pinned::new(&context, 1)?);
        Ok(Self { context, stream, call, posts, mixed, abort, report })
    }

    /// Runs a kernel to its end; the arguments are parameters, an argument of its own, abort word and report.
    fn run<T: Copy>(
        &self,
        kernel: RawFunction,
        launch: Launch,
        params: Params,
        own: T,
    ) -> Result<()> {
        let _entered = self.context.enter()?;
        let (mut params, mut own) = (params, own);
        let (mut abort, mut report) = (self.abort.at(0) as u64, self.report.at(0) as u64);
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut params).cast(),
            (&raw mut own).cast(),
            (&raw mut abort).cast(),
            (&raw mut report).cast(),
        ];
        // SAFETY: arguments of the kernel's types; its memory lives until the stream has passed it.
        unsafe {
            PLATFORM.driver.function_launch(kernel, launch, self.stream, &mut arguments)?;
            PLATFORM.driver.stream_synchronize(self.stream)?;
            // The kernel has ended.
            assert_eq!((*self.report.at(0))[0], 0, "a wait has ended: {:?}", *self.report.at(0));
        }
        Ok(())
    }
}

/// Memory of requests and records.
enum Memory {
    Host(Pinned<u8>),
    Gpu(Buffer),
}

impl Memory {
    fn address(&self) -> u64 {
        match self {
            Self::Host(memory) => memory.at(0) as u64,
            Self::Gpu(memory) => memory.address(),
        }
    }
}

/// Send queues of one rank to itself, and all that parameters name.
struct Queues<'a> {
    gpu: &'a Gpu,
    memory: Memory,
    /// For each queue the doorbell and the completion, a cache line each.
    words: Pinned<[u64; 16]>,
    table: Buffer,
    keys: Buffer,
    fault: Pinned<[u64; 4]>,
    count: u32,
    depth: u32,
}

impl<'a> Queues<'a> {
    fn new(gpu: &'a Gpu, on_gpu: bool, count: u32, depth: u32) -> Result<Self> {
        // Records lie behind all requests, a block each.
        let bytes = BLOCK * count as usize * (depth as usize + 1);
        let memory = if on_gpu {
            Memory::Gpu(Buffer::new(&gpu.context, bytes as u64)?)
        } else {
            Memory::Host(Pinned::new(&gpu.context, bytes)?)
        };
        Ok(Self {
            gpu,
            memory,
            words: Pinned::new(&gpu.context, count as usize)?,
            table: Buffer::new(&gpu.context, 128 * u64::from(count))?,
            keys: Buffer::new(&gpu.context, 64)?,
            fault: Pinned::new(&gpu.context, 1)?,
            count,
            depth,
        })
    }

    fn record(&self, queue: u32) -> u64 {
        self.memory.address() + BLOCK as u64 * u64::from(self.count * self.depth + queue)
    }

    /// Sets all queues to a state in which `index` requests were posted and are done.
    fn reset(&self, number: u32, index: u64, done: u32) -> Result<()> {
        let queue = |queue: u32| {
            let words = self.words.at(queue as usize).cast::<u64>();
            // SAFETY: words of this queue in pinned memory; no kernel runs.
            unsafe { words.add(8).cast::<u32>().write(done) };
            DeviceQueue {
                requests: self.memory.address() + BLOCK as u64 * u64::from(queue * self.depth),
                record: self.record(queue),
                doorbell: words as u64,
                completion: words.wrapping_add(8) as u64,
                number,
                mask: self.depth - 1,
                counts: [index, 2 * index, index],
                ..DeviceQueue::default()
            }
        };
        let all: Vec<_> = (0..self.count).map(queue).collect();
        let bytes = size_of_val(&*all) as u64;
        copy(&self.gpu.context, self.table.address(), all.as_ptr() as u64, bytes)
    }

    fn params(&self, remote: MemoryKey, local: MemoryKey, fence: bool) -> Result<Params> {
        let keys = [remote, local];
        let at = self.keys.address();
        copy(&self.gpu.context, at, keys.as_ptr() as u64, size_of_val(&keys) as u64)?;
        Ok(Params {
            queues: self.table.address(),
            remote: at,
            tables: at,
            local: at + 16,
            totals: at + 32,
            sink: local,
            fault: self.fault.at(0) as u64,
            peers: 1,
            queue_count: self.count,
            windows: 1,
            signals: 1,
            flags: if fence { flags::FENCE_SIGNALS } else { 0 },
            unused: 0,
        })
    }
}

/// Bytes of memory that the GPU or the host holds.
fn read(gpu: &Gpu, at: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut found = vec![0_u8; bytes];
    copy(&gpu.context, found.as_mut_ptr() as u64, at, bytes as u64)?;
    Ok(found)
}

/// Random calls write the requests, the record and the ring that Rust writes.
fn compare(gpu: &Gpu, on_gpu: bool) -> Result<()> {
    let queues = Queues::new(gpu, on_gpu, 1, DEPTH_OF_CALLS)?;
    let zeros = vec![0_u8; BLOCK * DEPTH_OF_CALLS as usize];
    let (mut random, mut blocks, mut calls) = (Random::new(29), 0, 0);
    while blocks < BLOCKS_OF_CALLS {
        let call = Call::random(&mut random);
        let index = u64::from(call.index);
        // A get waits for its request: the completion says that it is done.
        let done = if call.what == 3 { u32::from(call.index.swap_bytes()) } else { u32::MAX };
        queues.reset(call.qpn, index, done)?;
        // Short requests leave the last bytes of their slots as they are.
        let bytes = zeros.len() as u64;
        copy(&gpu.context, queues.memory.address(), zeros.as_ptr() as u64, bytes)?;
        let key = |address, key| MemoryKey::new(address, key);
        let params = queues.params(
            key(call.to.address, call.to.key),
            key(call.from.address, call.from.key),
            call.what == 5,
        )?;
        let (what, bytes) = (u64::from(call.what), u64::from(call.from.bytes));
        let own = CallArgs { what, bytes, value: call.value };
        gpu.run(gpu.call, Launch::of_threads(1, 32, 0), params, own)?;
        let expected = call.blocks();
        for (at, block) in (call.index..).zip(&expected) {
            let slot = BLOCK as u64 * u64::from(at as u32 % DEPTH_OF_CALLS);
            let found = read(gpu, queues.memory.address() + slot, BLOCK)?;
            assert_eq!(hex(&found), hex(block), "{call:?}");
        }
        let next = call.index.wrapping_add(expected.len() as u16);
        let record = read(gpu, queues.record(0) + 4, 4)?;
        assert_eq!(hex(&record), hex(&record_word(next)), "the record of {call:?}");
        let rung = read(gpu, queues.words.at(0) as u64, 8)?;
        let ring = Ring::NextIndex { next, qpn: call.qpn };
        assert_eq!(hex(&rung), hex(&ring.to_bytes()), "the ring of {call:?}");
        blocks += expected.len();
        calls += 1;
    }
    let place = if on_gpu { "the GPU" } else { "the host" };
    println!("{calls} calls, {blocks} requests in memory of {place}: the bytes that Rust writes");
    Ok(())
}

/// The requests of a queue, as far as they are looked at: opcode, offset of the peer's memory, and the value that is
/// added. Checks that each has its own index, that the last asks for a completion, and what was rung.
fn posted(queues: &Queues<'_>, queue: u32, count: u32) -> Result<Vec<(u8, u64, u64)>> {
    let bytes = BLOCK * count as usize;
    let at = queues.memory.address() + BLOCK as u64 * u64::from(queue * queues.depth);
    let all = read(queues.gpu, at, bytes)?;
    let word = |block: &[u8], at: usize| u64::from_be_bytes(block[at..at + 8].try_into().unwrap());
    let look = |(index, block): (usize, &[u8])| {
        let [high, low] = (index as u16).to_be_bytes();
        assert_eq!(block[..3], [0, high, low], "request {index}: {}", hex(block));
        assert!(block[11] == 8 || block[11] == 0 && index + 1 < count as usize, "request {index}");
        (block[3], word(block, 16), word(block, 32))
    };
    let found = all.chunks_exact(BLOCK).enumerate().map(look).collect();
    let (record, rung) = (queues.record(queue) + 4, queues.words.at(queue as usize) as u64);
    assert_eq!(read(queues.gpu, record, 4)?, record_word(count as u16), "the record");
    let ring = Ring::NextIndex { next: count as u16, qpn: NUMBER };
    assert_eq!(read(queues.gpu, rung, 8)?, ring.to_bytes(), "the last ring");
    Ok(found)
}

/// Lanes of warps that post one request or two together: an addition comes right behind its own row.
fn mixed(gpu: &Gpu) -> Result<()> {
    const ROUNDS: u32 = 64;
    const WARPS: u32 = 4;
    let queues = Queues::new(gpu, false, 1, DEPTH)?;
    queues.reset(NUMBER, 0, u32::MAX)?;
    let params = queues.params(MemoryKey::new(0, 7), MemoryKey::new(0, 5), false)?;
    let own = Posting { each: ROUNDS, lanes: 32, own_queues: 0, unused: 0 };
    gpu.run(gpu.mixed, Launch::of_threads(2, 32 * WARPS, 0), params, own)?;
    // Of 32 lanes, 11 make two requests.
    let count = 2 * WARPS * ROUNDS * (32 + 11);
    let found = posted(&queues, 0, count)?;
    let mut rows = [0; 32];
    for (at, (opcode, offset, added)) in found.iter().enumerate() {
        match opcode {
            0x08 => rows[(offset / 64) as usize] += 1,
            0x12 => assert_eq!(found[at - 1], (0x08, 64 * (added - 1), found[at - 1].2), "{at}"),
            other => panic!("request {at} has opcode {other:#x}"),
        }
    }
    assert_eq!(rows, [2 * WARPS * ROUNDS; 32]);
    println!("{count} requests of lanes that post together: each where it belongs");
    Ok(())
}

/// A row of rates: blocks, warps of each, lanes of each warp that post, and whether each block has a queue.
/// Beside them are the rates of a kernel that was written for this alone, on an H200: millions a second, with
/// queues in memory of the host and of the GPU.
#[derive(Clone, Copy)]
struct Row {
    blocks: u32,
    warps: u32,
    lanes: u32,
    own_queues: bool,
    by_hand: [f64; 2],
}

const ROWS: [Row; 8] = [
    Row { blocks: 1, warps: 1, lanes: 1, own_queues: true, by_hand: [0.27, 0.37] },
    Row { blocks: 16, warps: 1, lanes: 1, own_queues: true, by_hand: [4.5, 5.4] },
    Row { blocks: 132, warps: 1, lanes: 1, own_queues: true, by_hand: [29.7, 41.9] },
    Row { blocks: 1, warps: 16, lanes: 1, own_queues: false, by_hand: [2.05, 2.30] },
    Row { blocks: 16, warps: 1, lanes: 1, own_queues: false, by_hand: [3.4, 4.1] },
    Row { blocks: 1, warps: 1, lanes: 32, own_queues: true, by_hand: [10.5, 15.0] },
    Row { blocks: 8, warps: 1, lanes: 32, own_queues: true, by_hand: [72.0, 85.0] },
    Row { blocks: 16, warps: 1, lanes: 32, own_queues: true, by_hand: [129.0, 235.0] },
];

/// Millions of requests a second: the median of several runs.
fn rate(gpu: &Gpu, row: &Row, on_gpu: bool) -> Result<f64> {
    let count = if row.own_queues { row.blocks } else { 1 };
    let depth = if count > 16 { DEPTH / 4 } else { DEPTH };
    let queues = Queues::new(gpu, on_gpu, count, depth)?;
    let threads_of_queue = row.warps * row.lanes * row.blocks / count;
    let each = depth / threads_of_queue;
    let own = Posting { each, lanes: row.lanes, own_queues: row.own_queues.into(), unused: 0 };
    let params = queues.params(MemoryKey::new(0, 7), MemoryKey::new(0, 5), false)?;
    let mut rates = Vec::new();
    // The first run warms up.
    for _ in 0..=TIMES {
        queues.reset(NUMBER, 0, u32::MAX)?;
        let began = Instant::now();
        gpu.run(gpu.posts, Launch::of_threads(row.blocks, 32 * row.warps, 0), params, own)?;
        let posted = f64::from(each * row.warps * row.lanes * row.blocks);
        rates.push(posted / began.elapsed().as_secs_f64() / 1e6);
    }
    // Every thread has put each of its rows once.
    for queue in 0..count {
        let mut rows = vec![0; each as usize];
        let found = posted(&queues, queue, each * threads_of_queue)?;
        found.iter().for_each(|(_, offset, _)| rows[(offset / 64) as usize] += 1);
        assert!(rows.iter().all(|times| *times == threads_of_queue), "queue {queue}");
    }
    let mut rates = rates.split_off(1);
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}

fn main() -> Result<()> {
    let gpu = Gpu::new()?;
    for on_gpu in [false, true] {
        compare(&gpu, on_gpu)?;
    }
    mixed(&gpu)?;
    println!("millions of requests a second; in brackets what a kernel by hand did on an H200");
    for row in &ROWS {
        let [host, device] = [false, true].map(|on_gpu| rate(&gpu, row, on_gpu));
        println!(
            "{:3} blocks of {:2} warps, {:2} lanes, {}: host {:.2} ({}), GPU {:.2} ({})",
            row.blocks,
            row.warps,
            row.lanes,
            if row.own_queues { "a queue each" } else { "one queue" },
            host?,
            row.by_hand[0],
            device?,
            row.by_hand[1]
        );
    }
    Ok(())
}
