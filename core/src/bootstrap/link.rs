//! One authenticated connection: a task that reads and a task that writes.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::frame::{Frame, FrameHeader, HEADER_BYTES, Kind, MAC_BYTES};
use super::liveness::Liveness;
use super::seal::{Opener, Sealer};
use crate::{Error, ErrorKind, Result};

/// A frame that was authenticated.
pub(super) struct Received {
    pub(super) header: FrameHeader,
    pub(super) payload: Vec<u8>,
}

/// What happened on a connection to `peer`.
pub(super) struct Event {
    pub(super) peer: u32,
    /// Which connection, where a rank has had more than one.
    pub(super) link: u64,
    pub(super) what: What,
}

pub(super) enum What {
    Frame(Received),
    /// The last event: what the peer did, to be read behind its name.
    Closed(String),
}

/// A long payload is sent, received and authenticated in pieces of this many bytes.
const PIECE: usize = 256 << 10;

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
    Kind::Returning,
];
const TO_HUB: &[Kind] =
    &[Kind::Heartbeat, Kind::Contribution, Kind::Goodbye, Kind::Failed, Kind::GaveUp];

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
    /// Starts both tasks. Everything that comes from `peer` goes to `events`, marked as of `link`,
    /// and counts as a sign of life, down to every piece of a long frame.
    pub(super) fn start(
        secured: Secured,
        (peer, link): (u32, u64),
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
            reader: tokio::spawn(read_all((read, opener), (peer, link), events, liveness)),
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

    /// Waits until a closed link has sent everything.
    pub(super) async fn sent(&mut self) {
        let _ = (&mut self.writer).await;
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
    (mut stream, mut opener): (OwnedReadHalf, Opener),
    (peer, link): (u32, u64),
    events: mpsc::Sender<Event>,
    liveness: Arc<Liveness>,
) {
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
    // To close a socket with unread bytes resets it, and the peer could lose our last frames.
    discard(&mut stream).await;
}

/// Reads and forgets until the peer closes.
pub(super) async fn discard(stream: &mut (impl AsyncRead + Unpin)) {
    let mut scrap = [0; 4096];
    while matches!(stream.read(&mut scrap).await, Ok(count) if count > 0) {}
}

/// Seals and writes one frame. A long payload goes piece by piece, and others run in between.
pub(super) async fn write_frame(
    stream: &mut (impl AsyncWrite + Unpin),
    sealer: &mut Sealer,
    (kind, topic): (Kind, u64),
    payload: &[u8],
) -> std::io::Result<()> {
    const ONE_WRITE: usize = 16 << 10;
    let (header, mut mac) = sealer.begin(kind, topic, payload.len());
    if payload.len() <= ONE_WRITE {
        mac.update(payload);
        return stream.write_all(&[&header.encode()[..], payload, &mac.finish()].concat()).await;
    }
    stream.write_all(&header.encode()).await?;
    for piece in payload.chunks(PIECE) {
        mac.update(piece);
        stream.write_all(piece).await?;
        tokio::task::yield_now().await;
    }
    stream.write_all(&mac.finish()).await
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
        Self::Closed(match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                "closed its connection within a frame: the process ended or was killed".to_owned()
            }
            _ => format!("broke its connection without a goodbye: {error}"),
        })
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
}

/// Reads one frame of the `expected` kinds, small ones, for whoever opens it later.
pub(super) async fn read_raw(
    stream: &mut (impl AsyncRead + Unpin),
    expected: &[Kind],
) -> std::result::Result<Raw, ReadError> {
    let header = read_header(stream, expected, || ()).await?;
    let mut body = Vec::new();
    fill(stream, &mut body, header.body_bytes(), |_| ()).await?;
    Ok(Raw { header, body })
}

/// Reads one frame of the `expected` kinds and has `opener` check it. Memory grows with what
/// arrives, not with what a header announces; `heard` is called for every piece.
async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    opener: &mut Opener,
    expected: &[Kind],
    heard: impl Fn(),
) -> std::result::Result<Received, ReadError> {
    let header = read_header(stream, expected, &heard).await?;
    let mut running = opener.begin(&header);
    let mut payload = Vec::new();
    let on_piece = |piece: &[u8]| {
        heard();
        running.update(piece);
    };
    fill(stream, &mut payload, header.payload_bytes as usize, on_piece).await?;
    let mut claimed = [0; MAC_BYTES];
    stream.read_exact(&mut claimed).await?;
    opener.finish(&header, running, &claimed)?;
    Ok(Received { header, payload })
}

async fn read_header(
    stream: &mut (impl AsyncRead + Unpin),
    expected: &[Kind],
    heard: impl Fn(),
) -> std::result::Result<FrameHeader, ReadError> {
    let mut head = [0; HEADER_BYTES];
    // The end of the connection is proper here and nowhere else, so look for it apart.
    if stream.read(&mut head[..1]).await? == 0 {
        return Err(ReadError::Closed(
            "closed its connection without a goodbye: the process ended or was killed".to_owned(),
        ));
    }
    stream.read_exact(&mut head[1..]).await?;
    heard();
    let header = FrameHeader::parse(&head)?;
    if expected.contains(&header.kind) {
        return Ok(header);
    }
    let message = format!("found a {:?} frame, expected one of {expected:?}", header.kind);
    Err(Error::new(ErrorKind::Protocol, "read frame", message).into())
}

/// Appends to `buffer` until it holds `total` bytes; `on_piece` sees each of them once. Others run
/// in between.
async fn fill(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
    total: usize,
    mut on_piece: impl FnMut(&[u8]),
) -> std::io::Result<()> {
    while buffer.len() < total {
        let (have, most) = (buffer.len(), PIECE.min(total - buffer.len()));
        buffer.reserve(most);
        if (&mut *stream).take(most as u64).read_buf(buffer).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        on_piece(buffer.get(have..).unwrap_or_default());
        if most == PIECE {
            tokio::task::yield_now().await;
        }
    }
    Ok(())
}
