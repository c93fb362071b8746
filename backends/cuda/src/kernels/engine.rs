//! One exchange, planned: compiled kernels, memory, and what its operations share.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::link::Link;
use tokenyard_core::moe::{Arena, DType, Holder, Layout, RowFormat, Shape};
use tokenyard_core::wait::{WaitBoard, WaitFor, Waiter};
use tokenyard_core::{Error, ErrorKind, Result};

use super::args::{Common, ENTER, Outcome, State, TEXT, Trace};
use super::combine::CombineOp;
use super::counters::Told;
use super::dispatch::DispatchOp;
use super::exchange::{Exchange, Part};
use super::face::Face;
use super::handle::HandleState;
use super::observer::Observer;
use super::order::Order;
use super::outcome::{Called, Refusal, ticket};
use super::proxy::Ring;
use super::sizes::{Moves, Pulls, Sizes};
use super::waits::{Turn, Wait, Waits};
use crate::compile::{self, Architecture, Role, Rows};
use crate::config::CudaConfig;
use crate::driver::{Buffer, Context, Event, Function, Module, Pinned, RawStream, Stream, sys};

/// An operation between its send and its receive.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "one per slot, and an operation allocates nothing")]
pub(super) enum Operation {
    None,
    Dispatch(DispatchOp),
    Combine(CombineOp),
}

/// The kernels.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) dispatch: Function,
    /// By type: bf16, fp16, fp32. Where kernels put, what sums the rows that came back.
    pub(super) combine: [Function; 3],
    /// Where kernels put: enters a combine, and puts rows back.
    pub(super) give_back: Option<Function>,
    pub(super) arrive: Function,
    pub(super) spread: Function,
    /// By type, as `combine`.
    pub(super) merge: [Function; 3],
    pub(super) agree: Function,
    /// Inside one of several domains: learns which tokens are of which group.
    pub(super) group: Option<Function>,
}

/// Epoch 1 in slot 0.
const FIRST_TURN: u64 = 1;

/// Bytes of `Cell` of the kernels: slot and code, then a total and a tally per rank.
fn cell_bytes(ranks: u32) -> u64 {
    8 + 2 * 8 * u64::from(ranks)
}

/// The index of a type's kernel, and the bytes of an element.
pub(super) fn summable(dtype: u32) -> (usize, u64) {
    match DType::from_code(dtype) {
        Some(DType::F16) => (1, 2),
        Some(DType::F32) => (2, 4),
        _ => (0, 2),
    }
}

/// The planned exchange. Fields drop in order: streams end before the memory that they use.
#[derive(Debug)]
pub(super) struct Engine {
    /// Dropped first: it looks at the stream.
    pub(super) observer: Observer,
    pub(super) stream: Arc<Stream>,
    /// Joins the captures of callers' streams. Nothing runs on it.
    pub(super) recorded: Arc<Stream>,
    /// Whether the operation at hand is recorded.
    pub(super) is_recording: bool,
    /// Whether one ever was.
    pub(super) has_recorded: bool,
    /// The caller's stream, where the operation at hand is queued there.
    pub(super) direct: Option<RawStream>,
    /// Where a kernel that runs was queued last, and the slot whose event is behind it.
    pub(super) last: Cell<Option<(RawStream, usize)>>,
    pub(super) order: Order,
    pub(super) kernels: Kernels,
    /// Per slot: behind the last kernel of the operation.
    pub(super) events: Vec<Event>,
    outcomes: Pinned<Outcome>,
    /// What went wrong with an operation that nobody waits for; the first one only.
    pub(super) late: Pinned<Outcome>,
    /// Per slot: what its first kernel leaves for those behind it.
    cells: Buffer,
    pub(super) traces: Pinned<Trace>,
    pub(super) waits: Arc<Waits>,
    pub(super) state: Buffer,
    /// Totals of row signals that are waited for, and of done signals: `[slots, R]` each.
    _expected: [Buffer; 2],
    /// `[slots]`: operations that this rank has entered.
    _entered: Buffer,
    /// `[R]`: sums of `_expected` of each rank.
    _tallies: Buffer,
    /// Room for the rows and scales of a dispatch that are cast: `[M, H]` bytes, `[M, H/128]` f32.
    pub(super) cast: [Buffer; 2],
    /// `[R]` zeros: which ranks an output leaves out.
    pub(super) lost: Buffer,
    /// `Face::Params`, in words of 8 bytes for its alignment.
    pub(super) params: Vec<u64>,
    pub(super) handles: Vec<HandleState>,
    pub(super) operations: Vec<Operation>,
    pub(super) arena: Arena,
    pub(super) arena_at: u64,
    pub(super) exchange: Exchange,
    pub(super) shape: Shape,
    pub(super) sizes: Sizes,
    /// The last operation that was sent.
    pub(super) latest: u64,
    /// Why the last one that did not go on did not.
    pub(super) refusal: Option<Refusal>,
    pub(super) cap_ns: u64,
    pub(super) blocks: u32,
    pub(super) most_shared: u32,
    /// Rows are moved by bulk copies.
    has_bulk_copies: bool,
}

