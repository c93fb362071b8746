//! Structures that the transport fills: what it needs of memory, the windows that it allocates, and its errors.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{blank_error, services};
use tokenyard_core::transport::{Command, MemoryNeeds, NO_CAPABILITIES, NO_COMMAND, Window};

use super::errors::UNKNOWN_OP;
use super::memory::pattern;
use super::needs::Needs;
use super::patience::PATIENCE;
use super::queue::STATUSES;
use super::rig::{self, Rig};
use super::slots::{BESIDE, with_unknown_key};
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
        about: "errors of connect, open, health and commit are text within their arrays, and that of a refused connect \
                is about the peer's world rank or none",
        invariants: "errors",
        ranks: &[2],
        needs: Needs { teams: Teams::Backwards(1), ..Needs::SMALL },
        body: Body::Alone(errors_fit_their_room),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "structures_have_the_size_of_their_host",
        about: "probe and memory_needs fill a structure of a newer host, which is longer, leave its size, and write \
                nothing beside an error of an older one, which is shorter",
        invariants: "the rules of the header: sizes",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Alone(structures_have_the_size_of_their_host),
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

/// Calls a slot, which must fail or succeed within the room of its error. Returns the status, and the error.
fn in_error_room(
    what: &str,
    call: impl FnOnce(*mut abi::TyError) -> i32,
) -> Result<(i32, abi::TyError)> {
    let mut room = ErrorRoom { error: blank_error(), beside: [BESIDE; 1024] };
    // The pointer is that of the room: a write beside the error stays in it.
    let status = call((&raw mut room).cast());
    let ErrorRoom { error, beside } = room;
    ensure!(
        beside.iter().all(|byte| *byte == BESIDE) && error.size == size_of::<abi::TyError>(),
        "{what} wrote beside its error, or its size: expected text of at most {} bytes",
        abi::TY_ERROR_MESSAGE
    );
    if status != abi::TY_OK {
        ensure!(
            STATUSES.contains(&status),
            "{what}: found status {status}; expected one of {STATUSES:?}"
        );
        let (operation, message) = (text(&error.operation)?, text(&error.message)?);
        ensure!(
            !message.is_empty() && !operation.is_empty(),
            "{what} failed in {operation:?} with {message:?}; expected an operation and a message"
        );
    }
    Ok((status, error))
}

/// The slots of an open transport, and its instance.
fn slots(rig: &Rig<'_>) -> (&'static abi::TyTransportTable, *mut c_void) {
    // SAFETY: callers use the instance while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { rig.transport.link() }.as_abi();
    // SAFETY: judged tables live as long as the process.
    (unsafe { &*table }, instance)
}

fn errors_fit_their_room(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    rig.prepare(rig.next())?;
    let (table, instance) = slots(&rig);
    let connect = table.connect.context("a required slot is null")?;
    let (peer, damaged) = (rig.next(), [0xff_u8; 3]);
    let (status, error) = in_error_room("connect", |error| {
        // SAFETY: an open instance; the bytes and the error live for the call.
        unsafe { connect(instance, peer, damaged.as_ptr(), damaged.len(), error) }
    })?;
    ensure!(
        status != abi::TY_OK,
        "connect with an endpoint of 3 bytes: found status {status}; expected one of {STATUSES:?}"
    );
    let of_peer = i32::try_from(rig.world_rank(peer))?;
    ensure!(
        [-1, of_peer].contains(&error.rank) && error.os_errno >= 0,
        "found an error about rank {} with errno {}; expected world rank {of_peer}, or -1, and 0 or more",
        error.rank,
        error.os_errno
    );
    error_of_open(rank, &rig)?;
    rank.world.barrier("all have failed")?;
    drop(rig);
    error_of_health(rank, needs)?;
    error_of_commit(rank, needs)
}

/// A service that has no answer, so that an `open` which asks for one fails. It notes that it was asked.
unsafe extern "C" fn no_answer(
    asked: *mut c_void,
    _: *const u8,
    _: usize,
    _: *mut u8,
    _: *mut abi::TyError,
) -> i32 {
    // SAFETY: the caller of `open` gives the place, which lives for that call.
    unsafe { asked.cast::<bool>().write(true) };
    abi::TY_DEADLINE
}

