//! Memory that several processes map: made, sealed, checked, mapped, unmapped.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use tokenyard_core::{Error, ErrorKind, Result};

/// A stretch of mapped memory. It does not own the memory: the holder of a span also holds, for at least as
/// long, the [`Mapping`] or the registration that keeps the memory there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: a span is an address and a length. Every access goes through raw pointers or atomics,
// under the contract of whoever makes the access.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub(super) fn new(base: *mut u8, bytes: usize) -> Self {
        Self { base, bytes }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }

    /// The address of `offset`. Core promises that `offset + bytes` is inside.
    #[inline]
    pub(super) fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        debug_assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes as u64),
            "{bytes} bytes at {offset} leave a window of {} bytes",
            self.bytes
        );
        self.base.wrapping_add(offset as usize)
    }
}

/// A shared, writable mapping of a descriptor's memory; unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping(Span);

impl Mapping {
    /// Maps `bytes` behind `offset` (a multiple of the page size). The descriptor may be closed
    /// afterwards.
    pub(super) fn new(fd: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the system chooses a fresh address range, so no memory in use is replaced.
        let base = unsafe { rustix::mm::mmap(null_mut(), bytes, prot, flags, fd, offset) }
            .map_err(|e| {
                Error::system("map shared memory", format!("{bytes} bytes at offset {offset}"), e)
                    .with_fix("check the limits on address space (ulimit -v) and mappings (vm.max_map_count)")
            })?;
        Ok(Self(Span::new(base.cast(), bytes)))
    }

    pub(super) fn span(&self) -> Span {
        self.0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and is unmapped once; holders of its spans end
        // with or before it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.0.base.cast(), self.0.bytes) } {
            tracing::error!("cannot unmap {} bytes of shared memory: {error}", self.0.bytes);
        }
    }
}

/// Makes zeroed memory of `bytes` that can be sent to peers.
pub(super) fn create(name: &str, bytes: u64) -> Result<OwnedFd> {
    let failed = |e: Errno| {
        Error::system("create shared memory", format!("`{name}` of {bytes} bytes"), e)
            .with_fix(
                "allow memfd_create in the container's seccomp profile, enough memory, and files of that \
                 size (ulimit -f unlimited)",
            )
    };
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(failed)?;
    rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
    seal(fd.as_fd())?;
    Ok(fd)
}

/// Fixes the size of this rank's memory for ever. Peers demand it: if memory could shrink, a peer
/// that touches it would be killed by SIGBUS.
pub(super) fn seal(fd: BorrowedFd<'_>) -> Result<()> {
    let refused = |e: Errno| {
        Error::system("seal shared memory", "its size cannot be fixed", e)
            .with_fix("allocate window memory with memfd_create(MFD_ALLOW_SEALING)")
    };
    if seals(fd).map_err(refused)?.contains(SealFlags::SHRINK) {
        return Ok(());
    }
    rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK | SealFlags::GROW).map_err(refused)
}

/// Checks memory that came from a peer: it must never become shorter than `end`.
pub(super) fn check(fd: BorrowedFd<'_>, end: u64) -> Result<()> {
    let fail = |message: String| {
        Err(Error::new(ErrorKind::Protocol, "check peer memory", message)
            .with_fix("run the same version of tokenyard on all ranks"))
    };
    match seals(fd) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => {}
        Ok(seals) => {
            return fail(format!("found memory with seals {seals:?}; expected F_SEAL_SHRINK"));
        }
        Err(_) => {
            return fail("found a descriptor that is no memfd; expected a sealed memfd".into());
        }
    }
    // The size is read after the seal: from here on it cannot become smaller.
    let found = length(fd)?;
    if found < end {
        return fail(format!("found {found} bytes of memory; expected at least {end}"));
    }
    Ok(())
}

/// The length of the memory behind a descriptor.
pub(super) fn length(fd: BorrowedFd<'_>) -> Result<u64> {
    let stat = rustix::fs::fstat(fd)
        .map_err(|e| Error::system("check shared memory", "its size is unknown", e))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

fn seals(fd: BorrowedFd<'_>) -> Result<SealFlags, Errno> {
    rustix::fs::fcntl_get_seals(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_created_is_zeroed_sealed_and_shared() {
        let fd = create("test", 8192).unwrap();
        check(fd.as_fd(), 8192).unwrap();
        assert_eq!(rustix::fs::ftruncate(&fd, 4096), Err(Errno::PERM));
        let (one, two) = (
            Mapping::new(fd.as_fd(), 4096, 4096).unwrap(),
            Mapping::new(fd.as_fd(), 0, 8192).unwrap(),
        );
        // SAFETY: both mappings are live and hold the byte.
        unsafe {
            assert_eq!(two.span().at(4100, 1).read_volatile(), 0);
            one.span().at(4, 1).write_volatile(7);
            assert_eq!(two.span().at(4100, 1).read_volatile(), 7);
        }
    }

    #[test]
    fn memory_that_can_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let error = check(fd.as_fd(), 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().contains("expected F_SEAL_SHRINK"), "{error}");
    }

    #[test]
    fn memory_that_is_too_small_or_no_memfd_is_refused() {
        let fd = create("test", 4096).unwrap();
        let error = check(fd.as_fd(), 4097).unwrap_err();
        assert!(error.to_string().contains("found 4096 bytes of memory"), "{error}");
        let file = std::fs::File::open("/dev/null").unwrap();
        let error = check(file.as_fd(), 0).unwrap_err();
        assert!(error.to_string().contains("no memfd"), "{error}");
    }

    #[test]
    fn own_memory_that_cannot_be_sealed_is_an_error_with_the_fix() {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let error = seal(fd.as_fd()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.fix().unwrap().contains("MFD_ALLOW_SEALING"), "{error}");
    }
}
