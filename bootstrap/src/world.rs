//! The synchronous interface of the bootstrap.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::announcer::{Announcer, OnCall};
use super::control::{Bootstrap, Call, Farewell, LINGER, Member, Outcome, Request, Timing, serve};
use super::frame::MAX_PAYLOAD;
use super::hub::Hub;
use super::identity::{Identity, Launched, RankId};
use super::interface::{INTERFACE_VARIABLE, Local};
use super::liveness::Liveness;
use super::message::{
    Contribution, MAX_AGREED, MAX_TOPIC, Op, Start, encode, encode_items, items_bytes,
};
use super::rendezvous::{Entry, NextStep, enter};
use super::secret::{Secret, environment};
use super::spoke::{Route, Spoke};
use super::warnings::{ToRankZero, Waiting};
use crate::config::{OnFailure, WorldConfig};
use tokenyard_errors::{Error, ErrorKind, Result};

/// The shortest deadline that a busy machine can meet.
pub const MIN_DEADLINE: Duration = Duration::from_millis(100);
/// The longest deadline and lateness: a year.
pub const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Options of a join.
#[derive(Debug)]
pub struct WorldOptions {
    /// The identity of this rank, and the address of rank 0.
    pub identity: Identity,
    /// The secret by which a process proves that it belongs to the job. Must be equal on all ranks.
    pub secret: Secret,
    /// The longest silence of a live rank, [`MIN_DEADLINE`] to [`MAX_WAIT`]. Must be equal on all
    /// ranks.
    pub deadline: Duration,
    /// The longest that a live rank may take to join, or to arrive at a collective, up to
    /// [`MAX_WAIT`]. Must be equal on all ranks.
    pub late: Duration,
    /// The address at which rank 0 listens, if it is not the host of the identity: an address of one of
    /// its interfaces, or 0.0.0.0. Without a host (file, exchange) the default is 127.0.0.1. Other
    /// ranks take no more from it than the scope in which they reach a link-local address of rank 0. Its port is not
    /// used.
    pub bind: Option<SocketAddr>,
    /// The network interface to meet on, instead of `bind`: rank 0 listens at its address and at
    /// no other, the others connect from it. May differ between ranks.
    pub interface: Option<String>,
    /// The consequence of a loss. Must be equal on all ranks.
    pub on_failure: OnFailure,
    /// This process as its launcher counts, where that differs from the identity.
    pub launched: Launched,
    /// Called with what this rank announces, for a launcher: the other ranks may end in the same call.
    pub on_call: Option<OnCall>,
}

impl WorldOptions {
    /// Options with no secret, a deadline of 30 s and a lateness of 30 min.
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            secret: Secret::none(),
            deadline: Duration::from_secs(30),
            late: Duration::from_secs(30 * 60),
            bind: None,
            interface: None,
            on_failure: OnFailure::Stop,
            launched: Launched::default(),
            on_call: None,
        }
    }

    /// Options with the timing, the interface and the mode of `config`, and no secret. Where the config names no
    /// interface, the variable `TOKENYARD_INTERFACE` may.
    pub fn configured(config: &WorldConfig, identity: Identity) -> Self {
        Self {
            deadline: config.deadline,
            late: config.late,
            interface: config.interface.clone().or_else(interface_of_environment),
            on_failure: config.on_failure,
            ..Self::new(identity)
        }
    }
}

fn interface_of_environment() -> Option<String> {
    environment(INTERFACE_VARIABLE).filter(|name| !name.is_empty())
}

/// A collective under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// Its name.
    pub name: &'static str,
    /// Its topic.
    pub topic: String,
    /// The time for which this rank has been in it.
    pub since: Duration,
}

