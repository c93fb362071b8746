//! Rank 0: the connections of all ranks, every collective, and the state of each rank.
//!
//! Where losses are masked, the door stays open: a process may come back as a rank that ended. It waits,
//! and sends heartbeats like every rank, until an admit round lets it in.

mod admission;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::announcer::with_call;
use super::control::{
    Call, Farewell, LINGER, Look, Member, Outcome, Ticker, describe_silence, result_of,
};
use super::door::Door;
use super::frame::{FrameKind, ReceivedFrame};
use super::handshake::{Claim, Credentials};
use super::headway::{Begun, least};
use super::link::{ControlLink, Event, What};
use super::liveness::PeerState;
use super::loopback::OnlyHere;
use super::message::{
    Ask, Beat, Contribution, End, Missing, Op, Refusal, Start, Warning, decode, decode_reason,
    encode, encode_reason,
};
use super::rendezvous::Notice;
use super::rounds::{Delivery, Rounds};
use super::text::name_ranks;
use super::warnings;
use crate::config::OnFailure;
use tokenyard_errors::{Error, ErrorKind, Result};

/// The interval at which rank 0 reports the missing ranks to the ranks that have joined.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// The centre of the star of connections.
pub(super) struct Hub {
    member: Member,
    peers: Vec<Option<JoinedRank>>,
    events: mpsc::Receiver<Event>,
    /// The sender that readers of later links get a copy of.
    event_sender: mpsc::Sender<Event>,
    /// Connections so far.
    links: u64,
    /// Processes that wait to come back, by rank.
    returning: BTreeMap<u32, JoinedRank>,
    /// Open while processes may join.
    door: Option<Door>,
    /// Publishes the address of the door while the door is open.
    notice: Option<Notice>,
    /// Whether all ranks have joined.
    started: bool,
    /// Ranks that reported that they receive nothing from rank 0 any more, where losses are masked.
    gave_up: BTreeSet<u32>,
    ticker: Ticker,
    rounds: Rounds,
    /// Collectives that this rank has begun.
    begun: u64,
    /// This rank's own result.
    mine: Option<Delivery>,
    /// The first process of this job that differs from rank 0: because of it no rank joins.
    difference: Option<Difference>,
    /// Why ranks on other hosts cannot join.
    pub(super) only_here: Option<OnlyHere>,
}

/// A process that expects a different world than rank 0.
struct Difference {
    rank: u32,
    text: String,
    since: Instant,
}

struct JoinedRank {
    link: ControlLink,
    id: u64,
    /// The process, as text for display.
    name: String,
    /// The operations that it has begun.
    begun: Begun,
    /// The call that it has announced.
    call: String,
}

impl Hub {
    /// A hub without members.
    pub(super) fn new(member: Member) -> Self {
        let ranks = member.place.ranks;
        let (event_sender, events) = mpsc::channel(64);
        Self {
            peers: (0..ranks).map(|_| None).collect(),
            events,
            event_sender,
            links: 0,
            returning: BTreeMap::new(),
            door: None,
            notice: None,
            started: false,
            gave_up: BTreeSet::new(),
            ticker: Ticker::new(member.timing, member.on_failure),
            rounds: Rounds::new(ranks, member.timing.late),
            begun: 0,
            mine: None,
            difference: None,
            only_here: None,
            member,
        }
    }

    /// Waits until all ranks have joined, for the timing's `late` at most.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`] names the ranks that did not join, on all ranks that did;
    /// [`ErrorKind::PeerLost`] when a rank that had joined is lost.
    pub(super) async fn join(
        &mut self,
        listener: std::net::TcpListener,
        credentials: Credentials,
        notice: Option<Notice>,
    ) -> Result<()> {
        let started = Instant::now();
        self.door = Some(Door::open(listener, credentials, self.member.place.ranks)?);
        self.notice = notice;
        let gathered = self.gather(started).await;
        if gathered.is_err() {
            self.leave(Farewell::Goodbye).await;
            return gathered;
        }
        if self.member.on_failure == OnFailure::Stop {
            self.close_door().await;
        }
        self.started = true;
        let start = Arc::new(encode(&Start::default()));
        for rank in 1..self.member.place.ranks {
            self.send(rank, FrameKind::Start, Arc::clone(&start));
        }
        tracing::info!(ranks = self.member.place.ranks, took = ?started.elapsed(), "all joined");
        Ok(())
    }

