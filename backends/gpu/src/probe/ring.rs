//! The cost of a command that kernels post through the host: into the ring, to the thread that serves it,
//! and back.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use tokenyard_core::gpu_ring::{Fabric, GpuRing, RingToServe};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::{About, CAP_NS};
use crate::compile::{self, KernelSource};
use crate::config::GpuConfig;
use crate::driver::{Context, Device, DeviceFacts, Function, Launch, Module, Pinned, Stream};
use crate::engine::args::WaitReport;
use crate::kernels::{Ring, gpu_ring_api};
use crate::platform::Platform;

/// The kernels.
pub(crate) const RING_PROBE: KernelSource = KernelSource {
    name: "ring.cu",
    text: include_str!("ring.cu"),
    args_bytes: size_of::<RingProbeArgs>(),
};

/// Blocks of one launch, and round trips of one.
const MOST_TIMES: u32 = 4096;

/// As in `ring.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct RingProbeArgs {
    abort: u64,
    report: u64,
    cap_ns: u64,
    times: u64,
    raised: u64,
    commands: u32,
    unused: u32,
}

/// Threads that post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posters {
    /// Blocks, 1 to 4096.
    pub blocks: u32,
    /// Warps of a block, 1 to 32; one lane of each posts.
    pub warps: u32,
    /// Commands of each warp.
    pub commands: u32,
}

impl Posters {
    /// Commands of all.
    pub fn all(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.warps) * u64::from(self.commands)
    }
}

/// Kernels that post into a ring, and the thread that serves it. One thread uses it.
#[derive(Debug)]
pub struct RingProbe {
    about: About,
    /// Ended first: it uses the ring and the counters.
    _thread: GpuRing,
    stream: Stream,
    posts: Function,
    trips: Function,
    ring: Ring,
    counters: Box<SharedWords>,
    /// `DeviceApi::Params`, in words.
    params: Vec<u64>,
    abort: Pinned<u64>,
    report: Pinned<WaitReport>,
    times: Pinned<u64>,
    /// Commands so far.
    raised: u64,
    /// Threads of a warp.
    wave: u32,
}

/// The counters of the ring's thread.
#[derive(Debug, Default)]
struct SharedWords {
    /// `TyPeerCounters` of the one peer.
    peer: [AtomicU64; size_of::<abi::TyPeerCounters>() / 8],
    raised: AtomicU64,
}

impl RingProbe {
    /// Compiles the kernels for the GPU that this config names, and starts the ring's thread, which posts
    /// to `fabric`: one peer, one signal.
    ///
    /// # Errors
    /// No GPU, no compiler, an error of the driver; no thread can be started.
    pub fn open(
        platform: &'static Platform,
        kernels: &GpuConfig,
        fabric: impl Fabric,
    ) -> Result<Self> {
        let context = Context::retain(Device::choose(platform, kernels.ordinal())?)?;
        let DeviceFacts { architecture, wave, .. } = context.device.facts()?;
        let (image, _) =
            compile::probe(platform, kernels, architecture, gpu_ring_api(), &RING_PROBE)?;
        let module = Module::load(&context, &image)?;
        let ring = Ring::new(&context, abi::TY_LEVEL_SCALE_OUT, 1)?;
        let counters = Box::<SharedWords>::default();
        let thread = serve(&ring, &counters, fabric)?;
        Ok(Self {
            about: About::of(&context)?,
            _thread: thread,
            stream: Stream::new(&context)?,
            posts: module.function("ty_ring_posts")?,
            trips: module.function("ty_ring_trips")?,
            params: ring.device_api(0).params,
            ring,
            counters,
            abort: Pinned::new(&context, 1)?,
            report: Pinned::new(&context, 1)?,
            times: Pinned::new(&context, 2 * MOST_TIMES as usize)?,
            raised: 0,
            wave,
        })
    }