/// All ranks of a job, joined.
///
/// The collectives may be called from any thread, and run one at a time; all ranks must call the same
/// ones in the same order, with the same topics. Every call ends: with its result, or
/// - [`ErrorKind::PeerLost`]: a rank was lost or left. The world can no longer be used. Where losses
///   are masked (`on_failure`), this holds for the loss of rank 0 and of this rank only: collectives
///   continue without other lost ranks, whose items are empty.
/// - [`ErrorKind::Deadline`]: a live rank did not arrive within `late`. The error names it.
/// - [`ErrorKind::Mismatch`]: ranks called different collectives, or disagree. On every rank.
/// - [`ErrorKind::InvalidInput`]: an argument is too large or of the wrong length.
///
/// Dropping a world leaves it: call [`World::report_failure`] first if the reason is an error.
pub struct World {
    place: RankId,
    launched: Launched,
    timing: Timing,
    liveness: Arc<Liveness>,
    on_failure: OnFailure,
    /// True until the first admit: this rank knows the present ranks from its join alone.
    is_fresh: AtomicBool,
    start: Start,
    /// Held for the time of a collective.
    turn: Mutex<()>,
    under_way: Arc<CallUnderWay>,
    requests: UnboundedSender<Request>,
    farewells: UnboundedSender<Farewell>,
    warnings: Arc<Waiting>,
    on_call: Option<OnCall>,
    control: Mutex<Option<Control>>,
}

/// The collective that a rank is in.
#[derive(Default)]
pub struct CallUnderWay {
    call: Mutex<Option<(Op, String, Instant)>>,
    /// Number of collectives of the world that have succeeded, up to the last one that succeeded on
    /// this rank.
    ended: AtomicU64,
    /// Called for a failed collective before it returns.
    witnesses: Mutex<Vec<Weak<dyn Witness>>>,
}

/// An observer of failed collectives.
pub trait Witness: Send + Sync {
    /// A collective failed; the witness may add to its error.
    fn failed(&self, error: Error) -> Error;
}

/// Marks a collective that has not returned.
struct CallGuard<'a>(&'a CallUnderWay);

impl CallUnderWay {
    fn enter(&self, op: Op, topic: &str) -> CallGuard<'_> {
        *self.lock() = Some((op, topic.to_owned(), Instant::now()));
        CallGuard(self)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<(Op, String, Instant)>> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `witness` for every collective that fails from here on, while the witness lives.
    pub fn tell(&self, witness: Weak<dyn Witness>) {
        let mut witnesses = self.witnesses.lock().unwrap_or_else(PoisonError::into_inner);
        witnesses.retain(|known| known.strong_count() > 0);
        witnesses.push(witness);
    }

    /// The number of collectives of the world that have succeeded, as far as this rank has seen. All
    /// ranks count alike.
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// The collective under way, and its duration so far.
    pub fn read(&self) -> Option<Collective> {
        let call = self.lock();
        let (op, topic, since) = call.as_ref()?;
        Some(Collective { name: op.name(), topic: topic.clone(), since: since.elapsed() })
    }
}

