use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Barrier;
use std::thread;

use crate::transport::Team;
use rustix::fs::MemfdFlags;

use super::super::offer::{Handed, SignalMemory};
use super::super::wire::{Extent, secret};
use super::*;

const BYTES: u64 = 4096;
const SIGNALS: u32 = 8;
const SOON: Duration = Duration::from_millis(100);
/// No test waits this long, unless it fails: on a busy machine a rank may not run for many seconds.
const LATER: Duration = Duration::from_secs(120);

fn memory(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("window", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// Checks lengths and maps nothing: the peer is the list of lengths.
#[derive(Debug)]
struct Lengths;

impl Memory for Lengths {
    type Peer = Vec<u64>;

    fn own(&self) -> Vec<u64> {
        vec![BYTES, SIGNALS.into()]
    }

    fn map(&self, memory: Vec<Handed>) -> Result<Vec<u64>> {
        memory
            .iter()
            .map(|piece| {
                let found = rustix::fs::fstat(&piece.fd).unwrap().st_size as u64;
                let expected = piece.extent.offset + piece.extent.bytes;
                if found < expected {
                    let text = format!("found {found} bytes of memory; expected {expected}");
                    return Err(Error::new(ErrorKind::Protocol, "map", text));
                }
                Ok(found)
            })
            .collect()
    }
}

/// Links of one rank with one window. Fields drop in order: the links end before their window.
struct Rank {
    links: Links<Lengths>,
    _fd: OwnedFd,
}

impl Rank {
    fn new(me: u32, ranks: u32) -> Self {
        let fd = memory(BYTES);
        let extent = Extent { offset: 0, bytes: SIGNALS.into() };
        let signals = SignalMemory { fd: memory(SIGNALS.into()), extent };
        let mut offer = Offer::new(&Team::world(me, ranks), SIGNALS, signals).unwrap();
        // SAFETY: the descriptor is dropped after the links.
        let window = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        offer.add_window(window, Extent { offset: 0, bytes: BYTES });
        Self { links: Links::new(offer, Lengths).unwrap(), _fd: fd }
    }

    fn endpoint(&self) -> Endpoint {
        self.links.offer.endpoint
    }
}

/// A process that speaks the protocol and may send anything.
struct Stranger {
    socket: OwnedFd,
}

impl Stranger {
    fn call(endpoint: &Endpoint) -> Self {
        loop {
            match socket::dial(&endpoint.name).unwrap() {
                Dialled::Connected(socket) => return Self { socket },
                Dialled::Busy => thread::sleep(BUSY_PAUSE),
                Dialled::NoListener => panic!("found no listener"),
            }
        }
    }

    fn introduce(&self, it: Introduction, fds: &[BorrowedFd<'_>]) {
        let record = Record::Introduction(it).to_bytes();
        assert!(socket::send(self.socket.as_fd(), &record, fds).unwrap());
    }

    /// The text of the refusal that waits here.
    fn refusal(&self) -> String {
        let ReceivedRecord::Record(raw) = socket::receive(self.socket.as_fd()).unwrap() else {
            panic!("no answer")
        };
        match Record::parse(&raw.bytes).unwrap() {
            Record::Refusal(text) => text,
            other => panic!("{other:?}"),
        }
    }
}

/// The introduction of rank 1 of 2 to the rank with `to`.
fn introduction(to: &Endpoint, from: Secret) -> Introduction {
    Introduction {
        to: to.token,
        from,
        sender: 1,
        ranks: 2,
        signals: SIGNALS,
        windows: vec![Extent { offset: 0, bytes: BYTES }],
    }
}

/// A window and signals as a good rank would send them.
fn good_memory() -> [OwnedFd; 2] {
    [memory(BYTES), memory(SIGNALS.into())]
}

/// Lets a stranger with the right token send a changed introduction. Returns the rank's own error, and
/// the refusal that the stranger receives.
fn met_with(change: impl FnOnce(&mut Introduction, &mut Vec<OwnedFd>)) -> (Error, String) {
    let mut rank = Rank::new(0, 2);
    let (to, from) = (rank.endpoint(), Endpoint::draw().unwrap());
    let (mut it, mut fds) = (introduction(&to, from.token), Vec::from(good_memory()));
    change(&mut it, &mut fds);
    let stranger = Stranger::call(&to);
    stranger.introduce(it, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    let error = rank.links.connect(1, &from, SOON).unwrap_err();
    (error, stranger.refusal())
}

#[test]
fn a_good_introduction_is_admitted() {
    let mut rank = Rank::new(0, 2);
    let (to, from) = (rank.endpoint(), Endpoint::draw().unwrap());
    let [window, signals] = good_memory();
    let peer = Stranger::call(&to);
    peer.introduce(introduction(&to, from.token), &[window.as_fd(), signals.as_fd()]);
    rank.links.connect(1, &from, SOON).unwrap();
    assert_eq!(rank.links.peer(1).unwrap()[0], BYTES);
}

#[test]
fn memory_that_cannot_be_mapped_is_refused_on_both_sides() {
    let (error, refusal) = met_with(|_, fds| fds[0] = memory(BYTES - 1));
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(1)));
    assert!(error.to_string().contains("found 4095 bytes of memory"), "{error}");
    assert!(refusal.contains("found 4095 bytes of memory"), "{refusal}");
    let (error, _) = met_with(|it, _| it.windows[0].offset = u64::MAX - 8);
    assert!(error.to_string().contains("offset"), "{error}");
}

#[test]
fn numbers_that_differ_between_ranks_are_named() {
    let says = |change: fn(&mut Introduction), text: &str| {
        let (error, refusal) = met_with(|it, _| change(it));
        assert!(error.to_string().contains(text), "{error}");
        assert!(refusal.contains(text), "{refusal}");
    };
    says(|it| it.ranks = 3, "ranks in the team: found 3; expected 2");
    says(|it| it.signals = 9, "signals: found 9; expected 8");
    says(|it| it.windows[0].bytes = 8192, "bytes of a window: found 8192; expected 4096");
    says(|it| it.windows.clear(), "windows: found 0; expected 1");
    let (error, _) = met_with(|_, fds| fds.truncate(1));
    assert!(error.to_string().contains("descriptors: found 1; expected 2"), "{error}");
}

#[test]
fn strangers_are_turned_away_and_do_not_disturb_the_peer() {
    let mut rank = Rank::new(0, 2);
    let (to, from) = (rank.endpoint(), Endpoint::draw().unwrap());
    // The peer listens and does not answer: it comes as a caller, after the strangers.
    let _listener = socket::listen_as(&from.name, 2).unwrap();
    let callers = thread::spawn(move || {
        let [window, signals] = good_memory();
        let fds = [window.as_fd(), signals.as_fd()];
        let silent = Stranger::call(&to);
        drop(Stranger::call(&to));
        let wrong_token = Stranger::call(&to);
        wrong_token.introduce(Introduction { to: [0; 16], ..introduction(&to, [0; 16]) }, &fds);
        let wrong_index = Stranger::call(&to);
        wrong_index.introduce(Introduction { sender: 2, ..introduction(&to, [0; 16]) }, &fds);
        let nonsense = Stranger::call(&to);
        assert!(socket::send(nonsense.socket.as_fd(), b"hello", &fds).unwrap());
        let peer = Stranger::call(&to);
        peer.introduce(introduction(&to, from.token), &fds);
        [silent, wrong_token, wrong_index, nonsense, peer]
    });
    rank.links.connect(1, &from, LATER).unwrap();
    let [_, wrong_token, wrong_index, nonsense, _] = callers.join().unwrap();
    assert!(wrong_token.refusal().contains("wrong access token"));
    assert!(wrong_index.refusal().contains("found index 2"));
    assert!(nonsense.refusal().contains("magic"));
}

#[test]
fn a_peer_that_is_not_whom_the_bootstrap_named_is_refused() {
    let mut rank = Rank::new(0, 2);
    let to = rank.endpoint();
    let [window, signals] = good_memory();
    let peer = Stranger::call(&to);
    peer.introduce(introduction(&to, secret().unwrap()), &[window.as_fd(), signals.as_fd()]);
    let error = rank.links.connect(1, &Endpoint::draw().unwrap(), SOON).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(1)));
    assert!(error.to_string().contains("wrong access token"), "{error}");
    assert!(rank.links.peer(1).is_none());
}

