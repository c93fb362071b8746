//! Frames: the messages of a control connection once both ends hold its keys.
//!
//! A frame is a kind and a payload. It travels as one or more Noise messages, each behind its length
//! (16 bits, little-endian). The first message begins with a [`Head`]; all the rest is the payload. A
//! long payload is sent in pieces, and other tasks run between them.
//!
//! The cipher covers direction and order: decryption fails for a message that is replayed, reflected,
//! out of order or altered.

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::identity::MAX_RANKS;
use super::message;
use super::noise::{MAX_PLAIN, Opener, Sealer};
use tokenyard_errors::{Error, ErrorKind, Result};

/// The most payload bytes of any frame: 64 MiB.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// A long payload is sent in pieces of about this many bytes.
const PIECE: usize = 256 << 10;

const OPERATION: &str = "read frame";

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FrameKind {
    /// Joiner to rank 0, first frame: proves that the joiner holds the keys of this connection, so its
    /// first message is no replay.
    Confirm,
    /// Rank 0 to joiner: the joiner is accepted.
    Welcome,
    /// Rank 0 to joiner: the joiner is refused, with the reason.
    Refused,
    /// Rank 0 to all, or to a rank that comes back: collectives begin, with their first number and the
    /// absent ranks.
    Start,
    /// Both ways: the sender runs, and the operations it has begun. From rank 0: the operations all
    /// ranks have begun, and the quiet ranks.
    Heartbeat,
    /// To rank 0: this rank's part of a collective.
    Contribution,
    /// From rank 0: the result of a collective.
    Outcome,
    /// From rank 0: a collective failed the same way on every rank.
    Verdict,
    /// From rank 0: a rank left or was lost.
    Departure,
    /// Both ways, last frame: a clean end.
    Goodbye,
    /// Both ways, last frame: the sender ends because of an error.
    Failed,
    /// From rank 0: a process waits to come back as a lost rank, or does so no more.
    Returning,
    /// To rank 0, last frame: the sender ends because it receives nothing from rank 0 any more.
    GaveUp,
    /// From rank 0: the ranks that have not joined.
    Missing,
    /// To rank 0: a warning, which rank 0 shows.
    Warning,
    /// Both ways: the call of a component that the sender is about to make, or none.
    Calling,
}

impl FrameKind {
    /// All kinds.
    pub const ALL: [Self; 16] = [
        Self::Confirm,
        Self::Welcome,
        Self::Refused,
        Self::Start,
        Self::Heartbeat,
        Self::Contribution,
        Self::Outcome,
        Self::Verdict,
        Self::Departure,
        Self::Goodbye,
        Self::Failed,
        Self::Returning,
        Self::GaveUp,
        Self::Missing,
        Self::Warning,
        Self::Calling,
    ];

    /// The most payload bytes of this kind.
    pub fn payload_limit(self) -> usize {
        match self {
            Self::Confirm | Self::Welcome | Self::Goodbye => 0,
            Self::Returning => 8,
            Self::Missing | Self::Warning => 2048,
            Self::Start => 16 + 5 * MAX_RANKS as usize,
            Self::Refused | Self::Departure | Self::Failed | Self::GaveUp | Self::Calling => 1024,
            Self::Heartbeat | Self::Verdict => 8192,
            Self::Contribution | Self::Outcome => MAX_PAYLOAD,
        }
    }
}

/// The start of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The purpose of the frame.
    pub kind: FrameKind,
    /// Bytes of the payload, at most [`FrameKind::payload_limit`].
    pub bytes: u32,
}

impl Head {
    /// The most bytes of a head.
    const MAX_BYTES: usize = 6;

    /// Reads the head of a first message. Returns it with the payload bytes after it.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for an unknown kind, a payload beyond its limit, and more bytes than
    /// the head announces.
    pub fn parse(plain: &[u8]) -> Result<(Self, &[u8])> {
        let (head, rest): (Self, _) = postcard::take_from_bytes(plain)
            .map_err(|error| refuse("found no head of a frame".into()).with_source(error))?;
        let Self { kind, bytes } = head;
        let limit = kind.payload_limit();
        if bytes as usize > limit {
            return Err(refuse(format!(
                "found a {kind:?} frame of {bytes} bytes, expected at most {limit}"
            )));
        }
        if rest.len() > bytes as usize {
            return Err(too_much(head));
        }
        Ok((head, rest))
    }
}

/// A frame that was authenticated.
#[derive(Debug)]
pub(super) struct ReceivedFrame {
    pub(super) kind: FrameKind,
    pub(super) payload: Vec<u8>,
}

