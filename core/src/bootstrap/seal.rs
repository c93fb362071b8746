//! Keys, MACs and sequence numbers: what makes a frame one of ours.
//!
//! Every connection has a key of its own, derived from the job secret and from fresh nonces of both
//! ends, so a frame of another connection is worth nothing here. Within a connection the MAC covers
//! the direction (no reflection) and the sequence number (no replay, no omission). Payloads are
//! authenticated, not hidden.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::frame::{Frame, FrameHeader, Kind, MAC_BYTES};
use super::secret::Secret;
use crate::{Error, ErrorKind, Result};

/// Bytes of a handshake nonce.
pub const NONCE_BYTES: usize = 32;
/// Bytes of the id of a job.
pub const JOB_BYTES: usize = 16;

/// What both ends of a connection put into its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transcript {
    /// The id of the job where the rendezvous carries one, else zeros.
    pub job: [u8; JOB_BYTES],
    /// Fresh randomness of rank 0.
    pub hub_nonce: [u8; NONCE_BYTES],
    /// Fresh randomness of the joiner.
    pub spoke_nonce: [u8; NONCE_BYTES],
    /// The rank that the joiner claims.
    pub rank: u32,
    /// The size of the world, as the joiner believes.
    pub ranks: u32,
}

/// The key of one connection. Not printable.
#[derive(Clone)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of the two frames before both nonces are known. It is public: a MAC under it
    /// detects damage, it proves nothing.
    pub fn public() -> Self {
        Self(Sha256::digest(b"tokenyard bootstrap 1, before the handshake").into())
    }

    /// The key of a connection.
    pub fn derive(secret: &Secret, transcript: &Transcript) -> Self {
        let Transcript { job, hub_nonce, spoke_nonce, rank, ranks } = transcript;
        let mut mac = keyed(secret.bytes());
        mac.update(b"tokenyard bootstrap 1, connection");
        mac.update(job);
        mac.update(hub_nonce);
        mac.update(spoke_nonce);
        mac.update(&rank.to_le_bytes());
        mac.update(&ranks.to_le_bytes());
        Self(mac.finalize().into_bytes().into())
    }

    fn begin(&self, direction: Direction, header: &FrameHeader) -> PartialMac {
        let mut mac = keyed(&self.0);
        mac.update(&[direction as u8]);
        mac.update(&header.encode());
        PartialMac(mac)
    }
}

/// A MAC over the first part of a frame. Long payloads are added piece by piece as they travel, so
/// that the control thread stays free for heartbeats.
pub struct PartialMac(Hmac<Sha256>);

impl PartialMac {
    /// Adds the next piece of the payload.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The MAC, once the whole payload was added.
    pub fn finish(self) -> [u8; MAC_BYTES] {
        self.0.finalize().into_bytes().into()
    }
}

/// Which way a frame travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    /// From rank 0.
    FromHub = 1,
    /// To rank 0.
    ToHub = 2,
}

/// Seals the frames of one direction of one connection.
pub struct Sealer {
    key: Key,
    direction: Direction,
    sender: u32,
    next: u64,
}

impl Sealer {
    /// A sealer that starts at sequence 0.
    pub fn new(key: Key, direction: Direction, sender: u32) -> Self {
        Self { key, direction, sender, next: 0 }
    }

    /// The header of the next frame, whose payload has `payload_bytes`, within the limit of `kind`,
    /// and its MAC to go on with.
    pub fn begin(
        &mut self,
        kind: Kind,
        topic: u64,
        payload_bytes: usize,
    ) -> (FrameHeader, PartialMac) {
        debug_assert!(payload_bytes <= kind.payload_limit(), "{kind:?}: {payload_bytes}");
        let header = FrameHeader {
            kind,
            sender: self.sender,
            topic,
            sequence: self.next,
            payload_bytes: payload_bytes as u32,
        };
        self.next += 1;
        (header, self.key.begin(self.direction, &header))
    }
}

/// Checks the frames of one direction of one connection.
pub struct Opener {
    key: Key,
    direction: Direction,
    sender: u32,
    next: u64,
}

impl Opener {
    /// An opener that expects sequence 0 from `sender`.
    pub fn new(key: Key, direction: Direction, sender: u32) -> Self {
        Self { key, direction, sender, next: 0 }
    }

    /// Accepts `frame` as the next one of its sender.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when the MAC, the sender or the sequence is another than expected.
    /// The opener is unchanged then.
    pub fn open(&mut self, frame: &Frame<'_>) -> Result<()> {
        let mut mac = self.begin(&frame.header);
        mac.update(frame.payload);
        self.finish(&frame.header, mac, frame.mac)
    }

    /// The MAC of a frame whose payload is still to come.
    pub fn begin(&self, header: &FrameHeader) -> PartialMac {
        self.key.begin(self.direction, header)
    }

    /// Accepts the frame that [`Opener::begin`] began, after its payload was added to `mac`.
    ///
    /// # Errors
    /// As [`Opener::open`].
    pub fn finish(
        &mut self,
        header: &FrameHeader,
        mac: PartialMac,
        claimed: &[u8; MAC_BYTES],
    ) -> Result<()> {
        let refuse = |message: String| Err(Error::new(ErrorKind::Protocol, "open frame", message));
        // Before any other field is believed: `verify_slice` compares in constant time.
        if mac.0.verify_slice(claimed).is_err() {
            return refuse(format!(
                "found a {:?} frame with a wrong MAC, expected one made with this connection's key",
                header.kind
            ));
        }
        if header.sender != self.sender {
            return refuse(format!(
                "found sender rank {}, expected rank {}",
                header.sender, self.sender
            ));
        }
        if header.sequence != self.next {
            return refuse(format!(
                "found sequence number {}, expected {}",
                header.sequence, self.next
            ));
        }
        self.next += 1;
        Ok(())
    }
}

