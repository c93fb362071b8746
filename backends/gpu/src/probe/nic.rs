//! Puts of kernels through a transport with a device API, in a loop: a team of one rank puts to itself.

use std::ffi::c_void;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, TransportRef};
use tokenyard_core::transport::{NO_WINDOW, Team, TransportNeeds, TransportOpen, Window};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::{About, CAP_NS};
use crate::compile::{self, KernelSource};
use crate::config::GpuConfig;
use crate::driver::{
    self, Buffer, Context, Device, DeviceFacts, Function, Launch, Module, Pinned, Vmm,
};
use crate::engine::args::WaitReport;
use crate::kernels::DeviceApi;
use crate::platform::Platform;

/// The kernels.
pub(crate) const NIC_PROBE: KernelSource = KernelSource {
    name: "nic.cu",
    text: include_str!("nic.cu"),
    args_bytes: size_of::<NicProbeArgs>(),
};

/// Puts of one launch that are timed one by one.
const MOST_TIMES: u32 = 4096;
/// Bytes of the sources, and of the destinations: more than the caches hold.
const ROOM: u64 = 128 << 20;
const DEADLINE: Duration = Duration::from_secs(20);
/// Commands of a queue that are under way at most.
const QUEUE_DEPTH: u32 = 256;
/// The fix for sizes that no benchmark asks for.
const OUT_OF_RANGE: &str = "report this: a benchmark asks for sizes that its kernels do not have";

/// As in `nic.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct NicProbeArgs {
    abort: u64,
    report: u64,
    cap_ns: u64,
    times: u64,
    raised: u64,
    next: u64,
    room: u64,
    bytes: u64,
    puts: u64,
    window: u64,
}

/// Puts of many threads at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flood {
    /// Posting warps of each queue's block, 1 to 16.
    pub warps: u32,
    /// Puts of each warp.
    pub puts: u64,
    /// Bytes of a put: a multiple of 16.
    pub bytes: u64,
}

/// Puts of one thread for each queue, few of a queue under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutFlow {
    /// Puts of all queues together.
    pub puts: u64,
    /// Bytes of a put: a multiple of 16.
    pub bytes: u64,
    /// Puts of a queue that are under way.
    pub window: u64,
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
    queue: driver::Stream,
    puts: Function,
    stream: Function,
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
    context: Arc<Context>,
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
            queue_depth: QUEUE_DEPTH.min(component.probe(table)?.max_queue_depth),
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
            queue: driver::Stream::new(&context)?,
            puts: module.function("ty_nic_puts")?,
            stream: module.function("ty_nic_stream")?,
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
            context,
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
        if !(1..=16).contains(&warps) {
            let text = format!("found {warps} warps; expected 1 to 16");
            return Err(out_of_range(text));
        }
        let launch = Launch::of_threads(self.queues, warps * self.wave, 0);
        self.launch(&self.puts, launch, &PutFlow { puts, bytes, window: 0 })?;
        Ok(self.span())
    }

    /// The same for puts of few threads.
    ///
    /// # Errors
    /// As [`flood`](Self::flood).
    pub fn stream(&mut self, stream: &PutFlow) -> Result<f64> {
        self.launch(&self.stream, Launch::of_threads(self.queues, self.wave, 0), stream)?;
        Ok(self.span())
    }

    fn span(&self) -> f64 {
        let times = (0..self.queues).map(|block| self.time(block));
        let (begun, seen) = times
            .fold((u64::MAX, 0), |(begun, seen), times| (begun.min(times[0]), seen.max(times[2])));
        seen.saturating_sub(begun) as f64 / 1e9
    }

    /// The times of `count` (1 to 4096) puts, each posted once the one before it has arrived.
    ///
    /// # Errors
    /// A number out of range; a put that does not arrive.
    pub fn trips(&mut self, count: u32, bytes: u64) -> Result<Vec<Trip>> {
        if !(1..=MOST_TIMES).contains(&count) {
            let text = format!("found {count} puts; expected 1 to {MOST_TIMES}");
            return Err(out_of_range(text));
        }
        let stream = PutFlow { puts: count.into(), bytes, window: 0 };
        self.launch(&self.trips, Launch::of_threads(1, self.wave, 0), &stream)?;
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

    /// Runs a kernel to its end.
    fn launch(&self, kernel: &Function, launch: Launch, stream: &PutFlow) -> Result<()> {
        let PutFlow { puts, bytes, window } = *stream;
        if bytes > ROOM || !bytes.is_multiple_of(16) {
            let text =
                format!("found puts of {bytes} bytes; expected a multiple of 16, {ROOM} at most");
            return Err(out_of_range(text));
        }
        let next = Buffer::of(&self.context, &[0_u64])?;
        let arguments = NicProbeArgs {
            abort: self.abort.at(0) as u64,
            report: self.report.at(0) as u64,
            cap_ns: CAP_NS,
            times: self.times.at(0) as u64,
            raised: self.raised.at(0) as u64,
            next: next.address(),
            room: ROOM,
            bytes,
            puts,
            window,
        };
        let mut pointers = [
            (&raw const arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        // SAFETY: the kernels take these two; the memory that they name lives as long as `self`, and the
        // stream is waited for.
        unsafe { kernel.launch(self.queue.name(), launch, &mut pointers)? };
        self.queue.synchronize()?;
        self.transport.health()?;
        // SAFETY: as in `time`.
        let report = unsafe { self.report.at(0).read_volatile() };
        if report.ended == 0 {
            return Ok(());
        }
        Err(deadline(&report))
    }
}

fn out_of_range(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "put in a loop", text).with_fix(OUT_OF_RANGE)
}

/// The error of a wait that has ended. A device API names its queue in the place of a signal, `nic.cu` in the place of
/// a peer.
fn deadline(report: &WaitReport) -> Error {
    let (phase, queue) = match report.phase {
        abi::TY_PHASE_QUEUE => ("queue room", report.signal),
        _ => ("signals", report.peer),
    };
    let text = format!(
        "a wait for {phase} has ended: it lasted {} s, or the transport's device API ended it",
        CAP_NS / 1_000_000_000
    );
    Error::new(ErrorKind::Deadline, "put in a loop", text)
        .with_context("phase", phase)
        .with_context("queue", queue)
        .with_context("expected", report.expected)
        .with_context("found", report.found)
        .with_fix("set TOKENYARD_LOG=info and run it again: the transport logs what ended it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_has_ended_names_its_phase_and_queue_whichever_side_waited() {
        let rows = WaitReport { phase: abi::TY_PHASE_ROWS, peer: 3, ..WaitReport::default() };
        let room = WaitReport { phase: abi::TY_PHASE_QUEUE, signal: 3, ..WaitReport::default() };
        for (report, phase) in [(rows, "signals"), (room, "queue room")] {
            let error = deadline(&report);
            let text = error.to_string();
            assert!(text.contains(&format!("a wait for {phase} has ended")), "{text}");
            assert!(text.contains("queue 3") || text.contains("queue: 3"), "{text}");
            assert!(text.contains("device API ended it") && error.fix().is_some(), "{text}");
        }
    }
}
