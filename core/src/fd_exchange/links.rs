//! The connections by which ranks of one machine exchange the descriptors of their memory.
//!
//! Every rank listens on a socket whose name only its peers know. The rank that connects first calls the
//! other and introduces itself; the called rank answers on the same connection. A rank that waits for one
//! peer answers all others meanwhile, so the order in which ranks connect does not matter and no two ranks
//! wait for each other. A rank stops listening when it knows all peers. By then each of them knows the rank
//! too, or has its introduction queued. So an unknown peer that does not listen is lost, and the error is
//! reported at once.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::bootstrap::SparseLog;
use crate::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::offer::{Memory, Offer};
use super::socket::{self, Dialled, RawRecord, ReceivedRecord};
use super::wire::{Endpoint, Introduction, Record, Secret};

/// The pause before another call to a peer whose queue is full.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Longest sleep between two checks of the deadline.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// This rank's memory and its connections to that of all ranks.
#[derive(Debug)]
pub struct Links<M: Memory> {
    /// The memory that this rank offers.
    pub offer: Offer,
    /// Maps the memory that this rank receives.
    pub memory: M,
    /// By index in the team, with the token of the peer's introduction; nothing for a rank that is not
    /// connected.
    peers: Vec<Option<(Secret, M::Peer)>>,
    /// Peers with a bad introduction, until `connect` reports it.
    refused: Vec<(u32, Error)>,
    /// Open until all ranks are connected.
    door: Option<Listener>,
}

/// The socket that peers call.
#[derive(Debug)]
struct Listener {
    listener: OwnedFd,
    /// Accepted connections whose record has not arrived yet.
    callers: Vec<OwnedFd>,
}

/// This rank's own call to the peer that it waits for.
#[derive(Debug)]
enum OwnCall {
    NotYet,
    Waiting(OwnedFd),
    /// The peer does not listen any more, or has closed the connection without an answer.
    Gone,
}

impl<M: Memory> Links<M> {
    /// Starts to listen for the peers.
    ///
    /// # Errors
    /// The system has no sockets left.
    pub fn new(offer: Offer, memory: M) -> Result<Self> {
        let ranks = offer.ranks();
        let listener = socket::listen_as(&offer.endpoint.name, ranks)?;
        Ok(Self {
            offer,
            memory,
            peers: std::iter::repeat_with(|| None).take(ranks).collect(),
            refused: Vec::new(),
            door: Some(Listener { listener, callers: Vec::new() }),
        })
    }

    /// A connected rank. Hot.
    #[inline]
    pub fn peer(&self, peer: u32) -> Option<&M::Peer> {
        self.peers.get(peer as usize)?.as_ref().map(|(_, peer)| peer)
    }

    /// Connects to `peer` by its `endpoint`, within `limit`.
    ///
    /// # Errors
    /// `PeerLost` or `Deadline` where no process answers, `Protocol` where the answer is not the
    /// expected one.
    pub fn connect(&mut self, peer: u32, endpoint: &Endpoint, limit: Duration) -> Result<()> {
        if peer == self.offer.team.me {
            self.peers[peer as usize] = Some((self.offer.endpoint.token, self.memory.own()));
        } else {
            self.meet(peer, endpoint, limit)?;
        }
        self.check_token(peer, endpoint)?;
        if self.peers.iter().all(Option::is_some) {
            self.door = None;
        }
        Ok(())
    }

    fn meet(&mut self, peer: u32, endpoint: &Endpoint, limit: Duration) -> Result<()> {
        let start = Instant::now();
        let mut call = OwnCall::NotYet;
        loop {
            self.answer_callers()?;
            if let Some(at) = self.refused.iter().position(|(refused, _)| *refused == peer) {
                return Err(self.refused.swap_remove(at).1);
            }
            if self.peer(peer).is_some() {
                return Ok(());
            }
            call = match call {
                OwnCall::NotYet => self.call(endpoint)?,
                OwnCall::Waiting(socket) => match socket::receive(socket.as_fd())? {
                    ReceivedRecord::Nothing => OwnCall::Waiting(socket),
                    ReceivedRecord::Closed => OwnCall::Gone,
                    ReceivedRecord::Record(raw) => return self.take_answer(peer, raw),
                },
                // The callers were answered once more since the peer was found to have stopped
                // listening.
                OwnCall::Gone => return Err(self.lost(peer)),
            };
            let left = limit.saturating_sub(start.elapsed());
            match &call {
                OwnCall::Gone => continue,
                _ if left.is_zero() => return Err(self.late(peer, limit)),
                OwnCall::NotYet => self.sleep(None, left.min(BUSY_PAUSE))?,
                OwnCall::Waiting(socket) => self.sleep(Some(socket), left)?,
            }
        }
    }

    fn call(&self, endpoint: &Endpoint) -> Result<OwnCall> {
        let socket = match socket::dial(&endpoint.name)? {
            Dialled::Connected(socket) => socket,
            Dialled::Busy => return Ok(OwnCall::NotYet),
            Dialled::NoListener => return Ok(OwnCall::Gone),
        };
        socket::check_owner(socket.as_fd())?;
        let (record, fds) = self.offer.introduction(endpoint.token);
        let sent = socket::send(socket.as_fd(), &record, &fds)?;
        Ok(if sent { OwnCall::Waiting(socket) } else { OwnCall::Gone })
    }

    fn take_answer(&mut self, peer: u32, raw: RawRecord) -> Result<()> {
        let rank = self.world_rank(peer);
        let it = self.offer.identify(&raw).map_err(|e| e.with_rank(rank))?;
        if it.sender != peer {
            return Err(Error::new(
                ErrorKind::Protocol,
                "meet peer",
                format!("found index {} in the team; expected {peer}", it.sender),
            )
            .with_rank(rank));
        }
        self.peers[peer as usize] = Some(self.admit(&it, raw)?);
        Ok(())
    }

