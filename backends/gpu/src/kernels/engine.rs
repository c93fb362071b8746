//! One exchange, planned: compiled kernels, memory, and what its operations share.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::link::Link;
use tokenyard_core::moe::{Arena, DType, Holder, Layout, RowFormat, Shape};
use tokenyard_core::wait::{WaitBoard, Waiter};
use tokenyard_core::{Error, ErrorKind, Result};

use super::args::{Common, ENTER, Outcome, State, TEXT, Trace};
use super::combine_tiling::CombineTiling;
use super::counters::PeerCounters;
use super::device_api::DeviceApi;
use super::exchange::{Exchange, Scope};
use super::gpu_ring::Ring;
use super::handle::HandleState;
use super::loaded::Kernels;
use super::observer::Observer;
use super::operation::Operation;
use super::outcome::{Refusal, ticket};
use super::region_order::RegionOrder;
use super::sizes::{DispatchTiling, Sizes};
use super::waits::{Turn, Waits};
use crate::compile::Rows;
use crate::config::{GpuConfig, Outside};
use crate::driver::{Buffer, Context, DeviceFacts, Event, Pinned, RawStream, Stream};

/// Epoch 1 in slot 0.
const FIRST_TURN: u64 = 1;

/// Bytes of `Cell` of the kernels: slot and code, then a total and a tally per rank.
fn cell_bytes(ranks: u32) -> u64 {
    8 + 2 * 8 * u64::from(ranks)
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
    pub(super) order: RegionOrder,
    pub(super) kernels: Kernels,
    /// Per slot: behind the last kernel of the operation.
    pub(super) events: Vec<Event>,
    pub(super) outcomes: Pinned<Outcome>,
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
    /// `DeviceApi::Params`, in words of 8 bytes for its alignment.
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
    /// How rows outside the arena come back.
    pub(super) outside: Outside,
}

impl Engine {
    /// # Safety
    /// What the plan points to (but for the list of windows) outlives the engine.
    pub(super) unsafe fn new(
        context: &Arc<Context>,
        (exchange, sizes, handles): (Exchange, Sizes, u32),
        plan: &abi::TyPlan,
        (config, windows, told): (&GpuConfig, [u64; 2], PeerCounters),
    ) -> Result<Self> {
        let Exchange { shape: moe, level, .. } = exchange;
        let is_up = level == abi::TY_LEVEL_SCALE_UP;
        let raw = if is_up { &plan.scale_up } else { &plan.scale_out };
        // SAFETY: by this function's contract; the host passes judged tables.
        let (link, board) = unsafe { (Link::from_abi(raw)?, WaitBoard::from_abi(plan.board)) };
        if !plan.lost.is_null() {
            let message = "a lost rank cannot be left out on GPUs yet";
            return Err(Error::new(ErrorKind::Unsupported, "plan kernels", message)
                .with_fix("let a lost rank end the communicator, or use kernels = \"cpu\""));
        }
        let ring = match sizes.longest_put {
            Some(_) => Some(Ring::new(context, (link, level), sizes.signals())?),
            None => None,
        };
        let device_api = match &ring {
            Some(ring) => ring.device_api(exchange.rank),
            // SAFETY: the link lives, and with it what its device API points to.
            None => unsafe { DeviceApi::read(&link.device_api()?)? },
        };
        let DeviceFacts { most_shared, processors, .. } = context.device.facts()?;
        let kernels = Kernels::load(context, config, (&device_api, exchange.role()), most_shared)?;
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
            counters_step: told.step.into(),
            ..State::default()
        };
        let blocks = config.sms.blocks(processors);
        let slots = sizes.slots as usize;
        // Rows are cast once, before they leave their source.
        let cast = if exchange.scope == Scope::IntraDomain { 1 } else { u64::from(moe.max_tokens) };
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
            order: RegionOrder::new(context, Duration::from_nanos(plan.cap_ns))?,
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
            params: device_api.params,
            handles: (0..handles)
                .map(|_| HandleState::new(context, &exchange, blocks))
                .collect::<Result<_>>()?,
            operations: vec![Operation::None; slots],
            arena: Arena::new(
                sizes.arena_bytes,
                format!("{} arena_mib", context.device.platform.names.table()),
            ),
            arena_at: windows[1],
            exchange,
            shape: moe,
            sizes,
            latest: 0,
            refusal: None,
            cap_ns: plan.cap_ns,
            blocks,
            most_shared,
            outside: config.outside,
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
    /// `no_host_sync`: nobody waits for the outcome of a rank that takes part.
    pub(super) fn common(
        &self,
        operation: u64,
        (verdict, text): (u32, &[u8]),
        no_host_sync: bool,
    ) -> Common {
        let slot = self.slot(operation);
        let late = no_host_sync && verdict == ENTER;
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
            no_host_sync: no_host_sync.into(),
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
    pub(super) fn dispatch_tiling(&self, row: &RowFormat, layout: Layout) -> DispatchTiling {
        let links = match layout {
            Layout::Flat => self.kernels.rows == Rows::Tma,
            // Half of the warps spread what arrives: see `tiles.cuh`.
            _ => self.sizes.longest_put.is_none() && self.exchange.groups == 1,
        };
        DispatchTiling::new(&self.exchange, row, (self.most_shared, links))
    }

    /// How a combine of rows reads them.
    pub(super) fn combine_tiling(&self, row_bytes: u64) -> CombineTiling {
        CombineTiling::new(&self.exchange, row_bytes, self.most_shared)
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

    /// What the host serves, where kernels post through it.
    pub(super) fn gpu_ring(&self) -> Option<abi::TyGpuRing> {
        self.waits.ring.as_ref().map(Ring::as_abi)
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
            tracing::warn!("the streams of the kernel set did not end well: {error}");
        }
    }
}
