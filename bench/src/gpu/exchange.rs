//! Times of operations, on the ranks.
//!
//! First, operations follow each other on a stream, with a mark of the device's clock after each:
//! the distance of two marks is the time from routed input to usable rows. Where no call waits, the
//! marks are after every tenth, because a mark takes time itself. Then come pairs of operations in
//! which the kernels record times; the second of a pair gives the duration of each phase.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_conformance::moe::input::InputFile;
use tokenyard_core::ErrorKind;
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{
    Buffer, Combine, Communicator, CommunicatorOptions, Handle, OnStream, Received, Stream,
    TensorRef, ToolStream,
};
use tokenyard_core::config::Config;
use tokenyard_core::moe::DType;
use tokenyard_gpu::probe::Timer;
use tokenyard_gpu::twin;

use super::Components;
use super::case::{Calls, Case, Fixed, Layout, Manner, Phase, Routing, Rows};
use super::nic::Lateness;
use super::setup::{GivenRates, Setup, domains_of};
use super::two_levels::LevelSamples;
use super::workload::{InputTensors, Rooms, Routed};
use crate::ranks::Speaker;

/// Operations before the first that counts.
pub(super) const WARM_UP: u32 = 10;
/// Pairs of operations whose phases are timed, and the number of first ones that do not count.
const PAIRS: usize = 24;
const WARM_UP_PAIRS: usize = 4;

/// Operations from one mark to the next where no call waits.
const BATCH: u32 = 10;

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
    /// How the host queues operations.
    pub calls: Calls,
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
    /// Where there are two levels.
    #[serde(default)]
    pub levels: Option<LevelSamples>,
}

/// Facts of a run that operations need.
pub(super) struct Facts {
    /// Multiprocessors of the GPU.
    pub(super) processors: u32,
    /// Rates that are given.
    pub(super) given: GivenRates,
    /// The statements of the config about levels and stand-ins.
    pub(super) setup: Setup,
}