/// The hash of a collective and its topic, as the header carries it.
pub(super) fn topic_hash(operation: u8, topic: &str) -> u64 {
    let digest = Sha256::new().chain_update([operation]).chain_update(topic.as_bytes()).finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(first)
}

/// Fresh random bytes of the operating system.
///
/// # Errors
/// [`ErrorKind::System`] when it has none.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::System, "draw random bytes", error.to_string())
            .with_fix("make getrandom(2) available to this process")
    })?;
    Ok(bytes)
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    // A key of any length is hashed or padded to one block, exactly as RFC 2104 says. The fallible
    // constructor cannot fail for HMAC, and this form has no error to ignore.
    let mut block = [0; 64];
    if key.len() > block.len() {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    Hmac::<Sha256>::new(&block.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn transcript() -> Transcript {
        Transcript { job: [0; 16], hub_nonce: [1; 32], spoke_nonce: [2; 32], rank: 1, ranks: 2 }
    }

    fn key() -> Key {
        Key::derive(&Secret::from_text("a secret of enough length").unwrap(), &transcript())
    }

    fn sealed(sealer: &mut Sealer, payload: &[u8]) -> Vec<u8> {
        let (header, mut mac) = sealer.begin(Kind::Contribution, 5, payload.len());
        mac.update(payload);
        [&header.encode()[..], payload, &mac.finish()].concat()
    }

    fn open(opener: &mut Opener, bytes: &[u8]) -> Result<()> {
        Frame::parse(bytes).and_then(|frame| opener.open(&frame))
    }

    fn message(result: Result<()>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        error.to_string()
    }

    #[test]
    fn hmac_agrees_with_rfc_4231() {
        let cases: [(&[u8], &[u8], &str); 2] = [
            (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c7"),
            (
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f",
            ),
        ];
        for (key, data, start) in cases {
            let mac = keyed(key).chain_update(data).finalize().into_bytes();
            let hex: String = mac[..16].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, start);
        }
    }

    #[test]
    fn frames_open_in_the_order_they_were_sealed() {
        let mut sealer = Sealer::new(key(), Direction::ToHub, 1);
        let mut opener = Opener::new(key(), Direction::ToHub, 1);
        for payload in [&b"one"[..], b"", b"three"] {
            open(&mut opener, &sealed(&mut sealer, payload)).unwrap();
        }
    }

    #[test]
    fn a_replayed_a_skipped_and_a_reflected_frame_are_refused() {
        let mut sealer = Sealer::new(key(), Direction::ToHub, 1);
        let (first, second) = (sealed(&mut sealer, b"1"), sealed(&mut sealer, b"2"));
        let mut opener = Opener::new(key(), Direction::ToHub, 1);
        let skipped = message(open(&mut opener, &second));
        assert!(skipped.contains("found sequence number 1, expected 0"), "{skipped}");
        open(&mut opener, &first).unwrap();
        let replayed = message(open(&mut opener, &first));
        assert!(replayed.contains("found sequence number 0, expected 1"), "{replayed}");
        let mut back = Opener::new(key(), Direction::FromHub, 1);
        assert!(message(open(&mut back, &first)).contains("wrong MAC"));
        let mut other = Opener::new(key(), Direction::ToHub, 2);
        assert!(message(open(&mut other, &first)).contains("found sender rank 1, expected rank 2"));
    }

    #[test]
    fn every_part_of_the_transcript_changes_the_key() {
        let base = transcript();
        let secret = Secret::from_text("a secret of enough length").unwrap();
        let other = Secret::from_text("another secret of enough length").unwrap();
        let mut keys = vec![
            Key::public().0,
            Key::derive(&Secret::none(), &base).0,
            Key::derive(&secret, &base).0,
            Key::derive(&other, &base).0,
        ];
        for changed in [
            Transcript { job: [9; 16], ..base },
            Transcript { hub_nonce: [9; 32], ..base },
            Transcript { spoke_nonce: [9; 32], ..base },
            Transcript { rank: 9, ..base },
            Transcript { ranks: 9, ..base },
        ] {
            keys.push(Key::derive(&secret, &changed).0);
        }
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }

    proptest! {
        #[test]
        fn any_single_altered_byte_is_refused(
            payload in prop::collection::vec(any::<u8>(), 0..100), at: prop::sample::Index,
            flip in 1u8..=255,
        ) {
            let mut bytes = sealed(&mut Sealer::new(key(), Direction::ToHub, 1), &payload);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(open(&mut Opener::new(key(), Direction::ToHub, 1), &bytes).is_err());
        }

        #[test]
        fn any_truncation_is_refused(
            payload in prop::collection::vec(any::<u8>(), 0..100), cut: prop::sample::Index,
        ) {
            let bytes = sealed(&mut Sealer::new(key(), Direction::ToHub, 1), &payload);
            let kept = cut.index(bytes.len());
            prop_assert!(open(&mut Opener::new(key(), Direction::ToHub, 1), &bytes[..kept]).is_err());
        }
    }
}
