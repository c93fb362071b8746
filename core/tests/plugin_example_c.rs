//! The examples in C, and the code of the plugin author's guide, built by the system's compilers as C11
//! and as C++17, fulfil the promises of a transport. Ranks are threads of this process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, Registry, TransportRef};
use tokenyard_core::transport::{
    Command, Event, NO_COMMAND, NO_EVENT, Team, TransportNeeds, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind};

mod plugins;
#[path = "plugin_example_c/sockets.rs"]
mod sockets;

use plugins::{Library, compile};

const C: [&str; 2] = ["-std=c11", "-O2"];
const CPP: [&str; 4] = ["-std=c++17", "-O2", "-x", "c++"];
const WINDOW_BYTES: u64 = 1 << 20;
const DEPTH: u32 = 16;

fn component(library: &Library, name: &str) -> TransportRef {
    Registry::load(std::slice::from_ref(&library.path)).unwrap().transport(name).unwrap()
}

fn example() -> (Library, TransportRef) {
    let library = compile("plugins/example-c/shm.c", "cc", &C);
    let component = component(&library, "example_c");
    (library, component)
}

fn no_config() -> ComponentTable {
    ComponentTable::from_text("", "a.toml")
}

fn needs() -> TransportNeeds {
    TransportNeeds {
        windows: 2,
        queues: 2,
        signals: 8,
        queue_depth: DEPTH,
        largest_put: 4096,
        deadline: Duration::from_secs(10),
    }
}

/// An open transport with its two windows.
struct Rank {
    transport: OpenTransport,
    windows: Vec<Window>,
}

impl Rank {
    fn open(component: TransportRef, me: u32, ranks: u32) -> Self {
        let mut transport = component
            .open(&no_config(), &TransportOpen::new(&Team::world(me, ranks), &needs()))
            .unwrap();
        let windows: Vec<_> = (0..2).map(|id| transport.alloc(id, WINDOW_BYTES).unwrap()).collect();
        for window in &windows {
            // SAFETY: the transport owns the memory until it is dropped.
            unsafe { transport.register(window) }.unwrap();
        }
        Self { transport, windows }
    }

    /// A word of a window on this rank.
    fn word(&self, window: usize, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= WINDOW_BYTES as usize);
        // SAFETY: in range, aligned by the callers, and alive as long as `self`.
        unsafe { AtomicU64::from_ptr(self.windows[window].pointer.add(offset).cast()) }
    }

    fn post(&self, commands: &[Command]) -> usize {
        // SAFETY: windows, offsets and signals of the tests are in range; this thread owns the queue.
        unsafe { self.transport.post(commands[0].queue, commands) }.unwrap()
    }

    fn poll(&self, queue: u32) -> Vec<Event> {
        let mut events = [NO_EVENT; 64];
        let count = self.transport.poll(queue, &mut events).unwrap();
        events[..count].to_vec()
    }
}

fn command(op: u8, peer: u32) -> Command {
    Command { op, peer, add: 1, dst_window: 1, ..NO_COMMAND }
}

/// Runs `body` as each of `ranks`, connected to one another.
fn with_ranks(ranks: u32, body: impl Fn(u32, &Rank) + Sync) {
    let (_library, component) = example();
    let endpoints = Mutex::new(vec![vec![Vec::new(); ranks as usize]; ranks as usize]);
    let arrived = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for me in 0..ranks {
            let (endpoints, arrived, body) = (&endpoints, &arrived, &body);
            scope.spawn(move || {
                let all_arrived = |times: u32| {
                    arrived.fetch_add(1, Ordering::AcqRel);
                    let enough = || arrived.load(Ordering::Acquire) >= times * ranks;
                    wait_for("the other ranks", enough);
                };
                let mut rank = Rank::open(component, me, ranks);
                for peer in 0..ranks {
                    let bytes = rank.transport.endpoint(peer).unwrap();
                    endpoints.lock().unwrap()[me as usize][peer as usize] = bytes;
                }
                all_arrived(1);
                for peer in 0..ranks {
                    let data = endpoints.lock().unwrap()[peer as usize][me as usize].clone();
                    rank.transport.connect(peer, &data).unwrap();
                }
                all_arrived(2);
                body(me, &rank);
            });
        }
    });
}

fn wait_for(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    loop {
        for _ in 0..1000 {
            if done() {
                return;
            }
            std::hint::spin_loop();
        }
        assert!(start.elapsed() < Duration::from_secs(20), "timed out: {what}");
        std::thread::yield_now();
    }
}

// === the example between ranks ===

