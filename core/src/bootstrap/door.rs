//! Where rank 0 lets the others in. What strangers send here disturbs nobody.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

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
    let mut log = Log::default();
    loop {
        tokio::select! {
            accepted = listener.accept(), if handshakes.len() < most => match accepted {
                Ok((stream, address)) => {
                    handshakes.spawn(greet(stream, address, credentials.clone(), claims.clone()));
                }
                Err(error) => {
                    log.warn(&format!("cannot accept a connection: {error}"));
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(greeted) = handshakes.join_next() => {
                // A task that panicked has said so.
                if let Ok(Err(why)) = greeted {
                    log.warn(&why);
                }
            }
            () = log.is_due() => log.catch_up(),
        }
    }
}

/// `Err`: why a connection was turned away.
async fn greet(
    stream: TcpStream,
    address: SocketAddr,
    credentials: Credentials,
    claims: mpsc::Sender<Claim>,
) -> std::result::Result<(), String> {
    let _ = stream.set_nodelay(true);
    match tokio::time::timeout(HANDSHAKE_LIMIT, answer(stream, address, &credentials)).await {
        Ok(Ok(claim)) => {
            let _ = claims.send(claim).await;
            Ok(())
        }
        Ok(Err(error)) => Err(format!("turned a connection from {address} away: {error}")),
        Err(_) => {
            Err(format!("turned a connection from {address} away: it said nothing for too long"))
        }
    }
}

/// What the log says of strangers. Whoever reaches the port can cause as many lines as it likes, so
/// most are left out, and counted.
#[derive(Default)]
struct Log {
    last: Option<Instant>,
    left_out: u64,
}

impl Log {
    const EVERY: Duration = Duration::from_secs(1);

    fn warn(&mut self, why: &str) {
        if self.last.is_some_and(|last| last.elapsed() < Self::EVERY) {
            self.left_out += 1;
            return;
        }
        self.catch_up();
        tracing::warn!("{why}");
    }

    /// Says how many lines were left out.
    fn catch_up(&mut self) {
        self.last = Some(Instant::now());
        match std::mem::take(&mut self.left_out) {
            0 => {}
            left_out => tracing::warn!(left_out, "more connections were turned away"),
        }
    }

    /// Ends when lines were left out and nobody else will say so; else never.
    async fn is_due(&self) {
        match self.last {
            Some(last) if self.left_out > 0 => {
                tokio::time::sleep_until((last + Self::EVERY).into()).await;
            }
            _ => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::bootstrap::seal::JOB_BYTES;
    use crate::bootstrap::secret::Secret;

    /// Lines of the log, and what they say was left out.
    #[derive(Clone, Default)]
    struct Seen(std::sync::Arc<[AtomicU64; 2]>);

    impl Seen {
        fn lines(&self) -> [u64; 2] {
            [0, 1].map(|index| self.0[index].load(Ordering::SeqCst))
        }
    }

    impl Visit for &Seen {
        fn record_u64(&mut self, field: &Field, value: u64) {
            if field.name() == "left_out" {
                self.0[1].fetch_add(value, Ordering::SeqCst);
            }
        }

        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" && format!("{value:?}").contains("turned a connection") {
                self.0[0].fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    impl Subscriber for Seen {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target().contains("bootstrap::door")
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            event.record(&mut &*self);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn strangers_that_keep_coming_cause_few_lines_and_all_are_counted() {
        const STRANGERS: u64 = 50;
        let seen = Seen::default();
        let start = Instant::now();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let knock = async {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap();
            let credentials = Credentials { secret: Secret::none(), job: [0; JOB_BYTES] };
            let door = Door::open(listener, credentials, 2).unwrap();
            for _ in 0..STRANGERS {
                drop(TcpStream::connect(address).await.unwrap());
            }
            while seen.lines().iter().sum::<u64>() < STRANGERS {
                assert!(start.elapsed() < Duration::from_secs(60), "{:?}", seen.lines());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            door.close().await;
        };
        tracing::subscriber::with_default(seen.clone(), || runtime.block_on(knock));
        let ([lines, left_out], most) = (seen.lines(), start.elapsed().as_secs() + 1);
        assert!(lines <= most && lines + left_out == STRANGERS, "{lines} lines, {left_out} more");
    }
}