impl Engine {
    /// # Safety
    /// What the plan points to (but for the list of windows) outlives the engine.
    pub(super) unsafe fn new(
        context: &Arc<Context>,
        (exchange, sizes, handles): (Exchange, Sizes, u32),
        plan: &abi::TyPlan,
        (config, windows, told): (&CudaConfig, [u64; 2], Told),
    ) -> Result<Self> {
        let Exchange { shape: moe, level, .. } = exchange;
        let is_up = level == abi::TY_LEVEL_SCALE_UP;
        let raw = if is_up { &plan.scale_up } else { &plan.scale_out };
        // SAFETY: by this function's contract; the host passes judged tables.
        let (link, board) = unsafe { (Link::from_abi(raw)?, WaitBoard::from_abi(plan.board)) };
        if !plan.lost.is_null() {
            let message = "a lost rank cannot be left out on CUDA yet";
            return Err(Error::new(ErrorKind::Unsupported, "plan kernels", message)
                .with_fix("let a lost rank end the yard, or use kernels = \"cpu\""));
        }
        let ring = match sizes.longest_put {
            Some(_) => Some(Ring::new(context, (link, level), sizes.signals())?),
            None => None,
        };
        let face = match &ring {
            Some(ring) => ring.face(exchange.rank),
            // SAFETY: the link lives, and with it what its face points to.
            None => unsafe { Face::read(&link.device_face()?)? },
        };
        let most_shared = context.device.most_shared()?;
        let processors = context
            .device
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?
            as u32;
        let (kernels, rows) = load(context, config, (&face, exchange.role()), most_shared)?;
        let has_bulk_copies = rows == Rows::Tma;
        let totals = 8 * u64::from(moe.ranks) * u64::from(sizes.slots);
        let expected = [Buffer::new(context, totals)?, Buffer::new(context, totals)?];
        let entered = Buffer::new(context, 8 * u64::from(sizes.slots))?;
        let tallies = Buffer::new(context, 8 * u64::from(moe.ranks))?;
        let state = State {
            turn: FIRST_TURN,
            problem: u64::MAX,
            rows: expected[0].address(),
            done: expected[1].address(),
            entered: entered.address(),
            outbox: sizes.entries(sizes.slots),
            longest_put: sizes.longest_put.unwrap_or(0),
            // Behind those of `Common`.
            entry_signals: 2 * u64::from(moe.ranks) * u64::from(sizes.slots),
            windows,
            tallies: tallies.address(),
            told: told.address,
            told_step: told.step.into(),
            ..State::default()
        };
        let blocks = config.sms.blocks(processors);
        let slots = sizes.slots as usize;
        // Rows are cast once, before they leave their source.
        let cast = if exchange.part == Part::Inside { 1 } else { u64::from(moe.max_tokens) };
        let stream = Arc::new(Stream::new(context)?);
        let waits = Arc::new(Waits {
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            report: Pinned::new(context, 1)?,
            abort: Pinned::new(context, 1)?,
            ranks: exchange.world_ranks(),
            ring,
            turn: Turn::default(),
        });
        let engine = Self {
            observer: Observer::new(context, &stream, (&waits, level))?,
            order: Order::new(context, Duration::from_nanos(plan.cap_ns))?,
            stream,
            recorded: Arc::new(Stream::new(context)?),
            is_recording: false,
            has_recorded: false,
            direct: None,
            last: Cell::new(None),
            kernels,
            events: (0..slots).map(|_| Event::new(context)).collect::<Result<_>>()?,
            outcomes: Pinned::new(context, slots)?,
            late: Pinned::new(context, 1)?,
            cells: Buffer::new(context, cell_bytes(moe.ranks) * slots as u64)?,
            traces: Pinned::new(context, slots)?,
            waits,
            state: Buffer::of(context, &[state])?,
            _expected: expected,
            _entered: entered,
            _tallies: tallies,
            cast: [
                Buffer::new(context, cast * u64::from(moe.hidden))?,
                Buffer::new(context, 4 * cast * u64::from(moe.hidden.div_ceil(128)))?,
            ],
            lost: Buffer::new(context, exchange.regions.ranks.into())?,
            params: face.params,
            handles: (0..handles)
                .map(|_| HandleState::new(context, &exchange, blocks))
                .collect::<Result<_>>()?,
            operations: vec![Operation::None; slots],
            arena: Arena::new(sizes.arena_bytes, "[kernels.cuda] arena_mib"),
            arena_at: windows[1],
            exchange,
            shape: moe,
            sizes,
            latest: 0,
            refusal: None,
            cap_ns: plan.cap_ns,
            blocks,
            most_shared,
            has_bulk_copies,
        };
        Ok(engine)
    }

