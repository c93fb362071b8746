//! Where rank 0 lets the others in. What strangers send here disturbs nobody.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

use super::handshake::{Claim, Credentials, HANDSHAKE_LIMIT, answer};
use crate::{Error, Result};

/// Handshakes that may be under way beyond one per rank.
const SPARE_HANDSHAKES: usize = 64;

/// Accepts connections and brings them through the handshake, each in a task of its own with a
/// deadline. Dropping it ends every unfinished handshake.
pub(super) struct Door {
    /// Processes that hold the secret.
    pub(super) claims: mpsc::Receiver<Claim>,
    task: JoinHandle<()>,
}

impl Door {
    pub(super) fn open(
        listener: std::net::TcpListener,
        credentials: Credentials,
        ranks: u32,
    ) -> Result<Self> {
        let listener = TcpListener::from_std(listener)
            .map_err(|error| Error::system("join world", "cannot watch the listener", error))?;
        let (sender, claims) = mpsc::channel(64);
        let most = ranks as usize + SPARE_HANDSHAKES;
        let task = tokio::spawn(accept_all(listener, credentials, most, sender));
        Ok(Self { claims, task })
    }

    /// Closes the listener before it returns, so that another world may have its port.
    pub(super) async fn close(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept_all(
    listener: TcpListener,
    credentials: Credentials,
    most: usize,
    claims: mpsc::Sender<Claim>,
) {
    // Aborted with this task.
    let mut handshakes = JoinSet::new();
    loop {
        while handshakes.len() >= most {
            handshakes.join_next().await;
        }
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    handshakes.spawn(greet(stream, address, credentials.clone(), claims.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = handshakes.join_next() => {}
        }
    }
}

async fn greet(
    stream: TcpStream,
    address: SocketAddr,
    credentials: Credentials,
    claims: mpsc::Sender<Claim>,
) {
    let _ = stream.set_nodelay(true);
    match tokio::time::timeout(HANDSHAKE_LIMIT, answer(stream, address, &credentials)).await {
        Ok(Ok(claim)) => {
            let _ = claims.send(claim).await;
        }
        Ok(Err(error)) => tracing::warn!(%address, %error, "turned a connection away"),
        Err(_) => {
            tracing::warn!(%address, "turned a connection away: it said nothing for too long")
        }
    }
}
