//! Puts of kernels through a transport with a device API, in a loop: a team of one rank puts to itself.

use std::ffi::c_void;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, TransportRef};
use tokenyard_core::transport::{NO_WINDOW, Team, TransportNeeds, TransportOpen, Window};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::{About, CAP_NS};
use crate::compile::{self, ProbeSource};
use crate::config::GpuConfig;
use crate::driver::{Context, Device, DeviceFacts, Function, Launch, Module, Pinned, Stream, Vmm};
use crate::engine::args::WaitReport;
use crate::kernels::DeviceApi;
use crate::platform::Platform;

/// The kernels.
pub(crate) const NIC_PROBE: ProbeSource = ProbeSource {
    name: "nic.cu",
    text: include_str!("nic.cu"),
    args_bytes: size_of::<NicProbeArgs>(),
};

/// Puts of one launch that are timed one by one.
const MOST_TIMES: u32 = 4096;
/// Bytes of the sources, and of the destinations: more than the caches hold.
const ROOM: u64 = 128 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

/// As in `nic.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct NicProbeArgs {
    abort: u64,
    report: u64,
    cap_ns: u64,
    times: u64,
    raised: u64,
    room: u64,
    bytes: u64,
    puts: u32,
    unused: u32,
}

/// Puts of many threads at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flood {
    /// Posting warps of each queue's block, 1 to 16.
    pub warps: u32,
    /// Puts of each warp.
    pub puts: u32,
    /// Bytes of a put: a multiple of 16.
    pub bytes: u64,
}

/// The times of one put, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trip {
    /// Of the call that posts.
    pub post: f64,
    /// From the end of that call until the kernel sees the signal.
    pub seen: f64,
}

/// A transport, and kernels that put through it. One thread uses it.
#[derive(Debug)]
pub struct NicProbe {
    about: About,
    stream: Stream,
    puts: Function,
    trips: Function,
    /// Dropped before the window.
    transport: OpenTransport,
    _window: Vmm,
    /// `DeviceApi::Params`, in words.
    params: Vec<u64>,
    abort: Pinned<u64>,
    report: Pinned<WaitReport>,
    times: Pinned<u64>,
    /// Of each queue: signals so far.
    raised: Pinned<u64>,
    queues: u32,
    /// Threads of a warp.
    wave: u32,
}

impl NicProbe {
    /// Opens the transport with so many queues, and compiles the kernels over its device API.
    ///
    /// # Errors
    /// No GPU, no compiler, an error of the driver or of the transport; one without a device API that puts.
    pub fn open(
        platform: &'static Platform,
        kernels: &GpuConfig,
        component: &TransportRef,
        table: &ComponentTable,
        queues: u32,
    ) -> Result<Self> {
        let context = Context::retain(Device::choose(platform, kernels.ordinal())?)?;
        let DeviceFacts { architecture, wave, .. } = context.device.facts()?;
        let needs = TransportNeeds {
            windows: 1,
            queues,
            signals: 1,
            queue_depth: 1,
            largest_put: ROOM,
            deadline: DEADLINE,
        };
        let window = Vmm::new(&context, 2 * ROOM)?;
        let team = Team::world(0, 1);
        let ordinal = context.device.ordinal;
        let open =
            TransportOpen { device: Some(ordinal as u32), ..TransportOpen::new(&team, &needs) };
        let mut transport = component.open(table, &open)?;
        let flags = transport.capabilities().flags;
        if flags & abi::TY_CAP_DEVICE_API == 0 || flags & abi::TY_CAP_LOAD_STORE != 0 {
            let text = format!("found capabilities {flags:#x}; expected a device API that puts");
            return Err(Error::new(ErrorKind::Unsupported, "put in a loop", text).with_fix(
                "name a transport whose kernels post puts, such as paced with posts = \"kernels\"",
            ));
        }
        let shared = Window {
            kind: platform.memory,
            pointer: window.address() as *mut u8,
            bytes: window.bytes(),
            fd: window.fd().as_raw_fd(),
            device: ordinal,
            handle: abi::TY_HANDLE_POSIX,
            ..NO_WINDOW
        };
        // SAFETY: the window is dropped after the transport (field order, and order of locals here).
        unsafe { transport.register(&shared)? };
        let endpoint = transport.endpoint(0)?;
        transport.connect(0, &endpoint)?;
        transport.commit()?;
        // SAFETY: the transport lives, and with it the memory that its device API points to.
        let api = unsafe {
            let link = transport.link();
            DeviceApi::read(&platform.dialect, &link.device_api()?)?
        };
        let (image, _) = compile::probe(platform, kernels, architecture, api.source(), &NIC_PROBE)?;
        let module = Module::load(&context, &image)?;
        Ok(Self {
            about: About::of(&context)?,
            stream: Stream::new(&context)?,
            puts: module.function("ty_nic_puts")?,
            trips: module.function("ty_nic_trips")?,
            transport,
            _window: window,
            params: api.params,
            abort: Pinned::new(&context, 1)?,
            report: Pinned::new(&context, 1)?,
            times: Pinned::new(&context, 3 * MOST_TIMES as usize)?,
            raised: Pinned::new(&context, queues as usize)?,
            queues,
            wave,
        })
    }

