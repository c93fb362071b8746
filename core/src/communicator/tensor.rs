use std::marker::PhantomData;
use std::ptr::NonNull;

use super::caller_memory::{CallerMemory, bytes_reached};
use super::components::Components;
use crate::abi;
use crate::host::NO_TENSOR;
use crate::moe::DType;
use crate::{Error, ErrorKind, Result};

/// A plain element type of host memory.
///
/// # Safety
/// Every bit pattern is a value, and [`Element::DTYPE`] gives its size and meaning.
pub unsafe trait Element: Copy + 'static {
    /// The type code.
    const DTYPE: DType;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),+) => {$(
        // SAFETY: a plain number type of the stated size.
        unsafe impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }
    )+};
}

element!(half::bf16 => Bf16, half::f16 => F16, f32 => F32, u8 => U8, i32 => I32, i64 => I64);

/// The owner of a tensor's memory, and so its place.
#[derive(Clone, Copy, Debug)]
enum MemoryOwner<'a> {
    Host,
    /// On the device of a communicator, in memory of that communicator.
    Communicator(&'a Components),
    /// On the device with this ordinal, in memory of the caller.
    Caller(i32),
}

impl<'a> MemoryOwner<'a> {
    fn of(components: &'a Components) -> Self {
        components.user.device.map_or(Self::Host, |_| Self::Communicator(components))
    }

    fn device(self) -> Option<i32> {
        match self {
            Self::Host => None,
            Self::Communicator(components) => components.user.device,
            Self::Caller(device) => Some(device),
        }
    }
}

/// A borrowed two-dimensional tensor: `[rows, cols]` with strides in elements. It lies in host
/// memory, or in the memory of a communicator's device.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    raw: abi::TyTensor,
    owner: MemoryOwner<'a>,
    life: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of plain bytes.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorRef<'_> {}

impl<'a> TensorRef<'a> {
    /// A contiguous tensor over typed elements.
    ///
    /// # Errors
    /// A length that is not `rows * cols`.
    pub fn from_slice<T: Element>(data: &'a [T], rows: usize, cols: usize) -> Result<Self> {
        check_length(data.len(), rows, cols, T::DTYPE)?;
        Ok(Self::contiguous(data.as_ptr().cast(), T::DTYPE, rows, cols))
    }

