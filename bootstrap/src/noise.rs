//! Keys of a connection: Noise with a pre-shared key, by the library `snow`.
//!
//! With pattern `NNpsk0` the first message already proves that its sender holds the job secret, and costs its
//! receiver a few hashes. The second message proves the same of rank 0. Fresh keys of both ends enter the
//! session, so a recorded message opens no later connection, and a later theft of the secret does not decrypt
//! a recorded connection.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::secret::Secret;
use tokenyard_errors::{Error, ErrorKind, Result};

/// The version of the protocol of control connections. Another version is refused.
pub const VERSION: u16 = 5;
/// Bytes of the id of a job.
pub const JOB_BYTES: usize = 16;
/// The most bytes of a message before the session has its keys.
pub const MAX_GREETING: usize = 1024;
/// The most bytes of one message before it is sealed.
pub(super) const MAX_PLAIN: usize = u16::MAX as usize - TAG_BYTES;
/// The fresh public key that begins every first message.
pub(super) const FRESH_BYTES: usize = 32;

const TAG_BYTES: usize = 16;
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const PROLOGUE: &[u8] = b"tokenyard control 3";
const MAGIC: [u8; 4] = *b"TYBS";

/// The unencrypted preamble of a handshake message, by which strangers and other versions are
/// recognised: `TYBS`, the version and the length of the message, 16 bits each, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// Bytes of the message that follows. None: the sender refuses the other end.
    pub bytes: u16,
}

impl Preamble {
    /// Bytes of a preamble.
    pub const BYTES: usize = 8;

    /// The preamble as bytes: the inverse of [`Preamble::parse`].
    pub fn encode(self) -> [u8; Self::BYTES] {
        let [[v0, v1], [b0, b1]] = [VERSION.to_le_bytes(), self.bytes.to_le_bytes()];
        let [m0, m1, m2, m3] = MAGIC;
        [m0, m1, m2, m3, v0, v1, b0, b1]
    }

    /// Reads a preamble.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`]: the other end is not tokenyard, or has another version; or the message
    /// is longer than [`MAX_GREETING`].
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        let [m0, m1, m2, m3, v0, v1, b0, b1] = *bytes;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            return Err(refuse(format!(
                "found {magic:02x?}, expected {MAGIC:02x?}: the other end does not speak this protocol"
            )));
        }
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(refuse(format!(
                "found version {version} of the protocol, expected {VERSION}"
            ))
            .with_fix("run the same tokenyard on every rank"));
        }
        let bytes = u16::from_le_bytes([b0, b1]);
        if bytes as usize > MAX_GREETING {
            return Err(refuse(format!(
                "found a message of {bytes} bytes, expected at most {MAX_GREETING}"
            )));
        }
        Ok(Self { bytes })
    }
}

/// A handshake under way.
pub(super) struct Handshake(HandshakeState);

impl Handshake {
    /// The joiner's side.
    pub(super) fn joiner(secret: &Secret, job: &[u8; JOB_BYTES]) -> Result<Self> {
        Self::new(secret, job, |builder| builder.build_initiator())
    }

    /// Rank 0's side.
    pub(super) fn hub(secret: &Secret, job: &[u8; JOB_BYTES]) -> Result<Self> {
        Self::new(secret, job, |builder| builder.build_responder())
    }

    fn new(
        secret: &Secret,
        job: &[u8; JOB_BYTES],
        build: fn(Builder<'_>) -> std::result::Result<HandshakeState, snow::Error>,
    ) -> Result<Self> {
        // A key of the fixed length. Without a secret it is a well-known one, and proves nothing.
        let key: [u8; 32] =
            Sha256::new().chain_update(PROLOGUE).chain_update(secret.bytes()).finalize().into();
        let prologue = [PROLOGUE, job].concat();
        let parameters = PATTERN.parse().map_err(broken)?;
        let builder = Builder::new(parameters).psk(0, &key).map_err(broken)?;
        builder.prologue(&prologue).and_then(build).map(Self).map_err(broken)
    }

    /// The next message of this side, after its preamble.
    pub(super) fn write(&mut self, payload: &[u8]) -> Result<Vec<u8>> {
        let mut message = [0; MAX_GREETING];
        let bytes = self.0.write_message(payload, &mut message).map_err(broken)?;
        let preamble = Preamble { bytes: bytes as u16 }.encode();
        Ok([&preamble[..], message.get(..bytes).unwrap_or_default()].concat())
    }

    /// The contents of the other side's next message.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when its sender does not hold the secret, or belongs to another job.
    pub(super) fn read(&mut self, message: &[u8]) -> Result<Vec<u8>> {
        let mut payload = vec![0; message.len()];
        let bytes = self.0.read_message(message, &mut payload).map_err(|_| {
            refuse("found a wrong proof: it is of another job, or the secrets differ".into())
        })?;
        payload.truncate(bytes);
        Ok(payload)
    }

    /// The keys, after both messages.
    pub(super) fn finish(self) -> Result<(Sealer, Opener)> {
        let session = Arc::new(self.0.into_stateless_transport_mode().map_err(broken)?);
        let opener = Opener { session: Arc::clone(&session), next: 0 };
        Ok((Sealer { session, next: 0 }, opener))
    }
}

/// Seals the messages of one direction of one connection.
pub(super) struct Sealer {
    session: Arc<StatelessTransportState>,
    next: u64,
}

impl Sealer {
    /// Appends the length and the sealed bytes of `plain`, of [`MAX_PLAIN`] at most.
    pub(super) fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) -> std::io::Result<()> {
        let sealed = plain.len() + TAG_BYTES;
        out.extend((sealed as u16).to_le_bytes());
        let at = out.len();
        out.resize(at + sealed, 0);
        let room = out.get_mut(at..).unwrap_or_default();
        self.session.write_message(self.next, plain, room).map_err(std::io::Error::other)?;
        self.next += 1;
        Ok(())
    }
}