    async fn close_door(&mut self) {
        if let Some(door) = self.door.take() {
            door.close().await;
        }
        self.notice = None;
    }

    async fn gather(&mut self, started: Instant) -> Result<()> {
        let mut word = tokio::time::interval(TELL_EVERY);
        loop {
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            tokio::select! {
                () = self.step() => {}
                _ = word.tick() => self.report_missing(&missing),
            }
            // No loss is masked before the world has been whole once.
            if let Some(error) = self.member.liveness.any_gone("join world") {
                return Err(error);
            }
            if let Some(error) = self.give_up_over_difference() {
                return Err(error);
            }
            if started.elapsed() > self.member.timing.late {
                return Err(self.give_up(&missing));
            }
        }
    }

    /// Reports the ranks that have not joined: in this process, and to the ranks that have.
    fn report_missing(&self, missing: &[u32]) {
        let what = format!("{} did not join yet{}", name_ranks(missing), self.hindrances());
        self.member.waiting.waits_for(what);
        let payload = Arc::new(Missing::new(missing).encode());
        for rank in 1..self.member.place.ranks {
            self.send(rank, FrameKind::Missing, Arc::clone(&payload));
        }
    }

    /// The reasons why ranks may be missing, as text that follows them: strangers block the door, or it opens to this
    /// host alone.
    fn hindrances(&self) -> String {
        let pressure = self.door.as_ref().and_then(Door::pressure);
        let only_here = self.only_here.map(|only_here| only_here.to_string());
        pressure.into_iter().chain(only_here).map(|why| format!("; {why}")).collect()
    }

    fn missing(&self) -> Vec<u32> {
        (0u32..).zip(&self.peers).skip(1).filter(|(_, p)| p.is_none()).map(|(r, _)| r).collect()
    }

    /// Ends the join because a rank differs. It waits until the other ranks have joined, so that all receive
    /// the reason, but not longer than a deadline.
    fn give_up_over_difference(&mut self) -> Option<Error> {
        let Difference { rank, text, since } = self.difference.as_ref()?;
        let others_came = self.missing() == [*rank];
        if !others_came && since.elapsed() < self.member.timing.deadline {
            return None;
        }
        let text = text.clone();
        self.refuse_all(Refusal::Differ, &text);
        Some(Error::new(ErrorKind::Mismatch, "join world", text))
    }

    /// Reports the missing ranks to the ranks that joined.
    fn give_up(&mut self, missing: &[u32]) -> Error {
        let text = format!(
            "{} did not join within {:.1} s, expected all {} ranks{}{}",
            name_ranks(missing),
            self.member.timing.late.as_secs_f64(),
            self.member.place.ranks,
            self.member.liveness.list(missing),
            self.hindrances()
        );
        self.refuse_all(Refusal::Late, &text);
        let other = self.only_here.map(|only_here| format!("; {}", only_here.fix()));
        Error::new(ErrorKind::Deadline, "join world", text).with_fix(format!(
            "read the logs of the missing ranks: did they start, do they reach this host?{}",
            other.unwrap_or_default()
        ))
    }

    fn refuse_all(&mut self, refusal: Refusal, text: &str) {
        let payload = Arc::new(refusal.encode(text));
        for rank in 1..self.member.place.ranks {
            self.send(rank, FrameKind::Refused, Arc::clone(&payload));
        }
    }

    /// Handles one event or one look. May be dropped while it waits.
    async fn step(&mut self) {
        tokio::select! {
            Some(event) = self.events.recv() => self.on_event(event),
            Some(claim) = next_claim(&mut self.door) => self.admit(claim),
            look = self.ticker.tick() => self.on_look(look),
        }
    }

