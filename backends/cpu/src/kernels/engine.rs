use std::cell::Cell;
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::{Arena, Shape};
use tokenyard_core::transport::{Event, NO_EVENT, Window};
use tokenyard_core::wait::{WaitBoard, WaitFor, Waiter, reached};
use tokenyard_core::{Error, ErrorKind, Result};

use super::agree::{Agreed, Gathered};
use super::channel::{Channel, Team};
use super::combine::CombineOp;
use super::control::{Ids, Signal};
use super::counters::{Counters, Way};
use super::dispatch::DispatchOp;
use super::domains::Domains;
use super::handle::HandleState;
use super::losses::Losses;
use super::moe_shape;
use super::outstanding::Outstanding;
use super::rail::{Rail, no_rail};
use super::rows::RowScratch;
use super::slots::{End, Exposed};
use super::sums::Partial;
use super::windows::{ARENA, CONTROL, WindowSizes};
use crate::pool::Pool;

/// The only queue: one thread drives a communicator.
pub(super) const QUEUE: u32 = 0;

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
    pub(super) domains: Domains,
    /// The shape of this rank's domain: its ranks, and their experts.
    pub(super) inside: Shape,
    pub(super) sizes: WindowSizes,
    /// To the peers of this rank's domain.
    pub(super) channel: Channel,
    /// To the other domains; none where there is one domain.
    pub(super) rail: Option<Rail>,
    pub(super) waiter: Waiter<'static>,
    pub(super) control: Area,
    pub(super) arena_area: Area,
    /// Every peer's control window and arena, where peers can be loaded from and stored to.
    pub(super) peers: Vec<[Area; 2]>,
    pub(super) losses: Losses,
    pub(super) outstanding: Outstanding,
    pub(super) counters: Counters,
    /// By slot, how this rank left its last operation; none once all others are known to have left.
    pub(super) ends: Vec<Option<End>>,
    /// By slot, the first refusal that all have agreed on, where that was found out before the operation
    /// is received: a packed dispatch whose entries were heard.
    pub(super) agreed: Vec<Option<Agreed>>,
    /// Of the operation that is being entered or received.
    pub(super) exposed: Option<Exposed>,
    pub(super) arena: Arena,
    pub(super) handles: Vec<HandleState>,
    pub(super) operations: Vec<Operation>,
    /// The slot whose operation this rank still has to serve as a forwarder.
    pub(super) pending_forward: Option<usize>,
    pub(super) gathered: Gathered,
    /// `[R]`: where combine finds the partial rows of each place.
    pub(super) partials: Vec<Partial>,
    pub(super) scratch: RowScratch,
    pub(super) pool: Pool,
}

