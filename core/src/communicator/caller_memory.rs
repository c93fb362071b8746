//! Tensors of callers from another language, which pass addresses instead of slices.

use super::tensor::{check_alignment, present, wrong};
use crate::Result;
use crate::abi;
use crate::moe::DType;

/// A tensor in memory of the caller, named by its address, for callers from another language.
#[derive(Clone, Copy, Debug)]
pub struct CallerMemory {
    /// The first element. May be null where a tensor has no elements.
    pub data: *mut u8,
    /// The type of the elements.
    pub dtype: DType,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Elements from one row to the next, and from one column to the next.
    pub stride: [usize; 2],
    /// The ordinal of the device whose memory it is; none for host memory.
    pub device: Option<i32>,
}

impl CallerMemory {
    pub(super) fn check(&self) -> Result<abi::TyTensor> {
        let Self { data, dtype, shape, stride, .. } = *self;
        let reached = bytes_reached(dtype, shape, stride).filter(|n| isize::try_from(*n).is_ok());
        let Some(reached) = reached else {
            return Err(wrong(format!(
                "found a {} x {} {dtype} tensor with strides {stride:?}; expected one that fits an \
                 address space",
                shape[0], shape[1]
            )));
        };
        if reached > 0 && data.is_null() {
            return Err(wrong(format!("found no address; expected that of {reached} bytes")));
        }
        if reached > 0 {
            check_alignment(data, dtype)?;
        }
        Ok(present(abi::TyTensor {
            data,
            dtype: dtype.code(),
            reserved: 0,
            shape: shape.map(|n| n as u64),
            stride: stride.map(|n| n as i64),
        }))
    }
}

/// Bytes from the first element to the end of the last; none where a number overflows.
pub(super) fn bytes_reached(dtype: DType, shape: [usize; 2], stride: [usize; 2]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let last = |i: usize| (shape[i] - 1).checked_mul(stride[i]);
    last(0)?.checked_add(last(1)?)?.checked_add(1)?.checked_mul(dtype.bytes())
}

#[cfg(test)]
mod tests {
    use super::super::{TensorMut, TensorRef};
    use super::*;

    #[test]
    fn memory_of_the_caller_is_judged_before_it_is_a_tensor() {
        let mut data = [0_f32; 8];
        let good = CallerMemory {
            data: data.as_mut_ptr().cast(),
            dtype: DType::F32,
            shape: [2, 4],
            stride: [4, 1],
            device: None,
        };
        // SAFETY: of an accepted tensor, at most the eight elements are read.
        let judge = |memory: CallerMemory| unsafe { TensorRef::from_memory(&memory) };
        assert_eq!(judge(good).expect("eight elements").elements::<f32>(), data);
        let text = |memory| judge(memory).expect_err("refused").to_string();
        let null = CallerMemory { data: std::ptr::null_mut(), ..good };
        assert!(text(null).contains("found no address; expected that of 32 bytes"));
        let odd = CallerMemory { data: good.data.wrapping_add(2), ..good };
        assert!(text(odd).contains("expected a multiple of 4 for fp32"));
        let far = CallerMemory { stride: [usize::MAX / 2, 1], ..good };
        assert!(text(far).contains("fits an address space"));
        // A framework gives an empty tensor no address; null means that a tensor is absent.
        let empty = CallerMemory { shape: [0, 4], ..null };
        assert!(!judge(empty).expect("no element").raw().data.is_null());
        // SAFETY: as above.
        let gaps = unsafe { TensorMut::from_memory(&CallerMemory { stride: [1, 2], ..good }) };
        assert!(gaps.expect_err("gaps").to_string().contains("rows without gaps"));
    }

    #[test]
    fn memory_of_the_caller_on_a_device_is_not_looked_at() {
        let memory = CallerMemory {
            data: std::ptr::without_provenance_mut(4096),
            dtype: DType::U8,
            shape: [1, 16],
            stride: [16, 1],
            device: Some(3),
        };
        // SAFETY: no code reads the memory of a device.
        let tensor = unsafe { TensorRef::from_memory(&memory).expect("an address") };
        assert_eq!((tensor.device(), tensor.is_on_device()), (Some(3), true));
        assert!(tensor.bytes().is_empty() && tensor.memory().is_empty());
        let text = tensor.to_vec().expect_err("not ours").to_string();
        assert!(text.contains("memory of the caller on device 3"), "{text}");
    }
}