impl CallGuard<'_> {
    #[cold]
    fn failed(&self, error: Error) -> Error {
        let witnesses = self.0.witnesses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        witnesses.iter().filter_map(Weak::upgrade).fold(error, |error, w| w.failed(error))
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

struct Control {
    thread: JoinHandle<()>,
    /// Disconnected when the thread ends.
    ended: Receiver<()>,
}

impl World {
    /// Joins: blocks until all ranks have joined, for `late` at most. A rank that waits for longer than 2
    /// s logs a warning that names the missing ranks, and again at growing intervals; see also
    /// [`joins_under_way`](super::joins_under_way).
    ///
    /// A world of one rank needs no rendezvous and opens no socket.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: the options are invalid, the interface does not exist, or there is no
    /// secret although other hosts can reach rank 0. [`ErrorKind::Deadline`]: a rank did not join; the error
    /// names it. [`ErrorKind::Mismatch`]: this rank is taken, or the ranks differ in size or timing.
    /// [`ErrorKind::Protocol`]: for `late`, only strangers answered at rank 0's address: another job,
    /// another secret or another version. [`ErrorKind::PeerLost`]: a rank that had joined was lost.
    /// [`ErrorKind::System`].
    pub fn join(options: WorldOptions) -> Result<Self> {
        let WorldOptions {
            identity,
            secret,
            deadline,
            late,
            bind,
            interface,
            on_failure,
            launched,
            on_call,
        } = options;
        let place = identity.place.new()?;
        if !(MIN_DEADLINE..=MAX_WAIT).contains(&deadline) || late > MAX_WAIT {
            let message = format!(
                "found a deadline of {deadline:?} and a lateness of {late:?}, expected a deadline of \
                 at least {MIN_DEADLINE:?} and both at most {MAX_WAIT:?}"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "join world", message));
        }
        tracing::info!(rank = place.rank, ranks = place.ranks, source = identity.source, "joining");
        let local = Local::new(bind, interface.as_deref())?;
        let Entry { next, local_rank, roster } = enter(identity, secret, local, launched)?;
        let place = RankId { local_rank, ..place };
        let timing = Timing { deadline, late };
        let liveness = Liveness::new(place.rank, place.ranks, on_failure).with_roster(roster);
        let liveness = Arc::new(liveness);
        let member = Member::new(place, timing, on_failure, Arc::clone(&liveness));
        let warnings = Arc::clone(&member.warnings);
        let (requests, request_queue) = unbounded_channel();
        let (farewells, farewell_queue) = unbounded_channel();
        let (joined, when_joined) = sync_channel(1);
        let (running, ended) = sync_channel(0);
        let thread = std::thread::Builder::new()
            .name(format!("tokenyard-{}", place.rank))
            .spawn(move || {
                let _running = running;
                let report = |result| drop(joined.send(result));
                run(next, member, request_queue, farewell_queue, report);
            })
            .map_err(|error| Error::system("join world", "cannot start a thread", error))?;
        let mut world = Self {
            place,
            launched,
            timing,
            liveness,
            on_failure,
            is_fresh: AtomicBool::new(true),
            start: Start::default(),
            turn: Mutex::new(()),
            under_way: Arc::default(),
            requests,
            farewells,
            warnings,
            on_call,
            control: Mutex::new(Some(Control { thread, ended })),
        };
        // The control thread enforces the limit; this one is for a control thread that broke.
        let limit = late.saturating_add(4 * deadline).saturating_add(10 * LINGER);
        match when_joined.recv_timeout(limit) {
            Ok(start) => world.start = start?,
            Err(_) => return Err(world.broken("join world")),
        }
        Ok(world)
    }

    /// Joins the world that `config` and the environment of this process describe: identity from
    /// `[world] bootstrap`, the secret from `TOKENYARD_SECRET` or `TOKENYARD_SECRET_FILE`.
    ///
    /// # Errors
    /// The errors of [`Identity::resolve`], [`Secret::from_env`] and [`World::join`].
    pub fn from_config(config: &WorldConfig) -> Result<Self> {
        let identity = Identity::resolve(&config.bootstrap, &environment)?;
        let secret = Secret::from_env(&environment)?;
        Self::join(WorldOptions { secret, ..WorldOptions::configured(config, identity) })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.place.rank
    }

    /// R: ranks in the world.
    pub fn ranks(&self) -> u32 {
        self.place.ranks
    }

    /// The index of this rank among those of its host.
    pub fn local_rank(&self) -> u32 {
        self.place.local_rank
    }

    /// The index of this process on its machine: that of its launcher, or else the local rank.
    pub fn machine_index(&self) -> u32 {
        self.launched.local_rank.unwrap_or(self.place.local_rank)
    }

    /// The state of all ranks. May be read from any thread at any time, also after the world has ended.
    pub fn liveness(&self) -> Arc<Liveness> {
        Arc::clone(&self.liveness)
    }

    /// Tells the other ranks what this one calls.
    pub fn announcer(&self) -> Announcer {
        Announcer::new(&self.requests, self.on_call)
    }

    /// The way of this rank's warnings to rank 0.
    pub fn warnings(&self) -> ToRankZero {
        ToRankZero::new(self.rank(), &self.warnings, self.liveness())
    }

    /// Sends `mine` to all ranks and returns the items of all, by rank. Items may differ in length;
    /// together they may have 64 MiB.
    ///
    /// # Errors
    /// See [`World`].
    pub fn all_gather(&self, topic: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.call(Op::AllGather, topic, mine.to_vec()).map(|outcome| outcome.items)
    }

    /// Sends `outgoing[r]` to rank r and returns the items for this rank, by sender. The items that one
    /// rank sends, and those that it receives, may each have 64 MiB in total.
    ///
    /// # Errors
    /// See [`World`]; [`ErrorKind::InvalidInput`] when `outgoing` has not one item per rank.
    pub fn exchange(&self, topic: &str, outgoing: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        if outgoing.len() != self.place.ranks as usize {
            let (found, ranks) = (outgoing.len(), self.place.ranks);
            let message = format!("{topic:?}: found {found} outgoing items, expected {ranks}");
            return Err(Error::new(ErrorKind::InvalidInput, Op::Exchange.name(), message));
        }
        check_size(Op::Exchange.name(), topic, items_bytes(outgoing.iter().map(Vec::len)))?;
        self.call(Op::Exchange, topic, encode_items(&outgoing)).map(|outcome| outcome.items)
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// See [`World`].
    pub fn barrier(&self, topic: &str) -> Result<()> {
        self.call(Op::Barrier, topic, Vec::new()).map(drop)
    }

    /// Checks that all ranks pass the same names and values in the same order.
    ///
    /// # Errors
    /// See [`World`]; [`ErrorKind::Mismatch`] on every rank names the items that differ, and the ranks
    /// of each value.
    pub fn agree(&self, topic: &str, items: &[(String, String)]) -> Result<()> {
        self.agree_on(topic, items).map(drop)
    }

    /// As [`agree`](Self::agree). Returns the number of the collective, which is the same on all ranks.
    pub(super) fn agree_on(&self, topic: &str, items: &[(String, String)]) -> Result<u64> {
        if items.len() > MAX_AGREED {
            let found = items.len();
            let message = format!("{topic:?}: found {found} values, expected at most {MAX_AGREED}");
            return Err(Error::new(ErrorKind::InvalidInput, Op::Agree.name(), message));
        }
        self.call(Op::Agree, topic, encode(items)).map(|outcome| outcome.round)
    }

    /// Takes part in the collective that the other ranks call now, or call next, with a refusal. Once all have come,
    /// it fails there with [`ErrorKind::Refused`], `rank 2 cannot {what}: {why}`, and here. The world goes on. Where
    /// a rank is lost, all know that.
    pub fn refuse(&self, what: &str, why: &Error) {
        let refused = self.call(Op::Refuse, what, why.to_string().into_bytes()).map(drop);
        tracing::debug!("refusing to {what}: {refused:?}");
    }

    /// Checks what a collective refuses before anything is sent: the others wait for this rank then. A caller that
    /// checks it first can [`refuse`](Self::refuse).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a topic or a number of bytes that cannot be.
    pub fn check_call(operation: &'static str, topic: &str, bytes: usize) -> Result<()> {
        if topic.is_empty() || topic.len() > MAX_TOPIC || topic.contains(char::is_control) {
            let message = format!(
                "found topic {topic:?}, expected 1 to {MAX_TOPIC} bytes without control characters"
            );
            return Err(Error::new(ErrorKind::InvalidInput, operation, message));
        }
        check_size(operation, topic, bytes)
    }

    /// Reports to the others that this rank ends because of an error, and leaves the world. They
    /// receive `why` (cut to about 500 bytes) at once: `rank 2 failed: ...`. A collective under way on
    /// another thread ends with [`ErrorKind::PeerLost`], and so does every later one. Returns within
    /// about half a second.
    pub fn report_failure(&self, why: &str) {
        self.end(Farewell::Failed(why.to_owned()));
    }

    /// Says goodbye and ends the control thread, within about half a second. Other ranks may leave
    /// earlier or later, but no collective succeeds once a rank has left.
    pub fn leave(self) {
        drop(self);
    }

    /// The collective that this rank is in, for reports.
    pub fn call_under_way(&self) -> Arc<CallUnderWay> {
        Arc::clone(&self.under_way)
    }

    /// The consequence of a loss in this world.
    pub fn on_failure(&self) -> OnFailure {
        self.on_failure
    }

    /// The start that the join gave, at the first call only.
    pub(super) fn take_start(&self) -> Option<&Start> {
        self.is_fresh.swap(false, Ordering::AcqRel).then_some(&self.start)
    }

    pub(super) fn call(&self, op: Op, topic: &str, data: Vec<u8>) -> Result<Outcome> {
        Self::check_call(op.name(), topic, data.len())?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let under_way = self.under_way.enter(op, topic);
        let outcome = self.collect(op, topic, data).map_err(|error| under_way.failed(error))?;
        self.under_way.ended.store(outcome.round + 1, Ordering::Relaxed);
        Ok(outcome)
    }

    fn collect(&self, op: Op, topic: &str, data: Vec<u8>) -> Result<Outcome> {
        let call = Call { op, topic: topic.to_owned(), data };
        let (reply, result) = sync_channel(1);
        if self.requests.send(Request::Collective { call, reply }).is_err() {
            return Err(self.broken(op.name()));
        }
        // The control thread enforces the limit; this one is for a control thread that broke.
        let limit = self.timing.late.saturating_add(4 * self.timing.deadline);
        match result.recv_timeout(limit.saturating_add(10 * LINGER)) {
            Ok(result) => result,
            Err(_) => Err(self.broken(op.name())),
        }
    }

    /// The error of a control thread that does not answer.
    fn broken(&self, operation: &'static str) -> Error {
        self.liveness.gone(operation).unwrap_or_else(|| {
            let message = "the control thread does not answer, expected it to run";
            Error::new(ErrorKind::Internal, operation, message)
        })
    }

    fn end(&self, farewell: Farewell) {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Control { thread, ended }) = control else { return };
        // First, so that calls that end because of it can report the reason.
        self.liveness.end(self.place.rank, farewell.end());
        // Fails only when the thread has ended by itself.
        let _ = self.farewells.send(farewell);
        // The thread lingers for half a second at most. A broken thread is left behind, not joined.
        let rank = self.place.rank;
        if ended.recv_timeout(5 * LINGER) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(rank, "the control thread does not end");
        } else if thread.join().is_err() {
            tracing::error!(rank, "the control thread panicked");
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end(Farewell::Goodbye);
    }
}

