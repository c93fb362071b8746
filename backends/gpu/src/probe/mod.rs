//! Kernels of tools: they measure a link, the ring to the host ([`RingProbe`]) and puts of one rank to itself
//! ([`NicProbe`]). And a [`Timer`] for calls on a stream.
//!
//! The probe of the link copies between GPUs by multiprocessors and by copy engines, passes barriers and exchanges
//! counts. It uses the windows and the device API of the transport between devices. Each of its measurements is
//! collective: all ranks make the same calls in the same order. Its error names the rank that was waited for.
//!
//! All kernels end their waits by a cap (INV-6).
//!
//! No operation uses them. Watched by the tests in these files; their kernels run on GPUs alone, by `tokenyard
//! bench`.

mod args;
mod nic;
mod ring;
mod timer;
mod world;

pub(crate) use args::PROBE;
pub(crate) use nic::NIC_PROBE;
pub use nic::{Flood, NicProbe, PutFlow, Trip};
pub(crate) use ring::RING_PROBE;
pub use ring::{Posters, RingProbe};
pub use timer::Timer;

use std::ffi::c_void;

use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile::{self, Rows};
use crate::config::{GpuConfig, PeersConfig};
use crate::driver::{Buffer, Context, Device, Event, Function, Launch, Module, Pinned, Stream};
use crate::engine::args::WaitReport;
use crate::platform::{Components, Platform};
use args::{HEAD_BYTES, MOST_WORDS, ProbeArgs, VECTOR_THREADS, bulk_warps};
use world::Links;

/// Longest wait of a kernel for other ranks.
const CAP_NS: u64 = 20_000_000_000;
/// Launches whose times are stored.
const MOST_LAUNCHES: u32 = 64;
/// Shared memory that the kernels declare themselves, and more.
const STATIC_SHARED: u32 = 1024;

/// The GPU of a rank, and its driver and compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// The name that its maker gives it.
    pub name: String,
    /// Multiprocessors.
    pub processors: u32,
    /// The name that the compiler gives it, such as `sm_90a`.
    pub architecture: String,
    /// Version of the interface that the driver speaks, such as `13.0` of CUDA.
    pub interface: String,
    /// Its ordinal among those that this process sees.
    pub ordinal: i32,
}

impl About {
    fn of(context: &Context) -> Result<Self> {
        let facts = context.device.facts()?;
        Ok(Self {
            name: context.device.name()?,
            processors: facts.processors,
            architecture: facts.architecture.name(),
            interface: context.driver().version()?,
            ordinal: context.device.ordinal,
        })
    }
}

/// The GPU that a kernel set with this config drives.
///
/// # Errors
/// No driver, or no such GPU.
pub fn about(platform: &'static Platform, kernels: &GpuConfig) -> Result<About> {
    let context = Context::retain(Device::choose(platform, kernels.ordinal())?)?;
    About::of(&context)
}

/// GPUs that this process sees.
///
/// # Errors
/// No driver, or no GPU, with the fix.
pub fn devices(platform: &'static Platform) -> Result<u32> {
    Device::count(platform).map(|count| count as u32)
}

/// The unit that copies, and the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyMethod {
    /// Bulk copies (TMA) to peers: compute capability 9.0 and later.
    PushBulk,
    /// Bulk copies from peers.
    PullBulk,
    /// Vectors of 16 bytes, stored to peers.
    PushVectors,
    /// Vectors of 16 bytes, loaded from peers.
    PullVectors,
    /// The copy engines, one stream per peer, to peers; no multiprocessor.
    PushEngines,
}

impl CopyMethod {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::PushBulk => "push, bulk copies (TMA)",
            Self::PullBulk => "pull, bulk copies (TMA)",
            Self::PushVectors => "push, vectors of 16 bytes",
            Self::PullVectors => "pull, vectors of 16 bytes",
            Self::PushEngines => "push, copy engines",
        }
    }

    fn pulls(self) -> bool {
        matches!(self, Self::PullBulk | Self::PullVectors)
    }
}

/// One measurement of all-to-all copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// The unit that copies, and the direction.
    pub method: CopyMethod,
    /// Multiprocessors of each GPU; ignored by copy engines.
    pub blocks: u32,
    /// Bytes of a row: a multiple of 128.
    pub row_bytes: u32,
    /// Launches, 1 to 64; the first ones find cold caches.
    pub launches: u32,
}

