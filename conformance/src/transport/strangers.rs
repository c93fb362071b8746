//! Callers that are no peers of this job.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::ending::exchange;
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "strangers_change_nothing",
    about: "callers that are no peers delay no connect and fail none, whether they say nothing or anything or hang \
                up, and puts arrive",
    invariants: "INV-6; bytes from elsewhere",
    ranks: &[2],
    needs: Needs::SMALL,
    body: Body::OwnProcess(strangers_change_nothing),
    ..TransportCase::BARE
}];

/// Bytes that are no message: each number in them is out of any range.
pub(super) const JUNK: [u8; 4096] = [0xff; 4096];

/// The sockets of this process: their numbers in the kernel's lists, and their descriptors.
pub(super) fn sockets() -> Result<BTreeMap<u64, i32>> {
    let open = std::fs::read_dir("/proc/self/fd").context("this process's descriptors")?;
    let socket = |entry: std::fs::DirEntry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let number = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((number, entry.file_name().to_str()?.parse().ok()?))
    };
    Ok(open.flatten().filter_map(socket).collect())
}

/// The sockets that are not among those before.
pub(super) fn new_sockets(before: &BTreeMap<u64, i32>) -> Result<BTreeMap<u64, i32>> {
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
fn listens_at(line: &str, own: &BTreeMap<u64, i32>) -> Option<SocketAddr> {
    let listens = column(line, 3)? == "0A" && own.contains_key(&column(line, 9)?.parse().ok()?);
    let (address, port) = column(line, 1)?.split_once(':')?;
    listens.then_some(SocketAddr::new(address_of(address)?, u16::from_str_radix(port, 16).ok()?))
}

/// An address, from its words of 32 bits in the order of this machine. One that is all zeros is any of this machine.
fn address_of(words: &str) -> Option<IpAddr> {
    let word =
        |at: usize| Some(u32::from_str_radix(words.get(8 * at..8 * at + 8)?, 16).ok()?.to_be());
    if words.len() == 8 {
        let address = Ipv4Addr::from(word(0)?);
        return Some(if address.is_unspecified() { Ipv4Addr::LOCALHOST } else { address }.into());
    }
    let [a, b, c, d] = [word(0)?, word(1)?, word(2)?, word(3)?].map(u128::from);
    let address = Ipv6Addr::from(a << 96 | b << 64 | c << 32 | d);
    Some(if address.is_unspecified() { Ipv6Addr::LOCALHOST } else { address }.into())
}

/// The place at which a Unix socket listens, from its line: `Num RefCount Protocol Flags Type St Inode Path`.
/// An abstract name begins with `@`.
fn listens_in<'a>(line: &'a str, own: &BTreeMap<u64, i32>) -> Option<&'a str> {
    const STREAM: &str = "0001";
    const LISTENS: &str = "00010000";
    let is_own = own.contains_key(&column(line, 6)?.parse().ok()?);
    let listens = is_own && column(line, 3)? == LISTENS && column(line, 4)? == STREAM;
    listens.then(|| column(line, 7)).flatten().filter(|name| name.starts_with(['/', '@']))
}

/// A call to a Unix socket. One whose queue is full takes none, and the caller does not wait.
fn call_unix(name: &str) -> Option<OwnedFd> {
    let at = match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        None => SocketAddrUnix::new(name),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (at, socket) = (at.ok()?, socket.ok()?);
    rustix::net::connect(&socket, &at).is_ok().then_some(socket)
}

/// A call to each of these sockets that listens.
fn call(own: &BTreeMap<u64, i32>) -> Vec<Stranger> {
    let soon = Duration::from_secs(1);
    let [tcp, tcp6, unix] = ["/proc/net/tcp", "/proc/net/tcp6", "/proc/net/unix"]
        .map(|list| std::fs::read_to_string(list).unwrap_or_default());
    let tcp = tcp.lines().chain(tcp6.lines()).filter_map(|line| listens_at(line, own));
    let tcp = tcp.filter_map(|at| TcpStream::connect_timeout(&at, soon).ok());
    let tcp = tcp.filter(|stream| stream.set_write_timeout(Some(soon)).is_ok());
    let unix = unix.lines().filter_map(|line| listens_in(line, own)).filter_map(call_unix);
    tcp.map(Stranger::Tcp).chain(unix.map(|one| Stranger::Unix(one.into()))).collect()
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
    // First, so that a short backlog has room again for those that stay.
    drop(call(&own));
    let silent = [call(&own), call(&own)].into_iter().flatten().collect();
    let mut wrong = call(&own);
    wrong.iter_mut().for_each(|stranger| stranger.say(&JUNK));
    rank.world.barrier("strangers have called")?;
    let (connected, silent) = beside(silent, deadline / 2, || rig.connect_to(&endpoints))?;
    connected.context("beside strangers that say nothing, or no hello, or hang up")?;
    drop(wrong);
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
        let place = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
        assert_eq!(listens_at(&tcp("0A"), &own), Some(place));
        assert_eq!(listens_at(&tcp("01"), &own), None);
        let six = |address: &str| tcp("0A").replacen("0100007F", address, 1);
        let own_address = "00000000000000000000000001000000";
        let place = SocketAddr::from((Ipv6Addr::LOCALHOST, 8080));
        assert_eq!(listens_at(&six(own_address), &own), Some(place));
        assert_eq!(listens_at(&six(&"0".repeat(32)), &own), Some(place));
        assert_eq!(listens_at(&six("0100"), &own), None);
        assert_eq!(listens_at(&tcp("0A"), &BTreeMap::new()), None);
        let unix = "0000: 00000002 00000000 00010000 0001 01 77 /run/one";
        assert_eq!(listens_in(unix, &own), Some("/run/one"));
        assert_eq!(listens_in(&unix.replace("/run/", "@"), &own), Some("@one"));
        assert_eq!(listens_in(unix, &BTreeMap::new()), None);
    }
}
