//! Bytes from elsewhere: callers that are no peers of this job, and a peer that sends what no rank should.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::net::SendFlags;

use super::ending::exchange;
use super::memory::{UNTOUCHED, compare};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "strangers_change_nothing",
        about: "callers that are no peers delay no connect, whether they say nothing or anything, and puts arrive",
        invariants: "INV-6; bytes from elsewhere",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::OwnProcess(strangers_change_nothing),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_mad_peer_harms_no_memory",
        about: "bytes on a peer's connection that are no message end no process and change no window and no total",
        invariants: "bytes from elsewhere",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::OwnProcess(a_mad_peer_harms_no_memory),
        ..TransportCase::BARE
    },
];

/// Bytes that are no message: each number in them is out of any range.
const JUNK: [u8; 4096] = [0xff; 4096];

/// The sockets of this process: their numbers in the kernel's lists, and their descriptors.
fn sockets() -> Result<BTreeMap<u64, i32>> {
    let open = std::fs::read_dir("/proc/self/fd").context("this process's descriptors")?;
    let socket = |entry: std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let number = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((number, entry.file_name().to_str()?.parse().ok()?))
    };
    Ok(open.flatten().filter_map(socket).collect())
}

/// The sockets that are not among those before.
fn new_sockets(before: &BTreeMap<u64, i32>) -> Result<BTreeMap<u64, i32>> {
    let mut new = sockets()?;
    new.retain(|number, _| !before.contains_key(number));
    Ok(new)
}

/// A caller that is no peer.
enum Stranger {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stranger {
    /// Says something. The other side may have ended the connection, which is right.
    fn say(&mut self, what: &[u8]) {
        let _ = match self {
            Self::Tcp(stream) => stream.write(what),
            Self::Unix(stream) => stream.write(what),
        };
    }
}

/// One column of a line of the kernel's list.
fn column(line: &str, at: usize) -> Option<&str> {
    line.split_whitespace().nth(at)
}

/// The place at which a TCP socket listens, from its line: `sl local_address rem_address st ... inode`.
fn listens_at(line: &str, own: &BTreeMap<u64, i32>) -> Option<SocketAddrV4> {
    let listens = column(line, 3)? == "0A" && own.contains_key(&column(line, 9)?.parse().ok()?);
    let (address, port) = column(line, 1)?.split_once(':')?;
    let address = Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.swap_bytes());
    let address = if address.is_unspecified() { Ipv4Addr::LOCALHOST } else { address };
    listens.then_some(SocketAddrV4::new(address, u16::from_str_radix(port, 16).ok()?))
}

/// The place at which a Unix socket listens, from its line: `Num RefCount Protocol Flags Type St Inode Path`.
fn listens_in<'a>(line: &'a str, own: &BTreeMap<u64, i32>) -> Option<&'a Path> {
    const STREAM: &str = "0001";
    const LISTENS: &str = "00010000";
    let is_own = own.contains_key(&column(line, 6)?.parse().ok()?);
    let listens = is_own && column(line, 3)? == LISTENS && column(line, 4)? == STREAM;
    listens.then(|| column(line, 7)).flatten().filter(|path| path.starts_with('/')).map(Path::new)
}

/// A call to each of these sockets that listens.
fn call(own: &BTreeMap<u64, i32>) -> Vec<Stranger> {
    let soon = Duration::from_secs(1);
    let [tcp, unix] = ["/proc/net/tcp", "/proc/net/unix"]
        .map(|list| std::fs::read_to_string(list).unwrap_or_default());
    let tcp = tcp.lines().filter_map(|line| listens_at(line, own));
    let tcp = tcp.filter_map(|at| TcpStream::connect_timeout(&at.into(), soon).ok());
    let tcp = tcp.filter(|stream| stream.set_write_timeout(Some(soon)).is_ok());
    let unix = unix.lines().filter_map(|line| listens_in(line, own));
    let unix = unix.filter_map(|path| UnixStream::connect(path).ok());
    let unix = unix.filter(|stream| stream.set_nonblocking(true).is_ok());
    tcp.map(Stranger::Tcp).chain(unix.map(Stranger::Unix)).collect()
}

const NAP: Duration = Duration::from_millis(5);

