//! The address of rank 0, and its publication to the other ranks.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::exchange::enter_by_exchange;
use super::files::make_room;
use super::handshake::Credentials;
use super::identity::{Identity, Launched, Rendezvous};
use super::interface::Local;
use super::loopback::{OnlyHere, check_loopback, is_loopback_name};
use super::noise::{JOB_BYTES, random};
use super::other_hosts::OtherHosts;
use super::roster::{Card, Roster};
use super::secret::{SECRET_FILE_VARIABLE, SECRET_VARIABLE, Secret, open_private};
use super::text::{clean, hex};
use crate::machine::host_name;
use tokenyard_errors::{Error, ErrorKind, Result};

pub(super) const OPERATION: &str = "meet the other ranks";
/// Connections that may wait to be accepted, as far as the kernel lets them (`net.core.somaxconn`).
const BACKLOG: i32 = 4096;
const MAX_NOTICE_BYTES: u64 = 1024;

/// The way of this rank into the world.
pub(super) struct Entry {
    pub(super) next: NextStep,
    /// The index among the ranks of this host.
    pub(super) local_rank: u32,
    pub(super) roster: Roster,
}

/// The next step of this rank.
pub(super) enum NextStep {
    /// There is no other rank.
    Alone,
    /// This is rank 0.
    Hub {
        listener: TcpListener,
        credentials: Credentials,
        notice: Option<Notice>,
        only_here: Option<OnlyHere>,
    },
    /// Any other rank.
    Spoke { target: Target, credentials: Credentials, local: Local },
}

/// The place where a rank looks for rank 0.
#[derive(Debug)]
pub(super) enum Target {
    Address { host: String, port: u16, others: OtherHosts },
    File { path: PathBuf },
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { host, port, .. } => write!(f, "{host}:{port}"),
            Self::File { path } => write!(f, "the address in {}", path.display()),
        }
    }
}

/// The address that rank 0 publishes to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) job: [u8; JOB_BYTES],
}

/// Binds and publishes (rank 0), or finds the address. Waits for other ranks only in a caller's
/// exchange.
pub(super) fn enter(
    identity: Identity,
    secret: Secret,
    local: Local,
    launched: Launched,
) -> Result<Entry> {
    let Identity { place, rendezvous, others, .. } = identity;
    let credentials = Credentials { secret, job: [0; JOB_BYTES] };
    let next = match rendezvous {
        _ if place.ranks == 1 => NextStep::Alone,
        Rendezvous::Tcp { host, port } if place.rank == 0 => {
            let addresses = match &local {
                Local::Any => resolve_own(&host, port, others)?,
                Local::Address(own) => {
                    let mut own = *own;
                    own.set_port(port);
                    vec![own]
                }
                Local::Interface(interface) => vec![interface.listen_at(&host, port)?],
            };
            let listener = listen(&addresses, place.ranks, &credentials.secret)?;
            let only_here = OnlyHere::of(&listener);
            NextStep::Hub { listener, credentials, notice: None, only_here }
        }
        Rendezvous::Tcp { host, port } => {
            let target = Target::Address { host, port, others };
            NextStep::Spoke { target, credentials, local }
        }
        Rendezvous::File { path } if place.rank == 0 => {
            check_meeting(&path)?;
            check_replaced(&path)?;
            let (listener, address) =
                listen_anywhere(local.own(), place.ranks, &credentials.secret)?;
            let credentials = Credentials { job: address.job, ..credentials };
            let notice = Some(Notice::publish(path, &address)?);
            NextStep::Hub { listener, credentials, notice, only_here: None }
        }
        Rendezvous::File { path } => {
            check_meeting(&path)?;
            NextStep::Spoke { target: Target::File { path }, credentials, local }
        }
        Rendezvous::Exchange(exchange) => {
            let card = Card::mine(launched);
            return enter_by_exchange(place, exchange, credentials, local, card);
        }
    };
    let local_rank = if place.ranks == 1 { 0 } else { place.local_rank };
    Ok(Entry { next, local_rank, roster: Roster::default() })
}

