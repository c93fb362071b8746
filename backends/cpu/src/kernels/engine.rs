use std::cell::Cell;
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::link::Link;
use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT, Shape};
use tokenyard_core::transport::{Command, Event, NO_COMMAND, NO_EVENT};
use tokenyard_core::wait::{WaitBoard, WaitFor, Waiter};
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::Gathered;
use super::arena::Arena;
use super::combine::CombineOp;
use super::control::{Header, Ids, Signal, signals};
use super::dispatch::DispatchOp;
use super::handle::HandleState;
use super::moe_shape;
use super::rows::RowScratch;
use super::windows::{ARENA, CONTROL, WindowSizes};
use crate::pool::Pool;

/// The only lane: one thread drives a yard.
const LANE: u32 = 0;

/// Window memory that is mapped here: this rank's, or a peer's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    base: *mut u8,
    bytes: u64,
}

impl Area {
    /// The address of `offset`.
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.bytes, "{offset} is outside {} bytes", self.bytes);
        self.base.wrapping_add(offset as usize)
    }

    /// The offset of an address inside the area.
    pub(super) fn offset_of(&self, address: *const u8, bytes: u64) -> Option<u64> {
        let offset = (address as usize).checked_sub(self.base as usize)? as u64;
        (offset.checked_add(bytes)? <= self.bytes).then_some(offset)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What goes behind a record's header.
pub(super) enum Body<'a> {
    /// u32 `[El]`.
    Counts(&'a [u32]),
    /// Why this rank refuses.
    Text(&'a str),
    Nothing,
}

/// An operation between its send and its receive.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    None,
    Dispatch(DispatchOp),
    Combine(CombineOp),
}

/// The planned kernel set: everything is allocated, operations only move bytes.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) rank: u32,
    pub(super) shape: Shape,
    pub(super) sizes: WindowSizes,
    pub(super) ids: Ids,
    link: Link,
    /// One of `TY_LEVEL_*`.
    level: u64,
    waiter: Waiter<'static>,
    largest_put: u64,
    pub(super) control: Area,
    pub(super) arena_area: Area,
    /// Every rank's arena and control window, where peers can be loaded from and stored to.
    pub(super) peers: Vec<[Area; 2]>,
    /// Totals expected so far, by signal id (INV-2: counted, never reset).
    expected: Vec<u64>,
    /// Commands of each slot that are not done (INV-4).
    outstanding: Vec<Cell<u32>>,
    /// Slots whose last operation peers have not yet said `Done` to, as far as this rank knows.
    pub(super) owed: Vec<bool>,
    pub(super) arena: Arena,
    pub(super) handles: Vec<HandleState>,
    pub(super) operations: Vec<Operation>,
    pub(super) gathered: Gathered,
    pub(super) scratch: RowScratch,
    pub(super) pool: Pool,
}

// SAFETY: the areas are mappings that live as long as the yard; the engine is used by one thread at a
// time (thread rule of the kernel set ABI).
unsafe impl Send for Engine {}

impl Engine {
    /// # Safety
    /// What the plan points to (but for the list of windows) outlives the engine.
    pub(super) unsafe fn new(
        shape: &KernelShape,
        sizes: WindowSizes,
        plan: &abi::TyPlan,
        pool: Pool,
    ) -> Result<Self> {
        let (raw, level) = if plan.scale_up.table.is_null() {
            (&plan.scale_out, abi::TY_LEVEL_SCALE_OUT)
        } else {
            (&plan.scale_up, abi::TY_LEVEL_SCALE_UP)
        };
        // SAFETY: by this function's contract; the host passes a judged table.
        let (link, board, windows) = unsafe {
            (
                Link::from_abi(raw)?,
                WaitBoard::from_abi(plan.board),
                std::slice::from_raw_parts(plan.windows, plan.window_count),
            )
        };
        let area = |id: u16| {
            windows.get(id as usize).map(|w| Area { base: w.pointer, bytes: w.bytes }).ok_or_else(
                || {
                    Error::new(
                        ErrorKind::Internal,
                        "plan kernels",
                        format!("window {id} is missing"),
                    )
                },
            )
        };
        let (control, arena_area) = (area(CONTROL)?, area(ARENA)?);
        let mut peers = Vec::new();
        if link.is_load_store() {
            for peer in 0..shape.ranks {
                let map = |window: u16, own: Area| -> Result<Area> {
                    Ok(Area { base: link.peer_address(window.into(), peer)?, bytes: own.bytes })
                };
                peers.push([map(CONTROL, control)?, map(ARENA, arena_area)?]);
            }
        }
        let moe = moe_shape(shape);
        let in_flight = shape.in_flight as usize;
        Ok(Self {
            rank: shape.rank,
            shape: moe,
            sizes,
            ids: Ids { ranks: shape.ranks, in_flight: shape.in_flight },
            link,
            level,
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            largest_put: link.capabilities().largest_put.min(super::windows::LARGEST_PUT),
            control,
            arena_area,
            peers,
            expected: vec![0; signals(shape.ranks, shape.in_flight) as usize],
            outstanding: vec![Cell::new(0); in_flight],
            owed: vec![false; in_flight],
            arena: Arena::new(sizes.arena_bytes),
            handles: (0..shape.handles).map(|_| HandleState::new(shape, &moe)).collect(),
            operations: vec![Operation::None; in_flight],
            gathered: Gathered::new(&moe),
            scratch: RowScratch::new(&moe),
            pool,
        })
    }