fn check_size(operation: &'static str, topic: &str, bytes: usize) -> Result<()> {
    let most = MAX_PAYLOAD - Contribution::OVERHEAD;
    if bytes <= most {
        return Ok(());
    }
    let message = format!("{topic:?}: found {bytes} bytes, expected at most {most}");
    Err(Error::new(ErrorKind::InvalidInput, operation, message))
}

/// The control thread.
fn run(
    next: NextStep,
    member: Member,
    requests: UnboundedReceiver<Request>,
    farewells: UnboundedReceiver<Farewell>,
    joined: impl FnOnce(Result<Start>),
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return joined(Err(Error::system("join world", "cannot start a runtime", error)));
        }
    };
    runtime.block_on(async {
        match bring_up(next, member).await {
            Ok(bootstrap) => {
                joined(Ok(bootstrap.start()));
                serve(bootstrap, requests, farewells).await;
            }
            Err(error) => joined(Err(error)),
        }
    });
    // A name look-up may still block a thread of its own; the shutdown does not wait for it.
    runtime.shutdown_background();
}

/// Joins in the role of this rank.
pub(super) async fn bring_up(next: NextStep, member: Member) -> Result<Bootstrap> {
    let waiting = Arc::clone(&member.waiting);
    let bootstrap = match next {
        NextStep::Alone => Bootstrap::Hub(Box::new(Hub::new(member))),
        NextStep::Hub { listener, credentials, notice, only_here } => {
            let mut hub = Hub::new(member);
            hub.only_here = only_here;
            hub.join(listener, credentials, notice).await?;
            Bootstrap::Hub(Box::new(hub))
        }
        NextStep::Spoke { target, credentials, local } => {
            let spoke = Spoke::join(member, &Route { target, local }, credentials).await?;
            Bootstrap::Spoke(Box::new(spoke))
        }
    };
    waiting.done();
    Ok(bootstrap)
}
