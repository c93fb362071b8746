//! The control thread: the only asynchronous code of the project.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Interval, MissedTickBehavior};

use super::frame::FrameKind;
use super::hub::Hub;
use super::identity::RankId;
use super::liveness::Liveness;
use super::message::{
    CollectiveFailure, End, MAX_REASON, Op, Start, decode, decode_outcome, encode_reason,
};
use super::spoke::Spoke;
use super::text::clean;
use super::waiting::Join;
use super::warnings::Waiting;
use crate::config::OnFailure;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Most time that a leaving rank waits for its last frames to be received.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// A rank's connection to the other ranks: all collectives go through it. Between collectives it
/// watches the other ranks.
pub(super) enum Bootstrap {
    /// Of rank 0.
    Hub(Box<Hub>),
    /// Of any other rank.
    Spoke(Box<Spoke>),
}

impl Bootstrap {
    /// Takes part in one collective. Ends when the result has arrived, when all ranks fail alike, or
    /// when a rank is lost. The timing bounds it.
    pub(super) async fn collective(&mut self, call: Call) -> Result<Outcome> {
        match self {
            Self::Hub(hub) => hub.collective(call).await,
            Self::Spoke(spoke) => spoke.collective(call).await,
        }
    }

    /// The first collective of this rank.
    pub(super) fn start(&self) -> Start {
        match self {
            Self::Hub(_) => Start::default(),
            Self::Spoke(spoke) => spoke.start(),
        }
    }

    /// Sends heartbeats and receives those of others, for ever. May be dropped at any `await`.
    pub(super) async fn watch(&mut self) {
        match self {
            Self::Hub(hub) => hub.watch().await,
            Self::Spoke(spoke) => spoke.watch().await,
        }
    }

    /// Reports a call that this rank is about to make to the other ranks. Waits until it has left this process, for
    /// [`LINGER`] at most.
    pub(super) async fn announce(&mut self, call: &str) {
        match self {
            Self::Hub(hub) => hub.announce(call).await,
            Self::Spoke(spoke) => spoke.announce(call).await,
        }
    }

    /// Reports to the other ranks that this rank ends, and waits for [`LINGER`] at most.
    pub(super) async fn leave(&mut self, farewell: Farewell) {
        match self {
            Self::Hub(hub) => hub.leave(farewell).await,
            Self::Spoke(spoke) => spoke.leave(farewell).await,
        }
    }
}

/// One collective, as its caller requests it.
pub(super) struct Call {
    pub(super) op: Op,
    pub(super) topic: String,
    pub(super) data: Vec<u8>,
}

/// The result of a collective.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Collectives of the world before this one: the same on all ranks.
    pub(super) round: u64,
    /// One item per rank, or the items that the collective defines instead.
    pub(super) items: Vec<Vec<u8>>,
}

/// The result for the caller of `op`, from the payload of an [`FrameKind::Outcome`] or a
/// [`FrameKind::Verdict`].
pub(super) fn result_of(op: Op, kind: FrameKind, payload: &[u8], ranks: u32) -> Result<Outcome> {
    let items = match op {
        Op::AllGather | Op::Exchange => ranks as usize,
        Op::Barrier | Op::Agree => 0,
        Op::Admit => 1,
        // Never an outcome: a refusal has a verdict.
        Op::Refuse => 0,
    };
    if kind == FrameKind::Outcome {
        return decode_outcome(payload, items).map(|(round, items)| Outcome { round, items });
    }
    let (_, CollectiveFailure { kind, rank, text }): (u64, _) = decode(payload)?;
    let error = Error::new(kind, op.name(), text);
    let error = match rank {
        Some(rank) => error.with_rank(rank),
        None => error,
    };
    Err(match kind {
        ErrorKind::Mismatch => error.with_fix("run every rank with the same code and config"),
        ErrorKind::Deadline => error.with_fix("read the logs of the missing ranks"),
        _ => error,
    })
}

