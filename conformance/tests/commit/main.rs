//! `commit` reports to a transport once that this rank is connected to all peers, before any command uses a
//! connection.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

mod shared;

use std::sync::atomic::{AtomicU32, Ordering};

use tokenyard_conformance::moe::exchange::options;
use tokenyard_conformance::moe::oracle::Case;
use tokenyard_conformance::moe::round::Round;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Capabilities, Command, MemoryNeeds, Transport, TransportOpen};
use tokenyard_core::{Error, ErrorKind, Result, abi};

const RANKS: u32 = 3;

/// By test.
static COMMITS: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];

/// `shm` without loads and stores, whose connections do not work before `commit`.
struct Committed {
    inner: OpenTransport,
    memory: MemoryNeeds,
    connected: u32,
    peers: u32,
    commits: u32,
    test: usize,
}

impl Transport for Committed {
    const NAME: &'static str = "committed";
    const ABOUT: &'static str = "wants its commit";
    type Config = Settings;

    fn probe(_: &Settings) -> Result<Capabilities> {
        let found = find_transport("shm")?.probe(&ComponentTable::empty())?;
        Ok(Capabilities { flags: found.flags & !abi::TY_CAP_LOAD_STORE, ..found })
    }

    fn open(settings: Settings, open: &TransportOpen<'_>) -> Result<Self> {
        let team = open.team;
        let mut inner = find_transport("shm")?.open(&ComponentTable::empty(), open)?;
        let peers = team.world_ranks.len() as u32;
        Ok(Self {
            memory: inner.memory_needs()?,
            inner,
            connected: 0,
            peers,
            commits: 0,
            test: settings.test,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.connected += 1;
        self.inner.connect(peer, data)
    }

    fn commit(&mut self) -> Result<()> {
        if self.connected != self.peers || self.commits != 0 {
            let found = format!("{} connections, {} commits before", self.connected, self.commits);
            return Err(Error::new(ErrorKind::Internal, "commit", found));
        }
        self.commits = 1;
        COMMITS[self.test].fetch_add(1, Ordering::Relaxed);
        self.inner.commit()
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        if self.commits != 1 {
            return Err(abi::TY_INTERNAL);
        }
        // SAFETY: by this function's contract.
        unsafe { self.inner.post(queue, commands) }
    }

    tokenyard_testkit::pass_on!(inner: register, endpoint, poll, read_signal, health);
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    test: usize,
}

tokenyard_testkit::built_in_transport!(Committed);

#[test]
fn a_transport_is_committed_once_behind_its_last_connect_and_before_it_is_used() {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"committed\"\n\
                [transport.scale_up.committed]\ntest = 0\n";
    let config = Config::parse(text, "commit").unwrap();
    let case = Case { ranks: RANKS as usize, experts: 6, topk: 2, ..Case::default() };
    in_threads(RANKS, &config, |world| {
        let mut comm = Communicator::open(world, &config, options(&case)).unwrap();
        let round = Round::new(&case, comm.rank());
        let live = round.dispatch(&mut comm).unwrap();
        round.finish(&mut comm, &live).unwrap();
        drop(live);
        comm.close().unwrap();
    })
    .unwrap();
    assert_eq!(COMMITS[0].load(Ordering::Relaxed), RANKS);
}
