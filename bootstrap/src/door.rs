//! The door: rank 0 accepts the connections of the other ranks. Bytes from strangers disturb no rank.
//!
//! A connection has no place of its own until its first message proves the job secret. Until then it is
//! one of a bounded crowd. When a new connection arrives at a full crowd, the oldest connection of the
//! address with the most connections is closed. A rank sends its first message as it connects, so it
//! leaves the crowd at once. A rank whose connection was closed connects again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use super::handshake::{Claim, Credentials, HANDSHAKE_LIMIT, Proven, prove};
use super::noise::FRESH_BYTES;
use crate::sparse_log::SparseLog;
use tokenyard_errors::{Error, Result};

/// Handshakes of holders of the secret that may be under way, beyond one per rank.
const SPARE_HANDSHAKES: usize = 64;
/// A connection has at least this time to prove itself, however many others arrive: a rank on a busy
/// host needs so long to send its first message.
const GRACE: Duration = Duration::from_millis(50);
/// First messages that are remembered, so that none is accepted twice.
const REMEMBERED: usize = 1 << 16;
/// The time for which a full door counts as a reason why ranks do not join.
const LATELY: Duration = Duration::from_secs(10);

/// Accepts connections and runs the handshake of each, in a task of its own with a deadline. Dropping
/// it ends every unfinished handshake.
pub(super) struct Door {
    /// Claims of processes that hold the secret.
    pub(super) claims: mpsc::Receiver<Claim>,
    pressure: Arc<Pressure>,
    task: JoinHandle<()>,
}

/// The last time at which a connection found no place, and the reason.
#[derive(Default)]
struct Pressure(Mutex<Option<(Instant, String)>>);

impl Pressure {
    fn note(&self, why: String) {
        let mut pressure = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *pressure = Some((Instant::now(), why));
    }
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
        let pressure = Arc::new(Pressure::default());
        let porter = Porter {
            credentials,
            claims: sender,
            crowd: Crowd::new(crowd_limit()),
            strangers: JoinSet::new(),
            finishing: Finishing {
                most: ranks as usize + SPARE_HANDSHAKES,
                ..Finishing::default()
            },
            seen: HashSet::new(),
            log: SparseLog::new("more connections were turned away"),
            full: SparseLog::new("more connections were dropped at the full door"),
            pressure: Arc::clone(&pressure),
        };
        let task = tokio::spawn(porter.serve(listener));
        Ok(Self { claims, pressure, task })
    }

    /// A reason why ranks may not have joined: why connections found no place lately.
    pub(super) fn pressure(&self) -> Option<String> {
        let pressure = self.pressure.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lately = pressure.as_ref().filter(|(when, _)| when.elapsed() < LATELY);
        lately.map(|(_, of_whom)| of_whom.clone())
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

/// Most open connections without a proof: a share of the files that this process may open, so that
/// enough are left for the rest of the process.
fn crowd_limit() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    usize::try_from(files.unwrap_or(u64::MAX) / 4).unwrap_or(usize::MAX).clamp(16, 512)
}

/// The connections without a proof so far, by address, the oldest of each address first.
struct Crowd {
    most: usize,
    count: usize,
    waiting: HashMap<IpAddr, VecDeque<(Instant, AbortHandle)>>,
}

impl Crowd {
    fn new(most: usize) -> Self {
        Self { most, count: 0, waiting: HashMap::new() }
    }

    fn is_full(&self) -> bool {
        self.count >= self.most
    }

    fn add(&mut self, ip: IpAddr, task: AbortHandle) {
        self.waiting.entry(ip).or_default().push_back((Instant::now(), task));
        self.count += 1;
    }

    /// Removes a connection that proved itself or ended.
    fn remove(&mut self, ip: IpAddr, id: tokio::task::Id) {
        let Some(queue) = self.waiting.get_mut(&ip) else { return };
        if let Some(at) = queue.iter().position(|(_, task)| task.id() == id) {
            queue.remove(at);
            self.count -= 1;
        }
        if queue.is_empty() {
            self.waiting.remove(&ip);
        }
    }

    /// The address with the most connections, and their number.
    fn greediest(&self) -> Option<(IpAddr, usize)> {
        let counts = self.waiting.iter().map(|(ip, queue)| (*ip, queue.len()));
        counts.max_by_key(|(_, count)| *count)
    }

    /// The time from which the next connection may be dropped for another.
    fn yields_at(&self) -> Option<Instant> {
        let (ip, _) = self.greediest()?;
        self.waiting.get(&ip)?.front().map(|(since, _)| *since + GRACE)
    }

    /// Drops the oldest connection of the address with the most connections.
    fn evict(&mut self) -> Option<String> {
        let (ip, count) = self.greediest()?;
        let (_, task) = self.waiting.get_mut(&ip)?.pop_front()?;
        self.count -= 1;
        task.abort();
        if count == 1 {
            self.waiting.remove(&ip);
        }
        Some(format!("the door is full of connections that prove nothing: {count} from {ip}"))
    }
}

