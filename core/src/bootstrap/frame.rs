//! The layout of a frame, the only thing that crosses a control connection.
//!
//! All integers are little-endian.
//!
//! | bytes | field | meaning |
//! |---|---|---|
//! | 0..4 | magic | `TYBS` |
//! | 4..6 | version | 2 |
//! | 6..8 | kind | see [`Kind`] |
//! | 8..12 | sender | rank that sealed the frame |
//! | 12..16 | length | payload bytes, at most [`Kind::payload_limit`] |
//! | 16..24 | topic | hash of the collective and its topic, 0 outside of collectives |
//! | 24..32 | sequence | frames sealed before this one, in this direction of this connection |
//! | 32..32+length | payload | |
//! | then 32 | mac | HMAC-SHA256 over the direction, the header and the payload |
//!
//! Everything here is a pure function over bytes: nothing is read, allocated by what a length says,
//! or trusted. Whether the MAC and the sequence are right is for [`super::seal::Opener`].

use super::identity::MAX_RANKS;
use crate::{Error, ErrorKind, Result};

/// The first four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"TYBS";
/// The version of this layout. Another version is refused.
pub const VERSION: u16 = 2;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// Bytes of the MAC that ends a frame.
pub const MAC_BYTES: usize = 32;
/// The most payload bytes of any frame: 64 MiB.
pub const MAX_PAYLOAD: usize = 64 << 20;

const OPERATION: &str = "read frame";

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// Joiner to rank 0, first frame: which rank of which job, and a nonce.
    Hello = 1,
    /// Rank 0 to joiner: its nonce.
    Challenge = 2,
    /// Joiner to rank 0, first frame under the connection's key: timing, host and process.
    Proof = 3,
    /// Rank 0 to joiner: you are in.
    Welcome = 4,
    /// Rank 0 to joiner: you are not, and why.
    Refused = 5,
    /// Rank 0 to all, or to one that comes back: collectives begin, with which number and without
    /// whom.
    Start = 6,
    /// Both ways: the sender runs, and what it has begun. From rank 0: what all ranks have begun, and
    /// which of them are quiet.
    Heartbeat = 7,
    /// To rank 0: this rank's part of a collective.
    Contribution = 8,
    /// From rank 0: the result of a collective.
    Outcome = 9,
    /// From rank 0: a collective failed the same way on every rank.
    Verdict = 10,
    /// From rank 0: a rank left or was lost.
    Departure = 11,
    /// Both ways, last frame: a clean end.
    Goodbye = 12,
    /// Both ways, last frame: the sender ends because of an error.
    Failed = 13,
    /// From rank 0: whether a process waits to come back as a lost rank.
    Returning = 14,
    /// To rank 0, last frame: the sender ends because it hears rank 0 no more.
    GaveUp = 15,
}

impl Kind {
    const ALL: [Self; 15] = [
        Self::Hello,
        Self::Challenge,
        Self::Proof,
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
    ];

    /// The kind of a code, if there is one.
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// The code in the header.
    pub fn code(self) -> u16 {
        self as u16
    }

    /// The most payload bytes of this kind.
    pub fn payload_limit(self) -> usize {
        match self {
            Self::Welcome | Self::Goodbye => 0,
            Self::Returning => 8,
            Self::Start => 16 + 4 * MAX_RANKS as usize,
            Self::Hello | Self::Challenge | Self::Proof => 512,
            Self::Refused | Self::Departure | Self::Failed | Self::GaveUp => 1024,
            Self::Heartbeat | Self::Verdict => 8192,
            Self::Contribution | Self::Outcome => MAX_PAYLOAD,
        }
    }
}

/// The first 32 bytes of a frame, checked: magic, version, kind and length are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame is for.
    pub kind: Kind,
    /// The rank that sealed it.
    pub sender: u32,
    /// Hash of the collective and its topic, 0 outside of collectives.
    pub topic: u64,
    /// Frames sealed before this one, in this direction of this connection.
    pub sequence: u64,
    /// Bytes of the payload that follows.
    pub payload_bytes: u32,
}

impl FrameHeader {
    /// Reads the first 32 of `bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when fewer bytes are there, or magic, version, kind or length are
    /// not what this version writes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(refuse(format!(
                "found {} bytes, expected a header of {HEADER_BYTES}",
                bytes.len()
            )));
        };
        if header[..4] != MAGIC {
            return Err(refuse(format!(
                "found magic {:02x?}, expected {MAGIC:02x?}: the other end does not speak this \
                 protocol",
                &header[..4]
            )));
        }
        let version = u16::from_le_bytes([header[4], header[5]]);
        if version != VERSION {
            return Err(refuse(format!("found version {version}, expected {VERSION}"))
                .with_fix("run the same tokenyard on every rank"));
        }
        let code = u16::from_le_bytes([header[6], header[7]]);
        let Some(kind) = Kind::from_code(code) else {
            return Err(refuse(format!(
                "found frame kind {code}, expected 1 to {}",
                Kind::ALL.len()
            )));
        };
        let payload_bytes = u32_at(header, 12);
        if payload_bytes as usize > kind.payload_limit() {
            return Err(refuse(format!(
                "found a {kind:?} frame of {payload_bytes} bytes, expected at most {}",
                kind.payload_limit()
            )));
        }
        Ok(Self {
            kind,
            sender: u32_at(header, 8),
            topic: u64_at(header, 16),
            sequence: u64_at(header, 24),
            payload_bytes,
        })
    }

    /// The header as bytes: the inverse of [`FrameHeader::parse`].
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&self.kind.code().to_le_bytes());
        out[8..12].copy_from_slice(&self.sender.to_le_bytes());
        out[12..16].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[16..24].copy_from_slice(&self.topic.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out
    }

    /// Bytes that follow the header: payload and MAC.
    pub fn body_bytes(&self) -> usize {
        self.payload_bytes as usize + MAC_BYTES
    }
}

