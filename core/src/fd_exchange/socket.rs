//! Abstract Unix sockets that preserve record boundaries and carry descriptors. Nothing here blocks.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use crate::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};

use super::wire::{MAX_WINDOWS, RECORD_BYTES, Secret, secret};

/// Most descriptors of one record: the windows and the signals.
const MAX_FDS: usize = MAX_WINDOWS as usize + 1;
const ANCILLARY_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The result of a call to a peer's socket.
#[derive(Debug)]
pub(super) enum Dialled {
    Connected(OwnedFd),
    /// The peer's queue is full: try again.
    Busy,
    /// No process listens under this name.
    NoListener,
}

/// The result of a receive.
#[derive(Debug)]
pub(super) enum ReceivedRecord {
    Nothing,
    /// The other side closed the connection.
    Closed,
    Record(RawRecord),
}

/// Bytes and descriptors that are not checked yet.
#[derive(Debug)]
pub(super) struct RawRecord {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
    /// Descriptors were lost on the way: this process has reached its limit of open files.
    pub(super) cut: bool,
}

/// Checks that this system lets a process make abstract sockets.
///
/// # Errors
/// The system's error, with the fix.
pub fn probe() -> Result<()> {
    listen_as(&secret()?, 1).map(drop)
}

/// Opens a socket that peers can call by `name`. It leaves no file behind.
pub(super) fn listen_as(name: &Secret, backlog: usize) -> Result<OwnedFd> {
    let failed = |e| failed("listen for peers", e);
    let socket = new_socket().map_err(failed)?;
    bind(&socket, &address(name).map_err(failed)?).map_err(failed)?;
    listen(&socket, i32::try_from(backlog).unwrap_or(i32::MAX)).map_err(failed)?;
    Ok(socket)
}

/// Calls the socket that a peer listens on.
pub(super) fn dial(name: &Secret) -> Result<Dialled> {
    let failed = |e| failed("call peer", e);
    let socket = new_socket().map_err(failed)?;
    match connect(&socket, &address(name).map_err(failed)?) {
        Ok(()) => Ok(Dialled::Connected(socket)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Dialled::Busy),
        Err(Errno::CONNREFUSED) => Ok(Dialled::NoListener),
        Err(e) => Err(failed(e)),
    }
}

/// Takes the next caller, if there is one.
pub(super) fn accept(listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
    match accept_with(listener, FLAGS) {
        Ok(caller) => Ok(Some(caller)),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(failed("accept peer", e)),
    }
}

/// Checks that the other side runs as the same user.
pub(super) fn check_owner(socket: BorrowedFd<'_>) -> Result<()> {
    let (found, expected) = (owner(socket)?, rustix::process::geteuid().as_raw());
    if found != expected {
        return Err(Error::new(
            ErrorKind::Protocol,
            "check peer",
            format!("found a process of user {found}; expected user {expected}"),
        )
        .with_fix("run all ranks of a machine as one user"));
    }
    Ok(())
}

/// The effective user of the other side when it connected or listened.
fn owner(socket: BorrowedFd<'_>) -> Result<u32> {
    // Not rustix's `socket_peercred`: its type cannot hold process id 0, which the kernel returns for a
    // peer in another pid namespace (containers that share the host's network).
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open, `found` has `bytes` bytes and any bit pattern is a ucred.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &mut bytes,
        )
    };
    if status != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Error::system("check peer", "its user is unknown", error));
    }
    Ok(found.uid)
}

/// Sends one record with its descriptors. `Ok(false)`: the other side has closed the connection.
pub(super) fn send(socket: BorrowedFd<'_>, record: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool> {
    let mut space = [MaybeUninit::uninit(); ANCILLARY_BYTES];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::new(
            ErrorKind::Internal,
            "send descriptors",
            format!("{} descriptors; expected at most {MAX_FDS}", fds.len()),
        ));
    }
    let data = [IoSlice::new(record)];
    let sent = rustix::io::retry_on_intr(|| {
        sendmsg(socket, &data, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    });
    match sent {
        Ok(_) => Ok(true),
        Err(Errno::PIPE | Errno::CONNRESET) => Ok(false),
        Err(e) => Err(failed("send descriptors", e)),
    }
}

/// Receives one record, if one has arrived. Its descriptors are owned at once, so none leaks.
pub(super) fn receive(socket: BorrowedFd<'_>) -> Result<ReceivedRecord> {
    match receive_once(socket)? {
        // Linux (6.18: `__unix_dgram_recvmsg`) checks for a record first, and for a hang-up of the
        // other side after that, so it overlooks a record that arrives in between. By now all sent
        // records have arrived.
        ReceivedRecord::Closed => receive_once(socket),
        found => Ok(found),
    }
}

