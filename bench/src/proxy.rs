//! The cost of a proxy thread: commands through its rings into an engine that moves nothing.

use std::collections::VecDeque;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::abi;
use tokenyard_core::proxy::{FabricShare, Proxy, ProxyOptions};
use tokenyard_core::transport::{Command, Event, NO_COMMAND, NO_EVENT};

use crate::job::Output;
use tokenyard_allocations::{Allocations, are_counted};

/// Numbers of proxy threads that are measured.
pub const THREADS: [u32; 2] = [1, 2];

/// The required commands per second and thread, where every thread can have a core.
pub const REQUIRED_RATE: f64 = 1e6;

/// Commands of one post.
const BATCH: usize = 16;
/// Commands of a queue that may be in flight.
const DEPTH: u32 = 256;
/// Batches before the first that counts.
const WARM_UP: u32 = 1_000;
/// Polls in a row without a result before the first yield. A yield may cost milliseconds under
/// load.
const SPINS: u32 = 1_000;
/// The longest time without an ended command while some are awaited: on a busy machine all of them take minutes.
const DEADLINE: Duration = Duration::from_secs(60);

/// The task for one number of threads.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ProxyTask {
    /// Proxy threads; each has one queue, to which one thread posts.
    pub threads: u32,
    /// Batches of each queue whose allocations are counted.
    pub counted_batches: u32,
    /// Batches of each queue that are timed.
    pub timed_batches: u32,
    /// Single commands of each queue whose round trip is timed.
    pub round_trips: u32,
}

impl ProxyTask {
    /// The task for this number of threads.
    pub fn new(threads: u32) -> Self {
        Self { threads, counted_batches: 1_000, timed_batches: 200_000, round_trips: 20_000 }
    }
}

/// One line of the report.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ProxyRow {
    /// Proxy threads.
    pub threads: u32,
    /// Commands of one post.
    pub batch: usize,
    /// Commands per second and thread, of the slowest.
    pub commands_per_s: f64,
    /// [`REQUIRED_RATE`], or nothing if there are fewer cores than posting threads and proxy
    /// threads together.
    pub required: Option<f64>,
    /// From the post of a single command to its event, in microseconds: the median, of the slowest
    /// queue. Both threads are awake.
    pub round_trip_us: f64,
    /// Batches of each queue whose allocations were counted.
    pub counted_batches: u32,
    /// Allocations of all threads over them; 0 is required.
    pub allocations: u64,
}

/// Accepts the commands that it has room for, and ends them at the next poll.
#[derive(Debug)]
struct NullShare {
    in_flight: VecDeque<(u32, u64)>,
}

impl NullShare {
    fn new(depth: u32) -> Self {
        Self { in_flight: VecDeque::with_capacity(depth as usize) }
    }
}

impl FabricShare for NullShare {
    unsafe fn post(&mut self, queue: u32, commands: &[Command]) -> Result<usize, i32> {
        let count = commands.len().min(self.in_flight.capacity() - self.in_flight.len());
        self.in_flight.extend(commands[..count].iter().map(|command| (queue, command.tag)));
        Ok(count)
    }

    fn poll(&mut self, events: &mut [Event]) -> Result<usize, i32> {
        let count = events.len().min(self.in_flight.len());
        for (event, (queue, tag)) in events.iter_mut().zip(self.in_flight.drain(..count)) {
            *event = Event { kind: abi::TY_EVENT_DONE, queue, tag, ..NO_EVENT };
        }
        Ok(count)
    }
}

/// Measures one number of threads, in a program that counts allocations.
///
/// # Errors
/// The program does not count allocations, or a proxy does not answer.
pub fn measure(task: &ProxyTask) -> Result<ProxyRow> {
    ensure!(are_counted(), "proxy: this program does not use the counting allocator");
    let shares = (0..task.threads).map(|_| NullShare::new(DEPTH)).collect();
    let proxy = Proxy::start(shares, &ProxyOptions::new(task.threads, DEPTH))?;
    let phase = Barrier::new(task.threads as usize + 1);
    let (mut found, allocations) = std::thread::scope(|scope| {
        let poster = |queue| Poster {
            proxy: &proxy,
            queue,
            posted: 0,
            ended: 0,
            idle: 0,
            since: Instant::now(),
        };
        let posters: Vec<_> = (0..task.threads)
            .map(|queue| {
                scope.spawn({
                    let phase = &phase;
                    move || poster(queue).run(task, phase)
                })
            })
            .collect();
        phase.wait();
        let before = Allocations::now();
        phase.wait();
        phase.wait();
        let after = Allocations::now();
        phase.wait();
        let (allocations, _) = after.since(&before);
        let found: Result<Vec<_>> = posters
            .into_iter()
            .map(|poster| poster.join().map_err(|_| anyhow!("a poster panicked"))?)
            .collect();
        found.map(|found| (found.into_iter(), allocations))
    })?;
    proxy.health()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let Some(first) = found.next() else { bail!("found no thread; expected at least 1") };
    let slowest = found.fold(first, |a, b| (a.0.min(b.0), a.1.max(b.1)));
    Ok(ProxyRow {
        threads: task.threads,
        batch: BATCH,
        commands_per_s: slowest.0,
        required: (cores >= 2 * task.threads as usize).then_some(REQUIRED_RATE),
        round_trip_us: slowest.1,
        counted_batches: task.counted_batches,
        allocations,
    })
}