/// Calls while strangers say nothing. They leave where it takes longer than `patience`, and the result is none of them.
/// The time is that in which the machine lets this process run.
fn beside<T>(
    silent: Vec<Stranger>,
    patience: Duration,
    call: impl FnOnce() -> T,
) -> Result<(T, Option<Vec<Stranger>>)> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let strangers = scope.spawn(|| {
            let mut waited = Duration::ZERO;
            while !over.load(Ordering::Acquire) && waited < patience {
                std::thread::sleep(NAP);
                waited += NAP;
            }
            over.load(Ordering::Acquire).then_some(silent)
        });
        let result = call();
        over.store(true, Ordering::Release);
        let left =
            strangers.join().map_err(|_| anyhow::anyhow!("the strangers' thread panicked"))?;
        Ok((result, left))
    })
}

fn strangers_change_nothing(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let (before, deadline) = (sockets()?, rank.config.world.deadline);
    let mut rig = Rig::open(rank, needs, deadline)?;
    let endpoints = rig.exchange_endpoints()?;
    let own = new_sockets(&before)?;
    let silent = [call(&own), call(&own)].into_iter().flatten().collect();
    rank.world.barrier("strangers have called")?;
    let (connected, silent) = beside(silent, deadline / 2, || rig.connect_to(&endpoints))?;
    connected.context("beside strangers that say nothing")?;
    let mut silent = silent.with_context(|| {
        format!(
            "connect and commit waited for {:?} for strangers that say nothing; expected no wait for them (INV-6)",
            deadline / 2
        )
    })?;
    rig.barrier("connected")?;
    silent.iter_mut().for_each(|stranger| stranger.say(&JUNK));
    call(&own).iter_mut().for_each(|stranger| stranger.say(&JUNK));
    exchange(&mut rig).context("behind strangers that have sent something")?;
    rig.end(true)?;
    Ok(Outcome::Pass)
}

/// The time in which a rank takes what its peer has sent.
const TAKES: Duration = Duration::from_millis(100);

fn a_mad_peer_harms_no_memory(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let mut rig = Rig::open(rank, needs, rank.config.world.deadline)?;
    rig.windows.iter().for_each(|window| window.fill(UNTOUCHED));
    let endpoints = rig.exchange_endpoints()?;
    let before = sockets()?;
    rig.connect_to(&endpoints)?;
    let connections = new_sockets(&before)?;
    rig.barrier("connected")?;
    rig.expect_errors();
    if rig.me() == 1 {
        connections.values().for_each(|fd| say_on(*fd));
        rank.world.barrier("a peer went mad")?;
        return Ok(rank.world.barrier("rank 0 has looked").map(|()| Outcome::Pass)?);
    }
    rank.world.barrier("a peer went mad")?;
    let until = Instant::now() + TAKES;
    while Instant::now() < until {
        rig.drive()?;
        // Good and bad are right: the peer is.
        let _ = rig.transport.health();
        std::thread::sleep(Duration::from_millis(1));
    }
    let what = "window 0 behind bytes of a peer that are no message";
    let found = rig.windows[0].read(0, rig.windows[0].len());
    compare(what, &found, &vec![UNTOUCHED; found.len()])?;
    for id in 0..rig.needs.signals {
        let total = rig.transport.read_signal(0, id);
        ensure!(total == 0, "signal {id} behind such bytes: found total {total}; expected 0");
    }
    rank.world.barrier("rank 0 has looked")?;
    Ok(Outcome::Pass)
}

/// Sends junk on a connection of the transport. One that is none, or is full, takes nothing.
fn say_on(fd: i32) {
    // SAFETY: the transport has it open, as the kernel's list says, and ends it in no other thread now but its own.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    if rustix::net::sockopt::socket_type(fd)
        .is_ok_and(|kind| kind == rustix::net::SocketType::STREAM)
    {
        let _ = rustix::net::send(fd, &JUNK, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_listen_are_found_by_the_kernels_lines() {
        let own = BTreeMap::from([(77, 5)]);
        let tcp = |state: &str| {
            format!(
                " 0: 0100007F:1F90 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 77 1 0"
            )
        };
        let place = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8080);
        assert_eq!(listens_at(&tcp("0A"), &own), Some(place));
        assert_eq!(listens_at(&tcp("01"), &own), None);
        assert_eq!(listens_at(&tcp("0A"), &BTreeMap::new()), None);
        let unix = "0000: 00000002 00000000 00010000 0001 01 77 /run/one";
        assert_eq!(listens_in(unix, &own), Some(Path::new("/run/one")));
        assert_eq!(listens_in(unix, &BTreeMap::new()), None);
    }
}