/// The way in which a rank ends.
#[derive(Clone, Debug)]
pub(super) enum Farewell {
    Goodbye,
    Failed(String),
}

impl Farewell {
    /// The frame that reports this end.
    pub(super) fn frame(&self) -> (FrameKind, Arc<Vec<u8>>) {
        match self {
            Self::Goodbye => (FrameKind::Goodbye, Arc::default()),
            Self::Failed(why) => (FrameKind::Failed, Arc::new(encode_reason(why))),
        }
    }

    /// This rank's own end, as its later calls report it.
    pub(super) fn end(&self) -> End {
        match self {
            Self::Goodbye => End::Left,
            Self::Failed(why) => End::Lost(format!("failed: {}", clean(why, MAX_REASON))),
        }
    }
}

/// A wish of a caller, and the channel for its answer.
pub(super) enum Request {
    Collective {
        call: Call,
        reply: SyncSender<Result<Outcome>>,
    },
    /// The call of a component that this rank is about to make.
    Announce {
        call: String,
        sent: SyncSender<()>,
    },
}

/// Serves one world until it is requested to end, or until no caller is left.
pub(super) async fn serve(
    mut bootstrap: Bootstrap,
    mut requests: UnboundedReceiver<Request>,
    mut farewells: UnboundedReceiver<Farewell>,
) {
    let farewell = loop {
        let request = tokio::select! {
            farewell = farewells.recv() => break farewell,
            Some(request) = requests.recv() => request,
            () = bootstrap.watch() => continue,
        };
        let (call, reply) = match request {
            Request::Collective { call, reply } => (call, reply),
            Request::Announce { call, sent } => {
                bootstrap.announce(&call).await;
                let _ = sent.send(());
                continue;
            }
        };
        // A farewell interrupts a collective; its caller then finds the reply's sender dropped.
        tokio::select! {
            farewell = farewells.recv() => break farewell,
            result = bootstrap.collective(call) => {
                let _ = reply.send(result);
            }
        }
    };
    bootstrap.leave(farewell.unwrap_or(Farewell::Goodbye)).await;
}

/// State that rank 0 and the other ranks both need.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) place: RankId,
    pub(super) timing: Timing,
    pub(super) on_failure: OnFailure,
    pub(super) liveness: Arc<Liveness>,
    pub(super) waiting: Arc<Join>,
    /// Warnings of this process for rank 0.
    pub(super) warnings: Arc<Waiting>,
}

impl Member {
    /// A member that begins to join.
    pub(super) fn new(
        place: RankId,
        timing: Timing,
        on_failure: OnFailure,
        liveness: Arc<Liveness>,
    ) -> Self {
        let waiting = Join::begin(place);
        Self { place, timing, on_failure, liveness, waiting, warnings: Arc::default() }
    }
}

/// The limits on waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timing {
    /// The longest silence of a live rank.
    pub(super) deadline: Duration,
    /// The longest that a live rank may take to arrive.
    pub(super) late: Duration,
}

impl Timing {
    pub(super) fn beat(&self, on_failure: OnFailure) -> Duration {
        beat(self.deadline, on_failure)
    }
}

/// The time between two looks at the other ranks.
fn look(deadline: Duration) -> Duration {
    (deadline / 10).min(Duration::from_millis(100))
}

/// The time between two heartbeats: each costs rank 0 a message to every rank, so they are as rare as the deadline
/// allows. Where losses are masked, an operation ends only with news of rank 0 that is half a second old at most: a
/// rank that was given up must not use what the others have changed since. Rarer heartbeats would delay operations.
pub fn beat(deadline: Duration, on_failure: OnFailure) -> Duration {
    match on_failure {
        OnFailure::Mask => look(deadline),
        OnFailure::Stop => (deadline / 20).clamp(look(deadline), Duration::from_secs(1)),
    }
}

