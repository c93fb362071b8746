//! A kernel that runs beside all others for as long as a component lives: a stand-in for hardware.
//!
//! Some calls of a driver wait for everything that is queued on the device, such as to free memory or to load code.
//! So no launch lasts: each ends by itself once it has found nothing to do for a while, and a thread of the host
//! queues the next one behind it. Two are queued at most.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::compile::{self, KernelSource, Rows};
use crate::config::GpuConfig;
use crate::driver::{Context, DeviceFacts, Event, Function, Launch, Module, Pinned, Stream};
use crate::engine::device_api::DeviceApi;

/// The time between two looks at a launch.
const NAP: Duration = Duration::from_micros(50);

/// The source of the kernel. It takes its arguments, then the parameters of the device API.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    /// The name of the file.
    pub file: &'static str,
    /// Its text, compiled as those of `device/` are: `TY_OWN_ARGS_BYTES` is the size of the arguments.
    pub text: &'static str,
    /// The name of the kernel.
    pub kernel: &'static str,
    /// Blocks of a launch.
    pub blocks: u32,
    /// Warps of a block.
    pub warps: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
    /// More of it, where rows move by bulk copies.
    pub bulk_shared: u32,
}

/// The kernel, and the thread that launches it. Dropped: no launch is queued any more.
#[derive(Debug)]
pub struct Resident {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Other kernels read one of them until the component is dropped.
    _words: Arc<Words>,
    ended: Arc<Ended>,
    /// The name of the kernel.
    kernel: &'static str,
}

/// The reason why no launch comes any more, once one is known.
#[derive(Debug, Default)]
struct Ended(OnceLock<String>);

impl Ended {
    /// The first reason stays.
    fn set(&self, why: &Error) {
        drop(self.0.set(why.to_string()));
    }

    fn check(&self, kernel: &'static str) -> Result<()> {
        let Some(why) = self.0.get() else { return Ok(()) };
        let text =
            format!("the kernel {kernel} has ended; expected it to run until it is dropped: {why}");
        Err(Error::new(ErrorKind::Transport, "run a resident kernel", text)
            .with_fix("open a new communicator; where the driver has lost the device, start the process again"))
    }
}

/// The words in pinned memory that host and kernel share.
#[derive(Debug)]
struct Words(Pinned<u64>);

impl Words {
    const STOP: usize = 0;
    const FAILED: usize = 1;

    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: one of two aligned words of pinned memory that lives as long as `self`; both sides access
        // them whole.
        unsafe { AtomicU64::from_ptr(self.0.at(index)) }
    }
}

/// The addresses that a kernel's arguments name.
#[derive(Clone, Copy, Debug)]
pub struct ResidentWords {
    /// Not 0 once the kernel is to end: it finishes what it has begun.
    pub stop: u64,
    /// Not 0 once no launch comes any more.
    pub failed: u64,
}

impl Body {
    /// The source, where the kernel takes so many bytes of arguments.
    pub(crate) fn source(&self, args_bytes: usize) -> KernelSource {
        KernelSource { name: self.file, text: self.text, args_bytes }
    }
}

impl Resident {
    /// Compiles the kernel over a device API, loads it, and queues the first launches.
    ///
    /// `arguments` makes the kernel's arguments.
    ///
    /// # Errors
    /// No compiler; a device API that does not fit; an error of the driver; no thread can be started.
    ///
    /// # Safety
    /// The device API is valid. The memory that it and the arguments name lives until the result is dropped.
    pub unsafe fn start<A: Copy + Send + 'static>(
        context: &Arc<Context>,
        device_api: &abi::TyDeviceApi,
        body: &Body,
        arguments: impl FnOnce(ResidentWords) -> A,
    ) -> Result<Self> {
        let platform = context.device.platform;
        // SAFETY: by this function's contract.
        let device_api = unsafe { DeviceApi::read(&platform.dialect, device_api)? };
        let DeviceFacts { architecture, wave, .. } = context.device.facts()?;
        let source = body.source(size_of::<A>());
        let config = GpuConfig::default();
        let (image, rows) =
            compile::probe(platform, &config, architecture, device_api.source(), &source)?;
        let kernel = Module::load(context, &image)?.function(body.kernel)?;
        let shared = body.shared + if rows == Rows::Tma { body.bulk_shared } else { 0 };
        kernel.allow_shared(shared)?;
        let words = Arc::new(Words(Pinned::new(context, 2)?));
        let [stop, failed] = [Words::STOP, Words::FAILED].map(|word| words.0.at(word) as u64);
        let launches = Launches {
            stream: Stream::new(context)?,
            marks: [Event::new(context)?, Event::new(context)?],
            arguments: arguments(ResidentWords { stop, failed }),
            params: device_api.params,
            launch: Launch::of_threads(body.blocks, body.warps * wave, shared),
            kernel,
            words: Arc::clone(&words),
            ended: Arc::default(),
        };
        let ended = Arc::clone(&launches.ended);
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(body.kernel.into())
            .spawn(move || launches.run(&seen))
            .map_err(|e| Error::system("start a resident kernel", "a thread cannot be made", e))?;
        Ok(Self { stop, thread: Some(thread), _words: words, ended, kernel: body.kernel })
    }

    /// Whether launches still come.
    ///
    /// # Errors
    /// The error that has ended them.
    pub fn health(&self) -> Result<()> {
        self.ended.check(self.kernel)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a resident kernel panicked");
        }
    }
}

/// The state of the thread.
struct Launches<A> {
    stream: Stream,
    /// Behind the two launches that are queued.
    marks: [Event; 2],
    arguments: A,
    params: Vec<u64>,
    launch: Launch,
    kernel: Function,
    words: Arc<Words>,
    ended: Arc<Ended>,
}

impl<A: Copy> Launches<A> {
    fn run(&self, stop: &AtomicBool) {
        if let Err(error) = self.keep(stop) {
            self.ended.set(&error);
            tracing::error!("a resident kernel ended: {error}");
        }
        self.words.word(Words::FAILED).store(1, Ordering::Release);
        self.words.word(Words::STOP).store(1, Ordering::Release);
        if let Err(error) = self.stream.synchronize() {
            tracing::error!("a resident kernel did not end well: {error}");
        }
    }

    /// Queues launches until it is to stop.
    fn keep(&self, stop: &AtomicBool) -> Result<()> {
        let [mut ahead, mut behind] = self.marks.each_ref();
        self.queue(ahead)?;
        loop {
            self.queue(behind)?;
            while !ahead.is_done()? {
                if stop.load(Ordering::Acquire) {
                    return Ok(());
                }
                std::thread::sleep(NAP);
            }
            std::mem::swap(&mut ahead, &mut behind);
        }
    }

    fn queue(&self, mark: &Event) -> Result<()> {
        let mut pointers = [
            (&raw const self.arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        // SAFETY: the kernel takes these two; the memory that they name lives until this thread has waited for the
        // stream, by the contract of `start`.
        unsafe { self.kernel.launch(self.stream.name(), self.launch, &mut pointers)? };
        mark.record(self.stream.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_has_ended_is_reported_by_its_name_with_the_first_reason() {
        let ended = Ended::default();
        assert!(ended.check("ty_paced").is_ok());
        ended.set(&Error::new(ErrorKind::Transport, "launch kernel", "found 719"));
        ended.set(&Error::new(ErrorKind::Transport, "launch kernel", "found 700"));
        let text = ended.check("ty_paced").unwrap_err().to_string();
        assert!(text.contains("the kernel ty_paced has ended"), "{text}");
        assert!(text.contains("found 719"), "{text}");
    }
}