/// Opens by a table with an unknown key, which a transport that reads its table in `probe` alone may not notice; and by
/// the config's own, with the request of a newer host.
fn error_of_open(rank: &Rank<'_>, rig: &Rig<'_>) -> Result<()> {
    let (_, choice) = rig::choose(rank.config)?;
    let size = size_of::<abi::TyTransportOpen>();
    open_by(&with_unknown_key(&choice.table), size, rig)?;
    let (status, asked) = open_by(&choice.table, size, rig)?;
    let (of_newer, _) = open_by(&choice.table, size + LATER, rig)?;
    ensure!(
        of_newer == status || asked,
        "open of a newer host, whose request has {} bytes: found status {of_newer}; expected {status}, as for {size}",
        size + LATER
    );
    Ok(())
}

/// Opens and closes by a request of so many bytes. Returns the status, and whether it has asked the other ranks.
fn open_by(config: &ComponentTable, size: usize, rig: &Rig<'_>) -> Result<(i32, bool)> {
    let (table, _) = slots(rig);
    let (open, close) = table.open.zip(table.close).context("a required slot is null")?;
    let ranks: Vec<u32> = (0..rig.ranks()).map(|peer| rig.world_rank(peer)).collect();
    let mut asked = false;
    let exchange = abi::TyExchange {
        size: size_of::<abi::TyExchange>(),
        context: (&raw mut asked).cast(),
        all_gather: Some(no_answer),
    };
    let known = abi::TyTransportOpen {
        size,
        config: as_config(config),
        team: abi::TyTeam {
            size: size_of::<abi::TyTeam>(),
            me: rig.me(),
            count: rig.ranks(),
            world_ranks: ranks.as_ptr(),
        },
        needs: abi::TyTransportNeeds {
            size: size_of::<abi::TyTransportNeeds>(),
            windows: rig.needs.windows,
            queues: rig.needs.queues,
            signals: rig.needs.signals,
            queue_depth: rig.needs.queue_depth,
            largest_put: rig.needs.largest_put,
            deadline_ns: rig.needs.deadline.as_nanos() as u64,
        },
        nics: null(),
        nic_count: 0,
        flags: abi::TY_OPEN_ANY_RAILS,
        device: -1,
        exchange: &raw const exchange,
    };
    let request = Newer { known, later: [0; LATER], beside: [BESIDE; 64] };
    let mut instance = null_mut();
    let (status, _) = in_error_room("open", |error| {
        // SAFETY: a judged table; all structures live for the call.
        unsafe { open(services(), (&raw const request).cast(), &raw mut instance, error) }
    })?;
    if status == abi::TY_OK {
        // SAFETY: it was opened above, and is used no more.
        unsafe { close(instance) };
    }
    // SAFETY: it lives, and no call writes it any more.
    Ok((status, unsafe { (&raw const asked).read() }))
}

/// The error of `health`, which an unknown op of peer 0 has made.
fn error_of_health(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::bring_up(rank, needs)?;
    let (table, instance) = slots(&rig);
    let health = table.health.context("a required slot is null")?;
    if rig.me() == 0 {
        rig.expect_errors();
        rig.post(0, &[Command { op: UNKNOWN_OP, peer: 1, ..NO_COMMAND }])?;
        rig.wait_events(0, 1)?;
        in_error_room("health", |error| {
            // SAFETY: an open instance; the error lives for the call.
            unsafe { health(instance, error) }
        })?;
    }
    rig.end(false)
}

/// The error of `commit` of peer 0, to which peer 1 does not connect. Success is right as well.
fn error_of_commit(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::open(rank, needs, PATIENCE)?;
    let endpoints = rig.exchange_endpoints()?;
    let (table, instance) = slots(&rig);
    let is_first = rig.me() == 0;
    if let (true, Some(commit)) = (is_first, table.commit)
        && (0..).zip(&endpoints).all(|(peer, end)| rig.transport.connect(peer, end).is_ok())
    {
        in_error_room("commit", |error| {
            // SAFETY: an open instance, which has connected; the error lives for the call.
            unsafe { commit(instance, error) }
        })?;
    }
    rank.world.barrier("a peer was missing")?;
    rig.close_behind_others()?;
    Ok(())
}

/// A structure of a newer host: it has more fields, and memory of the host beside it.
#[repr(C)]
struct Newer<T> {
    known: T,
    later: [u8; LATER],
    beside: [u8; 64],
}