// SAFETY: the areas are mappings that live as long as the communicator; the engine is used by one thread at a
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
        let (moe, domains) = (moe_shape(shape), Domains::new(shape));
        let ids = Ids { places: shape.ranks, in_flight: shape.in_flight };
        // SAFETY: by this function's contract.
        let losses = unsafe { Losses::new(shape, plan) };
        let first = domains.place(domains.mine, 0);
        let team = Team { first, step: 1, peers: domains.size, losses: &losses };
        // SAFETY: by this function's contract; the host passes judged tables.
        let (channel, rail, board, windows) = unsafe {
            (
                Channel::new(raw, level, &team, ids)?,
                Rail::new(shape, &domains, (plan, &losses))?,
                WaitBoard::from_abi(plan.board),
                std::slice::from_raw_parts(plan.windows, plan.window_count),
            )
        };
        let control = own_area(windows, CONTROL)?;
        let arena_area = own_area(windows, ARENA)?;
        let in_flight = shape.in_flight as usize;
        Ok(Self {
            rank: shape.rank,
            shape: moe,
            domains,
            inside: domains.inside(&moe),
            sizes,
            peers: map_peers(&channel, domains.size, [control, arena_area])?,
            channel,
            rail,
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            control,
            arena_area,
            losses,
            outstanding: Outstanding::new(in_flight, shape.ranks as usize),
            counters: Counters::new(
                shape.ranks,
                (shape.in_flight, domains.count),
                [&plan.scale_up, &plan.scale_out].map(|l| super::queue_depth(&l.capabilities)),
            ),
            ends: vec![None; in_flight],
            agreed: vec![None; in_flight],
            exposed: None,
            arena: Arena::new(sizes.arena_bytes, "[kernels.cpu] arena_mib"),
            handles: (0..shape.handles).map(|_| HandleState::new(&moe, &domains)).collect(),
            operations: vec![Operation::None; in_flight],
            pending_forward: None,
            gathered: Gathered::new(&moe),
            partials: vec![Partial::default(); shape.ranks as usize],
            scratch: RowScratch::new(&moe, &domains.inside(&moe)),
            pool,
        })
    }

    pub(super) fn slot(&self, operation: u64) -> usize {
        (operation % self.operations.len() as u64) as usize
    }

    /// Whether rows are stored straight into the arenas of this rank's domain.
    pub(super) fn stores(&self) -> bool {
        !self.peers.is_empty()
    }

    /// Waits until everything that was posted for a slot is done, and it is known of all whose
    /// commands failed that they are lost.
    pub(super) fn wait_posted(&self, slot: usize, operation: u64) -> Result<()> {
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: self.losses.suspected().unwrap_or(self.rank),
            signal: 0,
            expected: 1,
            operation,
            level: self.channel.level,
        };
        let is_done =
            || self.outstanding.is_done(slot, &self.losses) && self.losses.suspected().is_none();
        let waited = self.waiter.until(&what, || u64::from(is_done()), || self.progress());
        waited.map_err(|error| self.losses.explain(error))
    }

    /// Waits until everything that was posted is done.
    pub(super) fn flush(&self) -> Result<()> {
        (0..self.operations.len()).try_for_each(|slot| self.wait_posted(slot, 0))
    }

    /// Whether nothing of a source counts any more: it was given up, or its forwarder here, or that one
    /// says that it is lost.
    pub(super) fn is_gone(&self, source: u32) -> bool {
        self.losses.is_given_up(self.domains.forwarder(source)) || self.losses.is_gone(source)
    }

    /// Waits until the writer of a place in this domain has raised a signal `wait.add` more times
    /// than were waited for before. Says whether it has: not so where the writer was given up. It
    /// may be the forwarder of `wait.rank`, and then has to say so itself if that one is lost.
    pub(super) fn wait(
        &mut self,
        signal: Signal,
        slot: usize,
        place: u32,
        wait: Wait,
    ) -> Result<bool> {
        let writer = self.domains.forwarder(place);
        if self.losses.is_given_up(writer) {
            return Ok(false);
        }
        let (id, expected) = self.channel.expect(signal, slot, place, wait.add);
        let rank = if self.losses.is_lost(wait.rank) { writer } else { wait.rank };
        let what = Wait { rank, ..wait }.what(id, expected, self.channel.level);
        self.until(&self.channel, what, (writer, wait.add))
    }

    /// The same for the rail's rank in `domain`, which is `wait.rank`.
    pub(super) fn wait_rail(
        &mut self,
        signal: Signal,
        slot: usize,
        domain: u32,
        wait: Wait,
    ) -> Result<bool> {
        if self.losses.is_given_up(wait.rank) {
            return Ok(false);
        }
        let Some(rail) = &mut self.rail else { return Err(no_rail()) };
        let (id, expected) = rail.channel.expect(signal, slot, domain, wait.add);
        let level = rail.channel.level;
        match &self.rail {
            Some(rail) => {
                let what = wait.what(id, expected, level);
                self.until(&rail.channel, what, (wait.rank, wait.add))
            }
            None => Err(no_rail()),
        }
    }

    /// Whether the signal rose so far; else its writer is lost, and given up.
    fn until(&self, channel: &Channel, what: WaitFor, (writer, add): (u32, u64)) -> Result<bool> {
        let way = Way { level: channel.level, rank: writer };
        self.counters.expects(way, add);
        let gone = Cell::new(false);
        let read = || {
            // In this order: what a rank had raised before its loss was known counts.
            let is_lost = self.losses.is_lost(writer);
            let found = channel.link.read_signal(QUEUE, what.signal);
            gone.set(is_lost && !reached(found, what.expected));
            if gone.get() { what.expected } else { found }
        };
        let waited = self.waiter.until(&what, read, || self.progress());
        waited.map_err(|error| self.losses.explain(error))?;
        if gone.get() {
            self.losses.give_up(writer);
        } else {
            self.counters.received(way, add);
        }
        Ok(!gone.get())
    }

    /// Collects events of both links; an error completion ends whatever waits (INV-7).
    pub(super) fn progress(&self) -> Result<()> {
        self.collect(&self.channel)?;
        self.rail.as_ref().map_or(Ok(()), |rail| self.collect(&rail.channel))
    }

    fn collect(&self, channel: &Channel) -> Result<()> {
        let mut events = [NO_EVENT; 64];
        let count = match channel.link.poll(QUEUE, &mut events) {
            Ok(count) => count,
            Err(status) => {
                self.blame(broken(channel, status))?;
                0
            }
        };
        for event in &events[..count] {
            self.outstanding.done(event.tag);
            if let Some(rank) = self.outstanding.rank_of(event.tag) {
                self.counters.done(Way { level: channel.level, rank });
            }
            if event.kind != abi::TY_EVENT_DONE {
                self.blame(failed_command(channel, event))?;
            }
        }
        if self.losses.rests_from_health() {
            return Ok(());
        }
        channel.link.health().or_else(|error| {
            self.losses.rest_from_health();
            self.blame(error)
        })
    }

    /// A failure of the link to one rank is no error where that rank is lost.
    #[cold]
    pub(super) fn blame(&self, error: Error) -> Result<()> {
        match error.rank() {
            Some(rank) if rank < self.shape.ranks => self.losses.suspect(rank, error),
            _ => Err(error),
        }
    }
}

