//! The memory that a device reads and writes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An access to addresses that nothing is mapped at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing is mapped at {address:#x}, {bytes} bytes")]
pub struct Unmapped {
    /// The first byte.
    pub address: u64,
    /// Length.
    pub bytes: usize,
}

/// Memory by address. Aligned 8-byte words are never torn. Every access is ordered behind those before it.
pub trait Memory: Send {
    /// Reads.
    ///
    /// # Errors
    /// Nothing is mapped there.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unmapped>;

    /// Writes.
    ///
    /// # Errors
    /// Nothing is mapped there.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), Unmapped>;

    /// Replaces the 8 bytes at an aligned address by what `change` makes of them, at once, and returns what
    /// was there. Integers are in this machine's order.
    ///
    /// # Errors
    /// Nothing is mapped there.
    fn update(&self, address: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, Unmapped>;
}

/// Memory that exists in a test only: areas at addresses of their own.
#[derive(Debug, Default)]
pub struct Arena {
    areas: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl Arena {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes an area of zeros that begins at a multiple of 4096, and returns where. Areas do not touch.
    pub fn allocate(&self, bytes: usize) -> u64 {
        let mut areas = self.areas();
        let last = areas.last_key_value().map_or(0x10_0000, |(at, area)| at + area.len() as u64);
        let at = (last + 2 * 4096) & !4095;
        areas.insert(at, vec![0; bytes]);
        at
    }

    fn areas(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        self.areas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(
        &self,
        address: u64,
        bytes: usize,
        then: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, Unmapped> {
        let mut areas = self.areas();
        let found = areas.range_mut(..=address).next_back().and_then(|(begin, area)| {
            let offset = usize::try_from(address - begin).ok()?;
            area.get_mut(offset..offset.checked_add(bytes)?)
        });
        found.map(then).ok_or(Unmapped { address, bytes })
    }
}

impl<M: Memory + Sync + ?Sized> Memory for std::sync::Arc<M> {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        (**self).read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Unmapped> {
        (**self).write(address, from)
    }

    fn update(&self, address: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, Unmapped> {
        (**self).update(address, change)
    }
}

impl Memory for Arena {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        self.with(address, into.len(), |area| into.copy_from_slice(area))
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Unmapped> {
        self.with(address, from.len(), |area| area.copy_from_slice(from))
    }

    fn update(&self, address: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, Unmapped> {
        self.with(address, 8, |area| {
            let mut word = [0; 8];
            word.copy_from_slice(area);
            let old = u64::from_ne_bytes(word);
            area.copy_from_slice(&change(old).to_ne_bytes());
            old
        })
    }
}

/// The memory of this process, by pointers.
#[derive(Debug)]
pub struct HostMemory(());

impl HostMemory {
    /// Takes the memory of this process.
    ///
    /// # Safety
    /// Everything that the device is given (regions, umems, queues, doorbell records, registers) stays mapped
    /// until it is taken from the device, and is touched by others in ways that bear with another thread's
    /// relaxed atomic accesses.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// Whole words where both ends allow it, so that nothing aligned is torn.
fn words(address: u64, bytes: usize) -> (usize, usize) {
    let head = (address.wrapping_neg() as usize % 8).min(bytes);
    (head, (bytes - head) / 8 * 8)
}

fn byte(address: u64) -> &'static AtomicU8 {
    // SAFETY: by the contract of `HostMemory::new` the address is mapped while it is used, which is until the
    // caller's next statement; a byte has no alignment.
    unsafe { AtomicU8::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

fn word(address: u64) -> &'static AtomicU64 {
    debug_assert!(address.is_multiple_of(8));
    // SAFETY: as in `byte`; callers align.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

impl Memory for HostMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        let (head, middle) = words(address, into.len());
        for (offset, to) in into[..head].iter_mut().enumerate() {
            *to = byte(address + offset as u64).load(Ordering::Relaxed);
        }
        for (at, to) in into[head..head + middle].chunks_exact_mut(8).enumerate() {
            let at = address + (head + 8 * at) as u64;
            to.copy_from_slice(&word(at).load(Ordering::Relaxed).to_ne_bytes());
        }
        for (offset, to) in into.iter_mut().enumerate().skip(head + middle) {
            *to = byte(address + offset as u64).load(Ordering::Relaxed);
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Unmapped> {
        std::sync::atomic::fence(Ordering::SeqCst);
        let (head, middle) = words(address, from.len());
        for (offset, value) in from[..head].iter().enumerate() {
            byte(address + offset as u64).store(*value, Ordering::Relaxed);
        }
        for (at, value) in from[head..head + middle].chunks_exact(8).enumerate() {
            let mut whole = [0; 8];
            whole.copy_from_slice(value);
            let at = address + (head + 8 * at) as u64;
            word(at).store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
        for (offset, value) in from.iter().enumerate().skip(head + middle) {
            byte(address + offset as u64).store(*value, Ordering::Relaxed);
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn update(&self, address: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, Unmapped> {
        if !address.is_multiple_of(8) {
            return Err(Unmapped { address, bytes: 8 });
        }
        let change = |old| Some(change(old));
        let (Ok(old) | Err(old)) =
            word(address).fetch_update(Ordering::SeqCst, Ordering::SeqCst, change);
        Ok(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_refuses_what_is_outside_its_areas() {
        let arena = Arena::new();
        let (first, second) = (arena.allocate(16), arena.allocate(16));
        arena.write(first + 8, &[1; 8]).unwrap();
        let mut found = [0; 16];
        arena.read(first, &mut found).unwrap();
        assert_eq!(found, [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
        let error = arena.write(first + 9, &[1; 8]).unwrap_err();
        assert_eq!(error, Unmapped { address: first + 9, bytes: 8 });
        assert!(arena.read(second - 1, &mut [0]).is_err());
        assert_eq!(arena.update(second, &|old| old + 5).unwrap(), 0);
        assert_eq!(arena.update(second, &|old| old).unwrap(), 5);
    }

    #[test]
    fn the_memory_of_the_process_is_read_and_written_at_every_alignment() {
        // SAFETY: the device's memory is this buffer, which lives to the end of the test.
        let memory = unsafe { HostMemory::new() };
        let mut buffer = [0_u64; 8];
        let base = buffer.as_mut_ptr().expose_provenance() as u64;
        for offset in 0..9 {
            for length in 0..40 {
                let data: Vec<u8> = (0..length).map(|at| at as u8 + 1).collect();
                memory.write(base + offset, &data).unwrap();
                let mut found = vec![0; length];
                memory.read(base + offset, &mut found).unwrap();
                assert_eq!(found, data, "{offset} {length}");
            }
        }
        memory.write(base, &7_u64.to_ne_bytes()).unwrap();
        assert_eq!(memory.update(base, &|old| old + 5).unwrap(), 7);
        assert_eq!(buffer[0], 12);
    }
}
