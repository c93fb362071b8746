//! How the processes of a team meet, and exchange words and descriptors: one datagram socket each.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg,
    sendmsg_addr, socket_with,
};

use crate::abi;
use crate::failure::{Failure, Result};
use crate::inbox::{Inbox, MOST_RANKS};

/// The longest wait for a rank.
const PATIENCE: Duration = Duration::from_secs(60);
const NAP: Duration = Duration::from_micros(20);

const MAGIC: u32 = 0x736f_6674;

/// The content of a rank's handle, for all others: enough to find its socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    magic: u32,
    process: u32,
    serial: u32,
}

impl Address {
    fn socket_address(self) -> Result<SocketAddrUnix> {
        let name = format!("softgin-{}-{}", self.process, self.serial);
        SocketAddrUnix::new_abstract_name(name.as_bytes())
            .map_err(|e| Failure::system("name a socket", e))
    }

    pub(crate) fn to_bytes(self) -> [u8; abi::HANDLE_BYTES] {
        let mut bytes = [0; abi::HANDLE_BYTES];
        for (at, word) in [self.magic, self.process, self.serial].iter().enumerate() {
            bytes[4 * at..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; abi::HANDLE_BYTES]) -> Result<Self> {
        let [magic, process, serial] = [0, 4, 8]
            .map(|at| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        if magic != MAGIC {
            let text = format!("found a handle that begins with {magic:#x}; expected {MAGIC:#x}");
            return Err(Failure::new(abi::INVALID_ARGUMENT, text));
        }
        Ok(Self { magic, process, serial })
    }
}

/// A socket that peers can send to, and this rank's inbox.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) address: Address,
    socket: OwnedFd,
    inbox: Arc<Inbox>,
}

impl Listener {
    pub(crate) fn new() -> Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let failed = |e| Failure::system("listen", e);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let address = Address { magic: MAGIC, process: std::process::id(), serial };
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
                .map_err(failed)?;
        for timeout in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, timeout, Some(PATIENCE)).map_err(failed)?;
        }
        bind(&socket, &address.socket_address()?).map_err(failed)?;
        Ok(Self { address, socket, inbox: Arc::new(Inbox::new()?) })
    }
}

/// The words that a rank sends about itself, or about a region.
pub(crate) type Words = [u64; 4];
const WORDS_BYTES: usize = 6 * 8;

/// A message from a peer.
#[derive(Debug)]
pub(crate) struct PeerMessage {
    pub(crate) words: Words,
    pub(crate) fd: Option<OwnedFd>,
}

/// The team.
#[derive(Debug)]
pub(crate) struct Mesh {
    pub(crate) me: usize,
    addresses: Vec<Address>,
    socket: OwnedFd,
    pub(crate) inboxes: Vec<Arc<Inbox>>,
    /// Steps that all ranks have taken together.
    epoch: u64,
}

impl Mesh {
    /// Meets the ranks behind these addresses. Collective.
    pub(crate) fn new(listener: &Listener, addresses: Vec<Address>, me: usize) -> Result<Self> {
        if addresses.len() > MOST_RANKS || addresses.get(me) != Some(&listener.address) {
            let text = format!(
                "found {} ranks, this one number {me}; expected at most {MOST_RANKS}, and its own handle there",
                addresses.len()
            );
            return Err(Failure::new(abi::INVALID_ARGUMENT, text));
        }
        let socket = listener.socket.try_clone().map_err(|e| Failure::system("connect", e))?;
        let mut mesh = Self { me, addresses, socket, inboxes: Vec::new(), epoch: 0 };
        let all = mesh.swap([0; 4], Some(listener.inbox.as_fd()))?;
        for message in all {
            mesh.inboxes.push(match message {
                None => Arc::clone(&listener.inbox),
                Some(PeerMessage { fd: Some(fd), .. }) => Arc::new(Inbox::map(fd)?),
                Some(_) => return Err(Failure::system("connect", "a peer sent no inbox")),
            });
        }
        mesh.meet()?;
        Ok(mesh)
    }

    /// Exchanges words with every other rank; the entry of this rank is none. Collective: [`meet`](Self::meet) ends it.
    pub(crate) fn swap(
        &self,
        words: Words,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Vec<Option<PeerMessage>>> {
        for (peer, address) in self.addresses.iter().enumerate() {
            if peer != self.me {
                self.send(*address, &words, fd)?;
            }
        }
        let mut all: Vec<Option<PeerMessage>> = self.addresses.iter().map(|_| None).collect();
        for _ in 1..self.addresses.len() {
            let (peer, message) = self.receive()?;
            match all.get_mut(peer) {
                Some(place @ None) if peer != self.me => *place = Some(message),
                _ => return Err(Failure::system("receive", format!("rank {peer} twice, or none"))),
            }
        }
        Ok(all)
    }

    fn send(&self, to: Address, words: &Words, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut bytes = [0; WORDS_BYTES];
        let all = [self.me as u64, self.epoch].into_iter().chain(*words);
        all.enumerate().for_each(|(at, word)| {
            bytes[8 * at..][..8].copy_from_slice(&word.to_ne_bytes());
        });
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(Failure::system("send", "no room for a descriptor"));
        }
        let iov = [IoSlice::new(&bytes)];
        let to = to.socket_address()?;
        sendmsg_addr(&self.socket, &to, &iov, &mut control, SendFlags::empty())
            .map(drop)
            .map_err(|e| Failure::system("send to a peer", e))
    }

    fn receive(&self) -> Result<(usize, PeerMessage)> {
        let mut bytes = [0; WORDS_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(&mut bytes)];
        let message = recvmsg(&self.socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)
            .map_err(|e| Failure::system("receive from a peer", e))?;
        let mut fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fd = fds.next().and_then(|mut fds| fds.next());
        drop(fds);
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..][..8]);
            u64::from_ne_bytes(word)
        };
        if message.bytes != WORDS_BYTES || word(1) != self.epoch {
            let text = format!(
                "found {} bytes at step {}; expected {WORDS_BYTES} at step {}",
                message.bytes,
                word(1),
                self.epoch
            );
            return Err(Failure::system("receive from a peer", text));
        }
        let words = [2, 3, 4, 5].map(word);
        Ok((usize::try_from(word(0)).unwrap_or(usize::MAX), PeerMessage { words, fd }))
    }

    /// Waits until all ranks have called this. Collective.
    pub(crate) fn meet(&mut self) -> Result<()> {
        self.epoch += 1;
        self.inboxes[self.me].set_epoch(self.epoch);
        let until = Instant::now() + PATIENCE;
        for (rank, inbox) in self.inboxes.iter().enumerate() {
            while inbox.epoch() < self.epoch {
                if Instant::now() > until {
                    let text = format!("rank {rank} has not come to step {}", self.epoch);
                    return Err(Failure::system("meet", text));
                }
                std::thread::sleep(NAP);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_was_written_and_other_bytes_are_refused() {
        let address = Address { magic: MAGIC, process: 77, serial: 3 };
        assert_eq!(Address::parse(&address.to_bytes()).unwrap(), address);
        let error = Address::parse(&[0; abi::HANDLE_BYTES]).unwrap_err();
        assert_eq!(error.code, abi::INVALID_ARGUMENT);
    }
}