    /// The GPU.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Commands so far, as the ring's thread has counted them: as many as kernels have posted.
    pub fn counted(&self) -> u64 {
        self.counters.raised.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Microseconds from the first block's begin until the host has done all commands.
    ///
    /// # Errors
    /// Sizes out of range; a ring that stands still.
    pub fn posts_us(&mut self, posters: &Posters) -> Result<f64> {
        let Posters { blocks, warps, commands } = *posters;
        if !(1..=MOST_TIMES).contains(&blocks) || !(1..=1024 / self.wave).contains(&warps) {
            let message = format!(
                "found {blocks} blocks of {warps} warps; expected 1 to 4096, of 1024 threads at most"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "post commands", message));
        }
        self.launch(&self.posts, Launch::of_threads(blocks, warps * self.wave, 0), commands)?;
        self.raised += posters.all();
        let times = (0..blocks).map(|block| self.time(block));
        let (begun, ended) = times.fold((u64::MAX, 0), |(a, b), (c, d)| (a.min(c), b.max(d)));
        Ok(ended.saturating_sub(begun) as f64 / 1e3)
    }

    /// Microseconds of each of `count` (1 to 4096) round trips: a kernel posts a command that raises a
    /// signal, and sees the signal.
    ///
    /// # Errors
    /// A number out of range; a ring that stands still.
    pub fn trips_us(&mut self, count: u32) -> Result<Vec<f64>> {
        if !(1..=MOST_TIMES).contains(&count) {
            let message = format!("found {count} round trips; expected 1 to {MOST_TIMES}");
            return Err(Error::new(ErrorKind::InvalidInput, "post commands", message));
        }
        self.launch(&self.trips, Launch::of_threads(1, self.wave, 0), count)?;
        self.raised += u64::from(count);
        let us = |(begun, ended): (u64, u64)| ended.saturating_sub(begun) as f64 / 1e3;
        Ok((0..count).map(|trip| us(self.time(trip))).collect())
    }

    fn time(&self, index: u32) -> (u64, u64) {
        let at = 2 * index as usize;
        // SAFETY: pinned memory that lives as long as `self`; no kernel runs.
        unsafe { (self.times.at(at).read_volatile(), self.times.at(at + 1).read_volatile()) }
    }

    /// Runs a kernel to its end.
    fn launch(&self, kernel: &Function, launch: Launch, commands: u32) -> Result<()> {
        let arguments = RingProbeArgs {
            abort: self.abort.at(0) as u64,
            report: self.report.at(0) as u64,
            cap_ns: CAP_NS,
            times: self.times.at(0) as u64,
            raised: self.raised,
            commands,
            unused: 0,
        };
        let mut pointers = [
            (&raw const arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        // SAFETY: the kernels take these two; the memory that they name lives as long as `self`, and the
        // stream is waited for.
        unsafe { kernel.launch(self.stream.name(), launch, &mut pointers)? };
        self.stream.synchronize()?;
        self.ring.check()?;
        // SAFETY: pinned memory that lives as long as `self`; no kernel runs.
        let report = unsafe { self.report.at(0).read_volatile() };
        if report.ended == 0 {
            return Ok(());
        }
        let text = format!("the ring stood still for {} s", CAP_NS / 1_000_000_000);
        Err(Error::new(ErrorKind::Deadline, "post commands", text)
            .with_context("expected", report.expected)
            .with_context("found", report.found))
    }
}

/// Starts the thread that serves the ring.
fn serve(ring: &Ring, counters: &SharedWords, fabric: impl Fabric) -> Result<GpuRing> {
    let ring = ring.as_abi();
    let windows: [abi::TyWindow; 0] = [];
    let raw = abi::TyServeRing {
        size: size_of::<abi::TyServeRing>(),
        ring: &raw const ring,
        counters: counters.peer.as_ptr().cast_mut().cast(),
        raised: counters.raised.as_ptr(),
        windows: windows.as_ptr(),
        window_count: 0,
        largest_put: 0,
        peers: 1,
        reserved: 0,
    };
    // SAFETY: ring and counters live until the thread has ended (see the fields of `RingProbe`); the ring is new, and
    // its commands move no bytes.
    GpuRing::serve(unsafe { RingToServe::new(&raw) }, fabric, &[])
}