/// A rank's end of the links. One thread uses it.
#[derive(Debug)]
pub struct Probe<C: Components> {
    stream: Stream,
    engines: Vec<Stream>,
    kernels: ProbeKernels,
    /// `DeviceApi::Params`, in words.
    params: Vec<u64>,
    /// Dropped before the memory that peers copy into.
    links: Links<C>,
    local: Buffer,
    wrong: Buffer,
    abort: Pinned<u64>,
    report: Pinned<WaitReport>,
    times: Pinned<u64>,
    room_bytes: u64,
    shared: u32,
    /// Barriers so far.
    epoch: u32,
    /// Blocks of one rank that have copied so far.
    left: u64,
    seed: u32,
    about: About,
}

/// Its kernels.
#[derive(Debug)]
struct ProbeKernels {
    bulk: Option<Function>,
    vectors: Function,
    barriers: Function,
    counts: Function,
    nothing: Function,
    fill: Function,
    check: Function,
}

impl ProbeKernels {
    fn load(module: &std::sync::Arc<Module>, rows: Rows, shared: u32) -> Result<Self> {
        let bulk = match rows {
            Rows::Tma => Some(module.cooperative("ty_probe_bulk")?),
            Rows::Vector => None,
        };
        bulk.iter().try_for_each(|kernel| kernel.allow_shared(shared))?;
        Ok(Self {
            bulk,
            vectors: module.cooperative("ty_probe_vectors")?,
            barriers: module.function("ty_probe_barriers")?,
            counts: module.function("ty_probe_counts")?,
            nothing: module.function("ty_probe_nothing")?,
            fill: module.function("ty_probe_fill")?,
            check: module.function("ty_probe_check")?,
        })
    }
}

impl<C: Components> Probe<C> {
    /// Connects the GPUs of all ranks, with space for `room_bytes` (a multiple of 128) from each rank
    /// to each other. Collective.
    ///
    /// # Errors
    /// Fewer than two ranks; no GPU, no compiler; an error of the transport.
    pub fn open(
        world: &World,
        kernels: &GpuConfig,
        link: &PeersConfig,
        room_bytes: u64,
    ) -> Result<Self> {
        let ranks = world.ranks();
        if ranks < 2 {
            let message = format!("found {ranks} rank; expected at least 2: a link has two ends");
            return Err(Error::new(ErrorKind::InvalidInput, "open probe", message));
        }
        let context = Context::retain(Device::choose(C::PLATFORM, kernels.ordinal())?)?;
        let links = Links::open(world, &context, link, HEAD_BYTES + u64::from(ranks) * room_bytes)?;
        let device_api = links.device_api()?;
        let facts = context.device.facts()?;
        let (image, rows) =
            compile::probe(C::PLATFORM, kernels, facts.architecture, device_api.source(), &PROBE)?;
        let module = Module::load(&context, &image)?;
        let shared = facts.most_shared.saturating_sub(STATIC_SHARED);
        let about = About::of(&context)?;
        let probe = Self {
            stream: Stream::new(&context)?,
            engines: (1..ranks).map(|_| Stream::new(&context)).collect::<Result<_>>()?,
            kernels: ProbeKernels::load(&module, rows, shared)?,
            params: device_api.params,
            local: Buffer::new(&context, u64::from(ranks - 1) * room_bytes)?,
            wrong: Buffer::new(&context, 8)?,
            abort: Pinned::new(&context, 1)?,
            report: Pinned::new(&context, 1)?,
            times: Pinned::new(&context, 2 * MOST_LAUNCHES as usize)?,
            links,
            room_bytes,
            shared,
            epoch: 0,
            left: 0,
            seed: 0,
            about,
        };
        // No kernel waits for a rank that still allocates.
        world.barrier("probe ready")?;
        Ok(probe)
    }

    /// The GPU.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Whether the device copies in bulk.
    pub fn has_bulk_copies(&self) -> bool {
        self.kernels.bulk.is_some()
    }

    /// Copies from every rank to every other, peers in turn, and checks the received bytes. Returns
    /// microseconds of each launch on this rank: from the moment when all ranks have begun until all
    /// copies to and from this rank are done. Collective.
    ///
    /// # Errors
    /// A method that the device does not have, wrong bytes, a rank that does not arrive.
    pub fn copies(&mut self, world: &World, copies: &Copies) -> Result<Vec<f64>> {
        let launches = copies.launches.clamp(1, MOST_LAUNCHES);
        self.seed += 1;
        let arguments = self.arguments(copies);
        self.prepare(copies, &arguments)?;
        world.barrier("probe copies")?;
        let us = match copies.method {
            CopyMethod::PushEngines => self.copy_by_engines(world, &arguments, launches)?,
            _ => self.copy_by_kernels(copies, arguments, launches)?,
        };
        world.barrier("probe copied")?;
        self.check(copies, &arguments)?;
        Ok(us)
    }

