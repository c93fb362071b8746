//! One exchange, planned: compiled kernels, memory, and the state that its operations share.

pub(crate) mod agree;
pub(crate) mod capture_marks;
pub(crate) mod counters;
pub(crate) mod device_api;
pub(crate) mod ends;
pub(crate) mod gpu_ring;
pub(crate) mod launch;
pub(crate) mod masking;
pub(crate) mod mode;
pub(crate) mod observer;
pub(crate) mod order;
#[cfg(test)]
pub(crate) mod order_model;
pub(crate) mod outcome;
pub(crate) mod path;
pub(crate) mod places;
pub(crate) mod posting;
pub(crate) mod queue;
pub(crate) mod region_order;
pub(crate) mod waits;
pub(crate) mod window;

use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::link::Link;
use tokenyard_core::moe::{DType, Holder, Layout, RowFormat};
use tokenyard_core::wait::{WaitBoard, Waiter};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::compile::Rows;
use crate::config::{GpuConfig, Sms};
use crate::driver::{Buffer, Context, Pinned, RawStream};
use crate::engine::counters::PeerCounters;
use crate::engine::device_api::DeviceApi;
use crate::engine::gpu_ring::Ring;
use crate::engine::launch::{DeviceState, Launcher};
use crate::engine::masking::Masks;
use crate::engine::observer::Observer;
use crate::engine::order::StreamOrder;
use crate::engine::outcome::ticket;
use crate::engine::places::Places;
use crate::engine::posting::{Health, Posting};
use crate::engine::waits::{Turn, Waits};
use crate::moe::args::{Common, ENTER, State, TEXT, Trace, WaitReport};
use crate::moe::blocks::Blocks;
use crate::moe::combine_tiling::CombineTiling;
use crate::moe::exchange::{Exchange, Scope};
use crate::moe::host_counts::HostCounts;
use crate::moe::limits::BlockLimits;
use crate::moe::loaded::Kernels;
use crate::moe::moving::Moving;
use crate::moe::quotient::factor;
use crate::moe::routing::RoutingTable;
use crate::moe::sizes::{DispatchTiling, Sizes};

/// Epoch 1 in slot 0.
const FIRST_TURN: u64 = 1;

/// Bytes of `Cell` of the kernels: slot, code and epoch, then a total and a tally per rank.
fn cell_bytes(ranks: u32) -> u64 {
    16 + 2 * 8 * u64::from(ranks)
}

/// The plan of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) exchange: Exchange,
    pub(crate) sizes: Sizes,
    /// Addresses of its windows: control and arena.
    pub(crate) windows: [u64; 2],
    /// The counters of its kernels, for reports.
    pub(crate) counters: PeerCounters,
    /// The number of handles that it stores.
    pub(crate) handles: u32,
}

/// The planned exchange. Fields drop in order: streams end before the memory that they use.
#[derive(Debug)]
pub(crate) struct Engine {
    /// Dropped first: it reads the stream.
    pub(crate) observer: Observer,
    pub(crate) order: StreamOrder,
    pub(crate) launcher: Launcher,
    pub(crate) routing: RoutingTable,
    pub(crate) places: Places,
    pub(crate) exchange: Exchange,
    pub(crate) sizes: Sizes,
    /// The address of the control window.
    pub(crate) control: u64,
}