/// The thread that posts to one queue.
struct Poster<'a> {
    proxy: &'a Proxy,
    queue: u32,
    /// Commands that asked for an event, and events.
    posted: u64,
    ended: u64,
    /// Polls in a row without a result.
    idle: u32,
    /// When polls began to find nothing; of meaning behind [`SPINS`] of them.
    since: Instant,
}

impl Poster<'_> {
    /// Returns commands per second and microseconds of a round trip. Waits at the barrier four
    /// times in every case, as other threads wait there. Allocations are read between the last two.
    fn run(mut self, task: &ProxyTask, phase: &Barrier) -> Result<(f64, f64)> {
        let warm = self.batches(WARM_UP);
        phase.wait();
        phase.wait();
        let counted = self.batches(task.counted_batches);
        phase.wait();
        phase.wait();
        warm.and(counted)?;
        let start = Instant::now();
        self.batches(task.timed_batches)?;
        let rate = f64::from(task.timed_batches) * BATCH as f64 / start.elapsed().as_secs_f64();
        Ok((rate, self.round_trip(task.round_trips)?))
    }

    /// Posts `count` batches, the last command of each with an event, and waits for the last event.
    fn batches(&mut self, count: u32) -> Result<()> {
        let mut batch = [Command { queue: self.queue, ..NO_COMMAND }; BATCH];
        batch[BATCH - 1].flags = abi::TY_FLAG_NOTIFY;
        for _ in 0..count {
            self.post(&batch)?;
        }
        self.wait()
    }

    fn post(&mut self, batch: &[Command]) -> Result<()> {
        let mut left = batch;
        while !left.is_empty() {
            // SAFETY: the engine touches no memory.
            let accepted = unsafe { self.proxy.post(self.queue, left) };
            let accepted = accepted.map_err(|status| anyhow!("post: status {status}"))?;
            left = &left[accepted..];
            if accepted == 0 {
                self.poll()?;
            }
        }
        self.posted += 1;
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        while self.ended < self.posted {
            self.poll()?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        let mut events = [NO_EVENT; BATCH];
        let count = self.proxy.poll(self.queue, &mut events);
        let count = count.map_err(|status| anyhow!("poll: status {status}"))?;
        self.ended += count as u64;
        self.idle = if count == 0 { self.idle.saturating_add(1) } else { 0 };
        if self.idle < SPINS {
            std::hint::spin_loop();
        } else {
            // The clock is read here only, so that it costs nothing while there is work.
            if self.idle == SPINS {
                self.since = Instant::now();
            }
            ensure!(
                self.since.elapsed() < DEADLINE,
                "queue {}: found {} events, and no more within {} s; expected {}",
                self.queue,
                self.ended,
                DEADLINE.as_secs(),
                self.posted
            );
            // There may be fewer cores than threads.
            std::thread::yield_now();
        }
        Ok(())
    }

    fn round_trip(&mut self, count: u32) -> Result<f64> {
        let command = [Command { queue: self.queue, flags: abi::TY_FLAG_NOTIFY, ..NO_COMMAND }];
        let mut times = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let start = Instant::now();
            self.post(&command)?;
            self.wait()?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        Ok(times.get(times.len() / 2).map_or(0.0, |median| median.as_secs_f64() * 1e6))
    }
}

/// The lines of the report, from the one process that measured.
pub(crate) fn rows(outputs: &[Output]) -> Result<Vec<ProxyRow>> {
    match outputs {
        [Output::Proxy(rows)] => Ok(rows.clone()),
        other => bail!("found {other:?}; expected the figures of one process"),
    }
}
