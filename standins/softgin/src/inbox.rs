//! Memory that the processes of a team share: the epoch of each process, and the signals that are on their way to it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::failure::{Failure, Result};

/// Most ranks of a team. A datagram socket holds ten unread messages, and each rank gets one from every other rank.
pub(crate) const MOST_RANKS: usize = 8;
/// Most signals from one rank that the owner has not taken.
const CAPACITY: u64 = 1024;

/// A signal on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SignalMessage {
    /// Number of the owner's region.
    pub(crate) region: u64,
    pub(crate) offset: u64,
    pub(crate) add: u64,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Line(AtomicU64);

/// One sender's messages.
#[repr(C)]
#[derive(Debug)]
struct MessageRing {
    /// Messages ever put in; the sender writes it.
    head: Line,
    /// Messages ever taken out; the owner writes it.
    tail: Line,
    messages: [[AtomicU64; 3]; CAPACITY as usize],
}

#[repr(C)]
#[derive(Debug)]
struct Shared {
    epoch: Line,
    from: [MessageRing; MOST_RANKS],
}

/// The inbox of one rank, mapped.
#[derive(Debug)]
pub(crate) struct Inbox {
    fd: OwnedFd,
    shared: NonNull<Shared>,
}

// SAFETY: the shared memory is atomics only.
unsafe impl Send for Inbox {}
// SAFETY: as above.
unsafe impl Sync for Inbox {}

impl Inbox {
    /// Makes an empty inbox for this rank.
    pub(crate) fn new() -> Result<Self> {
        let failed = |e| Failure::system("make an inbox", e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("softgin-inbox", flags).map_err(failed)?;
        rustix::fs::ftruncate(&fd, size_of::<Shared>() as u64).map_err(failed)?;
        // The file cannot shrink, so that no process that maps it faults.
        rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::SHRINK).map_err(failed)?;
        Self::map(fd)
    }

    /// Maps the inbox of a peer; its descriptor came over a socket.
    pub(crate) fn map(fd: OwnedFd) -> Result<Self> {
        let failed = |e| Failure::system("map an inbox", e);
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(failed)?;
        let bytes = rustix::fs::fstat(&fd).map_err(failed)?.st_size as usize;
        if bytes != size_of::<Shared>() || !seals.contains(rustix::fs::SealFlags::SHRINK) {
            let text = format!("{bytes} bytes, seals {seals:?}; expected {}", size_of::<Shared>());
            return Err(Failure::system("map an inbox", text));
        }
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        let at = at.map_err(failed)?;
        let shared = NonNull::new(at.cast()).ok_or_else(|| Failure::system("map", "null"))?;
        Ok(Self { fd, shared })
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped as long as `self` lives, of this size; atomics, for which all bytes are valid.
        unsafe { self.shared.as_ref() }
    }

    /// The epoch of the owner: the steps that it has taken.
    pub(crate) fn epoch(&self) -> u64 {
        self.shared().epoch.0.load(Ordering::Acquire)
    }

    /// Sets the epoch of the owner.
    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.shared().epoch.0.store(epoch, Ordering::Release);
    }

    /// Puts a message of rank `from` in; false where there is no room.
    pub(crate) fn put(&self, from: usize, message: SignalMessage) -> bool {
        let ring = &self.shared().from[from];
        let head = ring.head.0.load(Ordering::Relaxed);
        if head.wrapping_sub(ring.tail.0.load(Ordering::Acquire)) >= CAPACITY {
            return false;
        }
        let slot = &ring.messages[(head % CAPACITY) as usize];
        let words = [message.region, message.offset, message.add];
        slot.iter().zip(words).for_each(|(at, word)| at.store(word, Ordering::Relaxed));
        ring.head.0.store(head.wrapping_add(1), Ordering::Release);
        true
    }

    /// Takes the next message of rank `from` out. One load where there is none.
    pub(crate) fn take(&self, from: usize) -> Option<SignalMessage> {
        let ring = &self.shared().from[from];
        let tail = ring.tail.0.load(Ordering::Relaxed);
        if ring.head.0.load(Ordering::Acquire) == tail {
            return None;
        }
        let [region, offset, add] = &ring.messages[(tail % CAPACITY) as usize];
        let word = |at: &AtomicU64| at.load(Ordering::Relaxed);
        let message = SignalMessage { region: word(region), offset: word(offset), add: word(add) };
        ring.tail.0.store(tail.wrapping_add(1), Ordering::Release);
        Some(message)
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, unmapped once.
        let _ = unsafe { rustix::mm::munmap(self.shared.as_ptr().cast(), size_of::<Shared>()) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panic")]
mod tests {
    use super::*;

    #[test]
    fn messages_come_in_order_and_a_full_ring_takes_none() {
        let inbox = Inbox::new().unwrap();
        let there = Inbox::map(inbox.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let message = |add| SignalMessage { region: 3, offset: 8, add };
        for round in 0..3 {
            (0..CAPACITY).for_each(|add| assert!(there.put(2, message(add + round))));
            assert!(!there.put(2, message(0)) && there.put(1, message(9)));
            let all: Vec<u64> = std::iter::from_fn(|| inbox.take(2)).map(|m| m.add).collect();
            assert_eq!(all, (round..CAPACITY + round).collect::<Vec<_>>());
            assert_eq!(inbox.take(1), Some(message(9)));
        }
    }

    #[test]
    fn memory_that_is_no_inbox_is_refused() {
        let fd = rustix::fs::memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        assert!(Inbox::map(fd).unwrap_err().to_string().contains("0 bytes"));
    }
}
