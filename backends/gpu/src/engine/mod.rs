//! The base of every operation, whatever it moves: launches, the order of streams, waits and their outcomes, places of
//! the arena.
//!
//! It knows ranks; `lints/src/{arrows,below_operations}.rs` hold that it names no operation. A change here touches all
//! of them. Watched by the tests in these files, over `tests/doubles/order_model`, and on GPUs by the suite.

pub(crate) mod agree;
pub(crate) mod args;
pub(crate) mod capture_marks;
pub(crate) mod counters;
pub(crate) mod device_api;
pub(crate) mod ends;
pub(crate) mod gpu_ring;
pub(crate) mod launch;
pub(crate) mod masking;
pub(crate) mod member;
pub(crate) mod mode;
pub(crate) mod observer;
pub(crate) mod order;
// In the folder of tests, and a module of this one: it calls what no other crate may call.
#[cfg(test)]
#[path = "../../tests/doubles/order_model/mod.rs"]
mod order_model;
pub(crate) mod outcome;
pub(crate) mod path;
pub(crate) mod places;
pub(crate) mod posting;
pub(crate) mod queue;
pub(crate) mod region_order;
pub(crate) mod step;
pub(crate) mod waits;
pub(crate) mod window;

use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::wait::{WaitBoard, Waiter};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::driver::{Buffer, Context, Function, Pinned};
use crate::engine::args::{Common, ENTER, State, TEXT, Trace, WaitReport};
use crate::engine::counters::PeerCounters;
use crate::engine::gpu_ring::Ring;
use crate::engine::launch::{DeviceState, Launcher};
use crate::engine::masking::Masks;
use crate::engine::member::Member;
use crate::engine::observer::Observer;
use crate::engine::order::StreamOrder;
use crate::engine::outcome::{Faults, ticket};
use crate::engine::places::Places;
use crate::engine::posting::Posting;
use crate::engine::waits::{Turn, Waits};

/// Epoch 1 in slot 0.
const FIRST_TURN: u64 = 1;

/// Bytes of `Cell` of the kernels: slot, code, epoch and decision, then a total and a tally per rank.
fn cell_bytes(ranks: u32) -> u64 {
    24 + 2 * 8 * u64::from(ranks)
}

/// The records by which ranks enter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Records {
    /// 64-bit words of one.
    pub(crate) words: u32,
    /// Where they end in the control window.
    pub(crate) end: u64,
}

/// The plan of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) member: Member,
    pub(crate) records: Records,
    /// Addresses of its windows: control and arena.
    pub(crate) windows: [u64; 2],
    /// The counters of its kernels, for reports.
    pub(crate) counters: PeerCounters,
    /// The fields that the operations add to the arguments of each call, and to the state that kernels share.
    pub(crate) added: Added,
}

/// Fields of arguments that belong to the operations over an engine: all others are the engine's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Added {
    pub(crate) common: Common,
    pub(crate) state: State,
}

/// The kernels that an engine itself launches.
#[derive(Debug)]
pub(crate) struct EngineKernels {
    /// Waits for a signal of every rank.
    pub(crate) arrive: Function,
    /// The operation without data.
    pub(crate) agree: Function,
}

/// The parts that an engine is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) posting: Posting,
    /// Parameters of the device API.
    pub(crate) params: Vec<u64>,
    /// None where a lost rank ends the communicator.
    pub(crate) masks: Option<Masks>,
    pub(crate) kernels: EngineKernels,
    pub(crate) places: Places,
    pub(crate) faults: Box<dyn Faults>,
}

/// See the [module](self). Fields drop in order: streams end before the memory that they use.
#[derive(Debug)]
pub(crate) struct Engine {
    /// Dropped first: it reads the stream.
    pub(crate) observer: Observer,
    pub(crate) order: StreamOrder,
    pub(crate) launcher: Launcher,
    pub(crate) waits: Arc<Waits>,
    pub(crate) places: Places,
    pub(crate) member: Member,
    pub(crate) records: Records,
    added: Common,
    /// The last operation that was sent.
    pub(crate) latest: u64,
    faults: Box<dyn Faults>,
}