    pub(super) fn slot(&self, operation: u64) -> usize {
        (operation % self.operations.len() as u64) as usize
    }

    pub(super) fn cell(&self, slot: usize) -> u64 {
        self.cells.address() + slot as u64 * cell_bytes(self.shape.ranks)
    }

    /// What every operation passes: how this rank enters, and up to [`TEXT`] bytes that say why.
    /// `unheard`: nobody waits for the outcome of a rank that takes part.
    pub(super) fn common(
        &self,
        operation: u64,
        (verdict, text): (u32, &[u8]),
        unheard: bool,
    ) -> Common {
        let slot = self.slot(operation);
        let late = unheard && verdict == ENTER;
        let bytes = text.len().min(TEXT);
        let mut room = [0; TEXT];
        room[..bytes].copy_from_slice(&text[..bytes]);
        Common {
            abort: self.waits.abort.at(0) as u64,
            report: self.waits.report.at(0) as u64,
            state: self.state.address(),
            outcome: if late { self.late.at(0) } else { self.outcomes.at(slot) } as u64,
            trace: self.traces.at(slot) as u64,
            cell: self.cell(slot),
            cap_ns: self.cap_ns,
            signature: 0,
            rank: self.exchange.rank,
            ranks: self.shape.ranks,
            experts: self.shape.experts,
            topk: self.shape.topk,
            max_tokens: self.shape.max_tokens,
            brought: 0,
            ticket: ticket(operation),
            unheard: unheard.into(),
            verdict,
            entry_words: self.sizes.entry_words,
            text_bytes: bytes as u32,
            slots: self.sizes.slots,
            objector: self.exchange.world_rank(),
            group_count: self.exchange.groups,
            text: room,
        }
    }

    /// How a dispatch of rows moves them.
    pub(super) fn moves(&self, row: &RowFormat, layout: Layout) -> Moves {
        let links = match layout {
            Layout::Flat => self.has_bulk_copies,
            // Half of the warps spread what arrives: see `tiles.cuh`.
            _ => self.sizes.longest_put.is_none() && self.exchange.groups == 1,
        };
        Moves::new(&self.exchange, row, (self.most_shared, links))
    }

    /// How a combine of rows reads them.
    pub(super) fn pulls(&self, row_bytes: u64) -> Pulls {
        Pulls::new(&self.exchange, row_bytes, self.most_shared)
    }

