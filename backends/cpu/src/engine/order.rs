//! The order of operations, and the waits that keep it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokenyard_core::domains::Member;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::transport::{Event, NO_EVENT};
use tokenyard_core::wait::{WaitBoard, WaitFor, Waiter, reached};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::channel::{Channel, Team, queue_depth};
use crate::engine::control::{Ids, Signal};
use crate::engine::counters::{Counters, LevelPeer};
use crate::engine::ends::{End, Exposed};
use crate::engine::losses::Losses;
use crate::engine::outstanding::Outstanding;

/// The only queue: one thread drives a communicator.
pub(crate) const QUEUE: u32 = 0;

#[cold]
pub(crate) fn broken(channel: &Channel, status: i32) -> Error {
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
pub(crate) struct Wait {
    pub(crate) operation: u64,
    /// How much the total must grow.
    pub(crate) add: u64,
    /// One of `TY_PHASE_*`: decides which bound holds, and is reported when it is over.
    pub(crate) phase: u64,
    /// World rank that is most likely to be late.
    pub(crate) rank: u32,
}

impl Wait {
    fn what(&self, signal: u32, expected: u64, level: u64) -> WaitFor {
        let Self { operation, phase, rank: peer, .. } = *self;
        WaitFor { phase, peer, signal, expected, operation, level }
    }
}

/// The links of a communicator, and their state. A wait of one exchange collects the events of all exchanges.
#[derive(Debug)]
pub(crate) struct Traffic {
    /// By exchange: that with owners, then the rail.
    channels: Vec<Rc<Channel>>,
    waiter: Waiter<'static>,
    pub(crate) losses: Losses,
    outstanding: Outstanding,
    pub(crate) counters: Counters,
    ranks: u32,
}

impl Traffic {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives this.
    pub(crate) unsafe fn new<'a>(
        shape: &KernelShape,
        members: impl Iterator<Item = &'a Member>,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let KernelShape { ranks, domains, in_flight, .. } = *shape;
        // SAFETY: by this function's contract.
        let losses = unsafe { Losses::new(shape, plan) };
        let mut channels = Vec::new();
        for member in members {
            let is_up = member.level == abi::TY_LEVEL_SCALE_UP;
            let raw = if is_up { &plan.scale_up } else { &plan.scale_out };
            let ids = Ids { places: member.places(), in_flight };
            let team = Team { ranks: member.team, peers: member.peers(), losses: &losses };
            // SAFETY: by this function's contract; the host passes judged tables.
            channels.push(Rc::new(unsafe { Channel::new(raw, member.level, &team, ids)? }));
        }
        let slots = channels.len() * in_flight as usize;
        let depths = [&plan.scale_up, &plan.scale_out].map(|l| queue_depth(&l.capabilities));
        Ok(Self {
            channels,
            // SAFETY: by this function's contract.
            waiter: Waiter::new(
                unsafe { WaitBoard::from_abi(plan.board) },
                Duration::from_nanos(plan.cap_ns),
            ),
            losses,
            outstanding: Outstanding::new(slots, ranks as usize),
            counters: Counters::new(ranks, in_flight, domains, depths),
            ranks,
        })
    }
}

/// The order of an exchange's operations and of what they post: slots, outstanding commands, progress and signals.
#[derive(Debug)]
pub(crate) struct SlotOrder {
    pub(crate) member: Member,
    /// The channel to the peers of this exchange.
    pub(crate) channel: Rc<Channel>,
    traffic: Rc<Traffic>,
    /// The number of its first slot among those of all exchanges.
    first_slot: usize,
    /// By slot, how this rank left its last operation; none once all other ranks are known to have
    /// left it.
    pub(crate) ends: Vec<Option<End>>,
    /// The memory that the current operation exposes to its peers.
    pub(crate) exposed: Option<Exposed>,
}

impl SlotOrder {
    /// The order of the exchange with this number among those of the traffic.
    pub(crate) fn new(
        member: Member,
        traffic: &Rc<Traffic>,
        in_flight: u32,
        number: usize,
    ) -> Self {
        let slots = in_flight as usize;
        Self {
            member,
            channel: Rc::clone(&traffic.channels[number]),
            traffic: Rc::clone(traffic),
            first_slot: number * slots,
            ends: vec![None; slots],
            exposed: None,
        }
    }

    /// R.
    pub(crate) fn ranks(&self) -> u32 {
        self.traffic.ranks
    }