/// Seals and writes one frame.
pub(super) async fn write_frame(
    stream: &mut (impl AsyncWrite + Unpin),
    sealer: &mut Sealer,
    kind: FrameKind,
    payload: &[u8],
) -> std::io::Result<()> {
    debug_assert!(payload.len() <= kind.payload_limit(), "{kind:?}: {}", payload.len());
    let head = message::encode(&Head { kind, bytes: payload.len() as u32 });
    let (first, rest) = payload.split_at(payload.len().min(MAX_PLAIN - Head::MAX_BYTES));
    let mut out = Vec::new();
    sealer.seal(&[&head, first].concat(), &mut out)?;
    for plain in rest.chunks(MAX_PLAIN) {
        if out.len() >= PIECE {
            stream.write_all(&out).await?;
            out.clear();
            tokio::task::yield_now().await;
        }
        sealer.seal(plain, &mut out)?;
    }
    stream.write_all(&out).await
}

/// The reason why no frame was read.
#[derive(Debug)]
pub(super) enum ReadError {
    /// The connection ended. The text continues a sentence that begins with the peer's name.
    Closed(String),
    /// The bytes received are not the next frame of the peer.
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
            // The system resets the connection of a process that ends with bytes unread.
            std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::ConnectionAborted => format!(
                "closed its connection without a goodbye: the process ended or was killed ({error})"
            ),
            _ => format!("broke its connection without a goodbye: {error}"),
        })
    }
}

/// Reads one frame of the `expected` kinds. Memory grows with the bytes that arrive, not with the size
/// that a head announces; `heard` is called for every piece.
pub(super) async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    opener: &mut Opener,
    expected: &[FrameKind],
    heard: impl Fn(),
) -> std::result::Result<ReceivedFrame, ReadError> {
    let mut sealed = Vec::new();
    let mut plain = Vec::new();
    let mut length = [0; 2];
    // A connection may end here and nowhere else, so this end is detected separately.
    if stream.read(&mut length[..1]).await? == 0 {
        return Err(ReadError::Closed(
            "closed its connection without a goodbye: the process ended or was killed".to_owned(),
        ));
    }
    stream.read_exact(&mut length[1..]).await?;
    read_sealed(stream, length, &mut sealed).await?;
    opener.open(&sealed, &mut plain)?;
    heard();
    let (head, first) = Head::parse(&plain)?;
    let Head { kind, bytes } = head;
    if !expected.contains(&kind) {
        return Err(refuse(format!("found a {kind:?} frame, expected one of {expected:?}")).into());
    }
    let (mut payload, total) = (first.to_vec(), bytes as usize);
    let mut yielded = 0;
    while payload.len() < total {
        if payload.len() - yielded >= PIECE {
            yielded = payload.len();
            tokio::task::yield_now().await;
        }
        stream.read_exact(&mut length).await?;
        read_sealed(stream, length, &mut sealed).await?;
        opener.open(&sealed, &mut plain)?;
        heard();
        if plain.is_empty() {
            return Err(refuse(format!("found an empty piece of a {kind:?} frame")).into());
        }
        if plain.len() > total - payload.len() {
            return Err(too_much(head).into());
        }
        payload.extend(&plain);
    }
    Ok(ReceivedFrame { kind, payload })
}

async fn read_sealed(
    stream: &mut (impl AsyncRead + Unpin),
    length: [u8; 2],
    sealed: &mut Vec<u8>,
) -> std::io::Result<()> {
    sealed.resize(u16::from_le_bytes(length).into(), 0);
    stream.read_exact(sealed).await.map(drop)
}

