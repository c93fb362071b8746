//! How a connection gets its key, and how rank 0 learns who is there.
//!
//! ```text
//! joiner                         rank 0
//! Hello(job, nonce, rank, ranks)   ->                       public key
//!                                  <-  Challenge(nonce)     public key, or Refused(job)
//! Proof(timing, pid, host)         ->                       key of the connection
//!                                  <-  Welcome, or Refused  key of the connection; Refused(secret)
//!                                                           under the public key
//! ```
//!
//! Both prove that they hold the secret: rank 0 by the MAC of `Welcome`, the joiner by that of
//! `Proof`. Until then rank 0 reads two small frames and gives up after [`HANDSHAKE_LIMIT`].

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::frame::Kind;
use super::identity::Place;
use super::link::{ReadError, Secured, discard, read_raw, write_frame};
use super::message::{Hello, Proof, Refusal};
use super::seal::{Direction, JOB_BYTES, Key, Opener, Sealer, Transcript, random};
use super::secret::{SECRET_FILE_VARIABLE, SECRET_VARIABLE, Secret};
use crate::{Error, ErrorKind, Result};

/// How long a handshake may take, on either side.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
const REFUSAL_LIMIT: Duration = Duration::from_secs(1);
/// The sender in a `Hello`, before a rank is proven.
const UNPROVEN: u32 = u32::MAX;
const OPERATION: &str = "join world";

/// What both ends must share.
#[derive(Clone)]
pub(super) struct Credentials {
    pub(super) secret: Secret,
    /// Zeros where the rendezvous carries no id.
    pub(super) job: [u8; JOB_BYTES],
}

/// A process that holds the secret and claims a rank.
pub(super) struct Claim {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) proof: Proof,
    pub(super) address: SocketAddr,
    pub(super) secured: Secured,
}

/// Rank 0's side, for one connection.
pub(super) async fn answer(
    mut stream: TcpStream,
    address: SocketAddr,
    credentials: &Credentials,
) -> Result<Claim> {
    let failed = |error| explain(error, "the joiner");
    let mut public_sealer = Sealer::new(Key::public(), Direction::FromHub, 0);
    let mut public_opener = Opener::new(Key::public(), Direction::ToHub, UNPROVEN);
    let raw = read_raw(&mut stream, &[Kind::Hello]).await.map_err(failed)?;
    let hello = Hello::decode(raw.open(&mut public_opener)?)?;
    if hello.job != credentials.job {
        let why = "rank 0 here belongs to another job";
        refuse(&mut stream, &mut public_sealer, Refusal::Job, why).await;
        return Err(Error::new(ErrorKind::Protocol, OPERATION, "found the id of another job"));
    }
    let hub_nonce = random()?;
    write_frame(&mut stream, &mut public_sealer, (Kind::Challenge, 0), &hub_nonce)
        .await
        .map_err(|error| failed(error.into()))?;
    let Hello { job, nonce, rank, ranks } = hello;
    let transcript = Transcript { job, hub_nonce, spoke_nonce: nonce, rank, ranks };
    let key = Key::derive(&credentials.secret, &transcript);
    let mut opener = Opener::new(key.clone(), Direction::ToHub, rank);
    let raw = read_raw(&mut stream, &[Kind::Proof]).await.map_err(failed)?;
    let proof = match raw.open(&mut opener) {
        Ok(payload) => match Proof::decode(payload) {
            Ok(proof) => proof,
            Err(error) => {
                let mut sealer = Sealer::new(key, Direction::FromHub, 0);
                refuse(&mut stream, &mut sealer, Refusal::Claim, &error.to_string()).await;
                return Err(error.with_context("claimed rank", rank));
            }
        },
        Err(error) => {
            refuse(&mut stream, &mut public_sealer, Refusal::Secret, "").await;
            return Err(error.with_context("claimed rank", rank));
        }
    };
    let sealer = Sealer::new(key, Direction::FromHub, 0);
    Ok(Claim { rank, ranks, proof, address, secured: Secured { stream, sealer, opener } })
}

/// Tells a joiner no, and waits a moment so that it can read why.
pub(super) async fn refuse(
    stream: &mut TcpStream,
    sealer: &mut Sealer,
    refusal: Refusal,
    why: &str,
) {
    let told = async {
        write_frame(stream, sealer, (Kind::Refused, 0), &refusal.encode(why)).await?;
        stream.shutdown().await?;
        discard(stream).await;
        std::io::Result::Ok(())
    };
    // A joiner that does not listen loses only its explanation.
    let _ = tokio::time::timeout(REFUSAL_LIMIT, told).await;
}