    /// A contiguous tensor over bytes.
    ///
    /// # Errors
    /// A length that is not `rows * cols` elements, or an address that is not aligned for them.
    pub fn from_bytes(data: &'a [u8], dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        if !data.len().is_multiple_of(dtype.bytes()) {
            return Err(wrong(format!(
                "found {} bytes; expected whole elements of {dtype}",
                data.len()
            )));
        }
        check_length(data.len() / dtype.bytes(), rows, cols, dtype)?;
        if !data.is_empty() {
            check_alignment(data.as_ptr(), dtype)?;
        }
        Ok(Self::contiguous(data.as_ptr(), dtype, rows, cols))
    }

    /// A tensor with any strides (in elements, not negative) over bytes: for scales.
    ///
    /// # Errors
    /// Strides that leave `data`, or an address that is not aligned.
    pub fn strided(
        data: &'a [u8],
        dtype: DType,
        shape: [usize; 2],
        stride: [usize; 2],
    ) -> Result<Self> {
        let needed = bytes_reached(dtype, shape, stride);
        if needed.is_none_or(|n| n > data.len()) {
            return Err(wrong(format!(
                "a {} x {} {dtype} tensor with strides {stride:?} does not fit {} bytes",
                shape[0],
                shape[1],
                data.len()
            )));
        }
        if needed != Some(0) {
            check_alignment(data.as_ptr(), dtype)?;
        }
        Ok(Self {
            raw: abi::TyTensor {
                data: data.as_ptr().cast_mut(),
                dtype: dtype.code(),
                reserved: 0,
                shape: [shape[0] as u64, shape[1] as u64],
                stride: [stride[0] as i64, stride[1] as i64],
            },
            owner: MemoryOwner::Host,
            life: PhantomData,
        })
    }

    /// A tensor in memory of the caller that the host or a device can reach.
    ///
    /// # Safety
    /// Every element of `memory` is valid and not written for `'a`; the memory lies on
    /// [`CallerMemory::device`].
    ///
    /// # Errors
    /// A null address with elements, an address that is not aligned, or strides beyond the address space.
    pub unsafe fn from_memory(memory: &CallerMemory) -> Result<Self> {
        let owner = memory.device.map_or(MemoryOwner::Host, MemoryOwner::Caller);
        Ok(Self { raw: memory.check()?, owner, life: PhantomData })
    }

    fn contiguous(data: *const u8, dtype: DType, rows: usize, cols: usize) -> Self {
        Self {
            raw: abi::TyTensor {
                data: data.cast_mut(),
                dtype: dtype.code(),
                reserved: 0,
                shape: [rows as u64, cols as u64],
                stride: [cols as i64, 1],
            },
            owner: MemoryOwner::Host,
            life: PhantomData,
        }
    }

    /// A view of memory of a kernel set.
    ///
    /// # Safety
    /// The tensor's memory is valid and not written for `'a`; it is of the kind that the kernel set
    /// of `components` works on.
    pub(super) unsafe fn from_raw(raw: abi::TyTensor, components: &'a Components) -> Self {
        Self { raw: present(raw), owner: MemoryOwner::of(components), life: PhantomData }
    }

    /// True if it lies in the memory of a device. Then [`bytes`](Self::bytes) and
    /// [`elements`](Self::elements) are empty: the host cannot read it.
    pub fn is_on_device(&self) -> bool {
        self.device().is_some()
    }

    /// The address of the first element, of the host or of the device; not null for an empty tensor either.
    pub fn address(&self) -> *mut u8 {
        self.raw.data
    }

    /// The ordinal of the device that it lies on; none for host memory.
    pub fn device(&self) -> Option<i32> {
        self.owner.device()
    }

    /// A copy of all bytes of a contiguous tensor, wherever it lies.
    ///
    /// # Errors
    /// Errors of the device. `Unsupported` for memory of the caller on a device.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let components = match self.owner {
            MemoryOwner::Host => return Ok(self.bytes().to_vec()),
            MemoryOwner::Communicator(components) => components,
            MemoryOwner::Caller(device) => return Err(not_ours(device)),
        };
        let mut copy = vec![0; byte_length(&self.raw).unwrap_or(0)];
        // SAFETY: the constructor's promise: this many bytes are valid, and no code writes them.
        unsafe { components.kernels().copy(copy.as_mut_ptr(), self.raw.data, copy.len() as u64)? };
        Ok(copy)
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.raw.shape[0] as usize
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.raw.shape[1] as usize
    }

    /// Element type; `None` for a code this version does not know.
    pub fn dtype(&self) -> Option<DType> {
        DType::from_code(self.raw.dtype)
    }

    /// True if rows follow each other without gaps.
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.raw)
    }

    /// All bytes of a contiguous tensor in host memory; empty if it is not contiguous.
    pub fn bytes(&self) -> &'a [u8] {
        match byte_length(&self.raw).filter(|_| self.owner.device().is_none()) {
            // SAFETY: the constructor's promise: this many bytes are valid for 'a.
            Some(n) if n > 0 => unsafe { std::slice::from_raw_parts(self.raw.data, n) },
            _ => &[],
        }
    }

    /// Elements from one row to the next, and from one column to the next.
    pub fn strides(&self) -> [usize; 2] {
        self.raw.stride.map(|n| n as usize)
    }

    /// All bytes from the first element to the last, gaps of strides included; empty unless the
    /// tensor lies in host memory.
    pub fn memory(&self) -> &'a [u8] {
        let (rows, cols) = (self.rows(), self.cols());
        let Some(dtype) = self.dtype().filter(|_| !self.is_on_device() && rows * cols > 0) else {
            return &[];
        };
        let [row, column] = self.strides();
        let elements = (rows - 1) * row + (cols - 1) * column + 1;
        // SAFETY: the constructors checked that the last element lies inside their memory.
        unsafe { std::slice::from_raw_parts(self.raw.data, elements * dtype.bytes()) }
    }

    /// All elements of a contiguous tensor of type `T`; empty if type or layout differ.
    pub fn elements<T: Element>(&self) -> &'a [T] {
        if self.dtype() != Some(T::DTYPE) || !self.is_contiguous() || self.bytes().is_empty() {
            return &[];
        }
        let count = self.rows() * self.cols();
        // SAFETY: as in `bytes`; the address is aligned by the constructors' check and by the
        // arena's alignment, and every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.raw.data.cast(), count) }
    }

    pub(crate) fn raw(&self) -> abi::TyTensor {
        self.raw
    }
}

