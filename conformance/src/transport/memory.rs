//! Window memory of the rig, and the bytes that travel.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use tokenyard_core::abi;
use tokenyard_core::transport::{MemoryNeeds, NO_WINDOW, Window};

use crate::device::DeviceMemory;

/// The content of untouched window memory.
pub(super) const UNTOUCHED: u8 = 0xa5;

/// One window of this rank. Peers write it while this rank reads, so no reference to its bytes is ever
/// made: bytes are copied in and out.
#[derive(Debug)]
pub(super) struct Area {
    base: *mut u8,
    bytes: usize,
    /// The mapping, if the rig made the memory; the transport frees its own.
    mapping: Option<Mapping>,
    /// The device that the memory lies on; none: the processor reads and writes it.
    device: Option<Rc<DeviceMemory>>,
}

impl Area {
    /// Views a window that the transport allocated, which frees it.
    pub(super) fn of_transport(window: &Window, device: Option<&Rc<DeviceMemory>>) -> Result<Self> {
        let device = device.filter(|_| window.kind != abi::TY_MEMORY_HOST).cloned();
        ensure!(
            window.kind == abi::TY_MEMORY_HOST || device.is_some(),
            "the transport allocated memory of kind {}; the rig expected host memory",
            window.kind
        );
        Ok(Self { base: window.pointer, bytes: window.bytes as usize, mapping: None, device })
    }

    /// Makes memory on a device, and its description for `register`.
    pub(super) fn on_device(
        id: u32,
        bytes: u64,
        needs: &MemoryNeeds,
        device: &Rc<DeviceMemory>,
    ) -> Result<(Self, Window)> {
        let window = device.allocate(id, bytes, needs)?;
        let (base, bytes) = (window.pointer, window.bytes as usize);
        Ok((Self { base, bytes, mapping: None, device: Some(Rc::clone(device)) }, window))
    }

    /// Makes memory that satisfies `needs` and no more, and its description for `register`.
    pub(super) fn new(id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<(Self, Window)> {
        let page = rustix::param::page_size();
        let has_file = needs.handles & abi::TY_HANDLE_MEMFD != 0;
        let bytes = (bytes as usize).next_multiple_of(page);
        // The part of a file that a window is begins at a page, as other processes map it.
        let least = if has_file { page } else { WORD };
        let alignment = usize::try_from(needs.alignment)?.max(least);
        let mapping = Mapping::new((bytes + 4 * alignment).next_multiple_of(page))?;
        let offset = aligned_behind(mapping.base as usize, alignment);
        let base = mapping.base.wrapping_add(offset);
        let mut window = Window {
            id,
            kind: abi::TY_MEMORY_HOST,
            pointer: base,
            bytes: bytes as u64,
            ..NO_WINDOW
        };
        if has_file {
            window.fd = mapping.fd.as_raw_fd();
            window.fd_offset = offset as u64;
            window.handle = abi::TY_HANDLE_MEMFD;
        }
        let area = Self { base, bytes, mapping: Some(mapping), device: None };
        if let Some(mapping) = &area.mapping {
            for (at, bytes) in area.beside(mapping) {
                // SAFETY: a part of the new mapping, which nothing else knows.
                unsafe { mapping.base.wrapping_add(at).write_bytes(UNTOUCHED, bytes) };
            }
        }
        Ok((area, window))
    }

    /// Checks that nothing was written beside the window, where the rig made the memory.
    pub(super) fn has_changed_nothing_beside(&self) -> Result<()> {
        let Some(mapping) = &self.mapping else { return Ok(()) };
        for (side, (at, bytes)) in ["before", "behind"].into_iter().zip(self.beside(mapping)) {
            // SAFETY: mapped while the mapping lives.
            let found = unsafe { copy_from(mapping.base.wrapping_add(at), bytes) };
            compare(&format!("memory {side} a window"), &found, &vec![UNTOUCHED; bytes])?;
        }
        Ok(())
    }

    /// The memory of the mapping before the window and behind it, as far as one looks at it: places and bytes.
    fn beside(&self, mapping: &Mapping) -> [(usize, usize); 2] {
        let offset = self.base as usize - mapping.base as usize;
        let end = offset + self.bytes;
        let before = offset.min(BESIDE);
        [(offset - before, before), (end, (mapping.bytes - end).min(BESIDE))]
    }

    /// Checks that the rig's memory is still its own when the transport has closed.
    pub(super) fn outlives_its_transport(mut self) -> Result<()> {
        let beside = self.has_changed_nothing_beside();
        let is_own = self.mapping.as_ref().is_none_or(Mapping::has_its_file);
        if !is_own {
            // Its number may be another file's by now.
            std::mem::forget(self.mapping.take());
        }
        ensure!(
            is_own,
            "`close` has closed the descriptor of a window, which is the host's; expected it open"
        );
        beside
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} leave it");
        self.base.wrapping_add(offset)
    }

    /// Makes every byte `value`.
    pub(super) fn fill(&self, value: u8) {
        if self.device.is_some() {
            return self.write(0, &vec![value; self.bytes]);
        }
        // SAFETY: the whole window is mapped and writable while `self` lives (`new`, or the
        // transport's promise behind `of_transport`).
        unsafe { self.base.write_bytes(value, self.bytes) }
    }