impl Engine {
    /// # Safety
    /// The plan's board outlives the engine.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        planned: Planned,
        parts: Parts,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let Planned { member, records, .. } = planned;
        let Parts { posting, params, masks, kernels, places, faults } = parts;
        // SAFETY: by this function's contract; the host passes judged tables.
        let board = unsafe { WaitBoard::from_abi(plan.board) };
        let slots = member.slots as usize;
        let report = Pinned::<WaitReport>::new(context, 1)?;
        if let Some(masks) = &masks {
            let masking = masks.shared(context)?;
            // SAFETY: pinned memory that no kernel knows yet.
            unsafe { report.at(0).write(WaitReport { masking, ..WaitReport::default() }) };
        }
        let is_masked = masks.is_some();
        let waits = Arc::new(Waits {
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            report,
            abort: Pinned::new(context, 1)?,
            ranks: member.world_ranks(),
            posting,
            masks,
            turn: Turn::default(),
        });
        let order = StreamOrder::new(context, slots, Duration::from_nanos(plan.cap_ns))?;
        let mut observer = Observer::new(context, &order.stream, &waits, member.level)?;
        if is_masked {
            // It passes losses on to kernels.
            observer.stand()?;
        }
        Ok(Self {
            observer,
            order,
            launcher: Launcher {
                kernels,
                params,
                outcomes: Pinned::new(context, slots)?,
                late: Pinned::new(context, 1)?,
                traces: Buffer::new(context, (slots * size_of::<Trace>()) as u64)?,
                memory: device_state(context, &planned)?,
                cap_ns: plan.cap_ns,
            },
            waits,
            places,
            member,
            records,
            added: planned.added.common,
            latest: 0,
            faults,
        })
    }

    /// The slot of an operation.
    pub(crate) fn slot(&self, operation: u64) -> usize {
        (operation % u64::from(self.member.slots)) as usize
    }

    /// Refuses an operation that was never sent, or whose slot has passed to another.
    pub(crate) fn check_recent(&self, operation: u64) -> Result<()> {
        let (slots, latest) = (u64::from(self.member.slots), self.latest);
        if operation > latest || operation + slots <= latest {
            let text =
                format!("found operation {operation}; expected one of the {slots} up to {latest}");
            return Err(Error::new(ErrorKind::InvalidInput, "trace operation", text));
        }
        Ok(())
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
        let slot = self.slot(operation);
        let late = no_host_sync && verdict == ENTER;
        let bytes = text.len().min(TEXT);
        let mut room = [0; TEXT];
        room[..bytes].copy_from_slice(&text[..bytes]);
        Common {
            abort: self.waits.abort.at(0) as u64,
            report: self.waits.report.at(0) as u64,
            state: self.launcher.memory.state.address(),
            outcome: if late { self.launcher.late.at(0) } else { self.launcher.outcomes.at(slot) }
                as u64,
            trace: self.launcher.trace_at(slot),
            cell: self.launcher.cell(slot),
            former: 0,
            former_outcome: 0,
            former_stopped: 0,
            former_ticket: 0,
            cap_ns: self.launcher.cap_ns,
            signature: 0,
            rank: self.member.rank,
            ranks: self.member.ranks,
            ticket: ticket(operation),
            no_host_sync: no_host_sync.into(),
            verdict,
            entry_words: self.records.words,
            text_bytes: bytes as u32,
            slots: self.member.slots,
            objector: self.member.world_rank(),
            text: room,
            ..self.added
        }
    }

    /// The ring that the host serves, where kernels post through the host.
    pub(crate) fn gpu_ring(&self) -> Option<abi::TyGpuRing> {
        self.waits.posting.ring().map(Ring::as_abi)
    }
}

/// The memory of the device that kernels of all operations share.
fn device_state(context: &Arc<Context>, planned: &Planned) -> Result<DeviceState> {
    let Planned { member, records, windows, counters, added } = *planned;
    let (ranks, slots) = (u64::from(member.ranks), u64::from(member.slots));
    let expected =
        [Buffer::new(context, 8 * ranks * slots)?, Buffer::new(context, 8 * ranks * slots)?];
    let entered = Buffer::new(context, 8 * slots)?;
    let tallies = Buffer::new(context, 8 * ranks)?;
    let put_bytes = Buffer::new(context, 8 * ranks)?;
    let state = State {
        turn: FIRST_TURN,
        rows: expected[0].address(),
        done: expected[1].address(),
        entered: entered.address(),
        outbox: records.end,
        largest_put: member.path.largest_put,
        queues: member.path.queues.into(),
        // Behind the signals of `Common`.
        entry_signals: 2 * ranks * slots,
        windows,
        tallies: tallies.address(),
        counters: counters.address,
        counters_step: counters.step.into(),
        put_bytes: put_bytes.address(),
        ..added.state
    };
    let cell_bytes = cell_bytes(member.ranks);
    Ok(DeviceState {
        state: Buffer::of(context, &[state])?,
        _expected: expected,
        _entered: entered,
        _tallies: tallies,
        _put_bytes: put_bytes,
        cells: Buffer::new(context, cell_bytes * slots)?,
        cell_bytes,
    })
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.observer.stop();
        self.waits.end_all();
        let ended = self.order.end();
        if let Err(error) = ended {
            tracing::warn!("the streams of the kernel set did not end well: {error}");
        }
    }
}