    /// Waits until everything has ended that was launched, and streams have passed the regions that
    /// were taken back.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.check()?;
        self.take_back_late();
        let wait = self.wait(self.latest, abi::TY_PHASE_DONE);
        let is_over = || self.stream.is_idle();
        self.waits.until(wait, &|| matches!(is_over(), Ok(true)), &is_over)?;
        self.waits.ended(wait)?;
        self.order.settle()?;
        self.check()
    }

    /// A stream has ended, and nobody may name it any more.
    pub(super) fn forget(&mut self, stream: RawStream) {
        self.order.forget(stream);
        self.handles.iter_mut().for_each(|h| h.stream = h.stream.filter(|s| *s != stream));
    }

    /// Takes a region back.
    pub(super) fn release(&mut self, region: u64) {
        match self.order.take_back(region) {
            Ok(true) => self.arena.release(region),
            Ok(false) => {}
            // The stream may still read it, and others would write it: nothing may run after this.
            Err(error) => self.observer.fail(error),
        }
    }

    /// Waits until the kernel of an operation has told what it came to.
    pub(super) fn hear_outcome(&mut self, operation: u64, ours: &Called) -> Result<Outcome> {
        let slot = self.slot(operation);
        let ticket = u64::from(ticket(operation));
        let at = self.outcomes.at(slot);
        // SAFETY: pinned memory that lives as long as `self`; the epoch is a word that the kernel
        // writes last, with release order.
        let heard = || unsafe { AtomicU64::from_ptr(&raw mut (*at).epoch).load(Ordering::Acquire) };
        let wait = self.wait(operation, abi::TY_PHASE_ENTRY);
        let waited = self.waits.until(wait, &|| heard() == ticket, &|| self.events[slot].is_done());
        // Kernels enter nothing more once an operation has failed that nobody waited for.
        waited.map_err(|error| self.check().err().unwrap_or(error))?;
        // SAFETY: the kernel has written it and does not touch it again.
        let outcome = unsafe { at.read_volatile() };
        self.refusal = Refusal::of(&outcome, ours, &self.shape);
        self.refusal.as_ref().map_or(Ok(outcome), |refusal| Err(refusal.error()))
    }

    /// Waits until everything of an operation that was launched has ended well.
    pub(super) fn finish(&self, operation: u64, phase: u64) -> Result<()> {
        let event = &self.events[self.slot(operation)];
        let wait = self.wait(operation, phase);
        self.waits.until(wait, &|| matches!(event.is_done(), Ok(true)), &|| event.is_done())?;
        self.waits.ended(wait)?;
        // SAFETY: pinned memory that lives as long as `self`; no kernel of the operation runs.
        let trace = unsafe { self.traces.at(self.slot(operation)).read_volatile() };
        let since = |at: u64| at.wrapping_sub(trace.begun) as i64;
        tracing::trace!(
            operation,
            phase,
            counted_ns = since(trace.counted),
            heard_ns = since(trace.heard),
            moved_ns = since(trace.moved),
            arrived_ns = since(trace.arrived),
            "times of an operation, from the start of its kernel"
        );
        Ok(())
    }

    /// When things happened in an operation whose kernels have ended.
    pub(super) fn trace(&self, operation: u64) -> Result<abi::TyTrace> {
        let slots = self.operations.len() as u64;
        if operation > self.latest || operation + slots <= self.latest {
            let text = format!(
                "found operation {operation}; expected one of the {slots} up to {}",
                self.latest
            );
            return Err(Error::new(ErrorKind::InvalidInput, "trace operation", text));
        }
        // SAFETY: pinned memory that lives as long as `self`; no kernel of the operation runs.
        let t = unsafe { self.traces.at(self.slot(operation)).read_volatile() };
        Ok(abi::TyTrace {
            size: size_of::<abi::TyTrace>(),
            begun: t.begun,
            counted: t.counted,
            heard: t.heard,
            moved: t.moved,
            arrived: t.arrived,
        })
    }

    pub(super) fn wait(&self, operation: u64, phase: u64) -> Wait {
        let exchange = &self.exchange;
        let rank = exchange.team.rank((exchange.rank + 1) % self.shape.ranks);
        let operation = operation / u64::from(exchange.steps());
        Wait { operation, phase, level: exchange.level, rank }
    }

    /// What the host serves, where kernels post through it.
    pub(super) fn proxy_ring(&self) -> Option<abi::TyProxyRing> {
        self.waits.ring.as_ref().map(Ring::as_abi)
    }

    /// Waits until everything that kernels have put is done (INV-4). No kernel runs.
    pub(super) fn flush_puts(&self) -> Result<()> {
        let Some(ring) = &self.waits.ring else { return Ok(()) };
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: self.exchange.world_rank(),
            signal: 0,
            expected: ring.numbered()?,
            operation: 0,
            level: self.exchange.level,
        };
        self.waits.waiter.until(&what, || ring.done(), || ring.explain())
    }

    /// Ends every wait of this rank's kernels after an error that closes the yard: nobody else does,
    /// and memory must not go while a kernel runs.
    pub(super) fn give_up<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            if !matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full) {
                self.waits.end_all();
            }
        })
    }

    /// A region for the expert outputs of a handle.
    pub(super) fn combine_input(
        &mut self,
        handle: u32,
        dtype: u32,
    ) -> Result<(u64, abi::TyTensor)> {
        self.check()?;
        let Some(state) = self.handles.get(handle as usize) else {
            return Err(Error::new(ErrorKind::Internal, "combine input", "no such handle"));
        };
        let (rows, stream) = (state.rows, state.stream);
        let element = DType::from_code(dtype).map_or(4, DType::bytes) as u64;
        let columns = u64::from(self.shape.hidden);
        let region = self.arena.allocate(rows * columns * element, Holder::CombineInput(handle))?;
        if let Err(error) = self.order.lend(region.id, stream) {
            self.arena.release(region.id);
            return Err(error);
        }
        let tensor = abi::TyTensor {
            data: (self.arena_at + region.offset) as *mut u8,
            dtype,
            reserved: 0,
            shape: [rows, columns],
            stride: [columns as i64, 1],
        };
        Ok((region.id, tensor))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.observer.stop();
        self.waits.end_all();
        let ended = self.stream.synchronize().and_then(|()| self.order.take_back_all());
        if let Err(error) = ended {
            tracing::warn!("the streams of the cuda kernel set did not end well: {error}");
        }
    }
}

