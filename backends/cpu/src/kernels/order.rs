//! The order of operations, and the waits that keep it.

use std::cell::Cell;
use std::time::Duration;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::transport::{Event, NO_EVENT};
use tokenyard_core::wait::{WaitBoard, WaitFor, Waiter, reached};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::channel::{Channel, Team, no_rail, queue_depth};
use super::control::{Ids, Signal};
use super::counters::{Counters, LevelPeer};
use super::losses::Losses;
use super::operation::{End, Exposed, Operation};
use super::outstanding::Outstanding;
use super::world::World;

/// The only queue: one thread drives a communicator.
pub(super) const QUEUE: u32 = 0;

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

/// The context of a wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) operation: u64,
    /// How much the total must grow.
    pub(super) add: u64,
    /// One of `TY_PHASE_*`: decides which bound holds, and is reported when it is over.
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

/// The order of operations and of what they post: slots, queues, outstanding commands, progress and
/// signals.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) world: World,
    /// The channel to the peers of this rank's domain.
    pub(super) channel: Channel,
    /// The channel to the other domains; none where there is one domain.
    pub(super) rail: Option<Channel>,
    pub(super) waiter: Waiter<'static>,
    pub(super) losses: Losses,
    pub(super) outstanding: Outstanding,
    pub(super) counters: Counters,
    pub(super) operations: Vec<Operation>,
    /// By slot, how this rank left its last operation; none once all others are known to have left.
    pub(super) ends: Vec<Option<End>>,
    /// The memory that the current operation exposes to its peers.
    pub(super) exposed: Option<Exposed>,
    /// The slot whose operation this rank still has to serve as a forwarder.
    pub(super) pending_forward: Option<usize>,
}

/// The link to the other domains, where there are any.
///
/// # Safety
/// As [`Channel::new`].
unsafe fn rail_channel(
    world: &World,
    in_flight: u32,
    plan: &abi::TyPlan,
    losses: &Losses,
) -> Result<Option<Channel>> {
    let domains = &world.domains;
    if domains.count == 1 {
        return Ok(None);
    }
    let ids = Ids { places: domains.count, in_flight };
    let level = abi::TY_LEVEL_SCALE_OUT;
    let team = Team { first: domains.index, step: domains.size, peers: domains.count, losses };
    // SAFETY: by this function's contract.
    unsafe { Channel::new(&plan.scale_out, level, &team, ids).map(Some) }
}

impl Order {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives this.
    pub(super) unsafe fn new(
        world: World,
        shape: &KernelShape,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let (raw, level) = if plan.scale_up.table.is_null() {
            (&plan.scale_out, abi::TY_LEVEL_SCALE_OUT)
        } else {
            (&plan.scale_up, abi::TY_LEVEL_SCALE_UP)
        };
        let KernelShape { ranks, in_flight, .. } = *shape;
        let ids = Ids { places: ranks, in_flight };
        // SAFETY: by this function's contract.
        let losses = unsafe { Losses::new(shape, plan) };
        let first = world.domains.place(world.domains.mine, 0);
        let team = Team { first, step: 1, peers: world.domains.size, losses: &losses };
        // SAFETY: by this function's contract; the host passes judged tables.
        let (channel, rail, board) = unsafe {
            (
                Channel::new(raw, level, &team, ids)?,
                rail_channel(&world, in_flight, plan, &losses)?,
                WaitBoard::from_abi(plan.board),
            )
        };
        let slots = in_flight as usize;
        Ok(Self {
            world,
            channel,
            rail,
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            losses,
            outstanding: Outstanding::new(slots, ranks as usize),
            counters: Counters::new(
                ranks,
                in_flight,
                world.domains.count,
                [&plan.scale_up, &plan.scale_out].map(|l| queue_depth(&l.capabilities)),
            ),
            operations: vec![Operation::None; slots],
            ends: vec![None; slots],
            exposed: None,
            pending_forward: None,
        })
    }

    /// Waits until the row signal of a source has risen so often. Says whether it has: not so where
    /// the source was given up.
    pub(super) fn wait_rows(
        &mut self,
        slot: usize,
        source: u32,
        operation: u64,
        add: u64,
    ) -> Result<bool> {
        if add == 0 {
            return Ok(true);
        }
        // Sources send before any rank receives; a forwarder hands on when it receives.
        let rank =
            self.world.domains.place(self.world.domains.mine, source % self.world.domains.size);
        let wait = Wait { operation, add, phase: abi::TY_PHASE_ROWS, rank };
        self.wait(Signal::Rows, slot, source, wait)
    }

    pub(super) fn slot(&self, operation: u64) -> usize {
        (operation % self.operations.len() as u64) as usize
    }

    /// Waits until everything that was posted for a slot is done, and it is known of all whose
    /// commands failed that they are lost.
    pub(super) fn wait_posted(&self, slot: usize, operation: u64) -> Result<()> {
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: self.losses.suspected().unwrap_or(self.world.rank),
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
        self.losses.is_given_up(self.world.domains.forwarder(source)) || self.losses.is_gone(source)
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
        let writer = self.world.domains.forwarder(place);
        if self.losses.is_given_up(writer) {
            return Ok(false);
        }
        let (id, expected) = self.channel.expect(signal, slot, place, wait.add);
        let rank = if self.losses.is_lost(wait.rank) { writer } else { wait.rank };
        let what = Wait { rank, ..wait }.what(id, expected, self.channel.level);
        self.until(&self.channel, what, Wait { rank: writer, ..wait })
    }

    /// As [`wait`](Self::wait), for the rail's rank in `domain`, which is `wait.rank`.
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
        let (id, expected) = rail.expect(signal, slot, domain, wait.add);
        let what = wait.what(id, expected, rail.level);
        match &self.rail {
            Some(rail) => self.until(rail, what, wait),
            None => Err(no_rail()),
        }
    }

    /// Whether the signal rose so far; else its writer, which is `wait.rank`, is lost, and given up.
    fn until(&self, channel: &Channel, what: WaitFor, wait: Wait) -> Result<bool> {
        let Wait { rank: writer, add, .. } = wait;
        let at = LevelPeer { level: channel.level, rank: writer };
        self.counters.expects(at, add);
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
            self.counters.received(at, add);
        }
        Ok(!gone.get())
    }

    /// Collects events of both links; an error completion ends whatever waits (INV-7).
    pub(super) fn progress(&self) -> Result<()> {
        self.collect(&self.channel)?;
        self.rail.as_ref().map_or(Ok(()), |rail| self.collect(rail))
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
                self.counters.done(LevelPeer { level: channel.level, rank });
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
    fn blame(&self, error: Error) -> Result<()> {
        match error.rank() {
            Some(rank) if rank < self.world.shape.ranks => self.losses.suspect(rank, error),
            _ => Err(error),
        }
    }

    /// Whether there are several domains, and losses are masked: then not every rank receives from every other.
    pub(super) fn masks_domains(&self) -> bool {
        self.rail.is_some() && self.losses.are_masked()
    }
}