/// Opens the messages of one direction of one connection, in order.
pub(super) struct Opener {
    session: Arc<StatelessTransportState>,
    next: u64,
}

impl Opener {
    /// Writes the plain bytes of the next message to `plain`.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] when it is not the next message of the other end. The opener is
    /// unchanged then.
    pub(super) fn open(&mut self, sealed: &[u8], plain: &mut Vec<u8>) -> Result<()> {
        plain.resize(sealed.len(), 0);
        let bytes = self.session.read_message(self.next, sealed, plain).map_err(|_| {
            let message = format!(
                "found a message that does not open, expected message {} of this connection",
                self.next
            );
            Error::new(ErrorKind::Protocol, "open frame", message)
        })?;
        plain.truncate(bytes);
        self.next += 1;
        Ok(())
    }
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

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::Protocol, "join world", message)
}

/// The error where the library refuses a call, which only a bug of this module can cause.
fn broken(error: snow::Error) -> Error {
    Error::new(ErrorKind::Internal, "join world", "the handshake broke").with_source(error)
}

/// Both ends of a connection, without the connection.
#[cfg(test)]
pub(super) fn pair_for_tests() -> ((Sealer, Opener), (Sealer, Opener)) {
    let secret = Secret::from_text("a secret of enough length").unwrap();
    let mut joiner = Handshake::joiner(&secret, &[1; 16]).unwrap();
    let mut hub = Handshake::hub(&secret, &[1; 16]).unwrap();
    hub.read(&joiner.write(b"claim").unwrap()[Preamble::BYTES..]).unwrap();
    joiner.read(&hub.write(b"").unwrap()[Preamble::BYTES..]).unwrap();
    (joiner.finish().unwrap(), hub.finish().unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_secret_and_another_job_fail_the_first_message() {
        let right = Secret::from_text("a secret of enough length").unwrap();
        let other = Secret::from_text("another secret of enough length").unwrap();
        let hub = || Handshake::hub(&right, &[1; 16]).unwrap();
        for (secret, job, opens) in [
            (&right, [1; 16], true),
            (&right, [2; 16], false),
            (&other, [1; 16], false),
            (&Secret::none(), [1; 16], false),
        ] {
            let message = Handshake::joiner(secret, &job).unwrap().write(b"claim").unwrap();
            let read = hub().read(&message[Preamble::BYTES..]);
            assert_eq!(read.is_ok(), opens);
            if let Err(error) = read {
                assert_eq!(error.kind(), ErrorKind::Protocol);
            }
        }
    }

    #[test]
    fn every_wrong_part_of_a_preamble_is_named_with_what_was_expected() {
        let altered = |at: usize, value: u8| {
            let mut bytes = Preamble { bytes: 100 }.encode();
            bytes[at] = value;
            Preamble::parse(&bytes).unwrap_err().to_string()
        };
        assert!(altered(0, b'X').contains("found [58, 59, 42, 53], expected [54"));
        let version = altered(4, 2);
        assert!(version.contains("found version 2 of the protocol, expected 5"), "{version}");
        assert!(version.contains("run the same tokenyard on every rank"), "{version}");
        assert!(altered(7, 5).contains("found a message of 1380 bytes, expected at most 1024"));
        let good = Preamble { bytes: 100 };
        assert_eq!(Preamble::parse(&good.encode()).unwrap(), good);
    }
}