/// Handshakes of processes that proved the secret.
#[derive(Default)]
struct Finishing {
    most: usize,
    tasks: JoinSet<std::result::Result<(), String>>,
    oldest_first: VecDeque<AbortHandle>,
}

impl Finishing {
    fn add(
        &mut self,
        task: impl Future<Output = std::result::Result<(), String>> + Send + 'static,
    ) {
        self.oldest_first.retain(|task| !task.is_finished());
        if self.oldest_first.len() >= self.most
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            oldest.abort();
        }
        self.oldest_first.push_back(self.tasks.spawn(task));
    }
}

type Greeted = (SocketAddr, std::result::Result<Proven, String>);

/// The task that serves the door.
struct Porter {
    credentials: Credentials,
    claims: mpsc::Sender<Claim>,
    crowd: Crowd,
    /// The tasks of the crowd. Aborted with this value.
    strangers: JoinSet<Greeted>,
    finishing: Finishing,
    /// The fresh keys of all first messages so far.
    seen: HashSet<[u8; FRESH_BYTES]>,
    log: SparseLog,
    full: SparseLog,
    pressure: Arc<Pressure>,
}

impl Porter {
    async fn serve(mut self, listener: TcpListener) {
        // The address of each task, for tasks that were aborted too.
        let mut addresses = HashMap::new();
        loop {
            let wait = self.crowd.is_full().then(|| self.crowd.yields_at()).flatten();
            let accept = async {
                if let Some(wait) = wait {
                    tokio::time::sleep_until(wait.into()).await;
                }
                listener.accept().await
            };
            tokio::select! {
                // Connections with a proof come first, then connections that ended: both make room.
                biased;
                Some(greeted) = self.strangers.join_next_with_id() => {
                    let id = greeted.as_ref().map_or_else(|error| error.id(), |(id, _)| *id);
                    if let Some(ip) = addresses.remove(&id) {
                        self.crowd.remove(ip, id);
                    }
                    // A task that was aborted made room; a task that panicked has reported it.
                    if let Ok((_, (address, proven))) = greeted {
                        self.on_greeted(address, proven);
                    }
                }
                Some(finished) = self.finishing.tasks.join_next() => {
                    if let Ok(Err(why)) = finished {
                        self.log.warn(&why);
                    }
                }
                () = is_due(&self.log) => self.log.catch_up(),
                () = is_due(&self.full) => self.full.catch_up(),
                accepted = accept => match accepted {
                    Ok((stream, address)) => {
                        if self.crowd.is_full() {
                            self.make_room();
                        }
                        let task = greet(stream, address, self.credentials.clone());
                        let task = self.strangers.spawn(task);
                        addresses.insert(task.id(), address.ip());
                        self.crowd.add(address.ip(), task);
                    }
                    Err(error) => {
                        // Most likely no file descriptor is left.
                        let why = format!("cannot accept a connection: {error}");
                        self.log.warn(&why);
                        self.make_room();
                        self.pressure.note(why);
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                },
            }
        }
    }

    fn make_room(&mut self) {
        let Some(why) = self.crowd.evict() else { return };
        self.full.warn(&why);
        self.pressure.note(why);
    }

    fn on_greeted(&mut self, address: SocketAddr, proven: std::result::Result<Proven, String>) {
        let proven = match proven {
            Ok(proven) => proven,
            Err(why) => return self.log.warn(&why),
        };
        if self.seen.len() >= REMEMBERED {
            self.seen.clear();
        }
        if !self.seen.insert(proven.fresh) {
            let why = "its first message was received before: a replay";
            return self.log.warn(&turned_away(address, why));
        }
        let claims = self.claims.clone();
        self.finishing.add(async move {
            match tokio::time::timeout(HANDSHAKE_LIMIT, proven.confirm()).await {
                Ok(Ok(claim)) => {
                    let _ = claims.send(claim).await;
                    Ok(())
                }
                Ok(Err(error)) => Err(turned_away(address, error)),
                Err(_) => Err(turned_away(address, "it proved the secret and then sent nothing")),
            }
        });
    }
}

async fn greet(stream: TcpStream, address: SocketAddr, credentials: Credentials) -> Greeted {
    let _ = stream.set_nodelay(true);
    let proven =
        match tokio::time::timeout(HANDSHAKE_LIMIT, prove(stream, address, &credentials)).await {
            Ok(Ok(proven)) => Ok(proven),
            Ok(Err(error)) => Err(turned_away(address, error)),
            Err(_) => Err(turned_away(address, "it sent nothing for too long")),
        };
    (address, proven)
}

/// Ends when a log left lines out and no later line will report that; else never.
async fn is_due(log: &SparseLog) {
    match log.due() {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}

fn turned_away(address: SocketAddr, why: impl std::fmt::Display) -> String {
    format!("turned a connection from {address} away: {why}")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::noise::JOB_BYTES;
    use crate::secret::Secret;

    /// Lines of the log, and the number of lines that they report as left out.
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
            metadata.target().contains("sparse_log")
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