fn load(
    context: &Arc<Context>,
    config: &CudaConfig,
    (face, role): (&Face, Role),
    most_shared: u32,
) -> Result<(Kernels, Rows)> {
    let architecture = Architecture { capability: context.device.capability()? };
    let rows = compile::rows_of(config, architecture, face.source().puts)?;
    let (image, _) = compile::kernels(config, architecture, (face.source(), role))?;
    let module = Module::load(context, &image)?;
    let dispatch = module.cooperative("ty_dispatch")?;
    let combine = [
        module.cooperative("ty_combine_bf16")?,
        module.cooperative("ty_combine_f16")?,
        module.cooperative("ty_combine_f32")?,
    ];
    let puts = face.source().puts;
    let give_back = if puts { Some(module.function("ty_give_back")?) } else { None };
    let spread = module.function("ty_spread")?;
    let merge = [
        module.function("ty_merge_bf16")?,
        module.function("ty_merge_f16")?,
        module.function("ty_merge_f32")?,
    ];
    for kernel in combine.iter().chain(&merge).chain(&give_back).chain([&dispatch, &spread]) {
        kernel.allow_shared(most_shared.saturating_sub(2048))?;
    }
    let arrive = module.function("ty_arrive")?;
    let agree = module.function("ty_agree")?;
    let group = if role == Role::Inside { Some(module.function("ty_group")?) } else { None };
    let kernels = Kernels { dispatch, combine, give_back, arrive, spread, merge, agree, group };
    Ok((kernels, rows))
}
