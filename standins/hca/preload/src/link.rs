//! The wire between processes of a world: a socket per device, named by its local id.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use tokenyard_hca::Packet;

/// Most devices of a world.
const MOST: u16 = 1024;
/// Bytes that are read at once.
const CHUNK: usize = 1 << 16;
/// With more bytes waiting, a wire loses packets: their sender repeats them, also to a process that is stopped.
const FULL: usize = 1 << 26;

/// A device's ends of the wires.
#[derive(Debug)]
pub(crate) struct Wires {
    world: PathBuf,
    listener: UnixListener,
    lid: u16,
    outgoing: BTreeMap<u16, Outgoing>,
    incoming: Vec<Incoming>,
}

#[derive(Debug)]
struct Outgoing {
    stream: UnixStream,
    waiting: VecDeque<u8>,
}

#[derive(Debug)]
struct Incoming {
    stream: UnixStream,
    bytes: Vec<u8>,
}

impl Wires {
    /// Takes the first local id of the world that is free.
    pub(crate) fn open(world: &Path) -> io::Result<Self> {
        // Until the descriptor is closed, no other process takes an id.
        let lock = File::create(world.join("lock"))?;
        // SAFETY: an open descriptor.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } < 0 {
            return Err(io::Error::last_os_error());
        }
        for lid in 1..=MOST {
            let Some(listener) = bind(&socket(world, lid))? else { continue };
            listener.set_nonblocking(true)?;
            let world = world.to_owned();
            let (outgoing, incoming) = (BTreeMap::new(), Vec::new());
            return Ok(Self { world, listener, lid, outgoing, incoming });
        }
        Err(io::Error::other(format!("{MOST} devices are in this world")))
    }

    pub(crate) fn lid(&self) -> u16 {
        self.lid
    }

    /// Sends a packet to another device. A packet to a missing device, or on a full wire, is lost: the sender repeats
    /// it, and then gives up.
    pub(crate) fn send(&mut self, packet: &Packet) {
        let lid = packet.to.lid;
        if !self.outgoing.contains_key(&lid) {
            let Ok(stream) = UnixStream::connect(socket(&self.world, lid)) else { return };
            if stream.set_nonblocking(true).is_err() {
                return;
            }
            self.outgoing.insert(lid, Outgoing { stream, waiting: VecDeque::new() });
        }
        if let Some(outgoing) = self.outgoing.get_mut(&lid).filter(|to| to.waiting.len() <= FULL) {
            let bytes = packet.to_bytes();
            outgoing.waiting.extend((bytes.len() as u64).to_le_bytes());
            outgoing.waiting.extend(bytes);
        }
    }

    /// Moves the bytes that can be moved, and returns the packets that came.
    pub(crate) fn drive(&mut self) -> Vec<Packet> {
        self.outgoing.retain(|_, outgoing| outgoing.flush());
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.incoming.push(Incoming { stream, bytes: Vec::new() });
            }
        }
        let mut packets = Vec::new();
        self.incoming.retain_mut(|incoming| incoming.take(&mut packets));
        packets
    }
}

impl Outgoing {
    /// Writes as many bytes as fit; false if the peer is gone.
    fn flush(&mut self) -> bool {
        while !self.waiting.is_empty() {
            match self.stream.write(self.waiting.as_slices().0) {
                Ok(0) => return false,
                Ok(count) => drop(self.waiting.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl Incoming {
    /// Reads whole packets; false if the peer is gone.
    fn take(&mut self, packets: &mut Vec<Packet>) -> bool {
        let mut chunk = [0; CHUNK];
        let is_there = loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break false,
                Ok(count) => self.bytes.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break error.kind() == ErrorKind::WouldBlock,
            }
        };
        let mut bytes = self.bytes.as_slice();
        while let Some((length, rest)) = bytes.split_first_chunk() {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let Some((packet, rest)) = rest.split_at_checked(length) else { break };
            packets.extend(Packet::from_bytes(packet));
            bytes = rest;
        }
        let taken = self.bytes.len() - bytes.len();
        self.bytes.drain(..taken);
        is_there
    }
}

/// Listens on a path; none if another process does. A process that has ended leaves its socket behind.
fn bind(path: &Path) -> io::Result<Option<UnixListener>> {
    if UnixStream::connect(path).is_ok() {
        return Ok(None);
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path).map(Some)
}

fn socket(world: &Path, lid: u16) -> PathBuf {
    world.join(format!("lid-{lid}.sock"))
}
