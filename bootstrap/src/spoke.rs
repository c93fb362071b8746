//! Every rank but 0: one connection, to rank 0.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::announcer::with_call;
use super::control::{
    Call, Farewell, LINGER, Look, Member, Outcome, Ticker, describe_silence, result_of,
};
use super::frame::{FrameKind, ReceivedFrame};
use super::handshake::{Credentials, HANDSHAKE_LIMIT, Setback, introduce, refused};
use super::interface::Local;
use super::link::{ControlLink, Event, Inbox, Secured, What};
use super::liveness::PeerState;
use super::loopback::check_loopback;
use super::message::{
    Admitted, Beat, Contribution, End, Missing, Op, Proof, Start, Warning, decode, decode_reason,
    encode, encode_reason,
};
use super::other_hosts::OtherHosts;
use super::rendezvous::{Address, Target, check_secret, read_notice, unresolved};
use super::secret::{SECRET_FILE_VARIABLE, SECRET_VARIABLE};
use super::warnings;
use crate::config::OnFailure;
use crate::machine::host_name;
use tokenyard_errors::{Error, ErrorKind, Result};

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
const OPERATION: &str = "join world";
/// The time for which look-ups of the name of rank 0 may fail: a resolver may be busy, and the name of a host that has
/// just started may be new.
const LOOKUPS: Duration = Duration::from_secs(5);

/// The route to rank 0.
pub(super) struct Route {
    pub(super) target: Target,
    pub(super) local: Local,
}

/// The connection of one rank to rank 0.
pub(super) struct Spoke {
    member: Member,
    link: ControlLink,
    events: mpsc::Receiver<Event>,
    ticker: Ticker,
    /// Known once all ranks have joined, or have let this rank in.
    start: Option<Start>,
    refusal: Option<Error>,
    /// Collectives that this rank has begun.
    begun: u64,
    answer: Option<ReceivedFrame>,
    /// The call that rank 0 has announced.
    call_of_hub: String,
}

impl Spoke {
    /// Finds rank 0, proves that it belongs to the job, and waits until all ranks have joined, for the
    /// timing's `late` at most.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`] with the last reason when rank 0 or another rank does not join;
    /// [`ErrorKind::Protocol`] for a wrong secret or a stranger at rank 0's address;
    /// [`ErrorKind::Mismatch`] when rank 0 refuses this rank; [`ErrorKind::PeerLost`].
    pub(super) async fn join(
        member: Member,
        route: &Route,
        credentials: Credentials,
    ) -> Result<Self> {
        let started = Instant::now();
        let late = member.timing.late;
        let secured = connect(&member, route, credentials).await?;
        member.waiting.waits_for("rank 0 answers, and has not let this rank in yet".into());
        let mut spoke = Self::new(member, secured);
        // Rank 0 ends the join first, and names the missing ranks.
        let limit = late + spoke.member.timing.deadline;
        while spoke.start.is_none() {
            if let Some(refusal) = spoke.refusal.take() {
                return Err(refusal);
            }
            if let Some(error) = spoke.member.liveness.any_gone(OPERATION) {
                return Err(error);
            }
            if started.elapsed() > limit {
                let message = format!(
                    "within {:.1} s not all ranks joined, or, where this rank was to come back, the \
                     others did not renew their communicator",
                    started.elapsed().as_secs_f64()
                );
                return Err(Error::new(ErrorKind::Deadline, OPERATION, message));
            }
            spoke.step().await;
        }
        Ok(spoke)
    }

    fn new(member: Member, secured: Secured) -> Self {
        let (sender, events) = mpsc::channel(64);
        let liveness = Arc::clone(&member.liveness);
        let link =
            ControlLink::start(secured, Inbox { peer: 0, link: 0, events: sender, liveness });
        Self {
            link,
            events,
            ticker: Ticker::new(member.timing, member.on_failure),
            start: None,
            refusal: None,
            begun: 0,
            answer: None,
            call_of_hub: String::new(),
            member,
        }
    }

    /// Handles one event or one look. May be dropped while it waits.
    async fn step(&mut self) {
        tokio::select! {
            Some(Event { what, .. }) = self.events.recv() => self.on_event(what),
            look = self.ticker.tick() => self.on_look(look),
        }
    }

    fn on_event(&mut self, what: What) {
        if self.has_ended(0) || self.is_given_up() {
            return;
        }
        let result = match what {
            What::Frame(received) => self.on_frame(received),
            What::Closed(why) => {
                self.lose_hub(with_call(why, &self.call_of_hub));
                Ok(())
            }
        };
        if let Err(error) = result {
            self.lose_hub(format!("broke the protocol: {error}"));
        }
    }

