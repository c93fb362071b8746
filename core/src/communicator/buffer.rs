use std::sync::Arc;

use super::components::Components;
use super::output::Handle;
use super::tensor::{TensorMut, TensorRef};
use crate::abi;
use crate::moe::DType;
use crate::{Error, ErrorKind, Result};

/// Memory that a device communicator can work on, for callers without memory of their own: tools and tests.
/// A framework has its own tensors.
#[derive(Debug)]
pub struct Buffer {
    components: Arc<Components>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: an address of device memory; `&self` reaches it through the components' lock only.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Handle {
    /// As [`Communicator::works_on_device`](super::Communicator::works_on_device), for the communicator that the
    /// handle belongs to.
    pub fn is_on_device(&self) -> bool {
        self.routing.components.user.device.is_some()
    }

    /// As [`Communicator::buffer`](super::Communicator::buffer), on the communicator that the handle belongs to.
    ///
    /// # Errors
    /// As there.
    pub fn buffer(&self, bytes: &[u8]) -> Result<Buffer> {
        Buffer::new(&self.routing.components, bytes)
    }
}

impl Buffer {
    pub(super) fn new(components: &Arc<Components>, bytes: &[u8]) -> Result<Self> {
        let pointer = components.kernels().tensor_alloc(bytes.len() as u64)?;
        let buffer = Self { components: Arc::clone(components), pointer, bytes: bytes.len() };
        // SAFETY: memory of this length that was just allocated.
        unsafe { components.kernels().copy(pointer, bytes.as_ptr(), bytes.len() as u64)? };
        Ok(buffer)
    }

    /// A tensor over the front of the buffer, with strides in elements.
    ///
    /// # Errors
    /// A tensor that leaves the buffer.
    pub fn tensor(
        &self,
        dtype: DType,
        shape: [usize; 2],
        stride: [usize; 2],
    ) -> Result<TensorRef<'_>> {
        let raw = self.raw(dtype, shape, stride)?;
        // SAFETY: inside memory that lives as long as `self` and is written through `&mut` only.
        Ok(unsafe { TensorRef::from_raw(raw, &self.components) })
    }

    /// A contiguous tensor over the front of the buffer, to be written.
    ///
    /// # Errors
    /// A tensor that leaves the buffer.
    pub fn tensor_mut(&mut self, dtype: DType, shape: [usize; 2]) -> Result<TensorMut<'_>> {
        let raw = self.raw(dtype, shape, [shape[1], 1])?;
        // SAFETY: as above, borrowed exclusively.
        Ok(unsafe { TensorMut::from_raw(raw, &self.components) })
    }

    fn raw(&self, dtype: DType, shape: [usize; 2], stride: [usize; 2]) -> Result<abi::TyTensor> {
        let last = (0..2).try_fold(0_usize, |last, i| {
            last.checked_add(shape[i].saturating_sub(1).checked_mul(stride[i])?)
        });
        let empty = shape.contains(&0);
        let needed = last.and_then(|last| last.checked_add(1)?.checked_mul(dtype.bytes()));
        if !empty && needed.is_none_or(|needed| needed > self.bytes) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "make tensor",
                format!(
                    "a {} x {} {dtype} tensor with strides {stride:?} does not fit {} bytes",
                    shape[0], shape[1], self.bytes
                ),
            ));
        }
        Ok(abi::TyTensor {
            data: self.pointer,
            dtype: dtype.code(),
            reserved: 0,
            shape: shape.map(|n| n as u64),
            stride: stride.map(|n| n as i64),
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: operations borrow the tensors that they use, and so this buffer.
        unsafe { self.components.kernels().tensor_free(self.pointer) }
    }
}
