//! How a connection gets its keys, and how rank 0 learns which ranks are present.
//!
//! ```text
//! joiner                              rank 0
//! first message (its identity)             ->                  proves that the joiner holds the secret
//!                                       <-  second message  proves it of rank 0, or: turned away
//! Confirm                               ->                  the first message was no replay
//!                                       <-  Welcome, or Refused
//! ```
//!
//! A process that cannot prove the secret receives one unencrypted answer: its proof failed. The answer
//! proves nothing to a joiner, which tries again.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::frame::{FrameKind, ReadError, ReceivedFrame, read_frame, write_frame};
use super::link::{Secured, discard};
use super::message::{Proof, Refusal, decode, encode};
use super::noise::{FRESH_BYTES, Handshake, JOB_BYTES, Preamble, Sealer};
use super::secret::Secret;
use tokenyard_errors::{Error, ErrorKind, Result};

/// Most time of a handshake, on either side.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
const REFUSAL_LIMIT: Duration = Duration::from_secs(1);
const OPERATION: &str = "join world";

/// Values that both ends must share.
#[derive(Clone)]
pub(super) struct Credentials {
    pub(super) secret: Secret,
    /// Zeros where the rendezvous carries no id.
    pub(super) job: [u8; JOB_BYTES],
}

/// A process that holds the secret and claims a rank.
pub(super) struct Claim {
    pub(super) proof: Proof,
    pub(super) address: SocketAddr,
    pub(super) secured: Secured,
}

/// A connection whose first message was sealed by a holder of the secret, now or earlier.
pub(super) struct Proven {
    stream: TcpStream,
    address: SocketAddr,
    handshake: Handshake,
    claim: Vec<u8>,
    /// The bytes repeat only in a replay.
    pub(super) fresh: [u8; FRESH_BYTES],
}

/// Rank 0's side, up to the proof. For a stranger it does no more than read the first bytes.
pub(super) async fn prove(
    mut stream: TcpStream,
    address: SocketAddr,
    credentials: &Credentials,
) -> Result<Proven> {
    let read = async {
        let message = read_greeting(&mut stream).await.map_err(|e| explain(e, "the joiner"))?;
        let mut handshake = Handshake::hub(&credentials.secret, &credentials.job)?;
        let claim = handshake.read(&message)?;
        let fresh = message.first_chunk().copied().unwrap_or_default();
        Ok((handshake, claim, fresh))
    };
    match read.await {
        Ok((handshake, claim, fresh)) => Ok(Proven { stream, address, handshake, claim, fresh }),
        Err(error) => {
            let no = Preamble { bytes: 0 }.encode();
            let sent = async {
                stream.write_all(&no).await?;
                part(&mut stream).await
            };
            let _ = tokio::time::timeout(REFUSAL_LIMIT, sent).await;
            Err(error)
        }
    }
}

impl Proven {
    /// Rank 0's side, from the proof on.
    pub(super) async fn confirm(self) -> Result<Claim> {
        let Self { mut stream, address, mut handshake, claim, .. } = self;
        let failed = |error| explain(error, "the joiner");
        let answer = handshake.write(&[])?;
        stream.write_all(&answer).await.map_err(|error| failed(error.into()))?;
        let (mut sealer, mut opener) = handshake.finish()?;
        read_frame(&mut stream, &mut opener, &[FrameKind::Confirm], || ()).await.map_err(failed)?;
        match decode(&claim) {
            Ok(proof) => Ok(Claim { proof, address, secured: Secured { stream, sealer, opener } }),
            Err(error) => {
                refuse(&mut stream, &mut sealer, Refusal::Claim, &error.to_string()).await;
                Err(error)
            }
        }
    }
}

/// Refuses a joiner, and waits a moment so that it can read the reason.
pub(super) async fn refuse(
    stream: &mut TcpStream,
    sealer: &mut Sealer,
    refusal: Refusal,
    why: &str,
) {
    let sent = async {
        write_frame(stream, sealer, FrameKind::Refused, &refusal.encode(why)).await?;
        part(stream).await
    };
    // A joiner that does not read loses only the explanation.
    let _ = tokio::time::timeout(REFUSAL_LIMIT, sent).await;
}