fn own_area(windows: &[Window], id: u16) -> Result<Area> {
    windows.get(id as usize).map(|w| Area { base: w.pointer, bytes: w.bytes }).ok_or_else(|| {
        Error::new(ErrorKind::Internal, "plan kernels", format!("window {id} is missing"))
    })
}

/// Where the windows of the peers are mapped; nothing where they cannot be.
fn map_peers(channel: &Channel, peers: u32, own: [Area; 2]) -> Result<Vec<[Area; 2]>> {
    if !channel.link.is_load_store() {
        return Ok(Vec::new());
    }
    let map = |window: u16, peer: u32| -> Result<Area> {
        // An absent rank is never written to.
        let Some(number) = channel.number_of(peer) else {
            return Ok(Area { base: std::ptr::null_mut(), bytes: 0 });
        };
        let base = channel.link.peer_address(window.into(), number)?;
        Ok(Area { base, bytes: own[usize::from(window)].bytes })
    };
    (0..peers).map(|peer| Ok([map(CONTROL, peer)?, map(ARENA, peer)?])).collect()
}

#[cold]
pub(super) fn broken(channel: &Channel, status: i32) -> Error {
    channel.link.health().err().unwrap_or_else(|| {
        Error::new(
            ErrorKind::Transport,
            "use transport",
            format!("the transport failed with status {status} and gave no reason"),
        )
    })
}

#[cold]
fn failed_command(channel: &Channel, event: &Event) -> Error {
    let rank = channel.rank_behind(event.peer);
    let why = match channel.health_of(rank) {
        Some(error) => error.to_string(),
        None => format!("status {}", event.status),
    };
    Error::new(
        ErrorKind::Transport,
        "complete command",
        format!("a command to rank {rank} failed: {why}"),
    )
    .with_rank(rank)
}

/// What a wait is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) operation: u64,
    /// How much the total must grow.
    pub(super) add: u64,
    /// One of `TY_PHASE_*`: decides which bound holds, and is told when it is over.
    pub(super) phase: u64,
    /// World rank that is most likely to be late.
    pub(super) rank: u32,
}

impl Wait {
    fn what(&self, signal: u32, expected: u64, level: u64) -> WaitFor {
        let Self { operation, phase, rank: peer, .. } = *self;
        WaitFor { phase, peer, signal, expected, operation, level }
    }
}
