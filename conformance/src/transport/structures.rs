//! Structures that the transport fills: what it needs of memory, the windows that it allocates, and its errors.

use std::os::fd::BorrowedFd;

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::host::blank_error;
use tokenyard_core::transport::{MemoryNeeds, Window};

use super::memory::pattern;
use super::needs::Needs;
use super::queue::STATUSES;
use super::rig::{self, Rig};
use super::teams::Teams;
use super::{Body, TransportCase};
use crate::suite::Rank;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "memory_needs_are_sound",
        about: "memory_needs names kinds that probe declared, handles of the header, and a power of two; register \
                takes windows that have as much and no more",
        invariants: "the order of calls: `memory_needs`",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Alone(memory_needs_are_sound),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "allocated_windows_are_whole",
        about: "alloc describes the memory that it made: its kind and device, and the file behind it",
        invariants: "the order of calls: `alloc`",
        ranks: &[2],
        flags: abi::TY_CAP_OWNS_MEMORY,
        needs: Needs { windows: &[1 << 16, 1 << 13], ..Needs::SMALL },
        body: Body::Alone(allocated_windows_are_whole),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "errors_fit_their_room",
        about: "the error of a refused connect is text within its arrays, and about the peer's world rank or none",
        invariants: "errors",
        ranks: &[2],
        needs: Needs { teams: Teams::Backwards(1), ..Needs::SMALL },
        body: Body::Alone(errors_fit_their_room),
        ..TransportCase::BARE
    },
];

/// All handles of the header.
const HANDLES: u32 =
    abi::TY_HANDLE_MEMFD | abi::TY_HANDLE_POSIX | abi::TY_HANDLE_FABRIC | abi::TY_HANDLE_DMABUF;

fn memory_needs_are_sound(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    // Not by a rig, which asks as well: the host asks once.
    let (transport, _) = rig::open_transport(rank, needs, rank.config.world.deadline)?;
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let memory_needs = unsafe { (*table).memory_needs }.context("a required slot is null")?;
    let size = size_of::<MemoryNeeds>();
    let mut found = MemoryNeeds { size, kinds: 0, handles: 0, alignment: 0 };
    let mut error = blank_error();
    // SAFETY: an open instance; both structures live for the call.
    let status = unsafe { memory_needs(instance, &raw mut found, &raw mut error) };
    ensure!(status == abi::TY_OK, "memory_needs: found status {status}; expected 0");
    let declared = rank.capabilities.memory_kinds;
    ensure!(
        found.kinds != 0 && found.kinds & !declared == 0,
        "memory_needs: found kinds {:#x}; expected some of {declared:#x}, which probe declared",
        found.kinds
    );
    ensure!(
        found.handles & !HANDLES == 0,
        "memory_needs: found handles {:#x}; expected some of {HANDLES:#x}, or none",
        found.handles
    );
    ensure!(
        found.alignment.is_power_of_two() && found.size == size,
        "memory_needs: found alignment {} and size {}; expected a power of two, and {size}",
        found.alignment,
        found.size
    );
    rank.world.barrier("all have asked")?;
    drop(transport);
    Rig::open(rank, needs, rank.config.world.deadline)?;
    Ok(rank.world.barrier("all have registered")?)
}

fn allocated_windows_are_whole(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    for (window, asked) in rig.described.iter().zip(needs.windows) {
        is_whole(window, *asked, rank.capabilities.memory_kinds)
            .with_context(|| format!("alloc of window {}", window.id))?;
    }
    Ok(rank.world.barrier("all have allocated")?)
}

fn is_whole(window: &Window, asked: u64, declared: u32) -> Result<()> {
    let Window { kind, bytes, fd, device, handle, reserved, .. } = *window;
    ensure!(
        kind.is_power_of_two() && kind & declared != 0,
        "found kind {kind:#x}; expected one of {declared:#x}"
    );
    ensure!(bytes >= asked, "found {bytes} bytes; expected at least {asked}");
    let in_host_memory = kind == abi::TY_MEMORY_HOST;
    ensure!(
        in_host_memory == (device == -1),
        "found device {device} of memory of kind {kind:#x}; expected -1 for host memory alone"
    );
    let known = handle == 0 || handle.is_power_of_two() && handle & HANDLES != 0 && fd >= 0;
    ensure!(
        known && reserved == 0,
        "found handle {handle:#x} of descriptor {fd}, and {reserved}; expected one of {HANDLES:#x}, or 0 without a \
         descriptor, and 0"
    );
    if in_host_memory && fd >= 0 { is_behind(window) } else { Ok(()) }
}

/// Checks that a window's descriptor shows what is written to the window.
fn is_behind(window: &Window) -> Result<()> {
    let (mut found, data) = ([0; 64], pattern(u64::from(window.id), 64));
    // SAFETY: the window is memory of at least as many bytes while its transport is open, which no other rank
    // knows yet; its descriptor is open as long.
    let (file, read) = unsafe {
        std::ptr::copy_nonoverlapping(data.as_ptr(), window.pointer, data.len());
        let file = BorrowedFd::borrow_raw(window.fd);
        (file, rustix::io::pread(file, &mut found, window.fd_offset))
    };
    let read = read.context("read by the window's descriptor")?;
    let length = rustix::fs::fstat(file).context("the window's descriptor")?.st_size as u64;
    ensure!(
        read == 64 && found[..] == data[..] && length >= window.fd_offset + window.bytes,
        "the window's descriptor {}, of {length} bytes, does not show at {} what was written to the window",
        window.fd,
        window.fd_offset
    );
    Ok(())
}

/// An error, and memory of the host beside it.
#[repr(C)]
struct ErrorRoom {
    error: abi::TyError,
    beside: [u8; 1024],
}

const BESIDE: u8 = 0xd7;

fn errors_fit_their_room(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    rig.prepare(rig.next())?;
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { rig.transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let connect = unsafe { (*table).connect }.context("a required slot is null")?;
    let (peer, damaged) = (rig.next(), [0xff_u8; 3]);
    let mut room = ErrorRoom { error: blank_error(), beside: [BESIDE; 1024] };
    let error = (&raw mut room).cast();
    // SAFETY: an open instance; the bytes live for the call, and so does the error, whose pointer is that of the room.
    let status = unsafe { connect(instance, peer, damaged.as_ptr(), damaged.len(), error) };
    ensure!(
        STATUSES.contains(&status),
        "connect with an endpoint of 3 bytes: found status {status}; expected one of {STATUSES:?}"
    );
    let ErrorRoom { error, beside } = room;
    ensure!(
        beside.iter().all(|byte| *byte == BESIDE) && error.size == size_of::<abi::TyError>(),
        "connect wrote beside its error, or its size: expected text of at most {} bytes",
        abi::TY_ERROR_MESSAGE
    );
    let (operation, message) = (text(&error.operation)?, text(&error.message)?);
    ensure!(!message.is_empty(), "connect failed in {operation:?} without a message");
    let of_peer = i32::try_from(rig.world_rank(peer))?;
    ensure!(
        [-1, of_peer].contains(&error.rank) && error.os_errno >= 0,
        "found an error about rank {} with errno {}; expected world rank {of_peer}, or -1, and 0 or more",
        error.rank,
        error.os_errno
    );
    Ok(rank.world.barrier("all have failed")?)
}

/// The text of an array: up to the first zero byte, or to its end.
fn text(array: &[u8]) -> Result<&str> {
    let end = array.iter().position(|byte| *byte == 0).unwrap_or(array.len());
    std::str::from_utf8(&array[..end])
        .with_context(|| format!("found an error's text {:?}; expected UTF-8", &array[..end]))
}
