//! A transport whose `health` does not return delays neither a report nor the end of its communicator
//! (INV-6).
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use std::sync::{Condvar, Mutex};
use std::thread;

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::Result;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Transport, TransportOpen};

/// Whether `health` returns to the threads of reports.
static ANSWERS: Mutex<bool> = Mutex::new(false);
static CHANGED: Condvar = Condvar::new();

/// `shm`, whose `health` returns at once to kernels, and to reports only while `ANSWERS` is set.
struct Mute {
    inner: OpenTransport,
    memory: MemoryNeeds,
}

impl Transport for Mute {
    const NAME: &'static str = "mute";
    const ABOUT: &'static str = "does not answer reports";
    type Config = NoSettings;

    fn probe(_: &NoSettings) -> Result<Capabilities> {
        find_transport("shm")?.probe(&ComponentTable::empty())
    }

    fn open(_: NoSettings, open: &TransportOpen<'_>) -> Result<Self> {
        let mut inner = find_transport("shm")?.open(&ComponentTable::empty(), open)?;
        Ok(Self { memory: inner.memory_needs()?, inner })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    fn health(&self) -> Result<()> {
        if thread::current().name() == Some("tokenyard-query") {
            let answers = ANSWERS.lock().unwrap();
            drop(CHANGED.wait_while(answers, |answers| !*answers).unwrap());
        }
        self.inner.health()
    }

    tokenyard_testkit::pass_on!(
        inner: register, endpoint, connect, peer_address, post, poll, read_signal
    );
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct NoSettings {}

tokenyard_testkit::built_in_transport!(Mute);

#[test]
fn reports_say_that_a_transport_does_not_answer_and_its_communicator_ends() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let reports = tempfile::tempdir().unwrap();
    let text = format!(
        "[world]\ndeadline_ms = 30000\nreports = \"{}\"\n[kernels]\nuse = \"cpu\"\n\
         [transport.scale_up]\nuse = \"mute\"\n",
        reports.path().display()
    );
    let config = Config::parse(&text, "mute").unwrap();
    let case = Case { ranks: 2, experts: 4, topk: 2, ..Case::default() };
    in_threads(2, &config, |world| {
        let mut comm = Communicator::open(world, &config, options(&case)).unwrap();
        let reporter = comm.reporter();
        let report = reporter.capture("it is asked").unwrap();
        assert!(report.transports[0].unanswered_ms.is_some_and(|ms| ms >= 1000), "{report:?}");
        assert_eq!(report.peers.len(), 1, "the rest of it is there");
        let path = reporter.write("it is asked again").unwrap();
        let text = std::fs::read_to_string(path.with_extension("txt")).unwrap();
        assert!(text.contains("asked for its health, it has not answered for"), "{text}");
        // The communicator works, and its end does not wait for `health`.
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm).unwrap();
        round.finish(&mut comm, &live).unwrap();
        drop(live);
        comm.close().unwrap();
        assert!(!*ANSWERS.lock().unwrap());
    })
    .unwrap();
    // Threads that are still inside the transports find them open.
    *ANSWERS.lock().unwrap() = true;
    CHANGED.notify_all();
    in_threads(2, &config, |world| {
        let comm = Communicator::open(world, &config, options(&case)).unwrap();
        // A busy machine may not run the calling thread for a while.
        while comm.reporter().capture("").unwrap().transports[0].unanswered_ms.is_some() {}
        comm.close().unwrap();
    })
    .unwrap();
}
