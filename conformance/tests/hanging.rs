//! A transport whose `progress` does not return delays the end of its communicator for a limited time only,
//! and nothing is freed that the thread inside the call may still use (INV-6).
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::fmt::Debug;
use std::sync::{Condvar, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::abi::TY_CAP_MANUAL_PROGRESS;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Transport, TransportOpen};
use tokenyard_core::{ErrorKind, Result};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};

/// The behaviour of the transports of this process, and their state.
#[derive(Default)]
struct State {
    hangs: bool,
    /// The call of a bring-up that does not return.
    hangs_in: &'static str,
    /// Threads that are inside `progress`, or that call, and do not return.
    inside: u32,
    closed: u32,
}

static STATE: Mutex<State> = Mutex::new(State { hangs: false, hangs_in: "", inside: 0, closed: 0 });
static CHANGED: Condvar = Condvar::new();
static LOG: Mutex<String> = Mutex::new(String::new());
static ONE_TEST_AT_A_TIME: Mutex<()> = Mutex::new(());

/// `shm`, with manual progress.
struct Hanging {
    inner: OpenTransport,
    memory: MemoryNeeds,
    /// Connects once this many threads hang.
    after: u32,
}

impl Transport for Hanging {
    const NAME: &'static str = "hanging";
    const ABOUT: &'static str = "hangs in progress";
    type Config = Settings;

    fn probe(_: &Settings) -> Result<Capabilities> {
        let mut capabilities = find_transport("shm")?.probe(&ComponentTable::empty())?;
        capabilities.flags |= TY_CAP_MANUAL_PROGRESS;
        Ok(capabilities)
    }

    fn open(settings: Settings, open: &TransportOpen<'_>) -> Result<Self> {
        hang_in("open");
        let mut inner = find_transport("shm")?.open(&ComponentTable::empty(), open)?;
        Ok(Self { memory: inner.memory_needs()?, inner, after: settings.after })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        hang_in("connect");
        await_hanging(self.after);
        self.inner.connect(peer, data)
    }

    fn commit(&mut self) -> Result<()> {
        hang_in("commit");
        self.inner.commit()
    }

    fn progress(&self) -> std::result::Result<bool, i32> {
        let mut state = STATE.lock().unwrap();
        if state.hangs {
            state.inside += 1;
            CHANGED.notify_all();
            let mut state = CHANGED.wait_while(state, |state| state.hangs).unwrap();
            state.inside -= 1;
            CHANGED.notify_all();
        }
        Ok(false)
    }

    tokenyard_testkit::pass_on!(
        inner: register, endpoint, peer_address, post, poll, read_signal, health
    );
}

impl Drop for Hanging {
    fn drop(&mut self) {
        STATE.lock().unwrap().closed += 1;
        CHANGED.notify_all();
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    #[serde(default)]
    after: u32,
}

tokenyard_testkit::built_in_transport!(Hanging);

/// Stores the log.
struct Log;

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Line);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line;

impl Visit for Line {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        LOG.lock().unwrap().push_str(&format!("{value:?}\n"));
    }
}

fn set_up(more: &str) -> (MutexGuard<'static, ()>, Config) {
    static ONCE: Once = Once::new();
    let alone = ONE_TEST_AT_A_TIME.lock().unwrap();
    tokenyard_cpu::link();
    tokenyard_topology::link();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Log).unwrap());
    LOG.lock().unwrap().clear();
    STATE.lock().unwrap().closed = 0;
    let text = format!(
        "[world]\ndeadline_ms = 30000\nreports = \"none\"\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"hanging\"\n{more}"
    );
    (alone, Config::parse(&text, "hanging").unwrap())
}

fn case(ranks: u32) -> Case {
    Case { ranks: ranks as usize, experts: 4, topk: 2, ..Case::default() }
}

/// Waits until this many threads are inside `progress`.
fn await_hanging(threads: u32) {
    let state = STATE.lock().unwrap();
    drop(CHANGED.wait_while(state, |state| state.inside < threads).unwrap());
}

/// Does not return from this call of a bring-up, if it is the one that hangs.
fn hang_in(call: &str) {
    let mut state = STATE.lock().unwrap();
    if state.hangs_in == call {
        state.inside += 1;
        let mut state = CHANGED.wait_while(state, |state| state.hangs_in == call).unwrap();
        state.inside -= 1;
        CHANGED.notify_all();
    }
}

/// Lets the threads that hang return, into transports that must still exist.
fn release() {
    let mut state = STATE.lock().unwrap();
    (state.hangs, state.hangs_in) = (false, "");
    CHANGED.notify_all();
    drop(CHANGED.wait_while(state, |state| state.inside > 0).unwrap());
}

fn closed() -> u32 {
    STATE.lock().unwrap().closed
}

#[test]
fn a_communicator_ends_though_progress_hangs_and_keeps_what_the_thread_uses() {
    let (_alone, config) = set_up("");
    in_threads(2, &config, |world| {
        let case = case(2);
        let mut comm = Communicator::open(world, &config, options(&case)).unwrap();
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm).unwrap();
        round.finish(&mut comm, &live).unwrap();
        drop(live);
        world.barrier("all have ended").unwrap();
        STATE.lock().unwrap().hangs = true;
        await_hanging(2);
        let start = Instant::now();
        comm.close().unwrap();
        assert!(start.elapsed() >= Duration::from_secs(10), "a busy machine is waited for");
    })
    .unwrap();
    assert_eq!(closed(), 0, "a thread is still inside");
    let log = LOG.lock().unwrap().clone();
    let text = "transport `hanging` has not come back from `progress` within 10s";
    assert_eq!(log.matches(text).count(), 2, "{log}");
    release();
    in_threads(2, &config, |world| {
        Communicator::open(world, &config, options(&case(2))).unwrap().close().unwrap();
    })
    .unwrap();
    assert_eq!(closed(), 2, "a communicator whose threads come back is closed");
}

#[test]
fn a_bring_up_fails_where_progress_hangs_and_says_so() {
    // `progress` of the first level runs while the second connects.
    let (_alone, config) = set_up(
        "[transport.scale_out]\nuse = \"hanging\"\n[transport.scale_out.hanging]\nafter = 4\n\
         [topology]\ndomains = 2\n",
    );
    STATE.lock().unwrap().hangs = true;
    let errors = in_threads(4, &config, |world| {
        Communicator::open(world, &config, options(&case(4))).unwrap_err().to_string()
    })
    .unwrap();
    assert_eq!(closed(), 0, "a thread is still inside");
    release();
    let text = "transport `hanging` has not come back from `progress`";
    assert!(errors.iter().any(|error| error.contains(text)), "{errors:?}");
}

#[test]
fn a_bring_up_ends_where_a_transport_does_not_come_back_from_a_call_and_names_both() {
    for call in ["open", "connect", "commit"] {
        let (_alone, mut config) = set_up("");
        config.world.late = Duration::from_millis(1500);
        STATE.lock().unwrap().hangs_in = call;
        let errors = in_threads(2, &config, |world| {
            Communicator::open(world, &config, options(&case(2))).unwrap_err()
        })
        .unwrap();
        assert_eq!(closed(), 0, "a thread is still inside");
        release();
        // The threads end their bring-ups, and what these have opened.
        let state = STATE.lock().unwrap();
        drop(CHANGED.wait_while(state, |state| state.closed < 2).unwrap());
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
            let says = format!("transport `hanging` is inside of `{call}`");
            assert!(error.to_string().contains(&says), "{error}");
        }
    }
}
