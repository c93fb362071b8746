//! Executes commands: everything is done when it is posted.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::abi;
use tokenyard_core::fd_exchange::Links;
use tokenyard_core::transport::Command;

use super::peer::Local;

/// Why a command could not be executed. Small: it crosses the hot path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Op,
    Peer,
    Window,
    Signal,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Op => "the op is not known; expected one of TY_OP_*",
            Self::Peer => "the peer is not connected",
            Self::Window => "there is no such window",
            Self::Signal => "there is no such signal",
        })
    }
}

/// Executes one command.
///
/// # Safety
/// Core's promises of the transport contract hold: offsets and lengths are inside the windows, the
/// destination of a value is aligned to 8 bytes, and no other thread uses the source of a put or the
/// destination of a get meanwhile.
pub(super) unsafe fn execute(links: &Links<Local>, command: &Command) -> Result<(), Fault> {
    match command.op {
        // SAFETY: by this function's contract.
        abi::TY_OP_PUT => unsafe { put(links, command) },
        abi::TY_OP_PUT_SIGNAL => {
            if command.bytes > 0 {
                // SAFETY: by this function's contract.
                unsafe { put(links, command)? };
            }
            // INV-1: the payload is written before the total is raised with release order.
            raise(links, command)
        }
        // SAFETY: by this function's contract.
        abi::TY_OP_PUT_VALUE => unsafe { put_value(links, command) },
        abi::TY_OP_SIGNAL => raise(links, command),
        // SAFETY: by this function's contract.
        abi::TY_OP_GET => unsafe { get(links, command) },
        _ => Err(Fault::Op),
    }
}

/// The addresses of a copy: this rank's and the peer's.
fn ends(links: &Links<Local>, command: &Command) -> Result<(*mut u8, *mut u8), Fault> {
    let peer = links.peer(command.peer).ok_or(Fault::Peer)?;
    let remote = peer.windows.get(command.dst_window as usize).ok_or(Fault::Window)?;
    let local = links.memory.windows.get(usize::from(command.src_window)).ok_or(Fault::Window)?;
    Ok((local.at(command.src_offset, command.bytes), remote.at(command.dst_offset, command.bytes)))
}

/// # Safety
/// As [`execute`].
unsafe fn put(links: &Links<Local>, command: &Command) -> Result<(), Fault> {
    let (local, remote) = ends(links, command)?;
    // Other processes may touch the memory: no reference to it exists here, and a receiver reads it
    // after the acquire load of a signal that this thread raises after the copy.
    // SAFETY: both ranges are inside mapped windows, by this function's contract. They may overlap
    // (a put to this rank itself), which `copy` allows.
    unsafe { std::ptr::copy(local, remote, command.bytes as usize) };
    Ok(())
}

/// # Safety
/// As [`execute`].
unsafe fn get(links: &Links<Local>, command: &Command) -> Result<(), Fault> {
    let (local, remote) = ends(links, command)?;
    // SAFETY: as in `put`, with both ends exchanged. The owner of the remote range raised a signal after
    // writing it, or does not write it now.
    unsafe { std::ptr::copy(remote, local, command.bytes as usize) };
    Ok(())
}

/// # Safety
/// As [`execute`].
unsafe fn put_value(links: &Links<Local>, command: &Command) -> Result<(), Fault> {
    let peer = links.peer(command.peer).ok_or(Fault::Peer)?;
    let window = peer.windows.get(command.dst_window as usize).ok_or(Fault::Window)?;
    let target = window.at(command.dst_offset, 8).cast::<u64>();
    debug_assert!(target.is_aligned(), "offset {} of a value", command.dst_offset);
    // SAFETY: 8 mapped bytes, aligned because windows are page-aligned and the offset is a multiple
    // of 8, by this function's contract. One atomic store: the value arrives whole (INV-3).
    unsafe { AtomicU64::from_ptr(target) }.store(command.value, Ordering::Release);
    Ok(())
}

fn raise(links: &Links<Local>, command: &Command) -> Result<(), Fault> {
    let peer = links.peer(command.peer).ok_or(Fault::Peer)?;
    peer.signals.raise(command.signal, command.add).ok_or(Fault::Signal)
}
