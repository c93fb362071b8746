//! The `shm` transport with detection of lost peers: it notices that a peer's process is gone, as a network
//! does, and fails commands to that peer. Its reaction is right, or wrong in one way.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::{Exported, TRANSPORT_HEADER, TransportComponent};
use tokenyard_core::host::BuiltIn;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportOpen,
};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_cpu::Shm;

use crate::buffered::BufferedPuts;

/// The result of hot calls.
type Hot = std::result::Result<usize, i32>;

/// The reaction of the transport to commands to a lost peer.
pub(crate) trait Reaction: Send + Sync + 'static {
    const NAME: &'static str;

    /// How the command ends: by this event, or not at all.
    fn end(command: &Command) -> Option<Event>;

    /// The error, and the rank that it names.
    fn names(error: Error, rank: u32) -> Error {
        error.with_rank(rank)
    }

    /// Whether a peer whose process is stopped counts as lost at once.
    const STOPPED_IS_LOST: bool = true;
    /// Whether gets from a peer whose process is stopped wait until it goes on.
    const GETS_WAIT: bool = false;
    /// Whether they wait no longer than the deadline.
    const GETS_END: bool = true;
    /// Whether commands to other peers wait for one to a lost peer.
    const HOLDS_UP_ALL: bool = false;
    /// Whether `poll` waits for the lost peer.
    const HANGS: bool = false;
    /// Whether `poll` does not even wait for a peer to be lost before it hangs.
    const HANGS_AT_ONCE: bool = false;
}

fn failed(command: &Command) -> Option<Event> {
    let Command { queue, peer, tag, .. } = *command;
    Some(Event { kind: abi::TY_EVENT_ERROR, queue, peer, status: abi::TY_PEER_LOST, tag })
}

/// The right reaction.
pub(crate) struct LostIsError;
impl Reaction for LostIsError {
    const NAME: &'static str = "lost_is_error";
    /// It may go on (INV-6), and its memory takes the bytes meanwhile.
    const STOPPED_IS_LOST: bool = false;
    const GETS_WAIT: bool = true;
    fn end(command: &Command) -> Option<Event> {
        failed(command)
    }
}

/// Gets that wait for a peer never end where it is lost.
pub(crate) struct LostForgetsGets;
impl Reaction for LostForgetsGets {
    const NAME: &'static str = "lost_forgets_gets";
    const STOPPED_IS_LOST: bool = false;
    const GETS_WAIT: bool = true;
    fn end(command: &Command) -> Option<Event> {
        failed(command).filter(|_| command.op != abi::TY_OP_GET)
    }
}

/// Gets from a stopped peer wait until it goes on, or is gone.
pub(crate) struct StoppedHoldsGets;
impl Reaction for StoppedHoldsGets {
    const NAME: &'static str = "stopped_holds_gets";
    const STOPPED_IS_LOST: bool = false;
    const GETS_WAIT: bool = true;
    const GETS_END: bool = false;
    fn end(command: &Command) -> Option<Event> {
        failed(command)
    }
}

/// Commands to a lost peer end as done, and the transport stays healthy.
pub(crate) struct LostIsDone;
impl Reaction for LostIsDone {
    const NAME: &'static str = "lost_is_done";
    fn end(command: &Command) -> Option<Event> {
        let Command { queue, peer, tag, .. } = *command;
        Some(Event { kind: abi::TY_EVENT_DONE, queue, peer, status: abi::TY_OK, tag })
    }
}

/// Commands to a lost peer never end.
pub(crate) struct LostNeverEnds;
impl Reaction for LostNeverEnds {
    const NAME: &'static str = "lost_never_ends";
    fn end(_: &Command) -> Option<Event> {
        None
    }
}

/// No error names the lost peer.
pub(crate) struct NamelessLoss;
impl Reaction for NamelessLoss {
    const NAME: &'static str = "nameless_loss";
    fn end(command: &Command) -> Option<Event> {
        failed(&Command { peer: u32::MAX, ..*command })
    }
    fn names(error: Error, _: u32) -> Error {
        error
    }
}