#[test]
fn a_wrong_token_is_refused_by_the_peer_and_reported_here() {
    let (mut zero, mut one) = (Rank::new(0, 2), Rank::new(1, 2));
    let forged = Endpoint { token: [9; 16], ..one.endpoint() };
    let good = zero.endpoint();
    let answering = thread::spawn(move || {
        let _ = one.links.connect(0, &Endpoint { name: [1; 16], ..good }, SOON);
        let _ = one.links.connect(0, &good, SOON);
    });
    let error = zero.links.connect(1, &forged, LATER).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Protocol, Some(1)));
    assert!(error.to_string().contains("wrong access token"), "{error}");
    answering.join().unwrap();
}

#[test]
fn a_peer_that_never_answers_ends_at_the_deadline() {
    let (mut zero, one) = (Rank::new(0, 2), Rank::new(1, 2));
    let start = Instant::now();
    let error = zero.links.connect(1, &one.endpoint(), SOON).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)));
    assert!((SOON..LATER / 4).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[test]
fn a_peer_that_is_gone_is_reported_long_before_the_deadline() {
    let start = Instant::now();
    let (mut zero, one) = (Rank::new(0, 2), Rank::new(1, 2));
    let endpoint = one.endpoint();
    drop(one);
    let error = zero.links.connect(1, &endpoint, LATER).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)));

    let one = Rank::new(1, 2);
    let endpoint = one.endpoint();
    let dying = thread::spawn(move || {
        thread::sleep(SOON);
        drop(one);
    });
    let error = zero.links.connect(1, &endpoint, LATER).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)));
    dying.join().unwrap();
    assert!(start.elapsed() < LATER / 4);
}