#[test]
fn a_signal_never_overtakes_the_payload_of_its_put() {
    const ROUNDS: u64 = 200;
    // Long, so that a signal that is too early finds the copy under way.
    const BYTES: usize = WINDOW_BYTES as usize;
    with_ranks(2, |me, rank| {
        let peer = 1 - me;
        for round in 1..=ROUNDS {
            let expected = |rank: u32| round * 2 + u64::from(rank);
            for offset in (0..BYTES).step_by(8) {
                rank.word(0, offset).store(expected(me), Ordering::Relaxed);
            }
            let bytes = BYTES as u64;
            let put = Command { bytes, signal: 5, add: 3, ..command(abi::TY_OP_PUT_SIGNAL, peer) };
            assert_eq!(rank.post(&[put]), 1);
            wait_for("the put", || rank.transport.read_signal(0, 5) == round * 3);
            // The last byte that was copied is checked first.
            for offset in (0..BYTES).step_by(8).rev() {
                assert_eq!(rank.word(1, offset).load(Ordering::Relaxed), expected(peer));
            }
            // Signals that the payload was read, so that the next round may write.
            rank.post(&[Command { signal: 6, ..command(abi::TY_OP_SIGNAL, peer) }]);
            wait_for("the answer", || rank.transport.read_signal(0, 6) == round);
        }
    });
}

#[test]
fn values_gets_and_peer_addresses_reach_the_right_rank_and_offset() {
    with_ranks(3, |me, rank| {
        for peer in 0..3 {
            let at = 64 * (u64::from(me) + 1);
            let value = u64::from(10 * me + peer);
            rank.post(&[
                Command { dst_offset: at, value, ..command(abi::TY_OP_PUT_VALUE, peer) },
                command(abi::TY_OP_SIGNAL, peer),
            ]);
        }
        wait_for("all values", || rank.transport.read_signal(0, 0) == 3);
        for from in 0..3 {
            let found = rank.word(1, 64 * (from as usize + 1)).load(Ordering::Acquire);
            assert_eq!(found, u64::from(10 * from + me));
        }
        // The same words again, read from the peers' side.
        let peer = (me + 1) % 3;
        wait_for("the peer's values", || {
            let get =
                Command { bytes: 256, flags: abi::TY_FLAG_NOTIFY, ..command(abi::TY_OP_GET, peer) };
            rank.post(&[get]);
            assert_eq!(rank.poll(0).len(), 1);
            (0..3).all(|from| {
                let found = rank.word(0, 64 * (from as usize + 1)).load(Ordering::Relaxed);
                found == u64::from(10 * from + peer)
            })
        });
        let address = rank.transport.peer_address(1, peer).unwrap();
        // SAFETY: mapped until the transport is dropped; the word is in range and aligned.
        let word = unsafe { AtomicU64::from_ptr(address.add(64).cast()) };
        assert_eq!(word.load(Ordering::Acquire), u64::from(peer));
        assert_eq!(rank.transport.peer_address(1, me).unwrap(), rank.windows[1].pointer);
    });
}

#[test]
fn done_events_come_once_with_their_tag_and_a_full_queue_pushes_back() {
    with_ranks(1, |_, rank| {
        let quiet = Command { bytes: 8, queue: 1, ..command(abi::TY_OP_PUT, 0) };
        assert_eq!(rank.post(&[quiet]), 1);
        assert_eq!(rank.poll(1).len(), 0, "no call asked for an event");
        let loud = |tag| Command { flags: abi::TY_FLAG_NOTIFY, tag, ..quiet };
        for round in 0..3 {
            let batch: Vec<_> = (0..DEPTH as u64 + 4).map(|i| loud(100 * round + i)).collect();
            assert_eq!(rank.post(&batch), DEPTH as usize);
            assert_eq!(rank.post(&batch), 0, "the queue is full");
            assert_eq!(rank.poll(0).len(), 0, "another queue has its own events");
            let events = rank.poll(1);
            let tags: Vec<_> = events.iter().map(|e| e.tag).collect();
            assert_eq!(tags, (100 * round..100 * round + DEPTH as u64).collect::<Vec<_>>());
            for event in events {
                assert_eq!(
                    (event.kind, event.queue, event.peer, event.status),
                    (abi::TY_EVENT_DONE, 1, 0, abi::TY_OK)
                );
            }
        }
    });
}