    fn on_event(&mut self, Event { peer, link, what }: Event) {
        if self.is_over() {
            return;
        }
        if self.returning.get(&peer).is_some_and(|waiting| waiting.id == link) {
            return self.on_returning(peer, what);
        }
        let current = self.peers.get(peer as usize).and_then(Option::as_ref);
        if current.is_none_or(|current| current.id != link) {
            // The event belongs to a former life of the rank.
            return;
        }
        if *self.member.liveness.state(peer) != PeerState::Alive {
            // A rank that judged rank 0's silence right after a stop of rank 0 may still report it.
            let gave_up = matches!(&what, What::Frame(frame) if frame.kind == FrameKind::GaveUp);
            if !gave_up || !self.ticker.stalled_lately() {
                return;
            }
        }
        let result = match what {
            What::Frame(received) => self.on_frame(peer, received),
            What::Closed(why) => {
                let joined = self.peers.get(peer as usize).and_then(Option::as_ref);
                let why = with_call(why, joined.map_or("", |joined| &joined.call));
                self.depart(peer, End::Lost(why));
                Ok(())
            }
        };
        if let Err(error) = result {
            self.depart(peer, End::Lost(format!("broke the protocol: {error}")));
        }
    }

    fn on_frame(
        &mut self,
        peer: u32,
        ReceivedFrame { kind, payload }: ReceivedFrame,
    ) -> Result<()> {
        match kind {
            FrameKind::Contribution => {
                let part: Contribution = decode(&payload)?;
                self.contribute(peer, part)?;
            }
            FrameKind::Goodbye => self.depart(peer, End::Left),
            FrameKind::Failed => {
                let why = format!("failed: {}", decode_reason(&payload)?);
                self.depart(peer, End::Lost(why));
            }
            FrameKind::GaveUp => self.on_gave_up(peer, &decode_reason(&payload)?),
            FrameKind::Heartbeat => {
                let beat = Beat::decode(&payload)?;
                if let Some(Some(peer)) = self.peers.get_mut(peer as usize) {
                    peer.begun = beat.begun;
                }
            }
            FrameKind::Calling => {
                if let Some(Some(joined)) = self.peers.get_mut(peer as usize) {
                    joined.call = decode_reason(&payload)?;
                }
            }
            FrameKind::Warning => {
                let Warning(text) = decode(&payload)?;
                warnings::show(peer, &text);
            }
            _ => {}
        }
        Ok(())
    }

    /// A single rank may be cut off. But if most ranks receive nothing from rank 0 any more, rank 0 itself
    /// was stopped or cut off. The other ranks have ended or will end, and rank 0 must not continue alone.
    fn on_gave_up(&mut self, peer: u32, why: &str) {
        if self.member.on_failure == OnFailure::Mask {
            self.gave_up.insert(peer);
            let live = |rank: &u32| *self.member.liveness.state(*rank) == PeerState::Alive;
            let others = (1..self.member.place.ranks).filter(|rank| *rank != peer && live(rank));
            if self.gave_up.len() > others.count() {
                let ranks = name_ranks(&self.gave_up.iter().copied().collect::<Vec<_>>());
                return self.end_world(format!(
                    "was declared lost: {ranks} received nothing from it any more"
                ));
            }
        }
        self.depart(peer, End::Lost(format!("failed: {why}")));
    }

    /// Ends the world, from rank 0, where losses are masked.
    fn end_world(&mut self, why: String) {
        let payload = Arc::new(encode_reason(&why));
        tracing::error!("rank 0, this one, {why}");
        if self.member.liveness.end(0, End::Lost(why)) {
            for rank in 1..self.member.place.ranks {
                self.send(rank, FrameKind::Failed, Arc::clone(&payload));
            }
        }
    }

    /// True once this rank has ended the world. Frames of other ranks have no meaning after it.
    fn is_over(&self) -> bool {
        self.member.on_failure == OnFailure::Mask
            && matches!(self.member.liveness.state(0), PeerState::Lost { .. })
    }

