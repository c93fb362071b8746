//! Tensors as messages: bytes, whatever the shape.

use tokenyard_core::Result;
use tokenyard_core::communicator::{CallerMemory, TensorMut, TensorRef};

use super::Tensor;
use crate::dlpack;
use crate::errors::invalid;

impl Tensor {
    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// All elements, which follow each other in any shape: `[1, n]`.
    fn message(&self) -> Result<CallerMemory> {
        let count = self.shape.iter().try_fold(1_i64, |count, n| count.checked_mul(*n));
        let has_no_gaps = || {
            let wanted = dlpack::contiguous(&self.shape);
            let mut all = self.shape.iter().zip(&self.strides).zip(&wanted);
            // The stride of a dimension with one element is never used.
            all.all(|((length, found), wanted)| *length == 1 || found == wanted)
        };
        let is_whole = self.shape.iter().all(|n| *n >= 0);
        let Some(count) = count.filter(|count| is_whole && (*count == 0 || has_no_gaps())) else {
            let text = format!(
                "{}: found shape {:?} with strides {:?}; expected elements that follow each other",
                self.name, self.shape, self.strides
            );
            return Err(invalid(text).with_fix("copy it, as by .contiguous() of torch"));
        };
        let (data, dtype, device, count) = (self.data, self.dtype, self.device, count as usize);
        Ok(CallerMemory { data, dtype, shape: [1, count], stride: [count, 1], device })
    }

    /// All elements of a tensor of any shape, for core.
    ///
    /// # Safety
    /// As [`get`](Self::get).
    ///
    /// # Errors
    /// Gaps, or an address that cannot be.
    pub(crate) unsafe fn get_message(&self) -> Result<TensorRef<'static>> {
        // SAFETY: as in `get`.
        unsafe { TensorRef::from_memory(&self.message()?).map_err(|e| self.named(&e)) }
    }

    /// As [`get_message`](Self::get_message), to be written.
    ///
    /// # Safety
    /// As [`get_mut`](Self::get_mut).
    ///
    /// # Errors
    /// As there; memory that may not be written.
    pub(crate) unsafe fn get_message_mut(&self) -> Result<TensorMut<'static>> {
        // SAFETY: by this function's contract.
        unsafe { self.writable(&self.message()?) }
    }
}
