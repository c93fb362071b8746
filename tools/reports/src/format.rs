//! The fields of a report. The page for operators is `docs/reports.md`.

use serde::{Deserialize, Serialize};

/// Raised when a field changes its meaning; new fields do not raise it.
pub const SCHEMA_VERSION: u32 = 2;

/// What one rank knew at one moment. Times are milliseconds. Fields may be read microseconds apart from
/// each other, since nobody stops for a report.
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
    /// The same for people, UTC.
    pub time: String,
    /// Why the report was written.
    pub reason: Reason,
    /// The config.
    pub config: ConfigName,
    /// The components in use.
    #[serde(alias = "parts")] // schema 1
    pub components: Components,
    /// What this rank is doing.
    pub activity: Activity,
    /// What it waits for, or gave up to wait for; nothing where it does not wait.
    pub wait: Option<Wait>,
    /// The other ranks.
    pub peers: Vec<Peer>,
    /// Queues of commands.
    #[serde(alias = "lanes")] // schema 1
    pub queues: Vec<Queue>,
    /// What the transports say of themselves.
    pub transports: Vec<Health>,
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
    /// The signal's name, whom the communicator goes on without, or the error.
    pub text: String,
    /// The rank that the error, or the first loss, is about.
    pub rank: Option<u32>,
}

/// The config of a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigName {
    /// The file as it was named.
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
pub struct Components {
    /// The kernel set.
    pub kernels: String,
    /// Inside a domain.
    pub scale_up: Option<String>,
    /// Between domains.
    pub scale_out: Option<String>,
    /// The topology.
    pub topology: String,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The communicator is being brought up.
    Opening,
    /// In the caller's code.
    Caller,
    /// Inside a call that sends.
    Send,
    /// Inside a call that receives.
    Receive,
    /// The communicator was closed.
    Closed,
    /// A newer version says something else.
    #[default]
    #[serde(other)]
    Unknown,
}

/// What a rank is doing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Activity {
    /// Where it is.
    pub state: State,
    /// For how long.
    pub since_ms: u64,
    /// Operations that it has begun: the number of the next one.
    pub begun: u64,
    /// Operations that all ranks have begun, as rank 0 said it last.
    pub begun_by_all: u64,
    /// The operation that it is in, or was in last; nothing before the first.
    pub call: Option<Call>,
    /// The last operation in each slot, in order of their numbers.
    pub recent: Vec<Call>,
    /// The collective of the world that it is in: `barrier`, `all_gather`, ...
    pub collective: Option<Collective>,
    /// Collectives of the world that have ended well, as all ranks number them: up to the last one that
    /// did so on this rank.
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
    /// Which.
    pub name: String,
    /// Its topic.
    pub topic: String,
    /// For how long the rank is in it.
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
    /// The operation; nothing where it has no number, as a graph of the device launched it.
    pub operation: Option<u64>,
    /// How long ago it began.
    pub age_ms: u64,
    /// Whether it ended without the signal.
    pub given_up: bool,
}

/// What a rank knows of another.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Its number.
    pub rank: u32,
    /// Its host, as it said at the start.
    pub host: String,
    /// Its process, as it said at the start.
    pub pid: u32,
    /// `alive`, `left` (it said goodbye) or `lost`.
    pub state: String,
    /// What it did, where it was lost: `was silent for 3 s`.
    pub why: String,
    /// How long ago its end was heard of; nothing while it lives.
    pub ended_ms: Option<u64>,
    /// How long ago its last heartbeat was heard. Ranks other than 0 hear it through rank 0.
    pub heard_ms: u64,
    /// Whether this rank goes on without it.
    pub masked: bool,
    /// How long this rank has waited for it, all in all, since the communicator was opened.
    pub waited_ms: u64,
    /// The links to it.
    pub links: Vec<Traffic>,
}

/// What passed over one link since the communicator was opened. Counts are of signals: with each record and each
/// piece of rows a signal rises.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// What the transport calls the link.
    pub name: String,
    /// Counts; nothing where the kernel set does not count.
    pub counts: Option<Counts>,
    /// How far this rank has raised each signal of the peer: `[signal, total]`.
    pub raised: Vec<(u32, u64)>,
}

/// Counts of one link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// How far this rank has raised signals of the peer.
    pub sent: u64,
    /// How far it has seen the peer raise its own, up to its last wait that succeeded.
    pub received: u64,
    /// How far it has waited, or waits, for them to rise.
    pub expected: u64,
    /// Commands to the peer that the transport accepted.
    pub posted: u64,
    /// Those that have ended.
    pub done: u64,
}

/// A queue of commands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Queue {
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// Its number.
    #[serde(alias = "lane")] // schema 1
    pub queue: u32,
    /// Commands that were accepted.
    pub posted: u64,
    /// Those that have ended.
    pub done: u64,
    /// Those that have not.
    pub in_flight: u64,
    /// The most that may be in flight.
    pub depth: u32,
}

/// What a transport says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Health {
    /// `scale-up` or `scale-out`.
    pub level: String,
    /// The transport.
    pub transport: String,
    /// Its first asynchronous error, which stays; nothing while it is healthy, or where it does not say.
    pub error: Option<String>,
    /// For how long it has not answered the question whether it is healthy; nothing where it did.
    pub unanswered_ms: Option<u64>,
    /// The rank that the error is about.
    pub rank: Option<u32>,
}

/// How long a rank was waited for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slow {
    /// Which.
    pub rank: u32,
    /// How long, all in all.
    pub waited_ms: u64,
}

impl Report {
    /// The kind of the [`Reason`] of a rank that goes on without another.
    pub const MASKED: &str = "masked";

    /// Whether an error that closed the communicator made the rank write it.
    pub fn is_error(&self) -> bool {
        !self.is_asked() && !self.is_masked()
    }

    /// Whether somebody asked for it.
    pub fn is_asked(&self) -> bool {
        self.reason.kind == "asked"
    }

    /// Whether the rank wrote it as it went on without one that was lost.
    pub fn is_masked(&self) -> bool {
        self.reason.kind == Self::MASKED
    }

    /// What this rank knows of another. Of a report that was read: peers are in order.
    pub fn peer(&self, rank: u32) -> Option<&Peer> {
        let at = self.peers.binary_search_by_key(&rank, |peer| peer.rank).ok()?;
        self.peers.get(at)
    }
}