    fn has_ended(&self, rank: u32) -> bool {
        *self.member.liveness.state(rank) != PeerState::Alive
    }

    /// Where losses are masked, rank 0 only closes the connection of a rank that it declared lost: its
    /// silence then proves nothing.
    fn is_given_up(&self) -> bool {
        self.member.on_failure == OnFailure::Mask && self.has_ended(self.member.place.rank)
    }

    fn on_frame(&mut self, received: ReceivedFrame) -> Result<()> {
        let liveness = &self.member.liveness;
        let payload = &received.payload;
        match received.kind {
            FrameKind::Heartbeat => {
                let Beat { begun, quiet } = Beat::decode(payload)?;
                liveness.all_begun(&begun);
                let quiet: HashMap<u32, u32> = quiet.into_iter().collect();
                for rank in 1..self.member.place.ranks {
                    let ms = quiet.get(&rank).copied().unwrap_or(0);
                    liveness.heard(rank, Duration::from_millis(ms.into()));
                }
            }
            FrameKind::Start => self.on_start(payload)?,
            FrameKind::Refused => self.refusal = Some(refused(payload)),
            FrameKind::Missing => {
                let missing: Missing = decode(payload)?;
                let what = format!("rank 0 answers, and waits for {missing}");
                self.member.waiting.waits_for(what);
            }
            FrameKind::Outcome | FrameKind::Verdict => self.answer = Some(received),
            FrameKind::Departure => {
                let (rank, end) = decode(payload)?;
                self.on_departure(rank, end);
            }
            FrameKind::Returning => {
                let (rank, waits) = decode(payload)?;
                liveness.set_waiting(rank, waits);
            }
            FrameKind::Calling => self.call_of_hub = decode_reason(payload)?,
            FrameKind::Goodbye => {
                liveness.end(0, End::Left);
                self.link.close();
            }
            FrameKind::Failed => {
                let why = format!("failed: {}", decode_reason(payload)?);
                self.lose_hub(why);
            }
            _ => {}
        }
        Ok(())
    }

    /// Collectives begin; a rank that comes back learns the absent ranks from this frame.
    fn on_start(&mut self, payload: &[u8]) -> Result<()> {
        let start: Start = decode(payload)?;
        self.begun = start.round;
        for rank in &start.absent {
            self.member.liveness.end(*rank, End::Lost("was lost before this rank joined".into()));
        }
        self.start = Some(start);
        Ok(())
    }

    fn on_departure(&mut self, rank: u32, end: End) {
        let end = match end {
            End::Lost(why) if rank == self.member.place.rank => {
                End::Lost(format!("{why} (reported by rank 0)"))
            }
            other => other,
        };
        if let End::Lost(why) = &end {
            tracing::error!("rank {rank} {why}");
        }
        self.member.liveness.end(rank, end);
    }

    /// Sends the warnings that wait; shows them here where rank 0 has ended.
    fn pass_warnings(&self) {
        let is_over = self.has_ended(0) || self.is_given_up();
        for text in self.member.warnings.take() {
            if is_over {
                warnings::show(self.member.place.rank, &text);
            } else {
                self.link.send(FrameKind::Warning, Arc::new(encode(&Warning(text))));
            }
        }
    }

    fn on_look(&mut self, Look { may_judge, is_beat }: Look) {
        self.pass_warnings();
        if self.has_ended(0) || self.is_given_up() {
            return;
        }
        let liveness = &self.member.liveness;
        if is_beat {
            let beat = Beat { begun: liveness.begun(), quiet: Vec::new() };
            self.link.send(FrameKind::Heartbeat, Arc::new(beat.encode()));
        }
        let silence = liveness.silence(0);
        if may_judge && silence > self.member.timing.deadline {
            self.lose_hub(describe_silence(silence, self.member.timing, self.member.place.rank));
        }
    }

    pub(super) fn lose_hub(&mut self, why: String) {
        tracing::error!("rank 0 {why}");
        // If rank 0 does run after all, it receives the reason why this rank ended.
        let last_words = encode_reason(&format!("it declared rank 0 lost, which {why}"));
        self.link.send(FrameKind::GaveUp, Arc::new(last_words));
        self.member.liveness.end(0, End::Lost(why));
        self.link.close();
    }
}

