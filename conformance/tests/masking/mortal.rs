//! A transport around another one, in which a rank is killed at a step of a bring-up.

use std::sync::OnceLock;

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Transport, TransportOpen, Window};
use tokenyard_core::{Error, ErrorKind, Result};

/// The inner transport.
const INNER: &str = "shm";
/// The step at which this process is killed, if it is to be.
static STEP: OnceLock<Step> = OnceLock::new();

/// The step at which a rank is killed or fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Before its communicator is opened: the others know the rank from the join.
    Joined,
    Probe,
    Open,
    Register,
    Endpoint,
    /// It is connected to some of the others.
    Connect,
    /// It is connected to all.
    Connected,
    /// It lives, but its options differ from the others'.
    Differs,
    /// It lives, but its transport does not run on the node where it came back.
    NoProbe,
    /// It lives, but it opens its communicator only when the others have given it up.
    Late,
}

impl Step {
    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// The steps at which the rank is killed.
    pub(crate) const ALL: [Self; 7] = [
        Self::Joined,
        Self::Probe,
        Self::Open,
        Self::Register,
        Self::Endpoint,
        Self::Connect,
        Self::Connected,
    ];

    /// The steps at which the rank lives, and no communicator can be opened with it.
    pub(crate) const FAILS: [Self; 3] = [Self::Differs, Self::NoProbe, Self::Late];

    /// Words of its process's last error.
    pub(crate) fn says(self) -> &'static str {
        match self {
            Self::Differs => "max_tokens",
            Self::NoProbe => "no such device here",
            Self::Late => "came back, and no communicator could be opened with it",
            _ => "",
        }
    }

    /// From now on, this process is killed at this step.
    pub(crate) fn arm(self) {
        let armed = STEP.set(self);
        assert!(armed.is_ok(), "a process dies once");
        Self::Joined.reached();
    }

    fn reached(self) {
        if STEP.get() == Some(&self) {
            kill_process(getpid(), Signal::KILL).expect("a process may kill itself");
        }
    }
}

/// The table of the inner transport.
#[derive(Debug, Deserialize)]
pub(crate) struct Below {
    #[serde(skip, default = "ComponentTable::empty")]
    table: ComponentTable,
}

pub(crate) struct Mortal {
    inner: OpenTransport,
    memory: MemoryNeeds,
    peers: u32,
}

impl Transport for Mortal {
    const NAME: &'static str = "mortal";
    const ABOUT: &'static str =
        "for tests only: shm in which a rank dies while a communicator opens";
    type Config = Below;

    fn configure(table: &ComponentTable) -> Result<Below> {
        Ok(Below { table: table.clone() })
    }

    fn probe(Below { table }: &Below) -> Result<Capabilities> {
        Step::Probe.reached();
        if STEP.get() == Some(&Step::NoProbe) {
            return Err(Error::new(ErrorKind::Unavailable, "probe", "no such device here"));
        }
        find_transport(INNER)?.probe(table)
    }

    fn open(Below { table }: Below, open: &TransportOpen<'_>) -> Result<Self> {
        Step::Open.reached();
        let mut inner = find_transport(INNER)?.open(&table, open)?;
        let peers = open.team.world_ranks.len() as u32;
        Ok(Self { memory: inner.memory_needs()?, inner, peers })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        Step::Register.reached();
        // SAFETY: by this function's contract, as the inner transport lives as long as this one.
        unsafe { self.inner.register(window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        Step::Endpoint.reached();
        self.inner.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        if peer > 0 {
            Step::Connect.reached();
        }
        self.inner.connect(peer, data)?;
        if peer + 1 == self.peers {
            Step::Connected.reached();
        }
        Ok(())
    }

    tokenyard_testkit::pass_on!(
        inner: alloc, peer_address, post, poll, read_signal, health, progress
    );
}

tokenyard_testkit::built_in_transport!(Mortal);