/// The work of one rank.
pub(super) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &GpuExchangeTask,
    facts: &Facts,
    say: &Speaker,
) -> Result<Vec<GpuSamples>> {
    let (routed, most) = routings(world, task)?;
    let Fixed { hidden, topk, experts } = task.fixed;
    let options = CommunicatorOptions::new(experts, topk, hidden, most);
    let sms: Vec<u32> = task.sms.iter().copied().filter(|n| *n <= facts.processors).collect();
    ensure!(!sms.is_empty(), "found SM counts {:?}; the GPU has {}", task.sms, facts.processors);
    let components = Components::of(config)?;
    let cases = routed.len() * task.rows.len() * task.layouts.len();
    let mut found = Vec::new();
    for (turn, sms) in sms.iter().copied().enumerate() {
        let comm = Communicator::open(world, &super::with_sms(config, sms)?, options)?;
        let choices = &comm.report().choices;
        let inside = choices.scale_up.as_ref().map(|inside| inside.team.len() as u32);
        let domains = domains_of(world.ranks(), inside, choices.scale_out.is_some());
        if domains > 1 {
            // Hosts are domains too, which the config does not say.
            facts.setup.check_out(facts.given)?;
        }
        let mut bench = GpuBench {
            world: Arc::clone(world),
            comm,
            setup: facts.setup.clone(),
            domains,
            late: None,
            timer: Timer::new(
                components.backend.platform(),
                &components.kernels,
                // Sends take two marks each.
                (2 * (WARM_UP + task.samples) + 1) as usize,
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
                let GpuExchangeTask { phase, manner, calls, .. } = *task;
                let case = Case { phase, rows, layout, manner, calls, tokens };
                let context = || format!("{case}, {tokens} tokens, {sms} SMs");
                if bench.setup.is_idle(world.rank()) {
                    bench.look_on(routed).with_context(context)?;
                } else {
                    found.push(bench.case(&case, sms, routed).with_context(context)?);
                }
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

pub(super) struct GpuBench {
    pub(super) world: Arc<World>,
    pub(super) comm: Communicator,
    pub(super) timer: Timer,
    pub(super) samples: u32,
    setup: Setup,
    domains: u32,
    /// How late the stand-in between domains was in the last operations that were timed.
    late: Option<Lateness>,
}

/// The outputs of an operation, which live as long as a graph that has recorded it.
type Outputs = Option<(Received, Option<Handle>)>;

/// Queues an operation.
type Operation<'r> = dyn FnMut(&mut OnStream<'_>) -> Result<Outputs> + 'r;

/// The calls of a stream, as a case queues them.
fn on(comm: &mut Communicator, stream: Stream, calls: Calls) -> OnStream<'_> {
    let on = comm.on(stream);
    if calls.wait() { on } else { on.without_sync() }
}

/// The barriers before operations that are timed.
const BEFORE_TIMES: &str = "time operations";

impl GpuBench {
    /// The part of a rank that runs nothing in what the ranks of a case do together.
    fn look_on(&self, routed: &Routed) -> Result<()> {
        self.share(&routed.sends(self.world.ranks()))?;
        Ok(self.world.barrier(BEFORE_TIMES)?)
    }

    fn case(&mut self, case: &Case, sms: u32, routed: &Routed) -> Result<GpuSamples> {
        let sends = routed.sends(self.world.ranks());
        self.late = None;
        let inputs = InputTensors::new(&self.comm, case.rows, routed)?;
        let (received, handle) =
            self.comm.dispatch(&inputs.dispatch(case.layout, Calls::Waiting)?)?;
        self.check(&sends, &received)?;
        let (us, spent) = match (case.phase, case.manner) {
            (Phase::Dispatch, _) if case.calls == Calls::Sends => {
                let call = inputs.dispatch(case.layout, case.calls)?;
                drop((received, handle));
                (self.time_dispatch_sends(&call)?, Vec::new())
            }
            (Phase::Combine, _) if case.calls == Calls::Sends => {
                let (mut out, shape) = self.sums(routed)?;
                (self.time_combine_sends(&handle, received.x(), &mut out, shape)?, Vec::new())
            }
            (Phase::Dispatch, Manner::Replay) => {
                let call = inputs.replay()?;
                self.time(case.calls, &mut |on| Ok(Some((on.replay(&handle, &call)?, None))))?
            }
            (Phase::Dispatch, Manner::Copied) => {
                let call = inputs.dispatch(case.layout, case.calls)?;
                let mut rooms = Rooms::new(&self.comm, &received)?;
                drop((received, handle));
                self.time(case.calls, &mut |on| {
                    let (received, handle) = on.dispatch(&call)?;
                    on.copy_out(&received, &mut rooms.outputs()?)?;
                    Ok(Some((received, Some(handle))))
                })?
            }
            (Phase::Dispatch, _) => {
                let call = inputs.dispatch(case.layout, case.calls)?;
                drop((received, handle));
                self.time(case.calls, &mut |on| {
                    let (received, handle) = on.dispatch(&call)?;
                    Ok(Some((received, Some(handle))))
                })?
            }
            (Phase::Combine, _) => {
                let outside = (case.manner == Manner::Outside)
                    .then(|| self.rows_of_caller(&received))
                    .transpose()?;
                let x = match &outside {
                    Some(buffer) => self.bf16(buffer, received.rows())?,
                    None => received.x(),
                };
                let (mut out, shape) = self.sums(routed)?;
                self.time(case.calls, &mut |on| {
                    combine(on, &handle, x, &mut out, shape).map(|()| None)
                })?
            }
            (Phase::Pair, _) => {
                let call = inputs.dispatch(case.layout, case.calls)?;
                drop((received, handle));
                let (received, handle) = self.comm.dispatch(&call)?;
                let (rows, outside) = (received.rows(), self.rows_of_caller(&received)?);
                drop((received, handle));
                let x = self.bf16(&outside, rows)?;
                let (mut out, shape) = self.sums(routed)?;
                self.time(case.calls, &mut |on| {
                    let (received, handle) = on.dispatch(&call)?;
                    combine(on, &handle, x, &mut out, shape)?;
                    Ok(Some((received, Some(handle))))
                })?
            }
        };
        let levels = (self.domains > 1).then(|| LevelSamples {
            tokens: routed.tokens(),
            to_domains: routed.sends(self.domains),
            late: self.late,
        });
        Ok(GpuSamples { case: *case, sms, sends, us, spent, levels })
    }

    fn hidden(&self) -> usize {
        self.comm.shape().hidden as usize
    }

    /// Memory for the outputs of experts, outside the arena.
    fn rows_of_caller(&self, received: &Received) -> Result<Buffer> {
        Ok(self.comm.buffer(&vec![0; 2 * received.rows() * self.hidden()])?)
    }

    fn bf16<'b>(&self, buffer: &'b Buffer, rows: usize) -> Result<TensorRef<'b>> {
        Ok(buffer.tensor(DType::Bf16, [rows, self.hidden()], [self.hidden(), 1])?)
    }

    /// Memory for the sums of a combine, and its shape.
    fn sums(&self, routed: &Routed) -> Result<(Buffer, [usize; 2])> {
        let shape = [routed.tokens() as usize, self.hidden()];
        Ok((self.comm.buffer(&vec![0; 2 * shape[0] * shape[1]])?, shape))
    }

    /// The times of an operation, and of its phases. Collective.
    fn time(&mut self, calls: Calls, run: &mut Operation<'_>) -> Result<(Vec<f64>, Vec<Spent>)> {
        let tool = self.comm.tool_stream()?;
        // SAFETY: it is destroyed at the end of this function, after the communicator was flushed;
        // the tensors of `run` outlive that, and the outputs that `run` gets are dropped before.
        let stream = unsafe { tool.stream() };
        if calls == Calls::Graph {
            return Ok((self.time_graph(&tool, stream, run)?, Vec::new()));
        }
        self.world.barrier(BEFORE_TIMES)?;
        let before = self.lateness();
        let comm = &mut self.comm;
        let us = marked(&mut self.timer, stream, self.samples, calls, &mut || {
            run(&mut on(comm, stream, calls)).map(drop)
        });
        self.comm.flush()?;
        us?;
        // The last mark is after the flushed operations; copies wait for the streams of tools.
        let _waited = self.comm.buffer(&[0])?;
        let us = self.taken(calls)?;
        self.note_lateness(before);
        // Two levels are several exchanges, which keep times apart.
        let spent = if self.domains > 1 { Vec::new() } else { self.spent(calls, run, stream)? };
        Ok((us, spent))
    }

    /// How late the stand-in between domains was so far.
    pub(super) fn lateness(&self) -> Option<Lateness> {
        self.comm.rail_link().as_deref().and_then(Lateness::of)
    }

    /// Notes how late it was since it was looked at before.
    pub(super) fn note_lateness(&mut self, before: Option<Lateness>) {
        self.late = self.lateness().map(|late| late.since(before));
    }

    /// The times of launches of a graph with a batch of operations, as a step of a model has one for each layer. A
    /// graph of one operation would add the start of a graph to each of them. Outputs are released inside of the
    /// capture, so operations behind reuse their memory, as under a framework.
    fn time_graph(
        &mut self,
        tool: &ToolStream,
        stream: Stream,
        run: &mut Operation<'_>,
    ) -> Result<Vec<f64>> {
        tool.begin_capture()?;
        let recorded = (0..BATCH)
            .try_for_each(|_| run(&mut on(&mut self.comm, stream, Calls::Graph)).map(drop));
        let graph = tool.end_capture()?;
        recorded?;
        self.world.barrier("time launches")?;
        let before = self.lateness();
        let launched = marked(&mut self.timer, stream, self.samples, Calls::Graph, &mut || {
            // SAFETY: the tensors of `run` live, and so does the memory of what it has returned, which no
            // operation outside of a capture gets; all ranks launch the same graphs, and this function waits
            // for the last launch before it returns.
            unsafe { tool.launch(&graph) }.map_err(Into::into)
        });
        let _waited = self.comm.buffer(&[0])?;
        self.comm.flush()?;
        launched?;
        self.note_lateness(before);
        self.taken(Calls::Graph)
    }

    /// The times of operations between marks that have passed, without those of the warm-up.
    fn taken(&mut self, calls: Calls) -> Result<Vec<f64>> {
        let (mut us, batch) = (self.timer.take()?, batch(calls));
        us.drain(..(WARM_UP / batch) as usize);
        Ok(us.iter().map(|us| us / f64::from(batch)).collect())
    }

    fn spent(
        &mut self,
        calls: Calls,
        run: &mut Operation<'_>,
        stream: Stream,
    ) -> Result<Vec<Spent>> {
        let mut all = Vec::new();
        for _ in 0..PAIRS {
            self.world.barrier("time parts")?;
            for _ in 0..2 {
                drop(run(&mut on(&mut self.comm, stream, calls))?);
            }
            // Without synchronisation, kernels may still run.
            self.comm.flush()?;
            let _waited = self.comm.buffer(&[0])?;
            let before = match self.comm.trace(1) {
                Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(Vec::new()),
                before => before?,
            };
            let trace = self.comm.trace(0)?;
            let us = |from: u64, to: u64| to.wrapping_sub(from) as i64 as f64 / 1e3;
            all.push(Spent {
                launch: us(before.arrived, trace.begun),
                count: us(trace.begun, trace.counted),
                exchange: us(trace.counted, trace.entered),
                rows: us(trace.entered, trace.moved),
                drain: us(trace.moved, trace.arrived),
            });
        }
        all.drain(..WARM_UP_PAIRS);
        Ok(all)
    }

    /// Checks that as many tokens arrived as all ranks sent here. Otherwise the figures would be of
    /// another exchange.
    fn check(&self, sends: &[u64], received: &Received) -> Result<()> {
        let (me, all) = (self.world.rank(), self.share(sends)?);
        let expected: u64 = match self.setup.twin {
            Some(gpus) => {
                let all: Vec<&[u64]> = all.iter().map(Vec::as_slice).collect();
                twin::received(gpus, self.world.ranks() / self.domains, me, &all)
            }
            None => all.iter().map(|rows| rows.get(me as usize).copied().unwrap_or(0)).sum(),
        };
        let found = received.tokens() as u64;
        ensure!(found == expected, "found {found} tokens received; expected {expected}");
        Ok(())
    }
}

