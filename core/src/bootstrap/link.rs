//! One authenticated connection: a task that reads and a task that writes.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::frame::{Frame, FrameHeader, HEADER_BYTES, Kind};
use super::liveness::Liveness;
use super::seal::{Opener, Sealer};
use crate::{Error, ErrorKind, Result};

/// A frame that was authenticated.
pub(super) struct Received {
    pub(super) header: FrameHeader,
    pub(super) payload: Vec<u8>,
}

/// What happened on the connection to `peer`.
pub(super) struct Event {
    pub(super) peer: u32,
    pub(super) what: What,
}

pub(super) enum What {
    Frame(Received),
    /// The last event: what the peer did, to be read behind its name.
    Closed(String),
}

/// What comes after the handshake.
const FROM_HUB: &[Kind] = &[
    Kind::Heartbeat,
    Kind::Outcome,
    Kind::Verdict,
    Kind::Departure,
    Kind::Start,
    Kind::Refused,
    Kind::Goodbye,
    Kind::Failed,
];
const TO_HUB: &[Kind] = &[Kind::Heartbeat, Kind::Contribution, Kind::Goodbye, Kind::Failed];

struct Outgoing {
    kind: Kind,
    topic: u64,
    payload: Arc<Vec<u8>>,
}

/// A connection whose both ends hold the key. Dropping it closes the socket at once.
pub(super) struct Link {
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

impl Link {
    /// Starts both tasks. Everything that comes from `peer` goes to `events` and counts as a sign
    /// of life, down to every piece of a long frame.
    pub(super) fn start(
        secured: Secured,
        peer: u32,
        events: mpsc::Sender<Event>,
        liveness: Arc<Liveness>,
    ) -> Self {
        let Secured { stream, sealer, opener } = secured;
        let (read, write) = stream.into_split();
        // Unbounded, but short: one result is under way per rank, and heartbeats end with the peer.
        let (outbox, queue) = mpsc::unbounded_channel();
        liveness.heard(peer, Duration::ZERO);
        Self {
            outbox: Some(outbox),
            writer: tokio::spawn(write_all(write, sealer, queue)),
            reader: tokio::spawn(read_all(read, opener, peer, events, liveness)),
        }
    }

    /// Queues a frame. Nothing happens once the link is closed.
    pub(super) fn send(&self, kind: Kind, topic: u64, payload: Arc<Vec<u8>>) {
        if let Some(outbox) = &self.outbox {
            // Fails only when the writer met an error; the reader reports the end of the link.
            let _ = outbox.send(Outgoing { kind, topic, payload });
        }
    }

    /// Sends what is queued, then closes this direction. The other may go on.
    pub(super) fn close(&mut self) {
        self.outbox = None;
    }