impl Engine {
    /// # Safety
    /// Objects that the plan points to (except for the list of windows) outlive the engine.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        config: &GpuConfig,
        planned: Planned,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let Planned { exchange, sizes, windows, counters, handles } = planned;
        let Exchange { shape: moe, level, .. } = exchange;
        let is_up = level == abi::TY_LEVEL_SCALE_UP;
        let raw = if is_up { &plan.scale_up } else { &plan.scale_out };
        // SAFETY: by this function's contract; the host passes judged tables.
        let (link, board) = unsafe { (Link::from_abi(raw)?, WaitBoard::from_abi(plan.board)) };
        // SAFETY: the plan's table outlives the engine, by this function's contract.
        let masks = unsafe { Masks::new(context, &exchange, plan, config.mask_after())? };
        let is_masked = masks.is_some();
        let (posting, device_api) = if exchange.path.has_ring() {
            let ring = Ring::new(context, level, sizes.signals())?;
            let device_api = ring.device_api(exchange.rank);
            (Posting::Ring(ring, link), device_api)
        } else {
            // SAFETY: the link lives, and with it the objects that its device API points to.
            let device_api =
                unsafe { DeviceApi::read(&context.device.platform.dialect, &link.device_api()?)? };
            device_api.check_puts(exchange.path.puts())?;
            (Posting::DeviceApi(Health::new(link)), device_api)
        };
        let facts = context.device.facts()?;
        let (processors, block) = (facts.processors, BlockLimits::of(&facts));
        let kernels = Kernels::load(context, config, &device_api, exchange.role(is_masked))?;
        let totals = 8 * u64::from(moe.ranks) * u64::from(sizes.slots);
        let expected = [Buffer::new(context, totals)?, Buffer::new(context, totals)?];
        let entered = Buffer::new(context, 8 * u64::from(sizes.slots))?;
        let tallies = Buffer::new(context, 8 * u64::from(moe.ranks))?;
        let put_bytes = Buffer::new(context, 8 * u64::from(moe.ranks))?;
        let state = State {
            turn: FIRST_TURN,
            problem: u64::MAX,
            rows: expected[0].address(),
            done: expected[1].address(),
            entered: entered.address(),
            outbox: sizes.entries(sizes.slots),
            largest_put: exchange.path.largest_put,
            queues: exchange.path.queues.into(),
            // Behind the signals of `Common`.
            entry_signals: 2 * u64::from(moe.ranks) * u64::from(sizes.slots),
            windows,
            tallies: tallies.address(),
            counters: counters.address,
            counters_step: counters.step.into(),
            put_bytes: put_bytes.address(),
            ..State::default()
        };
        let blocks = Blocks {
            exchange: config.sms.blocks(processors),
            by_formula: config.sms == Sms::Auto
                && exchange.scope == Scope::Flat
                && !exchange.path.puts()
                && kernels.rows == Rows::Tma,
            local: config.local_sms.local_blocks(processors),
            local_is_set: config.local_sms != Sms::Auto,
            decode: config.decode_sms,
            all: processors,
        };
        let slots = sizes.slots as usize;
        let cell_bytes = cell_bytes(moe.ranks);
        let memory = DeviceState {
            state: Buffer::of(context, &[state])?,
            _expected: expected,
            _entered: entered,
            _tallies: tallies,
            _put_bytes: put_bytes,
            lost: Buffer::new(context, exchange.regions.ranks.into())?,
            cells: Buffer::new(context, cell_bytes * slots as u64)?,
            cell_bytes,
        };
        let report = Pinned::<WaitReport>::new(context, 1)?;
        if let Some(masks) = &masks {
            let masking = masks.shared(context)?;
            // SAFETY: pinned memory that no kernel knows yet.
            unsafe { report.at(0).write(WaitReport { masking, ..WaitReport::default() }) };
        }
        let waits = Arc::new(Waits {
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            report,
            abort: Pinned::new(context, 1)?,
            ranks: exchange.world_ranks(),
            posting,
            masks,
            turn: Turn::default(),
        });
        let order = StreamOrder::new(context, slots, Duration::from_nanos(plan.cap_ns))?;
        let mut observer = Observer::new(context, &order.stream, &waits, level)?;
        if is_masked {
            // It passes losses on to kernels.
            observer.stand()?;
        }
        Ok(Self {
            observer,
            order,
            launcher: Launcher {
                kernels,
                params: device_api.params,
                outcomes: Pinned::new(context, slots)?,
                counts: HostCounts::new(context, slots, moe.local_experts())?,
                late: Pinned::new(context, 1)?,
                traces: Buffer::new(context, (slots * size_of::<Trace>()) as u64)?,
                waits,
                memory,
                cap_ns: plan.cap_ns,
                blocks,
                block,
            },
            routing: RoutingTable::new(&exchange, handles, blocks.most_counting(), block.warps()),
            places: Places::new(
                windows[1],
                sizes.arena_bytes,
                format!("{} arena_mib", context.device.platform.names.table()),
                config.outside,
            ),
            exchange,
            sizes,
            control: windows[0],
        })
    }

    /// The arguments of every operation: how this rank enters, and up to [`TEXT`] bytes that say
    /// why. `no_host_sync`: no caller waits for the outcome of a rank that takes part.
    pub(crate) fn common(
        &self,
        operation: u64,
        verdict: u32,
        text: &[u8],
        no_host_sync: bool,
    ) -> Common {
        let slot = self.routing.slot(operation);
        let late = no_host_sync && verdict == ENTER;
        let bytes = text.len().min(TEXT);
        let mut room = [0; TEXT];
        room[..bytes].copy_from_slice(&text[..bytes]);
        Common {
            abort: self.launcher.waits.abort.at(0) as u64,
            report: self.launcher.waits.report.at(0) as u64,
            state: self.launcher.memory.state.address(),
            outcome: if late { self.launcher.late.at(0) } else { self.launcher.outcomes.at(slot) }
                as u64,
            trace: self.launcher.trace_at(slot),
            cell: self.launcher.cell(slot),
            former: 0,
            former_outcome: 0,
            former_stopped: 0,
            cap_ns: self.launcher.cap_ns,
            signature: 0,
            rank: self.exchange.rank,
            ranks: self.exchange.shape.ranks,
            experts: self.exchange.shape.experts,
            topk: self.exchange.shape.topk,
            max_tokens: self.exchange.shape.max_tokens,
            input_rows: 0,
            ticket: ticket(operation),
            no_host_sync: no_host_sync.into(),
            verdict,
            entry_words: self.sizes.entry_words,
            text_bytes: bytes as u32,
            slots: self.sizes.slots,
            objector: self.exchange.world_rank(),
            group_count: self.exchange.groups,
            local: self.exchange.shape.local_experts(),
            local_factor: factor(self.exchange.shape.local_experts()),
            text: room,
        }
    }

    /// How a dispatch of rows moves them, if it does not cast them.
    pub(crate) fn dispatch_tiling(
        &self,
        row: &RowFormat,
        layout: Layout,
        few: bool,
    ) -> DispatchTiling {
        let moving = match layout {
            Layout::Flat if self.launcher.kernels.rows == Rows::Tma => Moving::Links,
            Layout::ExpertMajor { .. } | Layout::Packed if self.has_tiles() => {
                Moving::Tiles { few }
            }
            _ => Moving::Any,
        };
        DispatchTiling::new(&self.exchange, row, self.launcher.block, moving)
    }

    /// How a dispatch casts rows of a type as it moves them.
    pub(crate) fn cast_tiling(&self, row: &RowFormat, dtype: u32) -> DispatchTiling {
        let channel_bytes = if dtype == DType::F32.code() { 4 } else { 2 };
        let moving = Moving::Cast { channel_bytes };
        DispatchTiling::new(&self.exchange, row, self.launcher.block, moving)
    }

    /// How a combine of rows reads them.
    pub(crate) fn combine_tiling(&self, row_bytes: u64) -> CombineTiling {
        CombineTiling::new(&self.exchange, row_bytes, self.launcher.block)
    }

    /// Forgets a stream that has ended: no later call may name it.
    pub(crate) fn forget(&mut self, stream: RawStream) {
        self.order.regions.forget(stream);
        self.routing.forget(stream);
    }

    /// The ring that the host serves, where kernels post through the host.
    pub(crate) fn gpu_ring(&self) -> Option<abi::TyGpuRing> {
        self.launcher.waits.posting.ring().map(Ring::as_abi)
    }

    /// A region for the expert outputs of a handle.
    pub(crate) fn combine_input(
        &mut self,
        handle: u32,
        dtype: u32,
    ) -> Result<(u64, abi::TyTensor)> {
        self.check()?;
        let Some(state) = self.routing.handles.get(handle as usize) else {
            return Err(Error::new(ErrorKind::Internal, "combine input", "no such handle"));
        };
        let (rows, stream) = (state.rows, state.stream);
        let element = DType::from_code(dtype).map_or(4, DType::bytes) as u64;
        let columns = u64::from(self.exchange.shape.hidden);
        let is_captured =
            stream.map_or(Ok(false), |stream| stream.is_captured(self.order.context()))?;
        let (bytes, holder) = (rows * columns * element, Holder::CombineInput(handle));
        let region = match is_captured {
            true => self.places.arena.allocate_captured(bytes, holder)?,
            false => self.places.arena.allocate(bytes, holder)?,
        };
        if let Err(error) = self.order.regions.lend(region.id, stream) {
            self.places.arena.release(region.id);
            return Err(error);
        }
        let tensor = abi::TyTensor {
            data: (self.places.address(&region)) as *mut u8,
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
        self.launcher.waits.end_all();
        let ended = self.order.end();
        if let Err(error) = ended {
            tracing::warn!("the streams of the kernel set did not end well: {error}");
        }
    }
}