#[test]
fn an_unknown_op_is_an_error_event_and_the_health_stays_bad() {
    with_ranks(1, |_, rank| {
        rank.transport.health().unwrap();
        let bad = Command { tag: 77, ..command(99, 0) };
        let good = Command { signal: 1, ..command(abi::TY_OP_SIGNAL, 0) };
        assert_eq!(rank.post(&[bad, good]), 2);
        let events = rank.poll(0);
        assert_eq!(events.len(), 1, "errors are reported unasked");
        assert_eq!((events[0].kind, events[0].tag), (abi::TY_EVENT_ERROR, 77));
        assert_eq!(events[0].status, abi::TY_UNSUPPORTED);
        assert_eq!(rank.transport.read_signal(0, 1), 1);
        for _ in 0..2 {
            let error = rank.transport.health().unwrap_err();
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Transport, None));
            assert!(error.message().contains("unknown op 99; expected 1 to 5"), "{error}");
        }
    });
}

// === the example's cold calls ===

/// The name in an endpoint, and the file of its object `which`.
fn object_of(endpoint: &[u8], which: usize) -> PathBuf {
    let name = &endpoint[endpoint.len() - 48..];
    let end = name.iter().position(|b| *b == 0).unwrap();
    let name = std::str::from_utf8(&name[1..end]).unwrap();
    PathBuf::from(format!("/dev/shm/{name}-{which}"))
}

/// The signal area's number among the objects.
const SIGNALS: usize = abi::TY_MAX_WINDOWS;

#[test]
fn names_go_when_the_last_rank_has_mapped_them_or_when_the_owner_closes() {
    use std::os::unix::fs::PermissionsExt;
    let (_library, component) = example();
    let mut ranks: Vec<_> = (0..2).map(|me| Rank::open(component, me, 2)).collect();
    let endpoints: Vec<_> = ranks.iter_mut().map(|r| r.transport.endpoint(0).unwrap()).collect();
    let files: Vec<_> = [0, 1, SIGNALS].map(|which| object_of(&endpoints[1], which)).into();
    for file in &files {
        assert_eq!(std::fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    ranks[0].transport.connect(1, &endpoints[1]).unwrap();
    assert!(files.iter().all(|f| f.exists()), "rank 1 has not mapped its own set yet");
    ranks[1].transport.connect(1, &endpoints[1]).unwrap();
    assert!(files.iter().all(|f| !f.exists()), "both have mapped it");

    let never_connected = object_of(&endpoints[0], SIGNALS);
    assert!(never_connected.exists());
    drop(ranks.remove(0));
    assert!(!never_connected.exists(), "the owner has closed");
    let error = ranks[0].transport.connect(0, &endpoints[0]).unwrap_err();
    assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
    assert!(error.to_string().contains("Fix: if both live"), "{error}");
}

#[test]
fn damaged_endpoints_are_refused_with_what_is_wrong() {
    let (_library, component) = example();
    let mut ranks: Vec<_> = (0..2).map(|me| Rank::open(component, me, 2)).collect();
    let good = ranks[1].transport.endpoint(0).unwrap();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] ^= byte;
        bytes
    };
    let name = good.len() - 48;
    let mut unended = good.clone();
    unended[name..].fill(b'a');
    let mut elsewhere = good.clone();
    elsewhere[name + 12..name + 16].copy_from_slice(b"/../");
    let cases: [(Vec<u8>, &str); 10] = [
        (Vec::new(), "has version 0 and 0 bytes; expected version 2 and 152 bytes"),
        (good[..good.len() - 1].to_vec(), "and 151 bytes; expected version 2 and 152 bytes"),
        ([&good[..], &[0]].concat(), "and 153 bytes"),
        (with(0, 1), "has version 3 and 152 bytes"),
        (with(4, 1), "team has 3 ranks; expected 2"),
        (with(8, 1), "the endpoint is of peer 0; expected that of peer 1"),
        (with(32 + 8, 1), "window 1 of the peer has 1048577 bytes; expected 1048576"),
        (with(32 + 8 * SIGNALS, 64), "signal area 8 of the peer has 512 bytes; expected 576"),
        (unended, "the name in the endpoint is damaged"),
        (elsewhere, "the name in the endpoint is damaged"),
    ];
    for (bytes, wanted) in cases {
        let error = ranks[0].transport.connect(1, &bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.message().contains(wanted), "expected `{wanted}` in: {error}");
        assert_eq!(error.rank(), Some(1));
    }
    // A wrong token is detected in the peer's own memory.
    let error = ranks[0].transport.connect(1, &with(16, 1)).unwrap_err();
    assert!(error.message().contains("another token"), "{error}");
}

