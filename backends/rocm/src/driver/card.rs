//! The name of an allocation, as hipIpc gives it, behind a descriptor: ranks exchange descriptors.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::MemfdFlags;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_hip::IpcHandle;

/// The first bytes; a descriptor of other memory does not begin like this.
const MAGIC: [u8; 8] = *b"TYHIPIPC";
const BYTES: usize = MAGIC.len() + 64;

/// A file in memory with the name of an allocation.
pub(super) fn write(handle: &IpcHandle) -> Result<OwnedFd> {
    let failed =
        |e: rustix::io::Errno| Error::system("export memory", "its name cannot be stored", e);
    let fd = rustix::fs::memfd_create("tokenyard-hip", MemfdFlags::CLOEXEC).map_err(failed)?;
    let mut bytes = [0; BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    bytes[MAGIC.len()..].copy_from_slice(&handle.reserved);
    match rustix::io::write(&fd, &bytes).map_err(failed)? {
        BYTES => Ok(fd),
        found => {
            let message = format!("found {found} bytes written; expected {BYTES}");
            Err(Error::new(ErrorKind::System, "export memory", message))
        }
    }
}

/// The name of an allocation in a peer's file; nothing for any other descriptor.
pub(super) fn read(fd: BorrowedFd<'_>) -> Option<IpcHandle> {
    let mut bytes = [0; BYTES + 1];
    // The descriptors of physical memory cannot be read.
    let found = rustix::io::pread(fd, &mut bytes, 0).ok()?;
    let name = bytes[..found].strip_prefix(&MAGIC)?;
    name.try_into().ok().map(|reserved| IpcHandle { reserved })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_name_crosses_whole() {
        let mut reserved = [0; 64];
        reserved.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
        let fd = write(&IpcHandle { reserved }).unwrap();
        assert_eq!(read(fd.as_fd()).unwrap().reserved, reserved);
        assert_eq!(read(fd.as_fd()).unwrap().reserved, reserved, "it can be read again");
    }

    #[test]
    fn a_descriptor_of_anything_else_has_no_name() {
        let file = |bytes: &[u8]| {
            let fd = rustix::fs::memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&fd, bytes).unwrap();
            fd
        };
        let mut long = MAGIC.to_vec();
        long.extend([7; 65]);
        for bytes in [&b""[..], b"TYHIPIPC", &long[..20], &long, &[0; BYTES]] {
            assert!(read(file(bytes).as_fd()).is_none(), "{} bytes", bytes.len());
        }
        let (pipe, _) = std::io::pipe().unwrap();
        assert!(read(pipe.as_fd()).is_none(), "what cannot be read at a place");
    }
}