/// Connects all ranks at once; rank `me` connects to its peers in the order that `order` gives.
fn connect_all(ranks: u32, order: impl Fn(u32) -> Vec<u32> + Sync) {
    let all: Vec<Rank> = (0..ranks).map(|me| Rank::new(me, ranks)).collect();
    let endpoints: Vec<Endpoint> = all.iter().map(Rank::endpoint).collect();
    let start = Barrier::new(ranks as usize);
    thread::scope(|scope| {
        for (me, rank) in (0..ranks).zip(all) {
            let (endpoints, start, order) = (&endpoints, &start, &order);
            scope.spawn(move || {
                // The whole rank, or the closure would take its links without their window.
                let mut rank: Rank = rank;
                start.wait();
                for peer in order(me) {
                    rank.links.connect(peer, &endpoints[peer as usize], LATER).unwrap();
                }
                assert!(rank.links.door.is_none(), "the listener is closed");
            });
        }
    });
}

#[test]
fn ranks_connect_in_any_order_without_waiting_for_each_other() {
    let ranks = 6;
    for _ in 0..20 {
        connect_all(ranks, |_| (0..ranks).collect());
        connect_all(ranks, |me| (0..ranks).map(|i| (me + 1 + i) % ranks).collect());
        connect_all(ranks, |me| (0..ranks).map(|i| (me + ranks - i) % ranks).collect());
    }
}

#[test]
fn a_large_team_connects() {
    let ranks = 48;
    connect_all(ranks, |me| (0..ranks).map(|i| (me + i) % ranks).collect());
}
