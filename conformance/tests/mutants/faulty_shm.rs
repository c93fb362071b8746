//! The `shm` transport with one fault built in.

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::{Exported, TRANSPORT_HEADER, TransportComponent};
use tokenyard_core::host::BuiltIn;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_cpu::Shm;

use crate::claim_mutants::*;
use crate::completion_mutants::*;
use crate::domain_mutants::*;
use crate::l0::{Intact, IntactLoadStore};
use crate::payload_mutants::*;
use crate::pipe_mutants::*;

/// The transport below a fault, and this rank's place on it.
pub(crate) struct Below {
    pub(crate) shm: Shm,
    pub(crate) me: u32,
    pub(crate) ranks: u32,
}

impl Below {
    /// # Safety
    /// As [`Transport::post`], for one command.
    pub(crate) unsafe fn post(&self, queue: u32, command: Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { self.shm.post(queue, &[command]) }
    }
}

/// The result of hot calls.
pub(crate) type Hot = std::result::Result<usize, i32>;

/// The fault. Every method does the right thing unless a fault overrides it.
pub(crate) trait Fault: Default + Send + Sync + 'static {
    /// The transport's name in a config.
    const NAME: &'static str;
    /// Capabilities that the mutant declares beside those of a transport that only puts.
    const KEEPS: u64 = abi::TY_CAP_GET;
    /// The most bytes of a put that it declares.
    const MOST: u64 = u64::MAX;

    /// # Safety
    /// As [`Transport::post`], for one command.
    unsafe fn post(&self, below: &Below, queue: u32, command: &Command) -> Hot {
        // SAFETY: by this function's contract.
        unsafe { below.post(queue, *command) }
    }

    fn poll(&self, below: &Below, queue: u32, events: &mut [Event]) -> Hot {
        below.shm.poll(queue, events)
    }

    fn read_signal(&self, below: &Below, queue: u32, id: u32) -> u64 {
        below.shm.read_signal(queue, id)
    }

    fn health(&self, below: &Below) -> Result<()> {
        below.shm.health()
    }

    fn connect(&self, below: &mut Below, peer: u32, data: &[u8]) -> Result<()> {
        below.shm.connect(peer, data)
    }

    fn peer_address(&self, below: &Below, window: u32, peer: u32) -> Result<*mut u8> {
        below.shm.peer_address(window, peer)
    }

    fn progress(&self, _: &Below) -> std::result::Result<bool, i32> {
        Ok(false)
    }

    fn alloc(&self, _: &Below, id: u32, bytes: u64) -> Result<Window> {
        Err(Error::new(ErrorKind::Unsupported, "alloc", format!("window {id} of {bytes} bytes")))
    }

    /// # Safety
    /// As [`Transport::register`].
    unsafe fn register(&self, below: &mut Below, window: &Window) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { below.shm.register(window) }
    }
}

/// A transport with the fault `F`.
pub(crate) struct Faulty<F> {
    below: Below,
    fault: F,
}

/// These components have no settings.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoSettings {}

fn shm_config() -> <Shm as Transport>::Config {
    ComponentTable::from_text("", "mutants").parse("shm").unwrap()
}

impl<F: Fault> Transport for Faulty<F> {
    const NAME: &'static str = F::NAME;
    const ABOUT: &'static str = "shared memory, broken on purpose";
    type Config = NoSettings;

    fn probe(_: &NoSettings) -> Result<Capabilities> {
        let found = Shm::probe(&shm_config())?;
        // Without load and store, so that puts carry the rows.
        let kept = found.flags & !(abi::TY_CAP_GET | abi::TY_CAP_LOAD_STORE);
        let largest_put = found.largest_put.min(F::MOST);
        Ok(Capabilities { flags: kept | F::KEEPS, largest_put, ..found })
    }

    fn open(_: NoSettings, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let shm = Shm::open(shm_config(), &TransportOpen::new(team, needs))?;
        let below = Below { shm, me: team.me, ranks: team.world_ranks.len() as u32 };
        Ok(Self { below, fault: F::default() })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.below.shm.memory_needs()
    }

    fn alloc(&mut self, id: u32, bytes: u64) -> Result<Window> {
        self.fault.alloc(&self.below, id, bytes)
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.fault.register(&mut self.below, window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.below.shm.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.fault.connect(&mut self.below, peer, data)
    }

    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        self.fault.peer_address(&self.below, window, peer)
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> Hot {
        for (accepted, command) in commands.iter().enumerate() {
            // SAFETY: by this function's contract.
            if unsafe { self.fault.post(&self.below, queue, command)? } == 0 {
                return Ok(accepted);
            }
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> Hot {
        self.fault.poll(&self.below, queue, events)
    }

    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.fault.read_signal(&self.below, queue, id)
    }

    fn health(&self) -> Result<()> {
        self.fault.health(&self.below)
    }

    fn progress(&self) -> std::result::Result<bool, i32> {
        self.fault.progress(&self.below)
    }
}

const fn table<F: Fault>() -> *const abi::TyTransportTable {
    TransportComponent::<Faulty<F>>::TABLE
}

const TABLES: &[*const abi::TyTransportTable] = &[
    table::<Intact>(),
    table::<IntactLoadStore>(),
    table::<SignalBeforePayload>(),
    table::<LostPut>(),
    table::<LostPayload>(),
    table::<LostRailRows>(),
    table::<CutPut>(),
    table::<TornValue>(),
    table::<NeighbourRail>(),
    table::<WrongPeer>(),
    table::<WrongWindow>(),
    table::<AlignedOffset>(),
    table::<StaleSignal>(),
    table::<DoubledSignal>(),
    table::<NarrowAdd>(),
    table::<NarrowId>(),
    table::<ErrorIsNotYet>(),
    table::<ForgivenError>(),
    table::<DoneAtPickUp>(),
    table::<EarlyGet>(),
    table::<StalledGet>(),
    table::<DoneTwice>(),
    table::<NarrowTag>(),
    table::<Overrun>(),
    table::<Slow>(),
    table::<OneQueueForAll>(),
    table::<GetFromItself>(),
    table::<AddressOfItself>(),
    table::<UncheckedEndpoint>(),
    table::<IntactDriven>(),
    table::<HeldPut>(),
    table::<NeedsDriving>(),
    table::<IdleProgress>(),
    table::<PrivateMemory>(),
    table::<UnregisteredMemory>(),
    table::<TwoPeers>(),
    table::<FourQueues>(),
    table::<ShallowQueue>(),
    table::<FourWindows>(),
    table::<CutAtABuffer>(),
    table::<RareLostPut>(),
    table::<RareLostPayload>(),
    table::<MisledSignal>(),
    table::<NarrowTotal>(),
    table::<LatePayload>(),
    table::<ShortPuts>(),
    table::<LostPieces>(),
];

static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }
