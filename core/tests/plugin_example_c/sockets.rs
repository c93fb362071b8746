//! The example over TCP: both ranks are instances of this thread, which drives each when the test says so.

use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{FromRawFd as _, RawFd};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokenyard_core::host::{OpenTransport, TransportRef};
use tokenyard_core::transport::{
    Command, Event, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{ErrorKind, abi};

use super::plugins::{Library, compile, repository};
use super::{component, no_config};

const RANKS: u32 = 2;
/// As in `sockets.h`: bytes of a turn, and the strangers that may be silent.
const TURN: usize = 1 << 20;
const STRANGERS: usize = 64;
/// Where an endpoint has the token of its instance, and its port.
const TOKEN: std::ops::Range<usize> = 16..32;
const PORT: usize = 100;

/// The library with the unbroken example.
fn sockets() -> (Library, TransportRef) {
    let traffic = repository("plugins/example-c/sockets_io.c");
    let traffic: &Path = &traffic;
    let options = ["-std=c11", "-O2", "-fvisibility=hidden", "-pthread", traffic.to_str().unwrap()];
    let library = compile("plugins/example-c/sockets.c", "cc", &options);
    let component = component(&library, "example_sockets");
    (library, component)
}

/// A rank with one window, which fields drop behind the transport.
struct Socket {
    transport: OpenTransport,
    me: u32,
    _memory: Vec<u64>,
}

impl Socket {
    fn open(component: TransportRef, me: u32, bytes: usize, deadline: Duration) -> Self {
        let needs = TransportNeeds {
            windows: 1,
            queues: 1,
            signals: 2,
            queue_depth: 64,
            largest_put: bytes as u64,
            deadline,
        };
        let team = Team::world(me, RANKS);
        let mut transport =
            component.open(&no_config(), &TransportOpen::new(&team, &needs)).unwrap();
        let mut memory = vec![0_u64; bytes / 8];
        let window = Window {
            kind: abi::TY_MEMORY_HOST,
            pointer: memory.as_mut_ptr().cast(),
            bytes: bytes as u64,
            ..NO_WINDOW
        };
        // SAFETY: the memory lives in `Socket`, behind the transport.
        unsafe { transport.register(&window) }.unwrap();
        Self { transport, me, _memory: memory }
    }

    fn post(&self, commands: &[Command]) {
        // SAFETY: the commands of these tests are in range, and no test writes a source.
        let accepted = unsafe { self.transport.post(0, commands) };
        assert_eq!(accepted, Ok(commands.len()));
    }

    fn poll(&self) -> Vec<Event> {
        let mut events = [NO_EVENT; 64];
        let count = self.transport.poll(0, &mut events).unwrap();
        events[..count].to_vec()
    }

    fn drive(&self) {
        self.transport.progress().unwrap();
    }
}

/// A put of this rank to the other one, which raises the sender's signal and asks for an event.
fn put(from: &Socket, bytes: usize) -> Command {
    Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer: 1 - from.me,
        signal: from.me,
        add: 1,
        bytes: bytes as u64,
        ..NO_COMMAND
    }
}

fn connect(from: &mut Socket, to: &mut Socket) {
    let endpoint = to.transport.endpoint(from.me).unwrap();
    from.transport.connect(to.me, &endpoint).unwrap();
}

fn connect_to_itself(rank: &mut Socket) {
    let endpoint = rank.transport.endpoint(rank.me).unwrap();
    rank.transport.connect(rank.me, &endpoint).unwrap();
}

fn open_both(component: TransportRef, bytes: usize, deadline: Duration) -> [Socket; 2] {
    [0, 1].map(|me| Socket::open(component, me, bytes, deadline))
}

fn connected(component: TransportRef, bytes: usize, deadline: Duration) -> [Socket; 2] {
    let [mut one, mut two] = open_both(component, bytes, deadline);
    connect_to_itself(&mut one);
    connect_to_itself(&mut two);
    connect(&mut one, &mut two);
    connect(&mut two, &mut one);
    one.transport.commit().unwrap();
    two.transport.commit().unwrap();
    [one, two]
}

/// A deadline that ends no healthy test.
const LONG: Duration = Duration::from_secs(10);

#[test]
fn a_put_behind_a_goodbye_is_an_error_and_health_names_the_peer() {
    let (_library, component) = sockets();
    let [one, two] = connected(component, 4096, LONG);
    drop(two);
    for _ in 0..20 {
        one.drive();
        one.transport.health().expect("a goodbye is no failure");
        sleep(Duration::from_millis(1));
    }
    one.post(&[put(&one, 64)]);
    let events = one.poll();
    let found: Vec<_> = events.iter().map(|e| (e.kind, e.peer, e.status)).collect();
    assert_eq!(found, [(abi::TY_EVENT_ERROR, 1, abi::TY_PEER_LOST)]);
    assert_eq!(one.transport.health().unwrap_err().rank(), Some(1));
}