/// The calls of [`Bootstrap`](super::control::Bootstrap).
impl Spoke {
    pub(super) async fn collective(&mut self, call: Call) -> Result<Outcome> {
        let Call { op, topic, data } = call;
        let operation = op.name();
        if let Some(error) = self.member.liveness.gone(operation) {
            return Err(error);
        }
        let part = Contribution { round: self.begun, op, topic, data };
        self.begun += 1;
        self.link.send(FrameKind::Contribution, Arc::new(encode(&part)));
        // Rank 0 fails the round first, and names the missing ranks. A rank 0 that does not is as lost as one that is
        // silent: all ranks then know that the collective failed, and a later result is not taken for that of another.
        let limit = Instant::now() + self.member.timing.late + 2 * self.member.timing.deadline;
        loop {
            if let Some(ReceivedFrame { kind, payload }) = self.answer.take() {
                let result = result_of(op, kind, &payload, self.member.place.ranks)?;
                if op == Op::Admit {
                    let back = Admitted::decode(&result.items)?.back;
                    back.into_iter().for_each(|rank| self.member.liveness.returns(rank));
                }
                return Ok(result);
            }
            if let Some(error) = self.member.liveness.gone(operation) {
                return Err(error);
            }
            if Instant::now() > limit {
                self.lose_hub(format!("sends heartbeats and gave no result of {:?}", part.topic));
                continue;
            }
            self.step().await;
        }
    }

    pub(super) fn start(&self) -> Start {
        self.start.clone().unwrap_or_default()
    }

    pub(super) async fn watch(&mut self) {
        loop {
            self.step().await;
        }
    }

    pub(super) async fn announce(&mut self, call: &str) {
        let sent = self.link.hand_over(FrameKind::Calling, Arc::new(encode_reason(call)));
        let _ = timeout(LINGER, sent).await;
    }

    pub(super) async fn leave(&mut self, farewell: Farewell) {
        self.pass_warnings();
        let (kind, payload) = farewell.frame();
        self.link.send(kind, payload);
        // The reader may not wait for this task any more.
        self.events.close();
        self.link.close();
        if matches!(self.member.liveness.state(0), PeerState::Lost { .. }) {
            // Rank 0 may run again, and must then read that this rank declared it lost.
            let _ = timeout(LINGER, self.link.sent()).await;
        } else {
            let _ = timeout(LINGER, self.link.drained()).await;
        }
    }
}