const LATER: usize = 64;

/// The error of an older host, which has no text, and memory of the host beside it.
#[repr(C)]
struct OlderError {
    size: usize,
    os_errno: i32,
    rank: i32,
    beside: [u8; size_of::<abi::TyError>()],
}

/// Calls a slot that fills a structure, which is longer than the header says, and checks its size behind that.
fn fills_longer<T>(
    what: &str,
    known: T,
    size_of_it: fn(&mut T) -> &mut usize,
    call: impl FnOnce(*mut T) -> i32,
) -> Result<T> {
    let mut longer = Newer { known, later: [0; LATER], beside: [BESIDE; 64] };
    let size = size_of::<T>() + LATER;
    *size_of_it(&mut longer.known) = size;
    let status = call((&raw mut longer).cast());
    let found = *size_of_it(&mut longer.known);
    ensure!(
        status == abi::TY_OK,
        "{what} of a host whose structure has {size} bytes: found status {status}; expected 0"
    );
    ensure!(
        found == size && longer.beside.iter().all(|byte| *byte == BESIDE),
        "{what}: found size {found} behind the call; expected {size}, which the host has set, and no write beside it"
    );
    Ok(longer.known)
}

fn structures_have_the_size_of_their_host(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let (transport, _) = rig::open_transport(rank, needs, rank.config.world.deadline)?;
    let (_, choice) = rig::choose(rank.config)?;
    // SAFETY: the copy is used while the transport is open.
    let abi::TyLink { table, instance, .. } = unsafe { transport.link() }.as_abi();
    // SAFETY: tables live as long as the process.
    let abi::TyTransportTable { probe, memory_needs, .. } = unsafe { *table };
    let (probe, memory_needs) = probe.zip(memory_needs).context("a required slot is null")?;
    let mut error = blank_error();
    let config = as_config(&choice.table);
    let found = fills_longer(
        "probe",
        NO_CAPABILITIES,
        |it| &mut it.size,
        |room| {
            // SAFETY: a judged table; all structures live for the call.
            unsafe { probe(services(), &raw const config, room, &raw mut error) }
        },
    )?;
    ensure!(
        found.flags == rank.capabilities.flags,
        "probe of a newer host: found flags {:#x}; expected {:#x}, as of this one",
        found.flags,
        rank.capabilities.flags
    );
    let blank = MemoryNeeds { size: 0, kinds: 0, handles: 0, alignment: 0 };
    fills_longer(
        "memory_needs",
        blank,
        |it| &mut it.size,
        |room| {
            // SAFETY: an open instance; both structures live for the call.
            unsafe { memory_needs(instance, room, &raw mut error) }
        },
    )?;
    let table = with_unknown_key(&choice.table);
    let config = as_config(&table);
    let (size, beside) =
        (std::mem::offset_of!(OlderError, beside), [BESIDE; size_of::<abi::TyError>()]);
    let mut older = OlderError { size, os_errno: 0, rank: -1, beside };
    let mut room = NO_CAPABILITIES;
    // SAFETY: as above; the error is as long as it says, and has memory of this side behind it.
    let status = unsafe {
        let error = (&raw mut older).cast();
        probe(services(), &raw const config, &raw mut room, error)
    };
    ensure!(
        STATUSES.contains(&status),
        "probe with an unknown key: found status {status}; expected one of {STATUSES:?}"
    );
    ensure!(
        older.size == size && older.beside.iter().all(|byte| *byte == BESIDE),
        "probe of an older host, whose error has {size} bytes, wrote beside it, or its size"
    );
    Ok(rank.world.barrier("all structures were filled")?)
}

/// A table as it crosses the ABI.
fn as_config(table: &ComponentTable) -> abi::TyConfig {
    let as_ty = |text: &str| abi::TyStr { data: text.as_ptr(), bytes: text.len() };
    let size = size_of::<abi::TyConfig>();
    abi::TyConfig { size, text: as_ty(table.text()), file: as_ty(table.file()) }
}

/// The text of an array: up to the first zero byte, or to its end.
fn text(array: &[u8]) -> Result<&str> {
    let end = array.iter().position(|byte| *byte == 0).unwrap_or(array.len());
    std::str::from_utf8(&array[..end])
        .with_context(|| format!("found an error's text {:?}; expected UTF-8", &array[..end]))
}
