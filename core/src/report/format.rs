//! The fields of a report. The page for operators is `docs/reports.md`.

use serde::{Deserialize, Serialize};

/// The version of the format. It rises when a field changes its meaning; new fields do not raise
/// it.
pub const SCHEMA_VERSION: u32 = 2;

/// The state of one rank at one moment. Times are milliseconds. Fields may be read microseconds
/// apart from each other, since no thread stops for a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// [`SCHEMA_VERSION`] of the writer; marks the file as a report.
    pub tokenyard_report: u32,
    /// Version of tokenyard.
    pub version: String,
    /// Names the job and the opening of the communicator; the same on all ranks. Empty before the ranks have met.
    pub job: String,
    /// This rank.
    pub rank: u32,
    /// Ranks in the world.
    pub ranks: u32,
    /// Its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Wall clock of this host, since 1970.
    pub unix_ms: u64,
    /// The same time for people, UTC.
    pub time: String,
    /// Why the report was written.
    pub reason: Reason,
    /// The config.
    pub config: ConfigName,
    /// The components in use.
    #[serde(alias = "parts")] // schema 1
    pub components: ReportedComponents,
    /// The current activity of this rank.
    pub activity: Activity,
    /// The wait that it is in, or that it gave up; nothing where it does not wait.
    pub wait: Option<Wait>,
    /// The other ranks.
    pub peers: Vec<Peer>,
    /// Queues of commands.
    #[serde(alias = "lanes")] // schema 1
    pub queues: Vec<ReportedQueue>,
    /// The health of the transports.
    pub transports: Vec<ReportedHealth>,
    /// The ranks that were waited for longest since the communicator was opened, the worst first.
    pub slowest: Vec<Slow>,
}

/// Why a report was written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reason {
    /// `asked` (a signal, or a call), `masked` (the communicator goes on without a rank that was lost), or the
    /// kind of the error that closed the communicator: `deadline`, `peer_lost`, `transport`, `mismatch`, ...
    pub kind: String,
    /// The signal's name, the ranks without which the communicator goes on, or the error.
    pub text: String,
    /// The rank that the error, or the first loss, is about.
    pub rank: Option<u32>,
}

/// The config of a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigName {
    /// The path of the file, as given.
    pub file: String,
    /// The start of the SHA-256 of its text.
    pub digest: String,
    /// `world.deadline_ms`.
    pub deadline_ms: u64,
    /// `world.late_ms`.
    pub late_ms: u64,
    /// `world.on_failure`.
    pub on_failure: String,
}

/// Names of components; nothing where a level has no transport, or before it is chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedComponents {
    /// The kernel set.
    pub kernels: String,
    /// The transport inside a domain.
    pub scale_up: Option<String>,
    /// The transport between domains.
    pub scale_out: Option<String>,
    /// The topology.
    pub topology: String,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The communicator opens: bring-up is under way.
    Opening,
    /// In the caller's code.
    Caller,
    /// Inside a call that sends.
    Send,
    /// Inside a call that receives.
    Receive,
    /// The communicator was closed.
    Closed,
    /// A state of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The activity of a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Activity {
    /// Where it is.
    pub state: State,
    /// How long it has been there.
    pub since_ms: u64,
    /// Operations that it has begun: the number of the next one.
    pub begun: u64,
    /// Operations that all ranks have begun, by the last message of rank 0.
    pub begun_by_all: u64,
    /// The operation that it is in, or was in last; nothing before the first.
    pub call: Option<Call>,
    /// The last operation in each slot, in order of their numbers.
    pub recent: Vec<Call>,
    /// The collective of the world that it is in: `barrier`, `all_gather`, ...
    pub collective: Option<Collective>,
    /// The number of the last collective of the world that succeeded on this rank. All ranks number
    /// collectives alike.
    pub collectives: u64,
}

/// One operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Call {
    /// Its number.
    pub operation: u64,
    /// `dispatch`, `replay` or `combine`.
    pub kind: String,
    /// Its slot.
    pub slot: u32,
}

/// A collective of the world.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Collective {
    /// Its name.
    pub name: String,
    /// Its topic.
    pub topic: String,
    /// How long the rank has been in it.
    pub since_ms: u64,
}

