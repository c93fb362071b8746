//! The memory that a device reads and writes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An access to addresses where nothing is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing is mapped at {address:#x}, {bytes} bytes")]
pub struct Unmapped {
    /// The first byte.
    pub address: u64,
    /// Length.
    pub bytes: usize,
}

/// Memory by address. Aligned words of 4 and 8 bytes are never torn. Every access is ordered after the earlier ones.
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

    /// Replaces the 8 bytes at an aligned address by the result of `change`, in one atomic step, and returns the
    /// old value. Integers are in this machine's order.
    ///
    /// # Errors
    /// Nothing is mapped there.
    fn update(&self, address: u64, change: &dyn Fn(u64) -> u64) -> Result<u64, Unmapped>;
}

/// Memory that exists only in a test: areas at addresses of their own.
#[derive(Debug, Default)]
pub struct Arena {
    areas: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl Arena {
    /// Memory without areas.
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
    /// until it is taken from the device. Others access it only in ways that allow relaxed atomic accesses of
    /// another thread at the same time.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// The most bytes at an address that are read or written at once: aligned words, such as records of 4 bytes,
/// are never torn.
fn unit(address: u64, bytes: usize) -> usize {
    [8, 4]
        .into_iter()
        .find(|size| address.is_multiple_of(*size) && bytes as u64 >= *size)
        .unwrap_or(1) as usize
}

/// The atomic of a type at an address.
macro_rules! at {
    ($atomic:ident, $address:expr) => {{
        let address = $address as usize;
        debug_assert!(address.is_multiple_of(align_of::<$atomic>()));
        // SAFETY: by the contract of `HostMemory::new` the address is mapped while it is used, which is in
        // this statement; `unit` and its callers ensure alignment.
        unsafe { $atomic::from_ptr(std::ptr::with_exposed_provenance_mut(address)) }
    }};
}

impl Memory for HostMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unmapped> {
        let (mut at, mut rest) = (address, into);
        while !rest.is_empty() {
            let (part, behind) = rest.split_at_mut(unit(at, rest.len()));
            match part.len() {
                8 => {
                    part.copy_from_slice(&at!(AtomicU64, at).load(Ordering::Relaxed).to_ne_bytes())
                }
                4 => {
                    part.copy_from_slice(&at!(AtomicU32, at).load(Ordering::Relaxed).to_ne_bytes())
                }
                _ => part.fill(at!(AtomicU8, at).load(Ordering::Relaxed)),
            }
            at += part.len() as u64;
            rest = behind;
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Unmapped> {
        std::sync::atomic::fence(Ordering::SeqCst);
        let (mut at, mut rest) = (address, from);
        while !rest.is_empty() {
            let (part, behind) = rest.split_at(unit(at, rest.len()));
            if let Ok(word) = part.try_into() {
                at!(AtomicU64, at).store(u64::from_ne_bytes(word), Ordering::Relaxed);
            } else if let Ok(word) = part.try_into() {
                at!(AtomicU32, at).store(u32::from_ne_bytes(word), Ordering::Relaxed);
            } else {
                at!(AtomicU8, at).store(part[0], Ordering::Relaxed);
            }
            at += part.len() as u64;
            rest = behind;
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
            at!(AtomicU64, address).fetch_update(Ordering::SeqCst, Ordering::SeqCst, change);
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
        assert_eq!(
            [unit(8, 8), unit(8, 7), unit(4, 64), unit(12, 4), unit(4, 3), unit(6, 8)],
            [8, 4, 4, 4, 1, 1]
        );
        memory.write(base, &7_u64.to_ne_bytes()).unwrap();
        assert_eq!(memory.update(base, &|old| old + 5).unwrap(), 7);
        assert_eq!(buffer[0], 12);
    }
}