/// A tensor that is written: contiguous `[rows, cols]`. It may lie wherever a [`TensorRef`] may.
#[derive(Debug)]
pub struct TensorMut<'a> {
    raw: abi::TyTensor,
    owner: MemoryOwner<'a>,
    life: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of plain bytes.
unsafe impl Send for TensorMut<'_> {}

impl<'a> TensorMut<'a> {
    /// Over typed elements.
    ///
    /// # Errors
    /// A length that is not `rows * cols`.
    pub fn from_slice<T: Element>(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self> {
        check_length(data.len(), rows, cols, T::DTYPE)?;
        let raw = TensorRef::contiguous(data.as_ptr().cast(), T::DTYPE, rows, cols).raw;
        let raw = abi::TyTensor { data: data.as_mut_ptr().cast(), ..raw };
        Ok(Self { raw, owner: MemoryOwner::Host, life: PhantomData })
    }

    /// Over bytes.
    ///
    /// # Errors
    /// A length that is not `rows * cols` elements, or an address that is not aligned for them.
    pub fn from_bytes(data: &'a mut [u8], dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        let raw = TensorRef::from_bytes(data, dtype, rows, cols)?.raw;
        let raw = abi::TyTensor { data: data.as_mut_ptr(), ..raw };
        Ok(Self { raw, owner: MemoryOwner::Host, life: PhantomData })
    }

    /// As [`TensorRef::from_memory`], to be written.
    ///
    /// # Safety
    /// As there, and no other code uses the memory for `'a`.
    ///
    /// # Errors
    /// As there; strides of rows that do not follow each other.
    pub unsafe fn from_memory(memory: &CallerMemory) -> Result<Self> {
        // SAFETY: by this function's contract.
        let TensorRef { raw, owner, .. } = unsafe { TensorRef::from_memory(memory)? };
        if !is_contiguous(&raw) && !raw.shape.contains(&0) {
            return Err(wrong(format!(
                "found strides {:?} of an output; expected rows without gaps",
                raw.stride
            )));
        }
        Ok(Self { raw, owner, life: PhantomData })
    }

    /// A view of memory of a kernel set.
    ///
    /// # Safety
    /// The tensor's memory is valid and used by no other code for `'a`; it is of the kind that the
    /// kernel set of `components` works on.
    pub(super) unsafe fn from_raw(raw: abi::TyTensor, components: &'a Components) -> Self {
        Self { raw: present(raw), owner: MemoryOwner::of(components), life: PhantomData }
    }

    /// Writes all bytes, wherever the tensor lies.
    ///
    /// # Errors
    /// A number of bytes that differs from the tensor's; errors of the device. `Unsupported` for memory of
    /// the caller on a device.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let expected = byte_length(&self.raw).unwrap_or(0);
        if bytes.len() != expected {
            return Err(wrong(format!("found {} bytes; expected {expected}", bytes.len())));
        }
        let components = match self.owner {
            MemoryOwner::Host => {
                self.bytes_mut().copy_from_slice(bytes);
                return Ok(());
            }
            MemoryOwner::Communicator(components) => components,
            MemoryOwner::Caller(device) => return Err(not_ours(device)),
        };
        // SAFETY: the constructor's promise: this many bytes belong to this tensor.
        unsafe { components.kernels().copy(self.raw.data, bytes.as_ptr(), bytes.len() as u64) }
    }

    /// All bytes of a tensor in host memory; empty elsewhere.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match byte_length(&self.raw).filter(|_| self.owner.device().is_none()) {
            // SAFETY: the constructor's promise: this many bytes belong to this tensor for 'a.
            Some(n) if n > 0 => unsafe { std::slice::from_raw_parts_mut(self.raw.data, n) },
            _ => &mut [],
        }
    }

    /// The tensor, to be read.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { raw: self.raw, owner: self.owner, life: PhantomData }
    }

    pub(crate) fn raw(&self) -> abi::TyTensor {
        self.raw
    }
}