/// A wait of an operation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wait {
    /// `entry`, `grant`, `dispatch rows`, `combine rows`, `combine done` or `queue room`.
    pub phase: String,
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// The rank that is most likely to be late.
    pub peer: u32,
    /// The signal that ends the wait.
    pub signal: u32,
    /// Its total then.
    pub expected: u64,
    /// Its total now.
    pub found: u64,
    /// The operation; nothing where it has no number because a graph of the device launched it.
    pub operation: Option<u64>,
    /// How long ago it began.
    pub age_ms: u64,
    /// Whether it ended without the signal.
    pub given_up: bool,
}

/// The knowledge of a rank about another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Its number.
    pub rank: u32,
    /// Its host, as it reported at the start.
    pub host: String,
    /// Its process, as it reported at the start.
    pub pid: u32,
    /// `alive`, `left` (it sent its goodbye) or `lost`.
    pub state: String,
    /// The reason for its loss: `was silent for 3 s`.
    pub why: String,
    /// How long ago this rank was informed of its end; nothing while it lives.
    pub ended_ms: Option<u64>,
    /// How long ago its last heartbeat was received. Ranks other than 0 receive it through rank 0.
    pub heard_ms: u64,
    /// Whether this rank goes on without it.
    pub masked: bool,
    /// How long this rank has waited for it, all in all, since the communicator was opened.
    pub waited_ms: u64,
    /// The links to it.
    pub links: Vec<Traffic>,
}

/// The traffic of one link since the communicator was opened. Counts are of signals: with each
/// record and each piece of rows a signal rises.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// The transport's name of the link.
    pub name: String,
    /// Counts; nothing where the kernel set does not count.
    pub counts: Option<ReportedCounts>,
    /// How far this rank has raised each signal of the peer: `[signal, total]`.
    pub raised: Vec<(u32, u64)>,
}

/// Counts of one link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedCounts {
    /// How far this rank has raised signals of the peer.
    pub sent: u64,
    /// How far it has seen the peer raise its own, up to its last wait that succeeded.
    pub received: u64,
    /// How far it has waited, or waits, for them to rise.
    pub expected: u64,
    /// Commands to the peer that the transport accepted.
    pub posted: u64,
    /// Commands to the peer that have ended.
    pub done: u64,
    /// Bytes that were put to the peer, records included.
    pub bytes: u64,
}

/// A queue of commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedQueue {
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// Its number.
    #[serde(alias = "lane")] // schema 1
    pub queue: u32,
    /// Commands that were accepted.
    pub posted: u64,
    /// Commands that have ended.
    pub done: u64,
    /// Commands that were accepted and have not ended.
    pub in_flight: u64,
    /// The most that may be in flight.
    pub depth: u32,
}

/// The health of a transport, by its own report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedHealth {
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// The transport.
    pub transport: String,
    /// Its first asynchronous error, which stays; nothing while it is healthy, or where it does not
    /// report its health.
    pub error: Option<String>,
    /// For how long it has not answered a request for its health; nothing where it answered.
    pub unanswered_ms: Option<u64>,
    /// The rank that the error is about.
    pub rank: Option<u32>,
}

/// The total time for which a rank was waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slow {
    /// The rank.
    pub rank: u32,
    /// The total time.
    pub waited_ms: u64,
}

impl Report {
    /// The kind of the [`Reason`] where a rank goes on without another.
    pub const MASKED: &str = "masked";

    /// Whether an error that closed the communicator caused the report.
    pub fn is_error(&self) -> bool {
        !self.is_asked() && !self.is_masked()
    }

    /// Whether a signal or a call asked for the report.
    pub fn is_asked(&self) -> bool {
        self.reason.kind == "asked"
    }

    /// Whether a masked loss caused the report.
    pub fn is_masked(&self) -> bool {
        self.reason.kind == Self::MASKED
    }

    /// The knowledge of this rank about another. The report must come from [`read()`](crate::read()),
    /// which sorts peers.
    pub fn peer(&self, rank: u32) -> Option<&Peer> {
        let at = self.peers.binary_search_by_key(&rank, |peer| peer.rank).ok()?;
        self.peers.get(at)
    }
}
