//! Times of operations, on the ranks.
//!
//! First, operations follow each other on a stream, with a mark of the device's clock after each:
//! the distance of two marks is the time from routed input to usable rows. Then come pairs of
//! operations in which the kernels record times; the second of a pair gives the duration of each
//! phase.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_conformance::input::InputFile;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{
    Buffer, Combine, Communicator, CommunicatorOptions, Handle, Received, Stream, TensorRef,
};
use tokenyard_core::config::Config;
use tokenyard_core::moe::DType;
use tokenyard_gpu::probe::Timer;

use super::Components;
use super::case::{Case, Fixed, Layout, Manner, Phase, Routing, Rows};
use super::workload::{Brought, Rooms, Routed};
use crate::ranks::Speaker;

/// Operations before the first that counts.
const WARM_UP: u32 = 10;
/// Pairs of operations whose phases are timed, and the number of first ones that do not count.
const PAIRS: usize = 24;
const WARM_UP_PAIRS: usize = 4;

/// The task of the ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GpuExchangeTask {
    /// The operation.
    pub phase: Phase,
    /// H, K and E.
    pub fixed: Fixed,
    /// Numbers of tokens; a recorded routing ignores them.
    pub tokens: Vec<u32>,
    /// The element types of rows.
    pub rows: Vec<Rows>,
    /// The layouts in which they arrive.
    pub layouts: Vec<Layout>,
    /// The experts that tokens select.
    pub routing: Routing,
    /// The variation.
    pub manner: Manner,
    /// SM counts.
    pub sms: Vec<u32>,
    /// Operations that count.
    pub samples: u32,
}

/// The times of the phases of one operation, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// From the end of the operation before to the start of its kernel; copies of rows too.
    pub launch: f64,
    /// Counting, and a cast.
    pub count: f64,
    /// Until the counts of all ranks were there.
    pub exchange: f64,
    /// Until rows had left, or sums were made.
    pub rows: f64,
    /// Until the rows of all ranks had arrived, or all had read.
    pub drain: f64,
}

/// The times of one operation on one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuSamples {
    /// The operation.
    pub case: Case,
    /// Its SM count.
    pub sms: u32,
    /// Rows that this rank sends to each rank.
    pub sends: Vec<u64>,
    /// The time of each operation, in microseconds.
    pub us: Vec<f64>,
    /// The phases of some of them, if the kernels record times.
    pub spent: Vec<Spent>,
}

/// The work of one rank, on a GPU with this number of multiprocessors.
pub(super) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &GpuExchangeTask,
    processors: u32,
    say: &Speaker,
) -> Result<Vec<GpuSamples>> {
    let (routed, most) = routings(world, task)?;
    let Fixed { hidden, topk, experts } = task.fixed;
    let options = CommunicatorOptions::new(experts, topk, hidden, most);
    let sms: Vec<u32> = task.sms.iter().copied().filter(|n| *n <= processors).collect();
    ensure!(!sms.is_empty(), "found SM counts {:?}; the GPU has {processors}", task.sms);
    let components = Components::of(config)?;
    let cases = routed.len() * task.rows.len() * task.layouts.len();
    let mut found = Vec::new();
    for (turn, sms) in sms.iter().copied().enumerate() {
        let comm = Communicator::open(world, &super::with_sms(config, sms)?, options)?;
        let mut bench = GpuBench {
            world: Arc::clone(world),
            comm,
            timer: Timer::new(
                &tokenyard_cuda::PLATFORM,
                &components.kernels,
                (WARM_UP + task.samples + 1) as usize,
            )?,
            samples: task.samples,
        };
        for routed in &routed {
            for (rows, layout) in
                task.rows.iter().flat_map(|rows| task.layouts.iter().map(move |l| (*rows, *l)))
            {
                let done = found.len() as u64;
                say.progress(done, (cases * task.sms.len()) as u64)?;
                let tokens = most_tokens(world, routed)?;
                let case = Case { phase: task.phase, rows, layout, manner: task.manner, tokens };
                let context = || format!("{case}, {tokens} tokens, {sms} SMs");
                found.push(bench.case(&case, sms, routed).with_context(context)?);
            }
        }
        bench.comm.close().with_context(|| format!("close communicator {turn}"))?;
    }
    Ok(found)
}

/// The routings of this rank, one for each number of tokens, and the most tokens of any rank.
fn routings(world: &World, task: &GpuExchangeTask) -> Result<(Vec<Routed>, u32)> {
    let (rank, ranks) = (world.rank(), world.ranks());
    if let Routing::Recorded(file) = &task.routing {
        let file = InputFile::read(file)?;
        let (routed, most) = Routed::recorded(task.fixed, &file, rank, ranks)?;
        return Ok((vec![routed], most));
    }
    let generated = |tokens| Routed::generated(task.fixed, &task.routing, rank, tokens);
    let most = task.tokens.iter().copied().max().context("found no number of tokens")?;
    Ok((task.tokens.iter().copied().map(generated).collect(), most))
}

fn most_tokens(world: &World, routed: &Routed) -> Result<u32> {
    let all = world.all_gather("tokens", &routed.tokens().to_le_bytes())?;
    let counts = all.iter().filter_map(|bytes| bytes.as_slice().try_into().ok());
    Ok(counts.map(u32::from_le_bytes).max().unwrap_or(0))
}

struct GpuBench {
    world: Arc<World>,
    comm: Communicator,
    timer: Timer,
    samples: u32,
}

