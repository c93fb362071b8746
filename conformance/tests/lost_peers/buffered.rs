//! The `shm` transport with puts that are buffered and gets that are one-sided, as on a fabric whose NIC reads peers'
//! memory. A put is done when it is copied, and crosses when the peer takes it: a stopped peer takes nothing, a
//! killed one makes it fail. Done is local (INV-4), so this transport is right.

use std::collections::VecDeque;
use std::sync::Mutex;

use tokenyard_core::abi;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Team, Transport, TransportOpen,
};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_cpu::Shm;

use crate::noticing::{NoSettings, is_gone, is_stopped, shm_config};

/// A command that is done, and has not crossed: its bytes are a copy.
struct Buffered {
    command: Command,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Held {
    waiting: Vec<Buffered>,
    events: Vec<Event>,
    /// Peers to which a command failed, the next one that `health` names first.
    failed: VecDeque<u32>,
}

pub(crate) struct BufferedPuts {
    shm: Shm,
    processes: Vec<u32>,
    team: Team,
    held: Mutex<Held>,
}

impl BufferedPuts {
    fn is_paused(&self, peer: u32) -> bool {
        is_stopped(self.processes[peer as usize])
    }

    /// Stores what waits for peers that go on.
    fn cross(&self, held: &mut Held) {
        let ready = held.waiting.extract_if(.., |one| !self.is_paused(one.command.peer));
        for Buffered { command, bytes } in ready.collect::<Vec<_>>() {
            let Ok(window) = self.shm.peer_address(command.dst_window.into(), command.peer) else {
                continue;
            };
            let to = window.wrapping_add(command.dst_offset as usize);
            // SAFETY: a put that the host posted: the range is inside the peer's window.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            let signal = Command { op: abi::TY_OP_SIGNAL, flags: 0, ..command };
            // SAFETY: it reads no window. A full queue of `shm` has events to be polled; none are asked for.
            let posted = unsafe { self.shm.post(command.queue, &[signal]) };
            assert_eq!(posted, Ok(1));
        }
    }
}

impl Transport for BufferedPuts {
    const NAME: &'static str = "buffered_puts";
    const ABOUT: &'static str = "shared memory whose puts are buffered";
    type Config = NoSettings;

    fn probe(_: &NoSettings) -> Result<Capabilities> {
        let found = Shm::probe(&shm_config())?;
        let flags = abi::TY_CAP_GET | abi::TY_CAP_BOUNDED_PUT | abi::TY_CAP_MASKING;
        Ok(Capabilities { flags, max_queues: 1, ..found })
    }

    fn open(_: NoSettings, open: &TransportOpen<'_>) -> Result<Self> {
        Ok(Self {
            shm: Shm::open(shm_config(), &TransportOpen::new(open.team, open.needs))?,
            processes: vec![0; open.team.world_ranks.len()],
            team: open.team.clone(),
            held: Mutex::default(),
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

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        for (accepted, command) in commands.iter().enumerate() {
            let mut held = self.held.lock().unwrap();
            self.cross(&mut held);
            let Command { peer, tag, .. } = *command;
            let paused = self.is_paused(peer);
            if paused && command.op == abi::TY_OP_PUT_SIGNAL {
                let window = self.shm.peer_address(command.src_window.into(), self.team.me);
                let window = window.map_err(|_| abi::TY_INTERNAL)?;
                let from = window.wrapping_add(command.src_offset as usize);
                // SAFETY: a posted put, whose source is inside its window.
                let bytes = unsafe { std::slice::from_raw_parts(from, command.bytes as usize) };
                held.waiting.push(Buffered { command: *command, bytes: bytes.to_vec() });
                if command.flags & abi::TY_FLAG_NOTIFY != 0 {
                    let (kind, status) = (abi::TY_EVENT_DONE, abi::TY_OK);
                    held.events.push(Event { kind, queue, peer, status, tag });
                }
            } else if !paused && is_gone(self.processes[peer as usize]) {
                if !held.failed.contains(&peer) {
                    held.failed.push_back(peer);
                }
                let status = abi::TY_PEER_LOST;
                held.events.push(Event { kind: abi::TY_EVENT_ERROR, queue, peer, status, tag });
            // SAFETY: by this function's contract. A get reads the memory of a stopped peer as well.
            } else if unsafe { self.shm.post(queue, &[*command])? } == 0 {
                return Ok(accepted);
            }
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        let mut held = self.held.lock().unwrap();
        self.cross(&mut held);
        match (held.events.pop(), events.first_mut()) {
            (Some(event), Some(room)) => {
                *room = event;
                Ok(1)
            }
            _ => self.shm.poll(queue, events),
        }
    }

    fn health(&self) -> Result<()> {
        let mut held = self.held.lock().unwrap();
        // An error about no peer comes first.
        self.shm.health()?;
        let Some(peer) = held.failed.pop_front() else { return Ok(()) };
        held.failed.push_back(peer);
        let what = "a command failed: its peer is gone";
        let rank = self.team.world_ranks[peer as usize];
        Err(Error::new(ErrorKind::PeerLost, "post", what).with_rank(rank))
    }

    tokenyard_testkit::pass_on!(shm: register, read_signal);
}
