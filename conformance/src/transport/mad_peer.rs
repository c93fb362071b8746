//! A peer that sends what no rank should.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType};
use tokenyard_core::abi;

use super::memory::{Area, UNTOUCHED, compare};
use super::needs::Needs;
use super::rig::{self, Rig};
use super::strangers::{JUNK, new_sockets, sockets};
use super::{Body, TransportCase};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "a_mad_peer_harms_no_memory",
    about: "bytes on a peer's connection that are no message, or a known one with one number out of range, end no \
            process and change no memory beside a window; the first ones change no window and no total, and the \
            others no total that they do not name",
    invariants: "bytes from elsewhere",
    ranks: &[2],
    needs: Needs::SMALL,
    body: Body::OwnProcess(a_mad_peer_harms_no_memory),
    ..TransportCase::BARE
}];

/// The time in which a rank takes what its peer has sent, which is no message, and what begins as one.
const TAKES: Duration = Duration::from_millis(100);
const TAKES_ONE: Duration = Duration::from_millis(10);
/// The calls that take it at least.
const DRIVES: u32 = 10;
/// The ops that a message may begin with.
const OPS: [u8; 5] = [
    abi::TY_OP_PUT,
    abi::TY_OP_PUT_SIGNAL,
    abi::TY_OP_PUT_VALUE,
    abi::TY_OP_SIGNAL,
    abi::TY_OP_GET,
];
/// The fields in heads that authors write: the first byte of each, and its bytes. One at a time is wrong, because a
/// check of one hides that another has none. The first two of a head are also wrong together: a signal, and what it
/// grows by.
const FIELDS: [(usize, usize); 10] =
    [(4, 4), (8, 4), (12, 4), (16, 4), (20, 4), (24, 4), (4, 8), (8, 8), (16, 8), (24, 8)];
/// A wrong number is out of any range. It is a multiple of 8, as the place of a value is, and a sum with the length
/// of a value runs over.
const WRONG: i64 = -8;
/// A head is no longer. A payload is behind it, which is longer than the window by as much.
const HEAD: usize = 64;

/// The bytes of a mad peer.
#[derive(Clone, Copy)]
enum Mad {
    Junk,
    /// A known op, one wrong field, and zeros.
    Known(u8, (usize, usize)),
}

impl Mad {
    fn bytes(self, window: usize) -> Vec<u8> {
        let Self::Known(op, (at, bytes)) = self else { return JUNK.to_vec() };
        let mut message = vec![0; HEAD];
        message[0] = op;
        match bytes {
            8 => message[at..at + 8].copy_from_slice(&WRONG.to_ne_bytes()),
            _ => message[at..at + 4].copy_from_slice(&(WRONG as i32).to_ne_bytes()),
        }
        message.resize(HEAD + window + HEAD, JUNK[0]);
        message
    }
}

fn a_mad_peer_harms_no_memory(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    // A fabric without connections hears nothing.
    if beside_a_mad_peer(rank, needs, Mad::Junk)? {
        for (op, field) in OPS.into_iter().flat_map(|op| FIELDS.map(|field| (op, field))) {
            beside_a_mad_peer(rank, needs, Mad::Known(op, field))?;
        }
    }
    Ok(Outcome::Pass)
}

/// Rank 1 goes mad. Returns whether it has a connection on which it sends that.
fn beside_a_mad_peer(rank: &Rank<'_>, needs: &Needs, mad: Mad) -> Result<bool> {
    let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    rig.windows.iter().for_each(|window| window.fill(UNTOUCHED));
    let endpoints = rig.exchange_endpoints()?;
    let before = sockets()?;
    rig.connect_to(&endpoints)?;
    let connections = new_sockets(&before)?;
    rig.barrier("connected")?;
    rig.expect_errors();
    if rig.me() == 1 {
        // The transport has closed some since, and a number may be another one's.
        let mut left = sockets()?;
        left.retain(|number, _| connections.contains_key(number));
        let bytes = mad.bytes(rig.windows[0].len());
        let heard = left.values().filter(|fd| send_on(**fd, &bytes)).count();
        rank.world.barrier("rank 1 has sent all")?;
        let heard = rig::of_any(rank.world, heard > 0)?;
        rank.world.barrier("rank 0 has looked")?;
        return Ok(heard);
    }
    // It takes meanwhile what is more than a connection holds.
    rig.barrier("rank 1 has sent all")?;
    let heard = rig::of_any(rank.world, false)?;
    let takes = if matches!(mad, Mad::Junk) { TAKES } else { TAKES_ONE };
    let (until, mut drives) = (Instant::now() + takes, 0);
    while Instant::now() < until || drives < DRIVES {
        rig.drive()?;
        drives += 1;
        // Good and bad are right: the peer is.
        let _ = rig.transport.health();
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.windows.iter().try_for_each(Area::has_changed_nothing_beside)?;
    // A fabric may find that what begins as a message is one in range: then it is about window 0 and signal 0.
    if matches!(mad, Mad::Junk) {
        let what = "window 0 behind bytes of a peer that are no message";
        let found = rig.windows[0].read(0, rig.windows[0].len());
        compare(what, &found, &vec![UNTOUCHED; found.len()])?;
    }
    let first = u32::from(!matches!(mad, Mad::Junk));
    for id in first..rig.needs.signals {
        let total = rig.transport.read_signal(0, id);
        ensure!(
            total == 0,
            "signal {id} behind bytes of a peer that do not name it: found total {total}; expected 0"
        );
    }
    rank.world.barrier("rank 0 has looked")?;
    Ok(heard)
}

/// Sends bytes on a connection of the transport, if it is one, until it takes no more. Returns whether it has taken
/// some.
fn send_on(fd: i32, bytes: &[u8]) -> bool {
    // SAFETY: the transport has it open, as the kernel's list says, and ends it in no other thread now but its own.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let is_one = rustix::net::sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM);
    let (mut sent, mut until) = (0, Instant::now() + TAKES_ONE);
    while is_one && sent < bytes.len() && Instant::now() < until {
        match rustix::net::send(fd, &bytes[sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(more) => (sent, until) = (sent + more, Instant::now() + TAKES_ONE),
            Err(Errno::AGAIN) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => break,
        }
    }
    sent > 0
}