    /// Copies `data` to `offset`.
    pub(super) fn write(&self, offset: usize, data: &[u8]) {
        let to = self.at(offset, data.len());
        match &self.device {
            // SAFETY: `at` checked the range, which is valid while `self` lives; `data` is not in it.
            Some(device) => unsafe { device.copy(to, data.as_ptr(), data.len()) },
            // SAFETY: the same.
            None => unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) },
        }
    }

    /// Copies `bytes` bytes at `offset`.
    pub(super) fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let from = self.at(offset, bytes);
        match &self.device {
            Some(device) => {
                let mut copy = vec![0_u8; bytes];
                // SAFETY: as in `write`.
                unsafe { device.copy(copy.as_mut_ptr(), from, bytes) };
                copy
            }
            // SAFETY: as in `write`.
            None => unsafe { copy_from(from, bytes) },
        }
    }

    /// Loads the 8-byte word at `offset`, a multiple of 8. Peers write it by value (INV-3).
    pub(super) fn load(&self, offset: usize) -> u64 {
        match &self.device {
            Some(_) => {
                let mut word = [0; 8];
                word.copy_from_slice(&self.read(offset, 8));
                u64::from_ne_bytes(word)
            }
            None => self.word(offset).load(Ordering::Acquire),
        }
    }

    /// Stores a word.
    pub(super) fn store(&self, offset: usize, value: u64) {
        match &self.device {
            Some(_) => self.write(offset, &value.to_ne_bytes()),
            None => self.word(offset).store(value, Ordering::Release),
        }
    }

    /// The word at `offset` in host memory.
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "{offset} is not the place of a word");
        // SAFETY: mapped while `self` lives, aligned, and only accessed as a whole word meanwhile.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }
}

/// Bytes on either side of a window at which one looks.
const BESIDE: usize = 1024;

/// The least alignment of a window: that of its values.
const WORD: usize = 8;

/// The distance from `base` to an address behind it that has this alignment, and no larger one.
fn aligned_behind(base: usize, alignment: usize) -> usize {
    let mut place = (base + 1).next_multiple_of(alignment);
    if place.is_multiple_of(2 * alignment) {
        place += alignment;
    }
    place - base
}

/// Copies memory that other ranks may write.
///
/// # Safety
/// `bytes` bytes at `from` are mapped.
pub(super) unsafe fn copy_from(from: *const u8, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0_u8; bytes];
    // SAFETY: by this function's contract; the copy is fresh memory.
    unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), bytes) };
    copy
}

/// A shared mapping of a memfd.
#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    bytes: usize,
    fd: OwnedFd,
    /// The number of the file behind it.
    file: u64,
}

impl Mapping {
    fn new(bytes: usize) -> Result<Self> {
        // Sealable, because a transport that maps it in another process must be sure that it cannot shrink.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd =
            rustix::fs::memfd_create("tokenyard-conformance", flags).context("memfd_create")?;
        rustix::fs::ftruncate(&fd, bytes as u64).context("size window memory")?;
        let (prot, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(null, bytes, prot, MapFlags::SHARED, &fd, 0) }
            .context("map window memory")?;
        let file = rustix::fs::fstat(&fd).context("the file of window memory")?.st_ino;
        Ok(Self { base: base.cast(), bytes, fd, file })
    }

    /// Whether the descriptor is still that of the file.
    fn has_its_file(&self) -> bool {
        rustix::fs::fstat(&self.fd).is_ok_and(|about| about.st_ino == self.file)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once; the rig drops the transport before its areas.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Bytes that identify their payload: every word depends on `seed` and on its place.
pub(super) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let word = |i: u64| {
        let mixed = (seed << 24 ^ i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ mixed >> 29
    };
    let mut all: Vec<u8> =
        (0..bytes.div_ceil(8) as u64).flat_map(|i| word(i).to_le_bytes()).collect();
    all.truncate(bytes);
    all
}

/// Compares found bytes with expected ones.
///
/// # Errors
/// Names `what` and the first byte that differs.
pub(super) fn compare(what: &str, found: &[u8], expected: &[u8]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let differs = |i: &usize| found.get(*i) != expected.get(*i);
    let longest = found.len().max(expected.len());
    let wrong = (0..longest).filter(differs).count();
    let first = (0..longest).find(differs).unwrap_or(0);
    let show = |bytes: &[u8]| {
        bytes[first.min(bytes.len())..]
            .iter()
            .take(8)
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    anyhow::bail!(
        "{what}: {wrong} of {} bytes are wrong, the first at {first}: found {}.., expected {}..",
        expected.len(),
        show(found),
        show(expected)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_different_seeds_differ_in_every_word() {
        let (one, two) = (pattern(1, 4099), pattern(2, 4099));
        assert_eq!(one.len(), 4099);
        for (a, b) in one.chunks(8).zip(two.chunks(8)) {
            assert!(a.len() < 8 || a != b);
        }
    }

    #[test]
    fn a_window_is_aligned_as_asked_and_no_better() {
        for base in [0x1000, 0x7fff_0000, 0x3000] {
            for alignment in [8, 64, 4096, 1 << 21] {
                let place = base + aligned_behind(base, alignment);
                assert!(place.is_multiple_of(alignment) && !place.is_multiple_of(2 * alignment));
                assert!(place > base && place <= base + 2 * alignment, "{base:#x} {alignment}");
            }
        }
    }

    #[test]
    fn a_difference_is_named_with_its_place_and_both_values() {
        compare("it", &[1, 2], &[1, 2]).unwrap();
        let text = compare("it", &[1, 3, 2], &[1, 2, 2]).unwrap_err().to_string();
        assert!(text.contains("1 of 3 bytes are wrong, the first at 1"), "{text}");
        assert!(text.contains("found 0302.., expected 0202.."), "{text}");
        assert!(compare("it", &[1], &[1, 2]).is_err());
    }
}
