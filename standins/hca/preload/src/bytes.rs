//! Fields of the kernel's structures, by offset, in this machine's order. Bytes behind the end are read as 0,
//! and are not written.

/// The bytes that a library sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    fn array<const N: usize>(self, at: usize) -> [u8; N] {
        std::array::from_fn(|i| self.0.get(at + i).copied().unwrap_or(0))
    }

    pub(crate) fn u8(self, at: usize) -> u8 {
        self.array::<1>(at)[0]
    }

    pub(crate) fn u16(self, at: usize) -> u16 {
        u16::from_ne_bytes(self.array(at))
    }

    pub(crate) fn u32(self, at: usize) -> u32 {
        u32::from_ne_bytes(self.array(at))
    }

    pub(crate) fn u64(self, at: usize) -> u64 {
        u64::from_ne_bytes(self.array(at))
    }

    /// The bytes from an offset on.
    pub(crate) fn from(self, at: usize) -> Self {
        Self(self.0.get(at..).unwrap_or_default())
    }
}

/// The bytes that the library gets back.
#[derive(Debug)]
pub(crate) struct Output(pub(crate) Vec<u8>);

impl Output {
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(room) = self.0.get_mut(at..at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    }

    pub(crate) fn u16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_ne_bytes());
    }

    pub(crate) fn u32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_ne_bytes());
    }

    pub(crate) fn u64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_ne_bytes());
    }
}