/// Why a joiner is not in.
pub(super) enum Setback {
    /// Rank 0 may not be there yet.
    Again(Error),
    /// Somebody else is at this address.
    Stranger(Error),
    /// Rank 0 said no, or this rank should not go on.
    Fatal(Error),
}

/// The joiner's side: everything up to `Welcome`.
pub(super) async fn introduce(
    mut stream: TcpStream,
    credentials: &Credentials,
    place: Place,
    proof: &Proof,
) -> std::result::Result<Secured, Setback> {
    let Place { rank, ranks, .. } = place;
    let mut public_sealer = Sealer::new(Key::public(), Direction::ToHub, UNPROVEN);
    let mut public_opener = Opener::new(Key::public(), Direction::FromHub, 0);
    let spoke_nonce = random().map_err(Setback::Fatal)?;
    let hello = Hello { job: credentials.job, nonce: spoke_nonce, rank, ranks }.encode();
    send(&mut stream, &mut public_sealer, Kind::Hello, &hello).await?;
    let raw = receive(&mut stream, &[Kind::Challenge, Kind::Refused]).await?;
    let payload = raw.open(&mut public_opener).map_err(Setback::Stranger)?;
    if raw.header.kind == Kind::Refused {
        return Err(unproven_refusal(payload));
    }
    let hub_nonce = payload.try_into().map_err(|_| {
        let message = format!("found a challenge of {} bytes, expected 32", payload.len());
        Setback::Stranger(Error::new(ErrorKind::Protocol, OPERATION, message))
    })?;
    let transcript = Transcript { job: credentials.job, hub_nonce, spoke_nonce, rank, ranks };
    let key = Key::derive(&credentials.secret, &transcript);
    let mut sealer = Sealer::new(key.clone(), Direction::ToHub, rank);
    send(&mut stream, &mut sealer, Kind::Proof, &proof.encode()).await?;
    let raw = receive(&mut stream, &[Kind::Welcome, Kind::Refused]).await?;
    let mut opener = Opener::new(key, Direction::FromHub, 0);
    match (raw.open(&mut opener), raw.header.kind) {
        (Ok(_), Kind::Welcome) => Ok(Secured { stream, sealer, opener }),
        (Ok(payload), _) => Err(match Refusal::decode(payload) {
            Ok((Refusal::Busy, _)) => Setback::Again(refused(payload)),
            _ => Setback::Fatal(refused(payload)),
        }),
        (Err(_), Kind::Refused) => {
            let payload = raw.open(&mut public_opener).map_err(Setback::Stranger)?;
            Err(unproven_refusal(payload))
        }
        (Err(_), _) => Err(Setback::Fatal(wrong_secret())),
    }
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

/// A refusal that anybody could have sent: only what it costs nothing to believe.
fn unproven_refusal(payload: &[u8]) -> Setback {
    match Refusal::decode(payload) {
        Ok((Refusal::Secret, _)) => Setback::Fatal(wrong_secret()),
        Ok((Refusal::Job, why)) => {
            Setback::Stranger(Error::new(ErrorKind::Mismatch, OPERATION, why))
        }
        Ok((refusal, _)) => {
            let message = format!("found an unproven refusal ({refusal:?}), expected a challenge");
            Setback::Stranger(Error::new(ErrorKind::Protocol, OPERATION, message))
        }
        Err(error) => Setback::Stranger(error),
    }
}

fn wrong_secret() -> Error {
    Error::new(
        ErrorKind::Protocol,
        OPERATION,
        "the job secret of this rank is not the one of rank 0",
    )
    .with_fix(format!("give all ranks the same {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}"))
}

async fn send(
    stream: &mut TcpStream,
    sealer: &mut Sealer,
    kind: Kind,
    payload: &[u8],
) -> std::result::Result<(), Setback> {
    let written = write_frame(stream, sealer, (kind, 0), payload).await;
    written.map_err(|error| Setback::Again(explain(error.into(), "rank 0")))
}

async fn receive(
    stream: &mut TcpStream,
    expected: &[Kind],
) -> std::result::Result<super::link::Raw, Setback> {
    read_raw(stream, expected).await.map_err(|error| match error {
        ReadError::Closed(_) => Setback::Again(explain(error, "rank 0")),
        ReadError::Refused(error) => Setback::Stranger(error),
    })
}

fn explain(error: ReadError, who: &str) -> Error {
    match error {
        ReadError::Closed(what) => {
            Error::new(ErrorKind::PeerLost, OPERATION, format!("{who} {what}"))
        }
        ReadError::Refused(error) => error,
    }
}