#[test]
fn an_object_that_is_shorter_than_promised_is_refused() {
    let (_library, component) = example();
    let mut ranks: Vec<_> = (0..2).map(|me| Rank::open(component, me, 2)).collect();
    let endpoint = ranks[1].transport.endpoint(0).unwrap();
    let file = std::fs::File::options().write(true).open(object_of(&endpoint, 0)).unwrap();
    file.set_len(4096).unwrap();
    let error = ranks[0].transport.connect(1, &endpoint).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.message().contains("4096 bytes; expected"), "{error}");
    assert!(error.message().contains("at least 1048576 bytes"), "{error}");
}

#[test]
fn memory_that_it_cannot_serve_is_refused() {
    let (_library, component) = example();
    let mut rank = Rank::open(component, 0, 1);
    let mut foreign = rank.windows[0];
    foreign.pointer = foreign.pointer.wrapping_add(4096);
    // SAFETY: the memory is not used: it is refused.
    let error = unsafe { rank.transport.register(&foreign) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("window 0 was not made by `alloc`"), "{error}");

    let mut transport =
        component.open(&no_config(), &TransportOpen::new(&Team::world(0, 1), &needs())).unwrap();
    let error = transport.alloc(0, 1 << 50).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.to_string().contains("cannot reserve 1125899906842624 bytes"), "{error}");
    assert!(error.fix().is_some_and(|fix| fix.contains("--shm-size")), "{error}");
    let needs = transport.memory_needs().unwrap();
    assert_eq!((needs.kinds, needs.handles), (abi::TY_MEMORY_HOST, 0));
}

#[test]
fn the_config_table_chooses_load_and_store_and_refuses_the_rest() {
    let (_library, component) = example();
    let flags = |text: &str| -> Result<u64, Error> {
        let capabilities = component.probe(&ComponentTable::from_text(text, "a.toml"))?;
        Ok(capabilities.flags & abi::TY_CAP_LOAD_STORE)
    };
    for on in ["", "\n# a comment\n", "load_store = true", "\tload_store=true# why\r\n"] {
        assert_eq!(flags(on).unwrap(), abi::TY_CAP_LOAD_STORE, "{on:?}");
    }
    for off in ["load_store = false", "\n\n  load_store =  false  # puts only\n\n"] {
        assert_eq!(flags(off).unwrap(), 0, "{off:?}");
    }
    for (text, wanted) in [
        ("\n\n\nrails = 2\n", "a.toml:4: unknown key `rails` of example_c; expected load_store"),
        ("load_store = maybe", "a.toml:1: load_store is `maybe`; expected true or false"),
        ("\nload_store", "a.toml:2: load_store is ``; expected true or false"),
        ("load_store = \"true\"", "load_store is `\"true\"`; expected true or false"),
        (&"x".repeat(5000), "a.toml:1: unknown key `xxx"),
    ] {
        let table = ComponentTable::from_text(text, "a.toml");
        let opened = component
            .open(&table, &TransportOpen::new(&Team::world(0, 1), &needs()))
            .map(|_| ())
            .unwrap_err();
        for error in [flags(text).unwrap_err(), opened] {
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.message().contains(wanted), "expected `{wanted}` in: {error}");
        }
    }
}

#[test]
fn the_example_compiled_as_cpp_is_the_same_plugin() {
    let library = compile("plugins/example-c/shm.c", "g++", &CPP);
    let component = component(&library, "example_c");
    let mut rank = Rank::open(component, 0, 1);
    let endpoint = rank.transport.endpoint(0).unwrap();
    rank.transport.connect(0, &endpoint).unwrap();
    sends_to_itself(&rank);
}

/// Puts a payload with a signal to this rank itself and finds it there.
fn sends_to_itself(rank: &Rank) {
    rank.word(0, 8).store(4711, Ordering::Relaxed);
    let put = Command {
        src_offset: 8,
        dst_offset: 16,
        bytes: 8,
        signal: 2,
        add: 5,
        flags: abi::TY_FLAG_NOTIFY,
        ..command(abi::TY_OP_PUT_SIGNAL, 0)
    };
    let value = Command { dst_offset: 24, value: 4712, ..command(abi::TY_OP_PUT_VALUE, 0) };
    assert_eq!(rank.post(&[put, value]), 2);
    assert_eq!(rank.transport.read_signal(0, 2), 5);
    assert_eq!(rank.word(1, 16).load(Ordering::Relaxed), 4711);
    assert_eq!(rank.word(1, 24).load(Ordering::Relaxed), 4712);
    assert_eq!(rank.poll(0).len(), 1);
    rank.transport.health().unwrap();
    rank.post(&[command(0, 0)]);
    assert_eq!(rank.poll(0)[0].kind, abi::TY_EVENT_ERROR);
    assert_eq!(rank.transport.health().unwrap_err().kind(), ErrorKind::Transport);
}