    /// The GPU.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// The transport's own words about the loop.
    pub fn link_name(&self) -> String {
        self.transport.link_name(0)
    }

    /// Seconds from the first block's begin until the last block has seen all signals of its queue.
    ///
    /// # Errors
    /// Sizes out of range; a put that does not arrive.
    pub fn flood(&mut self, flood: &Flood) -> Result<f64> {
        let Flood { warps, puts, bytes } = *flood;
        if !(1..=16).contains(&warps) || bytes > ROOM || !bytes.is_multiple_of(16) {
            let text = format!(
                "found {warps} warps and {bytes} bytes; expected 1 to 16, and at most {ROOM}"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "put in a loop", text));
        }
        let launch = Launch::of_threads(self.queues, warps * self.wave, 0);
        self.launch(&self.puts, launch, bytes, puts)?;
        for queue in 0..self.queues {
            self.count(queue, u64::from(warps) * u64::from(puts));
        }
        let times = (0..self.queues).map(|block| self.time(block));
        let span = |(begun, seen): (u64, u64), [first, _, last]: [u64; 3]| {
            (begun.min(first), seen.max(last))
        };
        let (begun, seen) = times.fold((u64::MAX, 0), span);
        Ok(seen.saturating_sub(begun) as f64 / 1e9)
    }

    /// The times of `count` (1 to 4096) puts, each posted once the one before it has arrived.
    ///
    /// # Errors
    /// A number out of range; a put that does not arrive.
    pub fn trips(&mut self, count: u32, bytes: u64) -> Result<Vec<Trip>> {
        if !(1..=MOST_TIMES).contains(&count) || bytes > ROOM {
            let text = format!(
                "found {count} puts of {bytes} bytes; expected 1 to {MOST_TIMES} of {ROOM} at most"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "put in a loop", text));
        }
        self.launch(&self.trips, Launch::of_threads(1, self.wave, 0), bytes, count)?;
        self.count(0, count.into());
        let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
        let trip = |[begun, posted, seen]: [u64; 3]| Trip {
            post: us(begun, posted),
            seen: us(posted, seen),
        };
        Ok((0..count).map(|index| trip(self.time(index))).collect())
    }

    fn time(&self, index: u32) -> [u64; 3] {
        // SAFETY: pinned memory that lives as long as `self`; no kernel runs.
        [0, 1, 2].map(|part| unsafe { self.times.at(3 * index as usize + part).read_volatile() })
    }

    fn count(&self, queue: u32, puts: u64) {
        let at = self.raised.at(queue as usize);
        // SAFETY: as in `time`.
        unsafe { at.write_volatile(at.read_volatile() + puts) };
    }

    /// Runs a kernel to its end; the puts are of these bytes, and so many.
    fn launch(&self, kernel: &Function, launch: Launch, bytes: u64, puts: u32) -> Result<()> {
        let arguments = NicProbeArgs {
            abort: self.abort.at(0) as u64,
            report: self.report.at(0) as u64,
            cap_ns: CAP_NS,
            times: self.times.at(0) as u64,
            raised: self.raised.at(0) as u64,
            room: ROOM,
            bytes,
            puts,
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
        self.transport.health()?;
        // SAFETY: as in `time`.
        let report = unsafe { self.report.at(0).read_volatile() };
        if report.ended == 0 {
            return Ok(());
        }
        let text = format!("puts did not arrive in {} s", CAP_NS / 1_000_000_000);
        Err(Error::new(ErrorKind::Deadline, "put in a loop", text)
            .with_context("expected", report.expected)
            .with_context("found", report.found))
    }
}