    pub(crate) fn waiter(&self) -> &Waiter<'static> {
        &self.traffic.waiter
    }

    pub(crate) fn losses(&self) -> &Losses {
        &self.traffic.losses
    }

    pub(crate) fn outstanding(&self) -> &Outstanding {
        &self.traffic.outstanding
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.traffic.counters
    }

    /// The load of a command of a slot to a world rank, so that its end is counted right.
    pub(crate) fn tag(&self, slot: usize, rank: u32) -> u64 {
        self.traffic.outstanding.tag(self.first_slot + slot, rank)
    }

    /// Waits until the row signal of a source has risen so often. Returns false if the source was
    /// given up.
    pub(crate) fn wait_rows(
        &self,
        slot: usize,
        source: u32,
        operation: u64,
        add: u64,
    ) -> Result<bool> {
        if add == 0 {
            return Ok(true);
        }
        let rank = self.member.forwarder(source);
        let wait = Wait { operation, add, phase: abi::TY_PHASE_ROWS, rank };
        self.wait(Signal::Rows, slot, source, wait)
    }

    pub(crate) fn slot(&self, operation: u64) -> usize {
        (operation % self.ends.len() as u64) as usize
    }

    /// Waits until all commands of a slot are done, and until every rank whose command failed is
    /// known to be lost. The wait is for the first rank whose command is not done.
    pub(crate) fn wait_posted(&self, slot: usize, operation: u64) -> Result<()> {
        let left = || self.outstanding().left(self.first_slot + slot, self.losses());
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: self.losses().suspected().or_else(left).unwrap_or(self.member.rank),
            signal: 0,
            expected: 1,
            operation,
            level: self.channel.level,
        };
        let is_done = || left().is_none() && self.losses().suspected().is_none();
        let waited = self.waiter().until(&what, || u64::from(is_done()), || self.progress());
        waited.map_err(|error| self.losses().explain(error))
    }

    /// Waits until everything that was posted is done.
    pub(crate) fn flush(&self) -> Result<()> {
        (0..self.ends.len()).try_for_each(|slot| self.wait_posted(slot, 0))
    }

    /// Whether a place counts no more: its source was given up, or the source's forwarder here was, or the
    /// forwarder reports the source as lost.
    pub(crate) fn is_gone(&self, source: u32) -> bool {
        self.losses().is_given_up(self.member.forwarder(source))
            || self.member.has_groups() && self.losses().is_gone(source)
    }

    /// Waits until the writer of a place has raised a signal `wait.add` more times than were waited for before.
    /// Returns false if the writer was given up. The writer may be the forwarder of `wait.rank`. It then
    /// reports itself if that rank is lost.
    pub(crate) fn wait(&self, signal: Signal, slot: usize, place: u32, wait: Wait) -> Result<bool> {
        let writer = self.member.forwarder(place);
        if self.losses().is_given_up(writer) {
            return Ok(false);
        }
        let (id, expected) = self.channel.expect(signal, slot, place, wait.add);
        let rank = if self.losses().is_lost(wait.rank) { writer } else { wait.rank };
        let what = Wait { rank, ..wait }.what(id, expected, self.channel.level);
        self.until(what, Wait { rank: writer, ..wait })
    }

    /// Whether the signal rose so far. If not, its writer, which is `wait.rank`, is lost and given
    /// up.
    fn until(&self, what: WaitFor, wait: Wait) -> Result<bool> {
        let Wait { rank: writer, add, .. } = wait;
        let at = LevelPeer { level: self.channel.level, rank: writer };
        self.counters().expects(at, add);
        let gone = Cell::new(false);
        let read = || {
            // The order of these two checks matters: signals that a rank had raised before its loss
            // was known count.
            let is_lost = self.losses().is_lost(writer);
            let found = self.channel.link.read_signal(QUEUE, what.signal);
            gone.set(is_lost && !reached(found, what.expected));
            if gone.get() { what.expected } else { found }
        };
        let waited = self.waiter().until(&what, read, || self.progress());
        waited.map_err(|error| self.losses().explain(error))?;
        if gone.get() {
            self.losses().give_up(writer);
        } else {
            self.counters().received(at, add);
        }
        Ok(!gone.get())
    }

    /// Collects events of all links; an error completion ends whatever waits (INV-7).
    pub(crate) fn progress(&self) -> Result<()> {
        self.traffic.channels.iter().try_for_each(|channel| self.traffic.collect(channel))
    }

    /// Whether rows come over a rail and losses are masked. Then not every rank receives from every other.
    pub(crate) fn masks_domains(&self) -> bool {
        self.member.has_groups() && self.losses().are_masked()
    }
}

impl Traffic {
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
            Some(rank) if rank < self.ranks => self.losses.suspect(rank, error),
            _ => Err(error),
        }
    }
}