fn not_ours(device: i32) -> Error {
    let text =
        format!("found memory of the caller on device {device}; expected the communicator's");
    Error::new(ErrorKind::Unsupported, "copy tensor", text)
        .with_fix("copy it with the library that allocated it")
}

/// The raw form of an optional tensor.
pub(super) fn raw_or_none(tensor: Option<&TensorRef<'_>>) -> abi::TyTensor {
    tensor.map_or(NO_TENSOR, TensorRef::raw)
}

/// Gives an empty tensor an address: null means that a tensor is absent, and ranks compare the present
/// tensors.
pub(super) fn present(raw: abi::TyTensor) -> abi::TyTensor {
    if raw.data.is_null() && raw.shape.contains(&0) {
        return abi::TyTensor { data: NonNull::<u128>::dangling().as_ptr().cast(), ..raw };
    }
    raw
}

fn is_contiguous(raw: &abi::TyTensor) -> bool {
    raw.stride[1] == 1 && (raw.stride[0] == raw.shape[1] as i64 || raw.shape[0] <= 1)
}

pub(crate) fn byte_length(raw: &abi::TyTensor) -> Option<usize> {
    let dtype = DType::from_code(raw.dtype)?;
    (is_contiguous(raw) && !raw.data.is_null())
        .then(|| raw.shape[0] as usize * raw.shape[1] as usize * dtype.bytes())
}

fn check_length(found: usize, rows: usize, cols: usize, dtype: DType) -> Result<()> {
    if rows.checked_mul(cols) != Some(found) {
        return Err(wrong(format!(
            "found {found} elements of {dtype}; expected {rows} rows of {cols}"
        )));
    }
    Ok(())
}

pub(super) fn check_alignment(data: *const u8, dtype: DType) -> Result<()> {
    if !(data as usize).is_multiple_of(dtype.bytes()) {
        return Err(wrong(format!(
            "found address {data:p}; expected a multiple of {} for {dtype}",
            dtype.bytes()
        )));
    }
    Ok(())
}

pub(super) fn wrong(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "make tensor", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_of_the_wrong_length_is_refused() {
        let error = TensorRef::from_slice(&[0_i64; 5], 2, 3).expect_err("5 is not 6");
        assert!(error.to_string().contains("found 5 elements of i64; expected 2 rows of 3"));
        let error = TensorRef::from_bytes(&[0; 7], DType::Bf16, 1, 3).expect_err("half an element");
        assert!(error.to_string().contains("found 7 bytes; expected whole elements of bf16"));
    }

    #[test]
    fn strides_that_leave_the_memory_are_refused() {
        let data = [0_u8; 64];
        let aligned = &data[data.as_ptr().align_offset(4)..];
        assert!(TensorRef::strided(&aligned[..48], DType::F32, [3, 4], [4, 1]).is_ok());
        assert!(TensorRef::strided(&aligned[..48], DType::F32, [3, 4], [1, 3]).is_ok());
        assert!(TensorRef::strided(&aligned[..48], DType::F32, [3, 4], [5, 1]).is_err());
        assert!(TensorRef::strided(&aligned[..48], DType::F32, [2, 2], [usize::MAX, 1]).is_err());
        assert!(TensorRef::strided(&[], DType::F32, [0, 4], [4, 1]).is_ok());
    }

    #[test]
    fn a_tensor_without_elements_is_there_wherever_its_memory_is() {
        let dtype = DType::U8.code();
        let empty = abi::TyTensor { dtype, shape: [0, 8], stride: [8, 1], ..NO_TENSOR };
        let raw = present(empty);
        assert!(!raw.data.is_null() && (raw.data as usize).is_multiple_of(16));
        assert_eq!(byte_length(&raw), Some(0));
        let mut byte = 0_u8;
        let there = abi::TyTensor { data: &raw mut byte, ..empty };
        assert_eq!(present(there).data, &raw mut byte);
    }
}