/// One whole frame within borrowed bytes. Its MAC is *not* checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The checked header.
    pub header: FrameHeader,
    /// `header.payload_bytes` bytes.
    pub payload: &'a [u8],
    /// The claimed MAC, for [`super::seal::Opener::open`].
    pub mac: &'a [u8; MAC_BYTES],
}

impl<'a> Frame<'a> {
    /// Takes `bytes` apart. They must hold one frame and nothing else.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for whatever [`FrameHeader::parse`] refuses, and for bytes that are
    /// missing or left over.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let header = FrameHeader::parse(bytes)?;
        Self::join(header, &bytes[HEADER_BYTES..])
    }

    /// Joins a checked header with the bytes that followed it.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when `body` is not of [`FrameHeader::body_bytes`].
    pub fn join(header: FrameHeader, body: &'a [u8]) -> Result<Self> {
        let wrong_length = || {
            refuse(format!(
                "found {} bytes behind the header of a {:?} frame, expected {}",
                body.len(),
                header.kind,
                header.body_bytes()
            ))
        };
        if body.len() != header.body_bytes() {
            return Err(wrong_length());
        }
        let (payload, mac) = body.split_last_chunk().ok_or_else(wrong_length)?;
        Ok(Self { header, payload, mac })
    }
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Protocol, OPERATION, message)
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(field)
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> FrameHeader {
        FrameHeader {
            kind: Kind::Contribution,
            sender: 3,
            topic: 0x0123_4567_89ab_cdef,
            sequence: 9,
            payload_bytes: 2,
        }
    }

    fn frame() -> Vec<u8> {
        [&header().encode()[..], b"hi", &[7; MAC_BYTES]].concat()
    }

    fn message(bytes: &[u8]) -> String {
        let error = Frame::parse(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        error.to_string()
    }

    #[test]
    fn layout_is_the_documented_one() {
        let bytes = frame();
        assert_eq!(&bytes[..8], b"TYBS\x02\x00\x08\x00");
        assert_eq!(&bytes[8..16], &[3, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(&bytes[16..24], &[0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01]);
        assert_eq!(&bytes[24..34], b"\x09\0\0\0\0\0\0\0hi");
        let frame = Frame::parse(&bytes).unwrap();
        assert_eq!((frame.header, frame.payload, frame.mac), (header(), &b"hi"[..], &[7; 32]));
    }

    #[test]
    fn every_wrong_field_is_named_with_what_was_expected() {
        let altered = |at: usize, value: u8| {
            let mut bytes = frame();
            bytes[at] = value;
            message(&bytes)
        };
        assert!(altered(0, b'X').contains("found magic [58, 59, 42, 53]"));
        assert!(altered(4, 1).contains("found version 1, expected 2"));
        assert!(altered(6, 77).contains("found frame kind 77, expected 1 to 15"));
        assert!(altered(15, 5).contains("expected at most 67108864"));
        assert!(altered(12, 3).contains("found 34 bytes behind the header"));
        assert!(message(&frame()[..31]).contains("found 31 bytes, expected a header of 32"));
        assert!(message(&frame()[..40]).contains("found 8 bytes behind the header"));
    }

    #[test]
    fn a_small_kind_may_not_carry_a_large_payload() {
        let hello = FrameHeader { kind: Kind::Hello, payload_bytes: 513, ..header() };
        assert!(
            message(&hello.encode()).contains("Hello frame of 513 bytes, expected at most 512")
        );
    }

    proptest! {
        #[test]
        fn parsing_any_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Frame::parse(&bytes);
        }

        #[test]
        fn parsing_any_bytes_behind_a_valid_start_never_panics(
            tail in prop::collection::vec(any::<u8>(), 0..200), code in 0u16..20,
        ) {
            let bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &code.to_le_bytes(), &tail].concat();
            if let Ok(frame) = Frame::parse(&bytes) {
                prop_assert_eq!(frame.payload.len() + MAC_BYTES + HEADER_BYTES, bytes.len());
            }
        }

        #[test]
        fn a_frame_survives_the_round_trip(
            code in 1u16..=14, sender: u32, topic: u64, sequence: u64, mac: [u8; 32],
            payload in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let kind = Kind::from_code(code).unwrap();
            let payload = &payload[..payload.len().min(kind.payload_limit())];
            let payload_bytes = payload.len() as u32;
            let header = FrameHeader { kind, sender, topic, sequence, payload_bytes };
            let bytes = [&header.encode()[..], payload, &mac].concat();
            prop_assert_eq!(Frame::parse(&bytes).unwrap(), Frame { header, payload, mac: &mac });
        }
    }
}