    fn contribute(&mut self, rank: u32, part: Contribution) -> Result<()> {
        if part.op == Op::Admit
            && let Ask::Without(why) = decode(&part.data)?
        {
            self.refuse_on_trial(rank, &why);
        }
        let due = self.rounds.contribute(rank, part, Instant::now())?;
        self.deliver(due);
        Ok(())
    }

    fn on_look(&mut self, Look { may_judge, is_beat }: Look) {
        if self.is_over() {
            return;
        }
        let timing = self.member.timing;
        let linked = (0u32..).zip(&self.peers).filter(|(_, peer)| peer.is_some());
        let alive = linked.map(|(rank, _)| (rank, self.member.liveness.silence(rank)));
        let alive: Vec<(u32, Duration)> =
            alive.filter(|(r, _)| *self.member.liveness.state(*r) == PeerState::Alive).collect();
        if may_judge {
            // A rank that was cut off receives nothing from any rank.
            let is_alone = alive.len() > 1 && alive.iter().all(|(_, s)| *s > timing.deadline / 2);
            let longest = alive.iter().map(|(_, silence)| *silence).max().unwrap_or_default();
            if is_alone && self.member.on_failure == OnFailure::Mask && longest > timing.deadline {
                let ms = longest.as_millis();
                return self.end_world(format!(
                    "has received nothing from any rank for {ms} ms: it is cut off"
                ));
            }
            for (rank, silence) in alive.iter().filter(|(_, silence)| *silence > timing.deadline) {
                let mut why = describe_silence(*silence, timing, 0);
                if is_alone {
                    why.push_str("; so is every other rank, so it may be rank 0 that is cut off");
                }
                self.depart(*rank, End::Lost(why));
            }
        }
        if is_beat {
            self.beat(&alive);
        }
        let silent = |rank: &u32| self.member.liveness.silence(*rank) > timing.deadline;
        let silent: Vec<u32> = self.returning.keys().copied().filter(silent).collect();
        for rank in silent.into_iter().filter(|_| may_judge) {
            self.stop_returning(rank, "was silent");
        }
        let liveness = &self.member.liveness;
        let due = self.rounds.expire(Instant::now(), |ranks| liveness.list(ranks));
        self.deliver(due);
    }

    /// Sends a heartbeat to the live ranks, each with its silence, and to those that wait to come back.
    fn beat(&self, alive: &[(u32, Duration)]) {
        let beat = self.member.timing.beat(self.member.on_failure);
        let quiet = alive.iter().filter(|(_, silence)| *silence > 3 * beat);
        let quiet: Vec<_> =
            quiet.map(|(rank, silence)| (*rank, silence.as_millis() as u32)).collect();
        let begun = self.begun_by_all();
        self.member.liveness.all_begun(&begun);
        let payload = Arc::new(Beat { begun, quiet }.encode());
        for (rank, _) in alive {
            self.send(*rank, FrameKind::Heartbeat, Arc::clone(&payload));
        }
        for waiting in self.returning.values() {
            waiting.link.send(FrameKind::Heartbeat, Arc::clone(&payload));
        }
    }

    /// The minimum over the live ranks, where ranks continue without a lost one.
    fn begun_by_all(&self) -> Begun {
        let counts = |rank: u32| {
            self.member.on_failure == OnFailure::Stop
                || *self.member.liveness.state(rank) == PeerState::Alive
        };
        let peers = (0..).zip(&self.peers).filter(|(rank, _)| counts(*rank));
        least(
            self.member.liveness.begun(),
            peers.flat_map(|(_, peer)| peer).map(|peer| &peer.begun),
        )
    }