/// Refuses a rendezvous file that exists and is no regular file. It need not exist yet.
fn check_meeting(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(about) if !about.is_file() => {
            let message =
                format!("found {}, expected a regular file", tokenyard_files::kind_name(&about));
            Err(Error::new(ErrorKind::InvalidInput, OPERATION, message)
                .with_context("file", path.display())
                .with_fix("name a file in a folder that all ranks share; rank 0 makes it"))
        }
        _ => Ok(()),
    }
}

/// Refuses a file with anything but the address of an earlier job, which rank 0 would replace and then
/// remove: it is a file of the user. An empty file is accepted, because `mktemp` makes one.
fn check_replaced(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let is_ours = tokenyard_files::read_text(path, MAX_NOTICE_BYTES)
        .is_ok_and(|text| text.is_empty() || Address::decode(&text).is_ok());
    if is_ours {
        return Ok(());
    }
    let message = "found a file with other contents than the address of an earlier job, expected \
                   none or an empty one: rank 0 would replace it";
    Err(Error::new(ErrorKind::InvalidInput, OPERATION, message)
        .with_context("file", path.display())
        .with_fix("name another file, or remove this one"))
}

/// Refuses an address that other hosts can reach when there is no secret to exclude them.
pub(super) fn check_secret(secret: &Secret, ip: IpAddr) -> Result<()> {
    if !secret.is_none() || ip.is_loopback() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidInput,
        OPERATION,
        format!("found no job secret, expected one: {ip} can be reached from other hosts"),
    )
    .with_fix(format!(
        "set {SECRET_VARIABLE} (at least 16 characters) or {SECRET_FILE_VARIABLE} (a file of mode \
         0600), the same on all ranks (mpirun hands it on with -x {SECRET_VARIABLE}), or meet on \
         127.0.0.1"
    )))
}

fn resolve_own(host: &str, port: u16, others: OtherHosts) -> Result<Vec<SocketAddr>> {
    let found = (host, port).to_socket_addrs().map_err(|error| unresolved(host, error))?;
    let mut addresses: Vec<SocketAddr> = found.collect();
    // Debian gives a host's own name a loopback address; others cannot reach rank 0 there.
    addresses.sort_by_key(|address| address.ip().is_loopback());
    check_loopback(host, &addresses, others)?;
    if is_loopback_name(host, &addresses) {
        tracing::warn!(
            host,
            "the host of rank 0 is a loopback address here: other hosts cannot \
            reach it; set the bind address of rank 0"
        );
    }
    Ok(addresses)
}

/// The error for a host of rank 0 that has no address.
pub(super) fn unresolved(host: &str, error: std::io::Error) -> Error {
    Error::system(OPERATION, format!("cannot resolve the host of rank 0, {host:?}"), error)
        .with_fix("give all ranks a name or an address of that host that they all resolve")
}

/// Listens at the first address that works.
fn listen(addresses: &[SocketAddr], ranks: u32, secret: &Secret) -> Result<TcpListener> {
    make_room(ranks)?;
    let mut failure = None;
    for address in addresses {
        check_secret(secret, address.ip())?;
        match TcpListener::bind(address) {
            Ok(listener) => {
                listener.set_nonblocking(true).map_err(|error| {
                    Error::system(OPERATION, "cannot make the listener non-blocking", error)
                })?;
                // The standard library requests a backlog of 128. Strangers would fill that at once,
                // and the kernel would then drop the connections of ranks.
                rustix::net::listen(&listener, BACKLOG)
                    .map_err(|error| Error::system(OPERATION, "cannot listen", error))?;
                return Ok(listener);
            }
            Err(error) => {
                failure.get_or_insert((address, error));
            }
        }
    }
    let Some((address, error)) = failure else {
        let message = "found no address of the host of rank 0, expected one";
        return Err(Error::new(ErrorKind::InvalidInput, OPERATION, message));
    };
    let fix = match error.kind() {
        IoErrorKind::AddrInUse => {
            "choose a free port; another process, perhaps a second rank 0, listens there"
        }
        IoErrorKind::AddrNotAvailable => {
            "run rank 0 on the host that is named, or set the bind address of rank 0"
        }
        _ => "choose an address and a port that this user may listen on",
    };
    Err(Error::system(OPERATION, format!("rank 0 cannot listen at {address}"), error).with_fix(fix))
}