/// Tries until rank 0 lets this rank in.
async fn connect(member: &Member, route: &Route, credentials: Credentials) -> Result<Secured> {
    let started = Instant::now();
    let late = member.timing.late;
    let mut pause = FIRST_PAUSE;
    let mut tries = Tries { last: None, strangers: 0 };
    let mut unresolved_since = None;
    loop {
        // On a network that drops packets silently, an attempt takes longer than a short lateness.
        let left = late.saturating_sub(started.elapsed());
        match timeout(left, attempt(member, route, &credentials)).await {
            Ok(Ok(secured)) => return Ok(secured),
            Ok(Err(Setback::Fatal(error))) => return Err(error),
            Ok(Err(Setback::Unresolved(error))) => {
                let since = *unresolved_since.get_or_insert_with(Instant::now);
                // A file may still be replaced by that of this job.
                if since.elapsed() >= LOOKUPS && matches!(route.target, Target::Address { .. }) {
                    return Err(error);
                }
                tries.last = Some(error);
            }
            Ok(Err(Setback::Again(error))) => {
                unresolved_since = None;
                tries.last = Some(error);
            }
            // Rank 0 may still appear: the port, or the file that names it, may belong to an earlier
            // job.
            Ok(Err(Setback::Stranger(error))) => {
                tries.strangers += 1;
                tries.last = Some(error);
            }
            Err(_) => {
                tries.last.get_or_insert_with(|| no_answer(late));
            }
        }
        if left.is_zero() {
            return Err(tries.give_up(&route.target, late));
        }
        member.waiting.waits_for(tries.describe(&route.target));
        tokio::time::sleep(pause.min(late.saturating_sub(started.elapsed()))).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// The results of the attempts to reach rank 0.
struct Tries {
    last: Option<Error>,
    /// The number of answers that failed the proof.
    strangers: u64,
}

impl Tries {
    /// The reason why this rank waits.
    fn describe(&self, target: &Target) -> String {
        let why = self.last.as_ref().map(Error::detail).unwrap_or_default();
        if self.strangers > 0 {
            format!("{}; last: {why}", self.failed_proofs(target))
        } else {
            format!("rank 0 at {target} does not answer yet: {why}")
        }
    }

    fn failed_proofs(&self, target: &Target) -> String {
        let count = self.strangers;
        let answers = if count == 1 { "answer" } else { "answers" };
        format!(
            "{count} {answers} at {target} failed the proof: another job has this port, or the \
             secrets differ"
        )
    }

    fn give_up(self, target: &Target, late: Duration) -> Error {
        let message = format!("cannot reach rank 0 within {:.1} s", late.as_secs_f64());
        let error = if self.strangers > 0 {
            let message = format!("{message}: {}", self.failed_proofs(target));
            let fix = self.last.as_ref().and_then(Error::fix).map_or_else(
                || {
                    format!(
                        "give all ranks the same {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}, and \
                         let nothing but rank 0 of this job listen there"
                    )
                },
                str::to_owned,
            );
            Error::new(ErrorKind::Protocol, OPERATION, message).with_fix(fix)
        } else {
            Error::new(ErrorKind::Deadline, OPERATION, message)
                .with_context("where", target)
                .with_fix(
                    "check that rank 0 runs, that this host can reach it, and that no other process \
                     has taken this rank",
                )
        };
        let error = error.with_rank(0);
        match self.last {
            Some(last) => error.with_source(last),
            None => error,
        }
    }
}

async fn attempt(
    member: &Member,
    Route { target, local }: &Route,
    credentials: &Credentials,
) -> std::result::Result<Secured, Setback> {
    let mut credentials = credentials.clone();
    let (host, port, others) = match target {
        Target::Address { host, port, others } => (host.clone(), *port, *others),
        Target::File { path } => {
            let Address { host, port, job } = read_notice(path).map_err(Setback::Again)?;
            credentials.job = job;
            (host, port, OtherHosts::NotStated)
        }
    };
    let unreachable =
        |what: String, error: std::io::Error| Setback::Again(Error::system(OPERATION, what, error));
    let found = timeout(HANDSHAKE_LIMIT, tokio::net::lookup_host((host.as_str(), port)))
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    let found = found.map_err(|error| Setback::Unresolved(unresolved(&host, error)))?;
    let addresses: Vec<SocketAddr> = found.map(|address| local.scoped(address)).collect();
    check_loopback(&host, &addresses, others).map_err(Setback::Fatal)?;
    let mut last = None;
    for address in addresses {
        check_secret(&credentials.secret, address.ip()).map_err(Setback::Fatal)?;
        let source = match local.source(address.ip()) {
            Ok(source) => source,
            // Another address of rank 0 may be of the right family.
            Err(error) => {
                last.get_or_insert(Setback::Fatal(error));
                continue;
            }
        };
        let connected = timeout(HANDSHAKE_LIMIT, connect_from(source, address))
            .await
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        match connected {
            Ok(stream) => return greet(member, stream, &credentials).await,
            Err(error) => {
                let from = source.map(|ip| format!(" from {ip}")).unwrap_or_default();
                let here = if address.ip().is_loopback() { " (this host)" } else { "" };
                last = Some(unreachable(format!("cannot connect to {address}{here}{from}"), error));
            }
        }
    }
    Err(last.unwrap_or_else(|| {
        let message = format!("found no address of {host:?}, expected one");
        Setback::Again(Error::new(ErrorKind::System, OPERATION, message))
    }))
}

async fn connect_from(source: Option<IpAddr>, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = if to.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
    if let Some(ip) = source {
        socket.bind(SocketAddr::new(ip, 0))?;
    }
    socket.connect(to).await
}

async fn greet(
    member: &Member,
    stream: TcpStream,
    credentials: &Credentials,
) -> std::result::Result<Secured, Setback> {
    let _ = stream.set_nodelay(true);
    let proof = Proof {
        rank: member.place.rank,
        ranks: member.place.ranks,
        deadline_ms: member.timing.deadline.as_millis() as u64,
        late_ms: member.timing.late.as_millis() as u64,
        on_failure: member.on_failure,
        pid: std::process::id(),
        host: host_name(),
    };
    let greeted = introduce(stream, credentials, &proof);
    timeout(HANDSHAKE_LIMIT, greeted)
        .await
        .unwrap_or_else(|_| Err(Setback::Again(no_answer(HANDSHAKE_LIMIT))))
}

fn no_answer(limit: Duration) -> Error {
    let message = format!("found no answer within {:.1} s, expected one", limit.as_secs_f64());
    Error::new(ErrorKind::Deadline, OPERATION, message)
}

#[cfg(test)]
mod tests;
