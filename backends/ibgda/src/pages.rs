//! Memory of the host that a device reads and writes, and the order of stores to it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use tokenyard_sys_mlx5::doorbell::PAGE;

/// Pages of zeros.
#[derive(Debug)]
pub(crate) struct Pages {
    first: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory, which only atomics touch.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates at least `bytes` bytes; more than 0.
    pub(crate) fn new(bytes: usize) -> Self {
        let rounded = bytes.max(1).next_multiple_of(PAGE);
        // SAFETY: a power of two, and a size that was rounded up to a multiple of it; sizes of queues are small.
        let layout = unsafe { Layout::from_size_align_unchecked(rounded, PAGE) };
        // SAFETY: not of size 0.
        let first = unsafe { alloc_zeroed(layout) };
        let first = NonNull::new(first).unwrap_or_else(|| handle_alloc_error(layout));
        Self { first, layout }
    }

    pub(crate) fn address(&self) -> u64 {
        self.first.as_ptr().expose_provenance() as u64
    }

    /// Length, whole pages.
    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// The aligned word of 4 bytes at an offset.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.layout.size(), "inside the pages");
        // SAFETY: inside the pages and aligned, as was just checked; only this type and the device access it, and
        // both allow atomic access by the other.
        unsafe { AtomicU32::from_ptr(self.first.as_ptr().add(offset).cast()) }
    }

    pub(crate) fn store(&self, offset: usize, bytes: &[u8]) {
        for (at, part) in bytes.chunks_exact(4).enumerate() {
            let word = u32::from_ne_bytes(std::array::from_fn(|i| part[i]));
            self.word(offset + 4 * at).store(word, Ordering::Relaxed);
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once. The device no longer uses it: its umem has ended before.
        unsafe { dealloc(self.first.as_ptr(), self.layout) };
    }
}

/// Makes stores before it visible to the device before later stores.
pub(crate) fn order_stores() {
    // x86-64 does not reorder stores, also those to a register that is not cached; this fence stops the compiler
    // from moving them.
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
    // A device is outside the domain of the barriers between processors.
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}