/// A queue moves no command after its first one to a lost peer.
pub(crate) struct LostHoldsUpAll;
impl Reaction for LostHoldsUpAll {
    const NAME: &'static str = "lost_holds_up_all";
    const HOLDS_UP_ALL: bool = true;
    fn end(_: &Command) -> Option<Event> {
        None
    }
}

/// `poll` waits for the lost peer.
pub(crate) struct LostHangsInPoll;
impl Reaction for LostHangsInPoll {
    const NAME: &'static str = "lost_hangs_in_poll";
    const HANGS: bool = true;
    fn end(_: &Command) -> Option<Event> {
        None
    }
}

/// `poll` never returns.
pub(crate) struct HangsInPoll;
impl Reaction for HangsInPoll {
    const NAME: &'static str = "hangs_in_poll";
    const HANGS_AT_ONCE: bool = true;
    fn end(command: &Command) -> Option<Event> {
        failed(command)
    }
}

#[derive(Default)]
struct Losses {
    events: VecDeque<Event>,
    /// The peers to which a command failed, the next one that `health` names first.
    failed: VecDeque<u32>,
    /// Whether a command to a lost peer was taken.
    any: bool,
    /// Gets from stopped peers, and when each was posted.
    gets: Vec<(Command, Instant)>,
}

pub(crate) struct Noticing<R> {
    shm: Shm,
    /// The process of each peer.
    processes: Vec<u32>,
    /// By which errors name them.
    world_ranks: Vec<u32>,
    deadline: Duration,
    losses: Mutex<Losses>,
    reaction: PhantomData<R>,
}

/// These components have no settings.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoSettings {}

pub(crate) fn shm_config() -> <Shm as Transport>::Config {
    ComponentTable::from_text("", "lost_peers").parse("shm").unwrap()
}

/// The state of a process; none once it is gone.
fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.filter(|state| !"ZX".contains(*state))
}

/// Whether a process is gone.
pub(crate) fn is_gone(pid: u32) -> bool {
    state_of(pid).is_none()
}

/// Whether a process is stopped.
pub(crate) fn is_stopped(pid: u32) -> bool {
    state_of(pid) == Some('T')
}

impl<R: Reaction> Noticing<R> {
    /// Ends a command to a lost peer, as the reaction says.
    fn lose(&self, command: &Command) {
        let mut losses = self.losses.lock().unwrap();
        losses.any = true;
        let end = R::end(command);
        let is_error = end.is_some_and(|event| event.kind == abi::TY_EVENT_ERROR);
        if is_error && !losses.failed.contains(&command.peer) {
            losses.failed.push_back(command.peer);
        }
        losses.events.extend(end.filter(|_| is_error || command.flags & abi::TY_FLAG_NOTIFY != 0));
    }

    /// Moves gets from peers that were stopped, and are it no more. Others end with the deadline.
    fn go_on(&self, queue: u32) {
        let process = |get: &Command| self.processes[get.peer as usize];
        let is_late = |posted: &Instant| R::GETS_END && posted.elapsed() > self.deadline;
        let ready: Vec<_> = {
            let mut losses = self.losses.lock().unwrap();
            let ready = |(get, posted): &mut (Command, Instant)| {
                get.queue == queue && (!is_stopped(process(get)) || is_late(posted))
            };
            losses.gets.extract_if(.., ready).collect()
        };
        for (get, posted) in ready {
            if is_gone(process(&get)) || is_stopped(process(&get)) {
                self.lose(&get);
                continue;
            }
            // SAFETY: a command that the host has posted, to a queue of the thread that polls it now.
            let accepted = unsafe { self.shm.post(queue, &[get]) };
            // A queue of `shm` is full while events are to be polled.
            if accepted != Ok(1) {
                self.losses.lock().unwrap().gets.push((get, posted));
            }
        }
    }
}

