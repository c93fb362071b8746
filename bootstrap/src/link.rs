//! One authenticated connection: a task that reads and a task that writes.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::frame::{FrameKind, ReadError, ReceivedFrame, read_frame, write_frame};
use super::liveness::Liveness;
use super::noise::{Opener, Sealer};

/// An event of a connection to `peer`.
pub(super) struct Event {
    pub(super) peer: u32,
    /// The number of the connection, where a rank has had more than one.
    pub(super) link: u64,
    pub(super) what: What,
}

pub(super) enum What {
    Frame(ReceivedFrame),
    /// The last event. The text continues a sentence that begins with the peer's name.
    Closed(String),
}

/// The frames after the handshake.
const FROM_HUB: &[FrameKind] = &[
    FrameKind::Heartbeat,
    FrameKind::Outcome,
    FrameKind::Verdict,
    FrameKind::Departure,
    FrameKind::Start,
    FrameKind::Refused,
    FrameKind::Goodbye,
    FrameKind::Failed,
    FrameKind::Returning,
    FrameKind::Missing,
    FrameKind::Calling,
];
const TO_HUB: &[FrameKind] = &[
    FrameKind::Heartbeat,
    FrameKind::Contribution,
    FrameKind::Goodbye,
    FrameKind::Failed,
    FrameKind::GaveUp,
    FrameKind::Warning,
    FrameKind::Calling,
];

struct Outgoing {
    kind: FrameKind,
    payload: Arc<Vec<u8>>,
    /// Answered once the system has it.
    sent: Option<oneshot::Sender<()>>,
}

/// The receiver of all frames of a connection.
pub(super) struct Inbox {
    /// The sending peer; each piece counts as a sign of life, each piece of a long frame included.
    pub(super) peer: u32,
    /// The number of the connection, which marks its events.
    pub(super) link: u64,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) liveness: Arc<Liveness>,
}

/// A connection whose both ends hold the keys. Dropping it closes the socket at once.
pub(super) struct ControlLink {
    outbox: Option<mpsc::UnboundedSender<Outgoing>>,
    writer: JoinHandle<()>,
    reader: JoinHandle<()>,
}

/// A connection right after its handshake.
pub(super) struct Secured {
    pub(super) stream: TcpStream,
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
}

impl ControlLink {
    /// Starts both tasks.
    pub(super) fn start(secured: Secured, inbox: Inbox) -> Self {
        let Secured { stream, sealer, opener } = secured;
        let (read, write) = stream.into_split();
        // Unbounded, but short: one result is under way per rank, and heartbeats end with the peer.
        let (outbox, queue) = mpsc::unbounded_channel();
        inbox.liveness.heard(inbox.peer, Duration::ZERO);
        Self {
            outbox: Some(outbox),
            writer: tokio::spawn(write_all(write, sealer, queue)),
            reader: tokio::spawn(read_all(read, opener, inbox)),
        }
    }

    /// Queues a frame. Nothing happens once the link is closed.
    pub(super) fn send(&self, kind: FrameKind, payload: Arc<Vec<u8>>) {
        if let Some(outbox) = &self.outbox {
            // Fails only when the writer met an error; the reader reports the end of the link.
            let _ = outbox.send(Outgoing { kind, payload, sent: None });
        }
    }

    /// Queues a frame. The answer comes once the system has it, which sends it whatever becomes of this process.
    pub(super) fn hand_over(
        &self,
        kind: FrameKind,
        payload: Arc<Vec<u8>>,
    ) -> oneshot::Receiver<()> {
        let (sent, is_sent) = oneshot::channel();
        if let Some(outbox) = &self.outbox {
            let _ = outbox.send(Outgoing { kind, payload, sent: Some(sent) });
        }
        is_sent
    }

    /// Sends the queued frames, then closes this direction. The other direction stays open.
    pub(super) fn close(&mut self) {
        self.outbox = None;
    }

    /// Waits until a closed link has sent everything.
    pub(super) async fn sent(&mut self) {
        end_of(&mut self.writer).await;
    }

    /// Waits until a closed link has sent everything and the peer has closed as well.
    pub(super) async fn drained(&mut self) {
        end_of(&mut self.writer).await;
        end_of(&mut self.reader).await;
    }
}

/// A task may be waited for again.
async fn end_of(task: &mut JoinHandle<()>) {
    if !task.is_finished() {
        let _ = task.await;
    }
}

impl Drop for ControlLink {
    fn drop(&mut self) {
        self.writer.abort();
        self.reader.abort();
    }
}

async fn write_all(
    mut stream: OwnedWriteHalf,
    mut sealer: Sealer,
    mut queue: mpsc::UnboundedReceiver<Outgoing>,
) {
    while let Some(Outgoing { kind, payload, sent }) = queue.recv().await {
        if write_frame(&mut stream, &mut sealer, kind, &payload).await.is_err() {
            return;
        }
        if let Some(sent) = sent {
            let _ = sent.send(());
        }
    }
    let _ = stream.shutdown().await;
}

async fn read_all(mut stream: OwnedReadHalf, mut opener: Opener, inbox: Inbox) {
    let Inbox { peer, link, events, liveness } = inbox;
    let heard = || liveness.heard(peer, Duration::ZERO);
    let expected = if peer == 0 { FROM_HUB } else { TO_HUB };
    loop {
        let what = match read_frame(&mut stream, &mut opener, expected, heard).await {
            Ok(received) => What::Frame(received),
            Err(ReadError::Closed(why)) => What::Closed(why),
            Err(ReadError::Refused(error)) => What::Closed(format!("broke the protocol: {error}")),
        };
        let last = matches!(what, What::Closed(_));
        if events.send(Event { peer, link, what }).await.is_err() || last {
            break;
        }
    }
    // Closing a socket with unread bytes resets it, and the peer could lose our last frames.
    discard(&mut stream).await;
}

/// Reads and discards until the peer closes.
pub(super) async fn discard(stream: &mut (impl AsyncRead + Unpin)) {
    let mut scrap = [0; 4096];
    while matches!(stream.read(&mut scrap).await, Ok(count) if count > 0) {}
}