#[test]
fn a_peer_that_takes_longer_than_the_deadline_but_goes_on_is_no_lost_one() {
    let (_library, component) = sockets();
    let (bytes, deadline) = (32 * TURN, Duration::from_millis(400));
    let [one, two] = connected(component, bytes, deadline);
    one.post(&[put(&one, bytes)]);
    let (mut events, mut turns) = (Vec::new(), 0);
    // The other rank takes a turn each time, so the first one has room each time that it looks.
    while events.is_empty() {
        two.drive();
        sleep(Duration::from_millis(25));
        events = one.poll();
        turns += 1;
    }
    assert!(turns > 20, "it took {turns} turns: too few to see anything");
    assert_eq!((events[0].kind, events[0].status), (abi::TY_EVENT_DONE, abi::TY_OK));
}

#[test]
fn a_peer_that_takes_nothing_until_the_deadline_is_lost() {
    let (_library, component) = sockets();
    let (bytes, deadline) = (32 * TURN, Duration::from_millis(100));
    let [one, _two] = connected(component, bytes, deadline);
    one.post(&[put(&one, bytes)]);
    let mut events = Vec::new();
    while events.is_empty() {
        sleep(Duration::from_millis(5));
        events = one.poll();
    }
    assert_eq!((events[0].kind, events[0].status), (abi::TY_EVENT_ERROR, abi::TY_DEADLINE));
}

#[test]
fn one_post_and_one_poll_send_a_turn_each() {
    let (_library, component) = sockets();
    let bytes = TURN / 16;
    let [one, two] = connected(component, bytes, LONG);
    let arrived = || {
        (0..40).for_each(|_| two.drive());
        two.transport.read_signal(0, 0)
    };
    one.post(&[put(&one, bytes); 64]);
    assert!(arrived() <= 16, "{} puts of a sixteenth of a turn", arrived());
    one.drive();
    assert!(arrived() <= 32, "{} puts of a sixteenth of a turn", arrived());
    for _ in 0..20 {
        one.drive();
        two.drive();
    }
    assert_eq!(arrived(), 64);
}

/// A limit of zero would be none: the system tries for two minutes to reach a listener that is full.
#[test]
fn a_deadline_below_a_microsecond_ends_a_connect() {
    let (_library, component) = sockets();
    let (bytes, deadline) = (64, Duration::from_nanos(500));
    let mut one = Socket::open(component, 0, bytes, deadline);
    let mut two = Socket::open(component, 1, bytes, deadline);
    let endpoint = two.transport.endpoint(0).unwrap();
    let address = address(&endpoint);
    let callers = std::iter::from_fn(|| {
        TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok()
    });
    let callers: Vec<_> = callers.collect();
    let start = Instant::now();
    let error = one.transport.connect(1, &endpoint).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(60), "{error} after {:?}", start.elapsed());
    assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(1)));
    drop(callers);
}

fn address(endpoint: &[u8]) -> SocketAddr {
    let port: [u8; 4] = endpoint[PORT..].try_into().unwrap();
    SocketAddr::from(([127, 0, 0, 1], u32::from_ne_bytes(port) as u16))
}

fn call(endpoint: &[u8]) -> TcpStream {
    TcpStream::connect(address(endpoint)).unwrap()
}

#[test]
fn strangers_that_are_silent_keep_no_peer_out() {
    let (_library, component) = sockets();
    let [mut one, mut two] = open_both(component, 4096, LONG);
    let endpoint = two.transport.endpoint(0).unwrap();
    let mut strangers = Vec::new();
    for _ in 0..STRANGERS + 10 {
        strangers.push(call(&endpoint));
        two.drive();
    }
    connect(&mut one, &mut two);
    connect_to_itself(&mut two);
    two.transport.commit().unwrap();
}

#[test]
fn a_late_hello_is_read_although_an_earlier_caller_has_gone() {
    let (_library, component) = sockets();
    let mut two = Socket::open(component, 1, 4096, LONG);
    let endpoint = two.transport.endpoint(0).unwrap();
    let (stranger, mut late) = (call(&endpoint), call(&endpoint));
    two.drive();
    drop(stranger);
    two.drive();
    // Now no caller waits.
    connect_to_itself(&mut two);
    two.drive();
    // As rank 0: the token, its rank, and a reserved word.
    late.write_all(&endpoint[TOKEN]).unwrap();
    late.write_all(&[0; 8]).unwrap();
    two.transport.commit().unwrap();
}

#[test]
fn short_commands_leave_at_once() {
    let (_library, component) = sockets();
    let [_one, mut two] = connected(component, 4096, LONG);
    let endpoint = two.transport.endpoint(0).unwrap();
    let port = u32::from_ne_bytes(endpoint[PORT..].try_into().unwrap()) as u16;
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let numbers = open.filter_map(|fd| fd.file_name().to_str()?.parse::<RawFd>().ok());
    let mut found = 0;
    for fd in numbers {
        // SAFETY: it is not closed here. A file that is no socket, or is gone by now, has no peer.
        let stream = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd) });
        if stream.peer_addr().is_ok_and(|peer| peer.port() == port) {
            assert!(stream.nodelay().unwrap());
            found += 1;
        }
    }
    assert_eq!(found, 2, "connections of both ranks to rank 1");
}