    /// Bytes that one call of [`copies`](Self::copies) moves from each rank to each other.
    pub fn bytes_per_peer(&self, row_bytes: u32) -> u64 {
        self.room_bytes / u64::from(row_bytes) * u64::from(row_bytes)
    }

    fn arguments(&self, copies: &Copies) -> ProbeArgs {
        ProbeArgs {
            rows: (self.room_bytes / u64::from(copies.row_bytes)) as u32,
            row_bytes: copies.row_bytes,
            pitch: copies.row_bytes.next_multiple_of(128),
            pull: copies.method.pulls().into(),
            ..self.blank()
        }
    }

    fn blank(&self) -> ProbeArgs {
        ProbeArgs {
            abort: self.abort.at(0) as u64,
            report: self.report.at(0) as u64,
            cap_ns: CAP_NS,
            times: self.times.at(0) as u64,
            local: self.local.address(),
            wrong: self.wrong.address(),
            rooms: HEAD_BYTES,
            room_bytes: self.room_bytes,
            rank: self.links.rank,
            ranks: self.links.ranks,
            seed: self.seed,
            ..ProbeArgs::default()
        }
    }

    /// Fills the sources, and clears the targets.
    fn prepare(&self, copies: &Copies, arguments: &ProbeArgs) -> Result<()> {
        let peers = u64::from(self.links.ranks - 1) * self.room_bytes;
        match copies.method.pulls() {
            true => self.stream.zero(self.local.address(), peers)?,
            false => {
                let rooms = self.links.window.address() + HEAD_BYTES;
                self.stream.zero(rooms, peers + self.room_bytes)?;
            }
        }
        self.launch(
            &self.kernels.fill,
            Launch::of_threads(4 * self.about.processors, 256, 0),
            arguments,
        )?;
        self.settle()
    }

    fn copy_by_kernels(
        &mut self,
        copies: &Copies,
        arguments: ProbeArgs,
        launches: u32,
    ) -> Result<Vec<f64>> {
        let bulk = matches!(copies.method, CopyMethod::PushBulk | CopyMethod::PullBulk);
        let warps = bulk_warps(copies.row_bytes, self.shared);
        for index in 0..launches {
            self.epoch += 1;
            self.left += u64::from(copies.blocks);
            let arguments = ProbeArgs {
                epoch: self.epoch,
                left: self.left,
                times: self.times.at(2 * index as usize) as u64,
                ..arguments
            };
            let (kernel, threads, shared) = match (&self.kernels.bulk, bulk) {
                (Some(kernel), true) if warps > 0 => (kernel, 32 * warps, warps * arguments.pitch),
                (_, true) => return Err(no_bulk_copies(&self.about, copies.row_bytes)),
                (_, false) => (&self.kernels.vectors, VECTOR_THREADS, 0),
            };
            self.launch(kernel, Launch::of_threads(copies.blocks, threads, shared), &arguments)?;
        }
        self.settle()?;
        Ok((0..launches as usize).map(|index| self.lasted(index)).collect())
    }

    /// Each launch copies once to each peer, all at once, behind a barrier of all ranks.
    fn copy_by_engines(
        &mut self,
        world: &World,
        arguments: &ProbeArgs,
        launches: u32,
    ) -> Result<Vec<f64>> {
        let context = self.links.context();
        let [begun, ended, done] =
            [Event::timed(context)?, Event::timed(context)?, Event::timed(context)?];
        let bytes = u64::from(arguments.rows) * u64::from(arguments.row_bytes);
        let mut us = Vec::new();
        for _ in 0..launches {
            world.barrier("probe engines")?;
            begun.record(self.stream.name())?;
            for (turn, stream) in (0_u32..).zip(&self.engines) {
                begun.hold(stream.name())?;
                let peer = (self.links.rank + 1 + turn) % self.links.ranks;
                let room = HEAD_BYTES + u64::from(self.links.rank) * self.room_bytes;
                let from = self.local.address() + u64::from(turn) * self.room_bytes;
                stream.copy(self.links.peer(peer)? + room, from, bytes)?;
                done.record(stream.name())?;
                done.hold(self.stream.name())?;
            }
            ended.record(self.stream.name())?;
            self.settle()?;
            us.push(ended.us_since(&begun)?);
        }
        Ok(us)
    }