    /// Records the end of a rank and reports it to all ranks, the rank itself included.
    fn depart(&mut self, rank: u32, end: End) {
        let payload = Arc::new(encode(&(rank, &end)));
        if !self.member.liveness.end(rank, end.clone()) {
            return;
        }
        if let End::Lost(why) = end {
            let peer = self.peers.get(rank as usize).and_then(Option::as_ref);
            tracing::error!("rank {rank} ({}) {why}", peer.map_or("unknown", |peer| &peer.name));
        }
        for to in 1..self.member.place.ranks {
            self.send(to, FrameKind::Departure, Arc::clone(&payload));
        }
        if let Some(Some(peer)) = self.peers.get_mut(rank as usize) {
            peer.link.close();
        }
        if self.started && self.member.on_failure == OnFailure::Mask {
            let due = self.rounds.leave(rank);
            self.deliver(due);
        }
    }

    fn deliver(&mut self, due: Vec<Delivery>) {
        for delivery in due {
            if delivery.kind == FrameKind::Start {
                self.let_in(delivery.rank);
            }
            if delivery.rank == 0 {
                self.mine = Some(delivery);
            } else {
                let Delivery { rank, kind, payload } = delivery;
                self.send(rank, kind, payload);
            }
        }
    }

    fn send(&self, rank: u32, kind: FrameKind, payload: Arc<Vec<u8>>) {
        if let Some(Some(peer)) = self.peers.get(rank as usize) {
            peer.link.send(kind, payload);
        }
    }
}

/// The next process that holds the secret; never, where the door is closed.
async fn next_claim(door: &mut Option<Door>) -> Option<Claim> {
    match door {
        Some(door) => door.claims.recv().await,
        None => std::future::pending().await,
    }
}

/// The calls of [`Bootstrap`](super::control::Bootstrap).
impl Hub {
    pub(super) async fn collective(&mut self, call: Call) -> Result<Outcome> {
        let Call { op, topic, data } = call;
        let operation = op.name();
        if let Some(error) = self.member.liveness.gone(operation) {
            return Err(error);
        }
        let part = Contribution { round: self.begun, op, topic, data };
        self.begun += 1;
        self.contribute(0, part)?;
        loop {
            if let Some(delivery) = self.mine.take() {
                return result_of(op, delivery.kind, &delivery.payload, self.member.place.ranks);
            }
            if let Some(error) = self.member.liveness.gone(operation) {
                return Err(error);
            }
            self.step().await;
        }
    }

    pub(super) async fn watch(&mut self) {
        loop {
            self.step().await;
        }
    }

    pub(super) async fn announce(&mut self, call: &str) {
        let payload = Arc::new(encode_reason(call));
        let links = self.peers.iter().flatten().map(|peer| &peer.link);
        let sent: Vec<_> =
            links.map(|link| link.hand_over(FrameKind::Calling, Arc::clone(&payload))).collect();
        let all = async {
            for one in sent {
                // Fails where the rank has gone.
                let _ = one.await;
            }
        };
        let _ = tokio::time::timeout(LINGER, all).await;
    }

    pub(super) async fn leave(&mut self, farewell: Farewell) {
        self.close_door().await;
        self.returning.clear();
        let (kind, payload) = farewell.frame();
        for rank in 1..self.member.place.ranks {
            self.send(rank, kind, Arc::clone(&payload));
        }
        // Readers must not wait for this task any more.
        self.events.close();
        let liveness = &self.member.liveness;
        let mut links: Vec<ControlLink> = Vec::new();
        for (rank, peer) in (0u32..).zip(&mut self.peers) {
            let Some(JoinedRank { mut link, .. }) = peer.take() else { continue };
            link.close();
            // Nothing is expected of a lost rank; dropping its link closes the socket.
            if !matches!(liveness.state(rank), PeerState::Lost { .. }) {
                links.push(link);
            }
        }
        // The result of a collective may still be on its way to them.
        let sent = async {
            for link in &mut links {
                link.sent().await;
            }
        };
        let _ = tokio::time::timeout(self.member.timing.deadline, sent).await;
        let drained = async {
            for link in &mut links {
                link.drained().await;
            }
        };
        let _ = tokio::time::timeout(LINGER, drained).await;
    }
}
