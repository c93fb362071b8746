//! Registered memory: that of this rank, and the places of its peers' memory.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi;
use crate::cuda::{Cuda, Mapping};
use crate::failure::{Failure, Result};
use crate::mesh::{Mesh, PeerMessage};

/// Where the region of a rank is.
#[derive(Debug)]
enum RegionPlace {
    /// In this process.
    Own,
    /// In the memory of another process.
    Process { id: u64, base: u64 },
    /// Mapped memory of another GPU, or of another process on this GPU.
    Mapped { mapping: Mapping, offset: u64 },
    /// Only its owner reaches it.
    Unreachable,
}

/// A region that all ranks have registered, under a number that is the same on all ranks.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) on_device: bool,
    places: Vec<RegionPlace>,
    /// Totals of signals by word, where the region holds signals.
    totals: Vec<AtomicU64>,
}

/// Memory that NCCL registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) on_device: bool,
}

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Host(u64),
    Process(u64, u64),
    Device(u64),
}

impl Region {
    /// Registers memory as number `number`. Collective.
    pub(crate) fn new(
        mesh: &mut Mesh,
        cuda: Option<&Arc<Cuda>>,
        memory: Memory,
        number: u64,
    ) -> Result<Self> {
        let Memory { base, bytes, on_device } = memory;
        let no_cuda = || {
            Failure::new(abi::INVALID_USAGE, "found CUDA memory, and no CUDA context in `connect`")
        };
        let exported = if on_device { cuda.ok_or_else(no_cuda)?.export(base)? } else { None };
        let (words, fd) = match &exported {
            Some(it) => ([number, 1, it.offset, it.bytes], Some(it.fd.as_fd())),
            None if on_device => ([number, 2, 0, 0], None),
            None => ([number, 0, base, u64::from(std::process::id())], None),
        };
        let all = mesh.swap(words, fd)?;
        let place = |message: Option<PeerMessage>| {
            let Some(PeerMessage { words, fd }) = message else { return Ok(RegionPlace::Own) };
            if words[0] != number {
                let text = format!("a peer registers region {}; expected {number}", words[0]);
                return Err(Failure::new(abi::INTERNAL_ERROR, text));
            }
            Ok(match (words[1], fd, cuda) {
                (0, None, _) => RegionPlace::Process { id: words[3], base: words[2] },
                (1, Some(fd), Some(cuda)) if words[2] < words[3] => {
                    RegionPlace::Mapped { mapping: cuda.import(&fd, words[3])?, offset: words[2] }
                }
                _ => RegionPlace::Unreachable,
            })
        };
        let places = all.into_iter().map(place).collect::<Result<_>>();
        // A rank that fails still meets the others: then they see its error, not a timeout of their own.
        mesh.meet()?;
        let totals = if exported.is_none() { bytes.div_ceil(8) } else { 0 };
        let totals = (0..totals).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { base, bytes, on_device, places: places?, totals })
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        let text = format!("found {bytes} bytes at {offset}; expected them in {}", self.bytes);
        Err(Failure::new(abi::INVALID_ARGUMENT, text))
    }

    /// A range of the region on this rank.
    pub(crate) fn own(&self, offset: u64, bytes: u64) -> Result<End> {
        self.check(offset, bytes)?;
        let at = self.base + offset;
        Ok(if self.on_device { End::Device(at) } else { End::Host(at) })
    }

    /// The same range on any rank, as seen from this process.
    pub(crate) fn of_rank(&self, rank: usize, offset: u64, bytes: u64) -> Result<End> {
        self.check(offset, bytes)?;
        match self.places.get(rank) {
            Some(RegionPlace::Own) => self.own(offset, bytes),
            Some(RegionPlace::Process { id, base }) => Ok(End::Process(*id, base + offset)),
            Some(RegionPlace::Mapped { mapping, offset: first }) => {
                Ok(End::Device(mapping.at + first + offset))
            }
            Some(RegionPlace::Unreachable) | None => {
                let text = format!("found no way to the memory of rank {rank}");
                Err(Failure::new(abi::INVALID_USAGE, text))
            }
        }
    }

    /// Adds to a signal of this rank.
    pub(crate) fn raise(&self, cuda: Option<&Arc<Cuda>>, offset: u64, add: u64) -> Result<()> {
        self.check(offset, 8)?;
        let total = usize::try_from(offset / 8).ok().and_then(|word| self.totals.get(word));
        let (Some(total), true) = (total, offset.is_multiple_of(8)) else {
            let text = format!("found a signal at {offset} of a region that peers write");
            return Err(Failure::new(abi::INVALID_USAGE, text));
        };
        let total = total.fetch_add(add, Ordering::Relaxed).wrapping_add(add);
        match (self.own(offset, 8)?, cuda) {
            (End::Device(at), Some(cuda)) => cuda.write(at, total),
            (End::Host(at), _) => {
                // SAFETY: an aligned word of memory that is registered; others access it as a whole word.
                unsafe { AtomicU64::from_ptr(at as *mut u64) }.store(total, Ordering::Release);
                Ok(())
            }
            _ => Err(Failure::new(abi::INTERNAL_ERROR, "found a signal on a device without CUDA")),
        }
    }
}

/// Copies between memory of the host, of this process or of another.
pub(crate) fn copy_on_host(to: End, from: End, bytes: usize) -> Result<()> {
    let iovec = |at: u64| libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes };
    let (moved, what) = match (to, from) {
        (End::Host(to), End::Host(from)) => {
            // SAFETY: both ranges are in registered regions of this process.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            return Ok(());
        }
        (End::Process(id, to), End::Host(from)) => {
            // SAFETY: the source is registered; the kernel checks the range in the other process.
            let moved =
                unsafe { libc::process_vm_writev(id as i32, &iovec(from), 1, &iovec(to), 1, 0) };
            (moved, "process_vm_writev")
        }
        (End::Host(to), End::Process(id, from)) => {
            // SAFETY: the destination is registered; the kernel checks the range in the other process.
            let moved =
                unsafe { libc::process_vm_readv(id as i32, &iovec(to), 1, &iovec(from), 1, 0) };
            (moved, "process_vm_readv")
        }
        _ => return Err(Failure::new(abi::INVALID_USAGE, "found a copy between host and device")),
    };
    match usize::try_from(moved) {
        Ok(moved) if moved == bytes => Ok(()),
        Ok(moved) => Err(Failure::system(what, format!("moved {moved} of {bytes} bytes"))),
        Err(_) => Err(Failure::system(what, std::io::Error::last_os_error())),
    }
}