/// Ends a connection after the last bytes were read.
async fn part(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.shutdown().await?;
    discard(stream).await;
    Ok(())
}

/// The reason why a joiner is not accepted.
pub(super) enum Setback {
    /// Rank 0 may not be listening yet.
    Again(Error),
    /// The name of rank 0's host has no address.
    Unresolved(Error),
    /// The answer came from another process: another job, another secret, another program.
    Stranger(Error),
    /// Rank 0 refused, or this rank must not continue.
    Fatal(Error),
}

/// The joiner's side: everything up to `Welcome`.
pub(super) async fn introduce(
    mut stream: TcpStream,
    credentials: &Credentials,
    proof: &Proof,
) -> std::result::Result<Secured, Setback> {
    let again = |error| Setback::Again(explain(error, "rank 0"));
    let unread = |error| match error {
        ReadError::Closed(_) => again(error),
        ReadError::Refused(error) => Setback::Stranger(error),
    };
    let mut handshake =
        Handshake::joiner(&credentials.secret, &credentials.job).map_err(Setback::Fatal)?;
    let hello = handshake.write(&encode(proof)).map_err(Setback::Fatal)?;
    stream.write_all(&hello).await.map_err(|error| again(error.into()))?;
    let answer = read_greeting(&mut stream).await.map_err(unread)?;
    handshake.read(&answer).map_err(Setback::Stranger)?;
    let (mut sealer, mut opener) = handshake.finish().map_err(Setback::Fatal)?;
    let confirmed = write_frame(&mut stream, &mut sealer, FrameKind::Confirm, &[]).await;
    confirmed.map_err(|error| again(error.into()))?;
    let expected = [FrameKind::Welcome, FrameKind::Refused];
    let ReceivedFrame { kind, payload } =
        read_frame(&mut stream, &mut opener, &expected, || ()).await.map_err(unread)?;
    if kind == FrameKind::Welcome {
        return Ok(Secured { stream, sealer, opener });
    }
    Err(match Refusal::decode(&payload) {
        Ok((Refusal::Busy, _)) => Setback::Again(refused(&payload)),
        _ => Setback::Fatal(refused(&payload)),
    })
}

/// Reads one message of a handshake, of a bounded length.
async fn read_greeting(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::result::Result<Vec<u8>, ReadError> {
    let mut preamble = [0; Preamble::BYTES];
    if stream.read(&mut preamble[..1]).await? == 0 {
        let closed = "closed its connection before it sent anything";
        return Err(ReadError::Closed(closed.to_owned()));
    }
    stream.read_exact(&mut preamble[1..]).await?;
    let Preamble { bytes } = Preamble::parse(&preamble)?;
    if bytes == 0 {
        let message = "the other end says that the proof of this one is wrong: it belongs to \
                       another job, or the secrets differ";
        return Err(Error::new(ErrorKind::Protocol, OPERATION, message).into());
    }
    let mut message = vec![0; bytes.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// The error of a refusal that rank 0 has proven to be its own.
pub(super) fn refused(payload: &[u8]) -> Error {
    match Refusal::decode(payload) {
        Ok((Refusal::Late, why)) => Error::new(ErrorKind::Deadline, OPERATION, why),
        Ok((Refusal::Differ, why)) => Error::new(ErrorKind::Mismatch, OPERATION, why),
        Ok((_, why)) => {
            Error::new(ErrorKind::Mismatch, OPERATION, format!("rank 0 refused this rank: {why}"))
        }
        Err(error) => error,
    }
}

fn explain(error: ReadError, who: &str) -> Error {
    match error {
        ReadError::Closed(what) => {
            Error::new(ErrorKind::PeerLost, OPERATION, format!("{who} {what}"))
        }
        ReadError::Refused(error) => error,
    }
}