impl<R: Reaction> Transport for Noticing<R> {
    const NAME: &'static str = R::NAME;
    const ABOUT: &'static str = "shared memory that notices lost peers";
    type Config = NoSettings;

    fn probe(_: &NoSettings) -> Result<Capabilities> {
        let found = Shm::probe(&shm_config())?;
        Ok(Capabilities { flags: found.flags & !abi::TY_CAP_LOAD_STORE, ..found })
    }

    fn open(_: NoSettings, open: &TransportOpen<'_>) -> Result<Self> {
        Ok(Self {
            shm: Shm::open(shm_config(), &TransportOpen::new(open.team, open.needs))?,
            processes: vec![0; open.team.world_ranks.len()],
            world_ranks: open.team.world_ranks.clone(),
            deadline: open.needs.deadline,
            losses: Mutex::default(),
            reaction: PhantomData,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.shm.memory_needs()
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        let mut endpoint = self.shm.endpoint(peer)?;
        endpoint.extend(std::process::id().to_le_bytes());
        Ok(endpoint)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        let cut = || Error::new(ErrorKind::Protocol, "connect", "the endpoint is cut short");
        let (inner, pid) = data.split_last_chunk().ok_or_else(cut)?;
        self.processes[peer as usize] = u32::from_le_bytes(*pid);
        self.shm.connect(peer, inner)
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> Hot {
        for (accepted, command) in commands.iter().enumerate() {
            if R::HOLDS_UP_ALL && self.losses.lock().unwrap().any {
                return Ok(accepted);
            }
            let pid = self.processes[command.peer as usize];
            if is_gone(pid) || R::STOPPED_IS_LOST && is_stopped(pid) {
                self.lose(command);
                continue;
            }
            if R::GETS_WAIT && command.op == abi::TY_OP_GET && is_stopped(pid) {
                self.losses.lock().unwrap().gets.push((*command, Instant::now()));
                continue;
            }
            // SAFETY: by this function's contract.
            if unsafe { self.shm.post(queue, &[*command])? } == 0 {
                return Ok(accepted);
            }
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> Hot {
        while R::HANGS_AT_ONCE || R::HANGS && self.losses.lock().unwrap().any {
            std::thread::sleep(Duration::from_secs(1));
        }
        self.go_on(queue);
        let lost = {
            let lost = &mut self.losses.lock().unwrap().events;
            let at = lost.iter().position(|event| event.queue == queue);
            at.and_then(|at| lost.remove(at))
        };
        match (lost, events.first_mut()) {
            (Some(event), Some(room)) => {
                *room = event;
                Ok(1)
            }
            _ => self.shm.poll(queue, events),
        }
    }

    fn health(&self) -> Result<()> {
        let mut losses = self.losses.lock().unwrap();
        // An error about no peer comes first.
        self.shm.health()?;
        let Some(peer) = losses.failed.pop_front() else { return Ok(()) };
        losses.failed.push_back(peer);
        let error = Error::new(ErrorKind::PeerLost, "post", "a command failed: its peer is gone");
        Err(R::names(error, self.world_ranks[peer as usize]))
    }

    tokenyard_testkit::pass_on!(shm: register, read_signal);
}

const fn table<R: Reaction>() -> *const abi::TyTransportTable {
    TransportComponent::<Noticing<R>>::TABLE
}

const TABLES: &[*const abi::TyTransportTable] = &[
    table::<LostIsError>(),
    table::<LostForgetsGets>(),
    table::<StoppedHoldsGets>(),
    table::<LostIsDone>(),
    table::<LostNeverEnds>(),
    table::<NamelessLoss>(),
    table::<LostHoldsUpAll>(),
    table::<LostHangsInPoll>(),
    table::<HangsInPoll>(),
    TransportComponent::<BufferedPuts>::TABLE,
];

static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Transport(&TRANSPORTS) }
