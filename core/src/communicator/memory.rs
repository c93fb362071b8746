//! Checks the memory of an operation's tensors. Kernels of a device fault on memory that they cannot
//! load, and a fault ends the whole context, so the check comes before an operation is entered.

use super::tensor::TensorRef;
use crate::moe::DType;
use crate::{Error, ErrorKind, Result};

/// Bytes that a device loads at once.
const VECTOR: usize = 16;

/// A tensor of a call.
pub(crate) struct Argument<'a> {
    name: &'static str,
    tensor: Option<TensorRef<'a>>,
    /// True if it holds rows of H elements, which move in vectors of 16 bytes.
    is_rows: bool,
}

impl<'a> Argument<'a> {
    /// Rows of H elements.
    pub(super) fn rows(name: &'static str, tensor: Option<TensorRef<'a>>) -> Self {
        Self { name, tensor, is_rows: true }
    }

    /// Anything else.
    pub(crate) fn other(name: &'static str, tensor: Option<TensorRef<'a>>) -> Self {
        Self { name, tensor, is_rows: false }
    }

    fn check_address(&self, tensor: &TensorRef<'_>) -> Result<()> {
        let expected = match self.is_rows {
            true => VECTOR,
            false => tensor.dtype().map_or(1, DType::bytes),
        };
        let found = tensor.raw().data as usize;
        if tensor.rows() * tensor.cols() == 0 || found.is_multiple_of(expected) {
            return Ok(());
        }
        refuse(format!(
            "{}: found address {found:#x}; expected a multiple of {expected} bytes",
            self.name
        ))
    }
}

/// Checks that all tensors lie where the kernel set works: on the device with this ordinal, or on the
/// host.
///
/// # Errors
/// `InvalidInput`, naming the tensor.
pub(crate) fn check_memory(arguments: &[Argument<'_>], device: Option<i32>) -> Result<()> {
    for argument in arguments {
        let Some(tensor) = &argument.tensor else { continue };
        check_place(argument.name, tensor.device(), device)?;
        if device.is_some() {
            argument.check_address(tensor)?;
        }
    }
    Ok(())
}

fn check_place(name: &str, found: Option<i32>, expected: Option<i32>) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let [found, expected] = [found, expected].map(|place| match place {
        None => "host memory".to_owned(),
        Some(device) => format!("memory of device {device}"),
    });
    refuse(format!("{name}: found {found}; expected {expected}"))
}

fn refuse<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, "check arguments", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_another_place_is_refused_by_name() {
        let check = |found, expected| check_place("x", found, expected);
        assert!(check(None, None).is_ok() && check(Some(1), Some(1)).is_ok());
        let text = check(Some(0), Some(1)).unwrap_err().to_string();
        assert!(
            text.contains("x: found memory of device 0; expected memory of device 1"),
            "{text}"
        );
        assert!(check(Some(0), None).unwrap_err().to_string().contains("expected host memory"));
    }

    #[test]
    fn host_memory_is_refused_where_the_communicator_works_on_a_device() {
        let weights = [1.0_f32];
        let tensor = TensorRef::from_slice(&weights, 1, 1).unwrap();
        let arguments = [Argument::other("weights", Some(tensor)), Argument::rows("bias 0", None)];
        assert!(check_memory(&arguments, None).is_ok());
        let text = check_memory(&arguments, Some(3)).unwrap_err().to_string();
        assert!(text.contains("weights: found host memory; expected memory of device 3"), "{text}");
    }

    #[test]
    fn rows_need_addresses_of_whole_vectors_and_lists_those_of_their_type() {
        let words = [0_u64; 8];
        // SAFETY: plain bytes of the array.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), 64) };
        let start = bytes.as_ptr().align_offset(16);
        let at = |offset: usize, rows: usize| {
            let bytes = &bytes[start + offset..][..16 * rows];
            TensorRef::from_bytes(bytes, DType::F32, rows, 4).unwrap()
        };
        let rows = |tensor| Argument::rows("out", None).check_address(&tensor);
        let list = |tensor| Argument::other("weights", None).check_address(&tensor);
        assert!(rows(at(0, 1)).is_ok() && rows(at(16, 1)).is_ok() && list(at(4, 1)).is_ok());
        let text = rows(at(4, 1)).unwrap_err().to_string();
        assert!(text.contains("out: found address") && text.contains("multiple of 16"), "{text}");
        // No element of an empty tensor is loaded.
        assert!(rows(at(4, 0)).is_ok());
    }
}