fn receive_once(socket: BorrowedFd<'_>) -> Result<ReceivedRecord> {
    let mut bytes = vec![0; RECORD_BYTES];
    let mut space = [MaybeUninit::uninit(); ANCILLARY_BYTES];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    });
    let message = match received {
        Ok(message) => message,
        Err(Errno::AGAIN) => return Ok(ReceivedRecord::Nothing),
        Err(Errno::CONNRESET) => return Ok(ReceivedRecord::Closed),
        Err(e) => return Err(failed("receive descriptors", e)),
    };
    let fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if message.bytes == 0 && fds.is_empty() {
        return Ok(ReceivedRecord::Closed);
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(Error::new(
            ErrorKind::Protocol,
            "receive descriptors",
            format!("found a record of more than {RECORD_BYTES} bytes"),
        ));
    }
    bytes.truncate(message.bytes);
    let cut = message.flags.contains(ReturnFlags::CTRUNC);
    Ok(ReceivedRecord::Record(RawRecord { bytes, fds, cut }))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

fn address(name: &Secret) -> Result<SocketAddrUnix, Errno> {
    use std::fmt::Write as _;
    let mut text = String::from("tokenyard-");
    for byte in name {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    SocketAddrUnix::new_abstract_name(text.as_bytes())
}

/// The fix where descriptors run out.
pub const DESCRIPTOR_FIX: &str = "raise the limit on open files: `ulimit -n`, LimitNOFILE= of the service, \
                                  --ulimit nofile= of the container";

fn failed(operation: &'static str, errno: Errno) -> Error {
    let error = Error::system(operation, "the system refused", errno);
    match errno {
        Errno::MFILE | Errno::NFILE | Errno::TOOMANYREFS => error.with_fix(DESCRIPTOR_FIX),
        _ => error.with_fix("allow abstract Unix sockets in the container's security profile"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    /// Without a second receive, the kernel overlooked a record in one of 7,000 rounds.
    const ROUNDS: usize = 50_000;

    fn pair() -> (OwnedFd, OwnedFd) {
        let name = secret().unwrap();
        let listener = listen_as(&name, 4).unwrap();
        let Dialled::Connected(caller) = dial(&name).unwrap() else { panic!("not connected") };
        (caller, accept(listener.as_fd()).unwrap().unwrap())
    }

    #[test]
    fn records_and_descriptors_arrive_whole() {
        let (caller, callee) = pair();
        check_owner(callee.as_fd()).unwrap();
        assert!(matches!(receive(callee.as_fd()).unwrap(), ReceivedRecord::Nothing));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(send(caller.as_fd(), b"one", &[file.as_fd(); MAX_FDS]).unwrap());
        assert!(send(caller.as_fd(), b"two", &[]).unwrap());
        drop(caller);
        for (text, fds) in [(b"one", MAX_FDS), (b"two", 0)] {
            let ReceivedRecord::Record(record) = receive(callee.as_fd()).unwrap() else {
                panic!("no record")
            };
            assert_eq!((record.bytes.as_slice(), record.fds.len()), (text.as_slice(), fds));
            assert!(!record.cut);
        }
        assert!(matches!(receive(callee.as_fd()).unwrap(), ReceivedRecord::Closed));
        assert!(!send(callee.as_fd(), b"late", &[]).unwrap());
    }

    #[test]
    fn a_record_is_received_when_its_sender_hangs_up_at_once() {
        for round in 0..ROUNDS {
            let (caller, callee) = pair();
            let sender =
                std::thread::spawn(move || assert!(send(caller.as_fd(), b"one", &[]).unwrap()));
            loop {
                match receive(callee.as_fd()).unwrap() {
                    // The sender may wait for the processor of this loop.
                    ReceivedRecord::Nothing => std::thread::yield_now(),
                    ReceivedRecord::Record(_) => break,
                    ReceivedRecord::Closed => panic!("round {round}: the record was overlooked"),
                }
            }
            sender.join().unwrap();
        }
    }

    #[test]
    fn an_oversized_record_is_refused() {
        let (caller, callee) = pair();
        assert!(send(caller.as_fd(), &[1; RECORD_BYTES + 1], &[]).unwrap());
        assert_eq!(receive(callee.as_fd()).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn no_listener_and_a_full_queue_are_distinguished() {
        let name = secret().unwrap();
        assert!(matches!(dial(&name).unwrap(), Dialled::NoListener));
        let _listener = listen_as(&name, 1).unwrap();
        let mut callers = Vec::new();
        loop {
            match dial(&name).unwrap() {
                Dialled::Connected(caller) => callers.push(caller),
                Dialled::Busy => break,
                Dialled::NoListener => panic!("the listener is there"),
            }
            assert!(callers.len() < 8, "the queue has no end");
        }
    }
}