impl GpuBench {
    fn case(&mut self, case: &Case, sms: u32, routed: &Routed) -> Result<GpuSamples> {
        let sends = routed.sends(self.world.ranks());
        let brought = Brought::new(&self.comm, case.rows, routed)?;
        let (received, handle) = self.comm.dispatch(&brought.dispatch(case.layout)?)?;
        self.check(&sends, &received)?;
        let (us, spent) = match (case.phase, case.manner) {
            (Phase::Dispatch, Manner::Replay) => {
                let call = brought.replay()?;
                self.time(&mut |comm, stream| {
                    comm.on(stream).replay(&handle, &call).map(drop).map_err(Into::into)
                })?
            }
            (Phase::Dispatch, Manner::Copied) => {
                let call = brought.dispatch(case.layout)?;
                let mut rooms = Rooms::new(&self.comm, &received)?;
                drop((received, handle));
                self.time(&mut |comm, stream| {
                    let (received, _handle) = comm.on(stream).dispatch(&call)?;
                    Ok(comm.on(stream).copy_out(&received, &mut rooms.outputs()?)?)
                })?
            }
            (Phase::Dispatch, _) => {
                let call = brought.dispatch(case.layout)?;
                drop((received, handle));
                self.time(&mut |comm, stream| {
                    comm.on(stream).dispatch(&call).map(drop).map_err(Into::into)
                })?
            }
            (Phase::Combine, manner) => self.time_combine(&received, &handle, routed, manner)?,
        };
        Ok(GpuSamples { case: *case, sms, sends, us, spent })
    }

    fn time_combine(
        &mut self,
        received: &Received,
        handle: &Handle,
        routed: &Routed,
        manner: Manner,
    ) -> Result<(Vec<f64>, Vec<Spent>)> {
        let hidden = self.comm.shape().hidden as usize;
        let shape = [routed.tokens() as usize, hidden];
        let mut out = self.comm.buffer(&vec![0; 2 * shape[0] * hidden])?;
        let outside = match manner {
            Manner::Outside => Some(self.comm.buffer(&vec![0; 2 * received.rows() * hidden])?),
            Manner::Plain | Manner::Replay | Manner::Copied => None,
        };
        let x = match &outside {
            Some(buffer) => buffer.tensor(DType::Bf16, [received.rows(), hidden], [hidden, 1])?,
            None => received.x(),
        };
        self.time(&mut |comm, stream| combine(comm.on(stream), handle, x, &mut out, shape))
    }

    /// The times of an operation, and of its phases. Collective.
    fn time(
        &mut self,
        run: &mut dyn FnMut(&mut Communicator, Stream) -> Result<()>,
    ) -> Result<(Vec<f64>, Vec<Spent>)> {
        let tool = self.comm.tool_stream()?;
        // SAFETY: it is destroyed at the end of this function, after the communicator was flushed;
        // the tensors of `run` outlive that, and the outputs that `run` gets are dropped before.
        let stream = unsafe { tool.stream() };
        self.world.barrier("time operations")?;
        for _ in 0..WARM_UP + self.samples {
            // SAFETY: a live stream of the communicator's device.
            unsafe { self.timer.mark(stream.raw())? };
            run(&mut self.comm, stream)?;
        }
        // SAFETY: as above.
        unsafe { self.timer.mark(stream.raw())? };
        self.comm.flush()?;
        // The last mark is after the flushed operations; copies wait for the streams of tools.
        let _waited = self.comm.buffer(&[0])?;
        let mut us = self.timer.take()?;
        us.drain(..WARM_UP as usize);
        let spent = self.spent(run, stream)?;
        Ok((us, spent))
    }

    fn spent(
        &mut self,
        run: &mut dyn FnMut(&mut Communicator, Stream) -> Result<()>,
        stream: Stream,
    ) -> Result<Vec<Spent>> {
        let mut all = Vec::new();
        for _ in 0..PAIRS {
            self.world.barrier("time parts")?;
            run(&mut self.comm, stream)?;
            run(&mut self.comm, stream)?;
            let before = match self.comm.trace(1) {
                Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(Vec::new()),
                before => before?,
            };
            let trace = self.comm.trace(0)?;
            let us = |from: u64, to: u64| to.wrapping_sub(from) as i64 as f64 / 1e3;
            all.push(Spent {
                launch: us(before.arrived, trace.begun),
                count: us(trace.begun, trace.counted),
                exchange: us(trace.counted, trace.heard),
                rows: us(trace.heard, trace.moved),
                drain: us(trace.moved, trace.arrived),
            });
        }
        all.drain(..WARM_UP_PAIRS);
        Ok(all)
    }

    /// Checks that as many tokens arrived as all ranks sent here. Otherwise the figures would be of
    /// another exchange.
    fn check(&self, sends: &[u64], received: &Received) -> Result<()> {
        let mine = self.world.rank() as usize;
        let bytes: Vec<u8> = sends.iter().flat_map(|rows| rows.to_le_bytes()).collect();
        let mut expected = 0;
        for from in self.world.all_gather("sends", &bytes)? {
            let rows = from.chunks(8).nth(mine).and_then(|word| word.try_into().ok());
            expected += rows.map_or(0, u64::from_le_bytes);
        }
        let found = received.tokens() as u64;
        ensure!(found == expected, "found {found} tokens received; expected {expected}");
        Ok(())
    }
}

fn combine(
    mut on: tokenyard_core::communicator::OnStream<'_>,
    handle: &Handle,
    x: TensorRef<'_>,
    out: &mut Buffer,
    shape: [usize; 2],
) -> Result<()> {
    let call = Combine::new(x, out.tensor_mut(DType::Bf16, shape)?);
    Ok(on.combine(handle, call)?)
}