fn too_much(Head { kind, bytes }: Head) -> Error {
    refuse(format!("found more payload of a {kind:?} frame than the {bytes} bytes it announced"))
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Protocol, OPERATION, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::noise::pair_for_tests;
    use super::*;

    /// The frame that the other end reads from `bytes`.
    fn read(opener: &mut Opener, mut bytes: &[u8]) -> Result<ReceivedFrame> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let frame = runtime.block_on(read_frame(&mut bytes, opener, &FrameKind::ALL, || ()));
        frame.map_err(|error| match error {
            ReadError::Closed(why) => Error::new(ErrorKind::PeerLost, OPERATION, why),
            ReadError::Refused(error) => error,
        })
    }

    fn write(sealer: &mut Sealer, kind: FrameKind, payload: &[u8]) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut out = Vec::new();
        runtime.block_on(write_frame(&mut out, sealer, kind, payload)).unwrap();
        out
    }

    fn refused(result: Result<ReceivedFrame>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        error.to_string()
    }

    #[test]
    fn frames_open_in_the_order_they_were_sealed_whatever_their_length() {
        let ((mut sealer, _), (_, mut opener)) = pair_for_tests();
        for bytes in [0, 1, MAX_PLAIN - 6, MAX_PLAIN - 5, MAX_PLAIN, 3 * MAX_PLAIN, 1 << 20] {
            let payload: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            let frame =
                read(&mut opener, &write(&mut sealer, FrameKind::Outcome, &payload)).unwrap();
            assert!(frame.kind == FrameKind::Outcome && frame.payload == payload, "{bytes}");
        }
    }

    #[test]
    fn a_peer_that_ends_with_bytes_unread_has_closed_its_connection_without_a_goodbye() {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        own.write_all(b"unread").unwrap();
        // The bytes are at the peer, so that its end resets the connection.
        peer.peek(&mut [0]).unwrap();
        drop(peer);
        let ((_, mut opener), _) = pair_for_tests();
        own.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let error = runtime.block_on(async {
            let mut own = tokio::net::TcpStream::from_std(own).unwrap();
            read_frame(&mut own, &mut opener, &FrameKind::ALL, || ()).await.unwrap_err()
        });
        let ReadError::Closed(why) = error else { panic!("{error:?}") };
        let expected = "closed its connection without a goodbye: the process ended or was killed";
        assert!(why.starts_with(expected) && why.contains("reset"), "{why}");
    }

    #[test]
    fn a_replayed_a_skipped_and_a_reflected_frame_are_refused() {
        let ((mut sealer, mut own), (_, mut opener)) = pair_for_tests();
        let first = write(&mut sealer, FrameKind::Contribution, b"1");
        let second = write(&mut sealer, FrameKind::Contribution, b"2");
        assert!(refused(read(&mut opener, &second)).contains("does not open"));
        read(&mut opener, &first).unwrap();
        assert!(refused(read(&mut opener, &first)).contains("does not open"));
        assert!(refused(read(&mut own, &first)).contains("does not open"));
        assert_eq!(read(&mut opener, &second).unwrap().payload, b"2");
    }

    #[test]
    fn a_head_that_cannot_be_is_refused_before_its_payload_is_read() {
        for (plain, says) in [
            (&[77, 0][..], "no head of a frame"),
            (&[], "no head of a frame"),
            (&message::encode(&Head { kind: FrameKind::Welcome, bytes: 1 }), "at most 0"),
            (
                &message::encode(&Head { kind: FrameKind::Outcome, bytes: 1 + (64 << 20) }),
                "67108864",
            ),
            (
                &[&message::encode(&Head { kind: FrameKind::Failed, bytes: 1 })[..], b"ab"]
                    .concat(),
                "than the 1 bytes",
            ),
        ] {
            let ((mut sealer, _), (_, mut opener)) = pair_for_tests();
            let mut bytes = Vec::new();
            sealer.seal(plain, &mut bytes).unwrap();
            let text = refused(read(&mut opener, &bytes));
            assert!(text.contains(says), "{text}");
        }
    }

    #[test]
    fn a_payload_that_stops_goes_on_for_too_long_or_with_nothing_is_refused() {
        for (piece, says) in [(&b""[..], "empty piece"), (&[7; 200], "than the 100 bytes")] {
            let ((mut sealer, _), (_, mut opener)) = pair_for_tests();
            let mut bytes = Vec::new();
            let head = message::encode(&Head { kind: FrameKind::Failed, bytes: 100 });
            sealer.seal(&head, &mut bytes).unwrap();
            sealer.seal(piece, &mut bytes).unwrap();
            let text = refused(read(&mut opener, &bytes));
            assert!(text.contains(says), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_single_altered_byte_and_any_truncation_is_refused(
            payload in prop::collection::vec(any::<u8>(), 0..100), at: prop::sample::Index,
            flip in 1u8..=255,
        ) {
            let ((mut sealer, _), (_, mut opener)) = pair_for_tests();
            let mut bytes = write(&mut sealer, FrameKind::Contribution, &payload);
            let at = at.index(bytes.len());
            prop_assert!(read(&mut opener, &bytes[..at]).is_err());
            bytes[at] ^= flip;
            prop_assert!(read(&mut opener, &bytes).is_err());
        }

        #[test]
        fn parsing_any_head_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..50)) {
            if let Ok((head, rest)) = Head::parse(&bytes) {
                prop_assert!(rest.len() <= head.bytes as usize);
            }
        }
    }
}
