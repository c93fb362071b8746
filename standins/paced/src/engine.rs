//! The engine: its arguments, and the kernel that stays.

use std::fmt;
use std::sync::Arc;

use tokenyard_core::{Result, abi};
use tokenyard_gpu::compile::{Compiled, Target};
use tokenyard_gpu::driver::{Buffer, Context, copy};
use tokenyard_gpu::resident::{Body, Resident, ResidentWords};
use tokenyard_gpu::warm::compile_resident;

use crate::config::{COMPONENT, PacedConfig};
use crate::queues::{CAPACITY, Queues};

pub(crate) const REQUEST: &str = include_str!("request.cuh");
const TEXT: &str = concat!(
    "#include \"transport.cuh\"\n",
    include_str!("request.cuh"),
    include_str!("jobs.cuh"),
    include_str!("engine.cu")
);

/// Warps of a block: 14 copy, one takes requests, one raises signals.
const COPY_WARPS: u32 = 14;
const WARPS: u32 = COPY_WARPS + 2;
/// Bytes of a chunk, and of the shared memory of a block beside chunks.
const CHUNK: u32 = 14_336;
const SHARED: u32 = 12_288;
/// The kernel; a config says how many blocks it has.
const BODY: Body = Body {
    file: "engine.cu",
    text: TEXT,
    kernel: "ty_paced",
    blocks: 1,
    warps: WARPS,
    shared: SHARED,
    bulk_shared: COPY_WARPS * CHUNK,
};

/// Time without a request after which a launch ends, and the longest time of one, in ns.
const IDLE_NS: u64 = 1_000_000;
const MOST_NS: u64 = 1_000_000_000;

/// `PacerArgs` of `jobs.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PacerArgs {
    stop: u64,
    lines: u64,
    wire: u64,
    byte_cost: u64,
    message_cost: u64,
    latency: u64,
    spread: u64,
    idle: u64,
    most: u64,
    seed: u64,
    queues: u32,
    mask: u32,
    signals: u32,
    fault: u32,
}

/// `Wire` of `jobs.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Wire {
    begun: u64,
    free: u64,
    raised: u64,
    late: u64,
    latest: u64,
    busy: u64,
    leaving: u64,
    left: u64,
}

const _: () = assert!(size_of::<Wire>() == 64, "jobs.cuh has another size of Wire");

/// Compiles the engine, to show its use of resources.
///
/// # Errors
/// No compiler, or its error.
pub fn compile_engine(target: Target<'_>) -> Result<Compiled> {
    compile_resident(target, &BODY, size_of::<PacerArgs>())
}

/// How late the engine raised signals.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lateness {
    /// Signals.
    pub(crate) signals: u64,
    /// Nanoseconds behind their time, of all together and of the latest one.
    pub(crate) all_ns: u64,
    pub(crate) most_ns: u64,
}

/// In these words benchmarks read it: `Lateness::of` in `bench/src/gpu/nic.rs`.
impl fmt::Display for Lateness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { signals, all_ns, most_ns } = self;
        write!(f, "{signals} signals late by {all_ns} ns in all, {most_ns} ns at most")
    }
}

/// The running engine.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Dropped first: its launches use the rest.
    resident: Resident,
    wire: Buffer,
    context: Arc<Context>,
    failed: u64,
}

impl Pacer {
    /// Starts the engine over the windows and signals of this device API; a queue has `signals`.
    ///
    /// # Safety
    /// The device API is valid, and with the memory of the queues outlives the result.
    pub(crate) unsafe fn start(
        context: &Arc<Context>,
        windows: &abi::TyDeviceApi,
        queues: &Queues,
        config: &PacedConfig,
        signals: u32,
    ) -> Result<Self> {
        let wire = Buffer::of(context, &[Wire::default()])?;
        let [latency, spread] = config.times_ns();
        let body = Body { blocks: config.blocks, ..BODY };
        let mut failed = 0;
        let arguments = |words: ResidentWords| {
            failed = words.failed;
            PacerArgs {
                stop: words.stop,
                lines: queues.lines(),
                wire: wire.address(),
                byte_cost: config.byte_cost(),
                message_cost: config.message_cost(),
                latency,
                spread,
                idle: IDLE_NS,
                most: MOST_NS,
                seed: config.seed,
                queues: queues.count(),
                mask: CAPACITY - 1,
                signals,
                fault: config.fault.map_or(0, |fault| fault as u32),
            }
        };
        // SAFETY: by this function's contract; the wire is dropped behind the launches.
        let resident = unsafe { Resident::start(context, windows, &body, arguments)? };
        Ok(Self { resident, wire, context: Arc::clone(context), failed })
    }

    /// The word in pinned memory that is not 0 once the engine has given up.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// The error that has ended the engine, if one has.
    pub(crate) fn health(&self) -> Result<()> {
        self.resident.health().map_err(|e| e.with_context("transport", COMPONENT))
    }

    /// How late signals were so far.
    pub(crate) fn lateness(&self) -> Result<Lateness> {
        let mut wire = Wire::default();
        let bytes = size_of::<Wire>() as u64;
        copy(&self.context, &raw mut wire as u64, self.wire.address(), bytes)?;
        Ok(Lateness { signals: wire.raised, all_ns: wire.late, most_ns: wire.latest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_has_the_words_that_benchmarks_read() {
        let late = Lateness { signals: 2, all_ns: 700, most_ns: 600 };
        assert_eq!(late.to_string(), "2 signals late by 700 ns in all, 600 ns at most");
    }

    #[test]
    fn the_kernel_has_as_much_shared_memory_as_its_constants_take() {
        let text = TEXT.replace(", kJobs = 128,", ",");
        let expected =
            format!("kCopyWarps = {COPY_WARPS}, kChunk = {CHUNK}, kOwnBytes = {SHARED};");
        assert!(text.contains(&expected), "jobs.cuh does not have {expected}");
    }
}