    fn check(&self, copies: &Copies, arguments: &ProbeArgs) -> Result<()> {
        let context = self.links.context();
        self.stream.zero(self.wrong.address(), 8)?;
        self.launch(
            &self.kernels.check,
            Launch::of_threads(4 * self.about.processors, 256, 0),
            arguments,
        )?;
        self.settle()?;
        let mut wrong = 0_u64;
        crate::driver::copy(context, &raw mut wrong as u64, self.wrong.address(), 8)?;
        if wrong == 0 {
            return Ok(());
        }
        let message = format!(
            "found {wrong} wrong words of 4 bytes after {:?} with {} multiprocessors; expected none",
            copies.method, copies.blocks
        );
        Err(Error::new(ErrorKind::Transport, "check copies", message).with_fix(format!(
            "test the GPUs and their links; see {}",
            C::PLATFORM.names.see_access
        )))
    }

    /// Microseconds of one barrier of all ranks: a word that each stores at all others. Collective.
    ///
    /// # Errors
    /// A rank that does not arrive.
    pub fn barrier_us(&mut self, rounds: u32) -> Result<f64> {
        let arguments = ProbeArgs { epoch: self.epoch + 1, rounds, ..self.blank() };
        self.epoch += 1 + rounds;
        self.launch(&self.kernels.barriers, Launch::of_threads(1, 128, 0), &arguments)?;
        self.settle()?;
        Ok(self.lasted(0) / f64::from(rounds.max(1)))
    }

    /// Microseconds of one exchange of counts: every rank sends every rank `words` (at most 1024)
    /// words of {epoch, count}. Collective.
    ///
    /// # Errors
    /// A rank that does not arrive.
    pub fn counts_us(&mut self, words: u32, rounds: u32) -> Result<f64> {
        let words = words.min(MOST_WORDS);
        let arguments = ProbeArgs { epoch: self.epoch + 1, rounds, words, ..self.blank() };
        self.epoch += 1 + rounds;
        let threads = words.max(self.links.ranks).next_multiple_of(64);
        self.launch(&self.kernels.counts, Launch::of_threads(1, threads, 0), &arguments)?;
        self.settle()?;
        Ok(self.lasted(0) / f64::from(rounds.max(1)))
    }

    /// Microseconds of an empty kernel, back to back with others.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn launch_us(&mut self, launches: u32) -> Result<f64> {
        let context = self.links.context();
        let (begun, ended) = (Event::timed(context)?, Event::timed(context)?);
        begun.record(self.stream.name())?;
        for _ in 0..launches {
            self.launch(&self.kernels.nothing, Launch::of_threads(1, 64, 0), &self.blank())?;
        }
        ended.record(self.stream.name())?;
        self.settle()?;
        Ok(ended.us_since(&begun)? / f64::from(launches.max(1)))
    }

    fn launch(&self, kernel: &Function, launch: Launch, arguments: &ProbeArgs) -> Result<()> {
        let mut pointers = [
            std::ptr::from_ref(arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        // SAFETY: the kernels take these two; the memory that they name lives as long as `self`,
        // which waits for its stream before it is dropped.
        unsafe { kernel.launch(self.stream.name(), launch, &mut pointers) }
    }

    /// Waits for all launched work, and names the rank for which a kernel has waited in vain.
    fn settle(&self) -> Result<()> {
        self.stream.synchronize()?;
        // SAFETY: pinned memory that lives as long as `self`; no kernel runs.
        let report = unsafe { self.report.at(0).read_volatile() };
        if report.ended == 0 {
            return Ok(());
        }
        let text = format!("rank {} did not come within {} s", report.peer, CAP_NS / 1_000_000_000);
        Err(Error::new(ErrorKind::Deadline, "wait for peers", text)
            .with_rank(report.peer as u32)
            .with_context("expected", report.expected)
            .with_context("found", report.found))
    }

    /// Microseconds of a launch that has ended.
    fn lasted(&self, index: usize) -> f64 {
        // SAFETY: pinned memory that lives as long as `self`; no kernel runs.
        let [begun, ended] =
            [0, 1].map(|at| unsafe { self.times.at(2 * index + at).read_volatile() });
        ended.saturating_sub(begun) as f64 / 1e3
    }
}

impl<C: Components> Drop for Probe<C> {
    fn drop(&mut self) {
        let streams = std::iter::once(&self.stream).chain(&self.engines);
        for stream in streams {
            if let Err(error) = stream.synchronize() {
                tracing::warn!("a stream of the probe did not end well: {error}");
            }
        }
    }
}

#[cold]
fn no_bulk_copies(about: &About, row_bytes: u32) -> Error {
    let text =
        format!("{} ({}) has no bulk copies of {row_bytes} bytes", about.name, about.architecture);
    Error::new(ErrorKind::Unsupported, "copy in bulk", text)
}