impl GpuBench {
    /// The rows that each rank sends to each. Collective.
    fn share(&self, sends: &[u64]) -> Result<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = sends.iter().flat_map(|rows| rows.to_le_bytes()).collect();
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let all = self.world.all_gather("sends", &bytes)?;
        Ok(all.iter().map(|rows| rows.chunks(8).map(word).collect()).collect())
    }
}

fn combine(
    on: &mut OnStream<'_>,
    handle: &Handle,
    x: TensorRef<'_>,
    out: &mut Buffer,
    shape: [usize; 2],
) -> Result<()> {
    let call = Combine::new(x, out.tensor_mut(DType::Bf16, shape)?);
    Ok(on.combine(handle, call)?)
}

/// Operations from one mark to the next.
fn batch(calls: Calls) -> u32 {
    if calls.wait() { 1 } else { BATCH }
}

/// Runs the operations of a warm-up and those that count, with marks between batches.
fn marked(
    timer: &mut Timer,
    stream: Stream,
    samples: u32,
    calls: Calls,
    run: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let batch = batch(calls);
    // A graph has a batch of operations.
    let runs = if calls == Calls::Graph { 1 } else { batch };
    for _ in 0..(WARM_UP + samples.next_multiple_of(batch)) / batch {
        // SAFETY: a live stream of the communicator's device.
        unsafe { timer.mark(stream.raw())? };
        (0..runs).try_for_each(|_| run())?;
    }
    // SAFETY: as above.
    unsafe { timer.mark(stream.raw()) }.map_err(Into::into)
}