/// A look at the other ranks.
#[derive(Clone, Copy)]
pub(super) struct Look {
    /// A silence may be judged.
    pub(super) may_judge: bool,
    /// A heartbeat is due.
    pub(super) is_beat: bool,
}

/// Times the looks and the heartbeats, and detects that this process itself was stopped or starved. Frames that
/// arrived in the meantime are then still unread, so the silence of other ranks proves nothing yet.
pub(super) struct Ticker {
    interval: Interval,
    beat: Duration,
    next_beat: Instant,
    slack: Duration,
    deadline: Duration,
    last: Instant,
    trust_from: Instant,
    stalled: Option<Instant>,
}

impl Ticker {
    pub(super) fn new(timing: Timing, on_failure: OnFailure) -> Self {
        let mut interval = tokio::time::interval(look(timing.deadline));
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (now, beat, deadline) = (Instant::now(), timing.beat(on_failure), timing.deadline);
        let (last, trust_from, next_beat, slack) = (now, now, now, look(deadline) / 2);
        Self { interval, beat, next_beat, slack, deadline, last, trust_from, stalled: None }
    }

    /// True if this process was stopped or starved lately: other ranks may still send their reactions
    /// to it.
    pub(super) fn stalled_lately(&self) -> bool {
        self.stalled.is_some_and(|when| when.elapsed() < 2 * self.deadline)
    }

    /// Waits for the next look. May be dropped.
    pub(super) async fn tick(&mut self) -> Look {
        self.interval.tick().await;
        let now = Instant::now();
        if now.duration_since(self.last) > self.deadline / 2 {
            self.trust_from = now + self.deadline / 4;
            self.stalled = Some(now);
        }
        self.last = now;
        // Looks come a moment early or late; where every look has a beat, an early one must not skip it.
        let is_beat = now + self.slack >= self.next_beat;
        if is_beat {
            self.next_beat = now + self.beat;
        }
        Look { may_judge: now >= self.trust_from, is_beat }
    }
}

/// Describes a rank that was silent for too long, from the view of the rank `judge`.
pub(super) fn describe_silence(silence: Duration, timing: Timing, judge: u32) -> String {
    format!(
        "was silent for {:.2} s, expected a heartbeat within {:.2} s: it is stopped, starved or cut \
         off from rank {judge}",
        silence.as_secs_f64(),
        timing.deadline.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_stall_of_this_process_no_silence_is_judged_for_a_while() {
        // Half of it is a stall: longer than a busy machine lets a tick wait.
        let deadline = Duration::from_secs(4);
        let timing = Timing { deadline, late: Duration::from_secs(1) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut ticker = Ticker::new(timing, OnFailure::Stop);
            assert!(ticker.tick().await.may_judge);
            std::thread::sleep(deadline * 5 / 8);
            let resumed = Instant::now();
            assert!(!ticker.tick().await.may_judge);
            while !ticker.tick().await.may_judge {}
            assert!(resumed.elapsed() >= deadline / 4);
        });
    }

    #[test]
    fn heartbeats_follow_the_deadline_and_several_come_within_each() {
        let beat = |ms, on_failure| {
            let deadline = Duration::from_millis(ms);
            Timing { deadline, late: Duration::from_secs(1) }.beat(on_failure).as_millis()
        };
        assert_eq!(
            [100, 1000, 10_000, 30_000].map(|ms| beat(ms, OnFailure::Stop)),
            [10, 100, 500, 1000]
        );
        assert_eq!([100, 1000, 30_000].map(|ms| beat(ms, OnFailure::Mask)), [10, 100, 100]);
    }

    #[test]
    fn a_world_with_a_long_deadline_looks_often_and_beats_rarely() {
        let timing = Timing { deadline: Duration::from_secs(30), late: Duration::from_secs(1) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut ticker = Ticker::new(timing, OnFailure::Stop);
            // The first look is a beat: a rank that joins is heard at once.
            assert!(ticker.tick().await.is_beat);
            assert!(!ticker.tick().await.is_beat);
        });
    }
}