    /// Answers all callers so far.
    fn answer_callers(&mut self) -> Result<()> {
        let Some(door) = &mut self.door else { return Ok(()) };
        while door.callers.len() < self.peers.len() {
            let Some(caller) = socket::accept(door.listener.as_fd())? else { break };
            match socket::check_owner(caller.as_fd()) {
                Ok(()) => door.callers.push(caller),
                Err(error) => turned_away(&format!("turned a caller away: {error}")),
            }
        }
        let mut silent = std::mem::take(&mut door.callers);
        silent.retain(|caller| match socket::receive(caller.as_fd()) {
            Ok(ReceivedRecord::Nothing) => true,
            Ok(ReceivedRecord::Closed) => false,
            Ok(ReceivedRecord::Record(raw)) => {
                self.answer(caller, raw);
                false
            }
            Err(error) => {
                turned_away(&format!("turned a caller away: {error}"));
                false
            }
        });
        if let Some(door) = &mut self.door {
            door.callers = silent;
        }
        Ok(())
    }

    /// Answers one caller. A stranger's record is refused and dropped; a peer's bad record is stored
    /// for the `connect` to that peer.
    fn answer(&mut self, caller: &OwnedFd, raw: RawRecord) {
        let it = match self.offer.identify(&raw) {
            Ok(it) => it,
            Err(error) => return refuse(caller, &error),
        };
        if self.peer(it.sender).is_some() {
            // The peer called while this rank's own call was answered: it has all it needs.
            return;
        }
        let admitted = self.admit(&it, raw).and_then(|peer| {
            let (record, fds) = self.offer.introduction(it.from);
            // A caller that has hung up either knows this rank by now or is lost: both are detected
            // elsewhere.
            socket::send(caller.as_fd(), &record, &fds).map(|_| peer)
        });
        match admitted {
            Ok(peer) => self.peers[it.sender as usize] = Some(peer),
            Err(error) => {
                refuse(caller, &error);
                self.refused.push((it.sender, error));
            }
        }
    }

    /// Maps the memory of a peer whose introduction was identified.
    fn admit(&self, it: &Introduction, raw: RawRecord) -> Result<(Secret, M::Peer)> {
        let mapped = self.offer.compare(it, raw).and_then(|memory| self.memory.map(memory));
        let peer = mapped.map_err(|e| e.with_rank(self.world_rank(it.sender)))?;
        Ok((it.from, peer))
    }

    /// Sleeps until a peer calls, sends or hangs up.
    fn sleep(&self, call: Option<&OwnedFd>, longest: Duration) -> Result<()> {
        let mut fds = Vec::new();
        let mut watch = |fd| fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        if let Some(door) = &self.door {
            door.callers.iter().for_each(|caller| watch(caller.as_fd()));
            if door.callers.len() < self.peers.len() {
                watch(door.listener.as_fd());
            }
        }
        if let Some(call) = call {
            watch(call.as_fd());
        }
        let longest = longest.min(LONGEST_SLEEP);
        let timeout =
            Timespec { tv_sec: longest.as_secs() as _, tv_nsec: longest.subsec_nanos() as _ };
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(Error::system("meet peer", "cannot wait for sockets", e)),
        }
    }

    /// Checks that the connected process is the one that the bootstrap named.
    fn check_token(&mut self, peer: u32, endpoint: &Endpoint) -> Result<()> {
        let known = self.peers[peer as usize].as_ref();
        if known.is_some_and(|(found, _)| *found == endpoint.token) {
            return Ok(());
        }
        self.peers[peer as usize] = None;
        Err(Error::new(
            ErrorKind::Protocol,
            "meet peer",
            "found a wrong access token; expected the one of the peer's endpoint",
        )
        .with_rank(self.world_rank(peer))
        .with_fix("exchange the endpoints of this run only, each once"))
    }

    fn world_rank(&self, peer: u32) -> u32 {
        self.offer.team.world_ranks[peer as usize]
    }

    fn lost(&self, peer: u32) -> Error {
        let rank = self.world_rank(peer);
        Error::new(
            ErrorKind::PeerLost,
            "meet peer",
            format!(
                "no process answers at the endpoint of rank {rank}; expected its process there"
            ),
        )
        .with_rank(rank)
        .with_fix(
            "find out why that rank ended; if it runs, give both the same network namespace (this \
             transport connects processes of one machine only)",
        )
    }

    fn late(&self, peer: u32, limit: Duration) -> Error {
        let rank = self.world_rank(peer);
        Error::new(
            ErrorKind::Deadline,
            "meet peer",
            format!("rank {rank} did not introduce itself within {limit:?}"),
        )
        .with_rank(rank)
        .with_fix("look at the state of that rank; raise deadline_ms if it is only slow")
    }
}

/// Logs a refused caller: any process of this network namespace can call, any number of times.
fn turned_away(why: &str) {
    static LOG: Mutex<SparseLog> = Mutex::new(SparseLog::new("more callers were turned away"));
    LOG.lock().unwrap_or_else(PoisonError::into_inner).warn(why);
}

/// Sends a caller the reason why it is refused.
fn refuse(caller: &OwnedFd, error: &Error) {
    turned_away(&format!("refused a caller: {error}"));
    let record = Record::Refusal(error.detail()).to_bytes();
    if let Err(error) = socket::send(caller.as_fd(), &record, &[]) {
        turned_away(&format!("the caller does not receive the reason: {error}"));
    }
}

#[cfg(test)]
mod tests;