/// Listens at a free port of `own`.
pub(super) fn listen_anywhere(
    own: SocketAddr,
    ranks: u32,
    secret: &Secret,
) -> Result<(TcpListener, Address)> {
    let ip = own.ip();
    let listener = listen(&[own], ranks, secret)?;
    let bound = listener
        .local_addr()
        .map_err(|error| Error::system(OPERATION, "cannot read the listener's address", error))?;
    let host = if ip.is_unspecified() { host_name() } else { ip.to_string() };
    Ok((listener, Address { host, port: bound.port(), job: random()? }))
}

impl Address {
    pub(super) fn encode(&self) -> String {
        format!("{} {} {}", self.host, self.port, hex(&self.job))
    }

    pub(super) fn decode(text: &str) -> Result<Self> {
        let mut words = text.split_ascii_whitespace();
        let parsed = (|| {
            let (host, port, job) = (words.next()?, words.next()?, words.next()?);
            let address =
                Self { host: host.to_owned(), port: port.parse().ok()?, job: unhex(job)? };
            words.next().is_none().then_some(address)
        })();
        parsed.ok_or_else(|| {
            let shown = clean(text, 120);
            let message = format!("found {shown:?}, expected \"host port nonce\" of rank 0");
            Error::new(ErrorKind::Protocol, OPERATION, message)
        })
    }
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(text.get(at..at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// The file with the address of rank 0. Dropping it removes the file, unless another job replaced it.
pub(super) struct Notice {
    path: PathBuf,
    text: String,
}

impl Notice {
    /// Writes the file atomically, over that of an earlier job.
    fn publish(path: PathBuf, address: &Address) -> Result<Self> {
        let text = address.encode() + "\n";
        let unwritable = |error| {
            Error::system(OPERATION, "rank 0 cannot write its address", error)
                .with_context("file", path.display())
                .with_fix("name a file in a folder that all ranks share and this user may write")
        };
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}", hex(&address.job)));
        let temporary = path.with_file_name(name);
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .and_then(|()| std::fs::rename(&temporary, &path));
        if let Err(error) = written {
            let _ = std::fs::remove_file(&temporary);
            return Err(unwritable(error));
        }
        Ok(Self { path, text })
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        if tokenyard_files::read_text(&self.path, MAX_NOTICE_BYTES)
            .is_ok_and(|text| text == self.text)
        {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Reads the present address of rank 0. The file may be missing, or belong to an earlier job.
pub(super) fn read_notice(path: &Path) -> Result<Address> {
    // A user who can write this file decides where this rank connects.
    let file = open_private(path, OPERATION)?;
    let mut text = String::new();
    file.take(MAX_NOTICE_BYTES)
        .read_to_string(&mut text)
        .map_err(|e| Error::system(OPERATION, "cannot read the address of rank 0", e))
        .and_then(|_| Address::decode(&text))
        .map_err(|error| error.with_context("file", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::identity::BOOTSTRAP_VARIABLE;
    use super::super::identity::RankId;
    use super::*;

    fn address() -> Address {
        Address { host: "127.0.0.1".into(), port: 4000, job: [0xab; 16] }
    }

    #[test]
    fn the_notice_is_private_readable_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        std::fs::write(&path, "left over").unwrap();
        let notice = Notice::publish(path.clone(), &address()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(read_notice(&path).unwrap(), address());
        drop(notice);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_notice_of_another_job_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        let old = Notice::publish(path.clone(), &address()).unwrap();
        let _new = Notice::publish(path.clone(), &Address { port: 1, ..address() }).unwrap();
        drop(old);
        assert_eq!(read_notice(&path).unwrap().port, 1);
    }

    #[test]
    fn a_file_of_the_user_is_not_replaced_by_the_address_of_rank_0() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        let enter_there = || {
            let place = RankId { rank: 0, ranks: 2, local_rank: 0 };
            let meeting = Rendezvous::File { path: path.clone() };
            let identity = Identity::new(place, meeting).unwrap();
            enter(identity, Secret::none(), Local::Any, Launched::default())
        };
        for contents in ["my thesis\n", "my thesis", &"x".repeat(5000)] {
            std::fs::write(&path, contents).unwrap();
            let error = enter_there().err().unwrap().to_string();
            assert!(error.contains("rank 0 would replace it"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), contents);
        }
        for contents in [String::new(), address().encode()] {
            std::fs::write(&path, contents).unwrap();
            assert!(enter_there().is_ok());
            assert!(!path.exists(), "it is removed with the listener");
        }
    }

    #[test]
    fn a_fifo_to_meet_at_is_refused_at_once_on_every_rank() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        for rank in 0..2 {
            let place = RankId { rank, ranks: 2, local_rank: rank };
            let rendezvous = Rendezvous::File { path: path.clone() };
            let identity = Identity::new(place, rendezvous).unwrap();
            let entry = enter(identity, Secret::none(), Local::Any, Launched::default());
            let error = entry.err().unwrap().to_string();
            assert!(error.contains("found a FIFO, expected a regular file"), "{error}");
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        let error = read_notice(&path).unwrap_err().to_string();
        assert!(error.contains("found a FIFO, expected a regular file"), "{error}");
    }

    #[test]
    fn a_notice_that_others_could_have_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        let _notice = Notice::publish(path.clone(), &address()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let text = read_notice(&path).unwrap_err().to_string();
        assert!(
            text.contains("found mode 0666") && text.contains(path.to_str().unwrap()),
            "{text}"
        );
    }

    #[test]
    fn malformed_notices_are_refused() {
        let good = address().encode();
        assert_eq!(Address::decode(&good).unwrap(), address());
        for text in ["", "a", "a 1", "a x 00", "a 1 00", &format!("{good} more"), &good[1..40]] {
            assert_eq!(Address::decode(text).unwrap_err().kind(), ErrorKind::Protocol, "{text}");
        }
    }

    #[test]
    fn no_secret_is_refused_unless_the_address_is_loopback() {
        let listen_at =
            |ip: &str, secret| listen_anywhere(SocketAddr::new(ip.parse().unwrap(), 0), 2, &secret);
        for ip in ["0.0.0.0", "192.0.2.1", "::"] {
            let error = listen_at(ip, Secret::none()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            let text = error.to_string();
            assert!(
                text.contains(SECRET_VARIABLE) && text.contains(SECRET_FILE_VARIABLE),
                "{text}"
            );
        }
        assert!(listen_at("127.0.0.1", Secret::none()).is_ok());
        let (listener, address) = listen_at("0.0.0.0", Secret::generate().unwrap()).unwrap();
        assert_eq!(
            (address.port, address.host),
            (listener.local_addr().unwrap().port(), host_name())
        );
    }

    #[test]
    fn a_name_that_is_loopback_here_is_refused_at_once_where_ranks_may_be_on_other_hosts() {
        let loopback: Vec<SocketAddr> = vec!["127.0.1.1:9".parse().unwrap()];
        assert!(is_loopback_name("node-7", &loopback));
        assert!(!is_loopback_name("127.0.1.1", &loopback));
        let reachable = "192.0.2.1:9".parse().unwrap();
        assert!(!is_loopback_name("node-7", &[loopback[0], reachable]));
        // Resolvers ignore case: a name that stands for loopback everywhere.
        let name = "LOCALHOST";
        let found = resolve_own(name, 9, OtherHosts::NotStated).unwrap();
        assert!(found.iter().all(|a| a.ip().is_loopback()));
        for others in [OtherHosts::Stated, OtherHosts::Unknown] {
            let error = resolve_own(name, 9, others).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            let text = error.to_string();
            assert!(text.contains("rank 0 would listen on loopback only"), "{text}");
            assert!(text.contains("MASTER_ADDR") && text.contains(BOOTSTRAP_VARIABLE), "{text}");
            for chosen in ["localhost", "127.0.0.1", "::1"] {
                assert!(resolve_own(chosen, 9, others).is_ok(), "{chosen}");
            }
        }
    }

    #[test]
    fn a_port_that_is_taken_is_named_with_the_fix() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = first.local_addr().unwrap();
        let text = listen(&[address], 2, &Secret::none()).unwrap_err().to_string();
        assert!(text.contains(&address.to_string()) && text.contains("second rank 0"), "{text}");
    }
}