    /// Ranks, this one first: so that not all ranks turn to rank 0 at once.
    pub(super) fn rotation(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.rank, self.shape.ranks);
        (0..ranks).map(move |i| (rank + i) % ranks)
    }

    pub(super) fn slot(&self, operation: u64) -> usize {
        (operation % u64::from(self.ids.in_flight)) as usize
    }

    /// Whether rows are stored straight into peers' arenas.
    pub(super) fn stores(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Waits until everything that was posted for a slot is done.
    pub(super) fn wait_posted(&self, slot: usize, operation: u64) -> Result<()> {
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: self.rank,
            signal: 0,
            expected: 1,
            operation,
            level: self.level,
        };
        self.waiter.until(
            &what,
            || u64::from(self.outstanding[slot].get() == 0),
            || self.progress(),
        )
    }

    /// Waits until everything that was posted is done.
    pub(super) fn flush(&self) -> Result<()> {
        (0..self.outstanding.len()).try_for_each(|slot| self.wait_posted(slot, 0))
    }

    /// Waits until a peer has raised a signal `wait.add` more times than were waited for before.
    pub(super) fn wait(
        &mut self,
        signal: Signal,
        slot: usize,
        peer: u32,
        wait: Wait,
    ) -> Result<()> {
        let id = self.ids.id(signal, slot, peer);
        let expected = self.expected[id as usize].wrapping_add(wait.add);
        self.expected[id as usize] = expected;
        let what = WaitFor {
            phase: wait.phase,
            peer,
            signal: id,
            expected,
            operation: wait.operation,
            level: self.level,
        };
        self.waiter.until(&what, || self.link.read_signal(LANE, id), || self.progress())
    }

    /// Collects events; an error completion ends whatever waits (INV-7).
    fn progress(&self) -> Result<()> {
        let mut events = [NO_EVENT; 64];
        let count = self.link.poll(LANE, &mut events).map_err(|status| self.broken(status))?;
        for event in &events[..count] {
            match event.kind {
                abi::TY_EVENT_DONE => {
                    if let Some(count) = self.outstanding.get(event.tag as usize) {
                        count.set(count.get().saturating_sub(1));
                    }
                }
                _ => return Err(self.failed_command(event)),
            }
        }
        self.link.health()
    }

    #[cold]
    fn broken(&self, status: i32) -> Error {
        self.link.health().err().unwrap_or_else(|| {
            Error::new(
                ErrorKind::Transport,
                "use transport",
                format!("the transport failed with status {status} and gave no reason"),
            )
        })
    }

    #[cold]
    fn failed_command(&self, event: &Event) -> Error {
        let why = match self.link.health() {
            Err(error) => error.to_string(),
            Ok(()) => format!("status {}", event.status),
        };
        Error::new(
            ErrorKind::Transport,
            "complete command",
            format!("a command to rank {} failed: {why}", event.peer),
        )
        .with_rank(event.peer)
    }

    /// Posts one command of a slot; waits while the queue is full.
    pub(super) fn post(&self, slot: usize, command: &Command, operation: u64) -> Result<()> {
        let command = Command { flags: abi::TY_FLAG_NOTIFY, tag: slot as u64, ..*command };
        let try_post = || {
            // SAFETY: offsets were laid out inside the windows; sources stay until the slot is
            // entered again, which waits for `outstanding`; one thread drives this lane.
            unsafe { self.link.post(LANE, std::slice::from_ref(&command)) }
        };
        let accepted = try_post().map_err(|status| self.broken(status))?;
        let outstanding = &self.outstanding[slot];
        outstanding.set(outstanding.get() + 1);
        if accepted == 1 {
            return Ok(());
        }
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: command.peer,
            signal: command.signal,
            expected: 1,
            operation,
            level: self.level,
        };
        let status = Cell::new(0);
        self.waiter.until(
            &what,
            || match try_post() {
                Ok(n) => n as u64,
                Err(bad) => {
                    status.set(bad);
                    1
                }
            },
            || self.progress(),
        )?;
        if status.get() < 0 { Err(self.broken(status.get())) } else { Ok(()) }
    }

    /// Raises a signal of `peer` by `add`, in as many steps as its width demands.
    pub(super) fn raise(&self, signal: Signal, slot: usize, peer: u32, raise: Raise) -> Result<()> {
        let mut left = raise.add;
        while left > 0 {
            let add = left.min(0xffff);
            left -= add;
            let command = Command {
                op: abi::TY_OP_SIGNAL,
                peer,
                signal: self.ids.id(signal, slot, self.rank),
                add: add as u32,
                ..NO_COMMAND
            };
            self.post(slot, &command, raise.operation)?;
        }
        Ok(())
    }

    /// Puts `rows` rows of `width` bytes to `peer`; each piece raises `Rows` by its rows, because
    /// only a piece's own signal says that it is there (INV-1, INV-2).
    pub(super) fn put_rows(&self, slot: usize, block: &Block, operation: u64) -> Result<()> {
        let most = (self.largest_put / block.width).clamp(1, 0xffff);
        let mut done = 0;
        while done < block.rows {
            let rows = most.min(block.rows - done);
            let command = Command {
                op: abi::TY_OP_PUT_SIGNAL,
                peer: block.peer,
                signal: self.ids.id(Signal::Rows, slot, self.rank),
                add: rows as u32,
                src_window: block.src.0,
                src_offset: block.src.1 + done * block.width,
                dst_window: block.dst.0,
                dst_offset: block.dst.1 + done * block.width,
                bytes: rows * block.width,
                ..NO_COMMAND
            };
            self.post(slot, &command, operation)?;
            done += rows;
        }
        Ok(())
    }

    /// Sends a record to `peer`, in this rank's place there.
    pub(super) fn send_record(
        &self,
        signal: Signal,
        slot: usize,
        peer: u32,
        record: (Header, Body<'_>),
    ) -> Result<()> {
        let (mut header, body) = record;
        let spans = self.sizes.records;
        let span = if signal == Signal::Grant { spans.grants } else { spans.entries };
        let out = self.sizes.records_out(slot) + span.offset + spans.pitch * u64::from(peer);
        let target = self.control.at(out);
        // SAFETY: the record lies in this rank's own control window, in a part that only this rank
        // writes and no peer reads or writes; what was posted from it before is done (enter_slot).
        let used = unsafe {
            let payload = target.add(RECORD_HEADER as usize);
            let used = match body {
                Body::Counts(counts) => {
                    std::ptr::copy_nonoverlapping(
                        counts.as_ptr().cast(),
                        payload,
                        4 * counts.len(),
                    );
                    4 * counts.len() as u64
                }
                Body::Text(text) => {
                    let bytes = text.len().min(RECORD_TEXT as usize);
                    std::ptr::copy_nonoverlapping(text.as_ptr(), payload, bytes);
                    header.0[6] = bytes as u64;
                    bytes as u64
                }
                Body::Nothing => 0,
            };
            target.cast::<Header>().write(header);
            used
        };
        let command = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            peer,
            signal: self.ids.id(signal, slot, self.rank),
            add: 1,
            src_window: CONTROL,
            src_offset: out,
            dst_window: CONTROL,
            dst_offset: self.sizes.records_in(slot)
                + span.offset
                + spans.pitch * u64::from(self.rank),
            bytes: RECORD_HEADER + used,
            ..NO_COMMAND
        };
        self.post(slot, &command, header.operation())
    }

    /// Where the record of `peer` arrived. Read it only after its signal was seen.
    pub(super) fn record_from(&self, signal: Signal, slot: usize, peer: u32) -> *const u8 {
        let spans = self.sizes.records;
        let span = if signal == Signal::Grant { spans.grants } else { spans.entries };
        self.control.at(self.sizes.records_in(slot) + span.offset + spans.pitch * u64::from(peer))
    }
}

/// What a wait is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) operation: u64,
    /// How much the total must grow.
    pub(super) add: u64,
    /// One of `TY_PHASE_*`: decides which bound holds, and is told when it is over.
    pub(super) phase: u64,
}

/// How far a signal is raised, and for which operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raise {
    pub(super) operation: u64,
    pub(super) add: u64,
}

/// Consecutive rows that go to one peer: (window, offset) on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) peer: u32,
    pub(super) rows: u64,
    pub(super) width: u64,
    pub(super) src: (u16, u64),
    pub(super) dst: (u16, u64),
}