    /// Waits until a closed link has sent everything and the peer has closed as well.
    pub(super) async fn drained(&mut self) {
        let _ = (&mut self.writer).await;
        let _ = (&mut self.reader).await;
    }
}

impl Drop for Link {
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
    while let Some(Outgoing { kind, topic, payload }) = queue.recv().await {
        if write_frame(&mut stream, &mut sealer, (kind, topic), &payload).await.is_err() {
            return;
        }
    }
    let _ = stream.shutdown().await;
}

async fn read_all(
    mut stream: OwnedReadHalf,
    mut opener: Opener,
    peer: u32,
    events: mpsc::Sender<Event>,
    liveness: Arc<Liveness>,
) {
    let heard = || liveness.heard(peer, Duration::ZERO);
    let expected = if peer == 0 { FROM_HUB } else { TO_HUB };
    loop {
        let read = read_raw(&mut stream, expected, heard).await;
        let what = match read.and_then(|raw| Ok(raw.into_received(&mut opener)?)) {
            Ok(received) => What::Frame(received),
            Err(ReadError::Closed(why)) => What::Closed(why),
            Err(ReadError::Refused(error)) => What::Closed(format!("broke the protocol: {error}")),
        };
        let last = matches!(what, What::Closed(_));
        if events.send(Event { peer, what }).await.is_err() || last {
            break;
        }
    }
    // To close a socket with unread bytes resets it, and the peer could lose our last frames.
    discard(&mut stream).await;
}

/// Reads and forgets until the peer closes.
pub(super) async fn discard(stream: &mut (impl AsyncRead + Unpin)) {
    let mut scrap = [0; 4096];
    while matches!(stream.read(&mut scrap).await, Ok(count) if count > 0) {}
}

/// Seals and writes one frame.
pub(super) async fn write_frame(
    stream: &mut (impl AsyncWrite + Unpin),
    sealer: &mut Sealer,
    (kind, topic): (Kind, u64),
    payload: &[u8],
) -> std::io::Result<()> {
    const ONE_WRITE: usize = 16 << 10;
    let (header, mac) = sealer.seal(kind, topic, payload);
    if payload.len() <= ONE_WRITE {
        return stream.write_all(&[&header.encode()[..], payload, &mac].concat()).await;
    }
    stream.write_all(&header.encode()).await?;
    stream.write_all(payload).await?;
    stream.write_all(&mac).await
}

/// Why no frame was read.
pub(super) enum ReadError {
    /// The connection ended. What the peer did, behind its name.
    Closed(String),
    /// What came is not the next frame of the peer.
    Refused(Error),
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl From<std::io::Error> for ReadError {
    fn from(error: std::io::Error) -> Self {
        Self::Closed(format!("broke its connection without a goodbye: {error}"))
    }
}

/// A frame whose layout is right. Its MAC is not checked yet.
pub(super) struct Raw {
    pub(super) header: FrameHeader,
    body: Vec<u8>,
}

impl Raw {
    /// The payload, if this is the next frame for `opener`.
    pub(super) fn open(&self, opener: &mut Opener) -> Result<&[u8]> {
        let frame = Frame::join(self.header, &self.body)?;
        opener.open(&frame).map(|()| frame.payload)
    }

    fn into_received(mut self, opener: &mut Opener) -> Result<Received> {
        self.open(opener)?;
        self.body.truncate(self.header.payload_bytes as usize);
        Ok(Received { header: self.header, payload: self.body })
    }
}

/// Reads one frame of the `expected` kinds. Memory grows with what arrives, not with what a header
/// announces.
pub(super) async fn read_raw(
    stream: &mut (impl AsyncRead + Unpin),
    expected: &[Kind],
    heard: impl Fn(),
) -> std::result::Result<Raw, ReadError> {
    let mut head = Vec::with_capacity(HEADER_BYTES);
    if !fill(stream, &mut head, HEADER_BYTES, &heard).await? {
        return Err(match head.len() {
            0 => ReadError::Closed(CLOSED.to_owned()),
            found => cut_short(found, HEADER_BYTES),
        });
    }
    let header = FrameHeader::parse(&head)?;
    if !expected.contains(&header.kind) {
        let message = format!("found a {:?} frame, expected one of {expected:?}", header.kind);
        return Err(Error::new(ErrorKind::Protocol, "read frame", message).into());
    }
    let mut body = Vec::new();
    if !fill(stream, &mut body, header.body_bytes(), &heard).await? {
        return Err(cut_short(HEADER_BYTES + body.len(), HEADER_BYTES + header.body_bytes()));
    }
    Ok(Raw { header, body })
}

/// What a peer did whose connection ended between two frames.
const CLOSED: &str = "closed its connection without a goodbye: the process ended or was killed";

fn cut_short(found: usize, expected: usize) -> ReadError {
    ReadError::Closed(format!(
        "closed its connection within a frame, after {found} of {expected} bytes: the process ended \
         or was killed"
    ))
}

/// Appends to `buffer` until it holds `total` bytes, or says that the stream ended before.
async fn fill(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    total: usize,
    heard: &impl Fn(),
) -> std::io::Result<bool> {
    const PIECE: usize = 64 << 10;
    while buffer.len() < total {
        let missing = total - buffer.len();
        buffer.reserve(missing.min(PIECE.max(buffer.len())));
        if (&mut *stream).take(missing as u64).read_buf(buffer).await? == 0 {
            return Ok(false);
        }
        heard();
    }
    Ok(true)
}
