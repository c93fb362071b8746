//! DLPack, in both directions and both versions of its capsule.
//!
//! The structures are those of `dlpack.h`, versions 0.8 and 1.0. A capsule holds a pointer to a managed tensor; who
//! takes it renames the capsule and calls the deleter when done, on any thread.

use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use smallvec::SmallVec;
use tokenyard_core::moe::DType;

use crate::exit;

/// Host memory.
pub(crate) const CPU: i32 = 1;
/// Memory of a CUDA device.
pub(crate) const CUDA: i32 = 2;
/// Pinned host memory.
pub(crate) const CUDA_HOST: i32 = 3;

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";

/// The version of these structures.
pub(crate) const MAJOR: u32 = 1;
const READ_ONLY: u64 = 1;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct DlTensor {
    data: *mut u8,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Plain {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

impl DlTensor {
    /// A place for a description.
    pub(crate) const NONE: Self = Self {
        data: std::ptr::null_mut(),
        device_type: CPU,
        device_id: 0,
        ndim: 0,
        dtype: DataType::FP8_E4M3,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
}

impl DataType {
    /// `kDLBool` of one byte.
    pub(crate) const BOOL: Self = Self { code: 6, bits: 8, lanes: 1 };
    /// `kDLFloat8_e4m3fn` of DLPack 1.1.
    const FP8_E4M3: Self = Self { code: 10, bits: 8, lanes: 1 };

    /// The type that leaves. Few libraries read FP8, so it leaves as bytes.
    fn of(dtype: DType) -> Self {
        let code = match dtype {
            DType::I32 | DType::I64 => 0,
            DType::Fp8E4m3 | DType::U8 => 1,
            DType::F16 | DType::F32 => 2,
            DType::Bf16 => 4,
        };
        Self { code, bits: 8 * dtype.bytes() as u8, lanes: 1 }
    }

    fn dtype(self) -> Option<DType> {
        // U8 stands for bytes. Only its own code means FP8.
        let plain = [DType::U8, DType::I32, DType::I64, DType::F16, DType::F32, DType::Bf16];
        let known = plain.into_iter().find(|dtype| Self::of(*dtype) == self);
        known.or((self == Self::FP8_E4M3).then_some(DType::Fp8E4m3))
    }
}

/// A tensor that another library lent. Its drop gives it back.
pub(crate) enum Lent {
    /// The tensor of a capsule of the first version.
    Plain(LentPlain),
    /// The tensor of a versioned capsule.
    Versioned(LentVersioned),
}

/// See [`Lent`].
pub(crate) struct LentPlain(*mut Plain);
/// See [`Lent`].
pub(crate) struct LentVersioned(*mut Versioned);

// SAFETY: the protocol lets any thread read the tensor and call its deleter.
unsafe impl Send for LentPlain {}
// SAFETY: as above; `&self` only reads.
unsafe impl Sync for LentPlain {}
// SAFETY: as above.
unsafe impl Send for LentVersioned {}
// SAFETY: as above.
unsafe impl Sync for LentVersioned {}

impl Drop for LentPlain {
    fn drop(&mut self) {
        // A deleter of a Python library needs the GIL, or takes it itself.
        Python::try_attach(|_| {
            // SAFETY: taken from a capsule once, so it is ours to give back once.
            unsafe { (*self.0).deleter.map(|delete| delete(self.0)) }
        });
    }
}

impl Drop for LentVersioned {
    fn drop(&mut self) {
        Python::try_attach(|_| {
            // SAFETY: as for the other one.
            unsafe { (*self.0).deleter.map(|delete| delete(self.0)) }
        });
    }
}

/// The description of a lent tensor.
pub(crate) struct Description {
    pub(crate) data: *mut u8,
    /// The type as DLPack has it, and as this package knows it.
    pub(crate) code: DataType,
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Dims,
    /// The strides, in elements.
    pub(crate) strides: Dims,
    pub(crate) device: (i32, i32),
    pub(crate) is_read_only: bool,
}

impl Lent {
    /// Takes the tensor out of a capsule.
    ///
    /// # Errors
    /// Another capsule, one that was taken before, or a version that this module does not read.
    pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        // SAFETY: the names say what the pointers are to; renaming makes the tensor ours.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule.as_ptr(), VERSIONED.as_ptr()) == 1 {
                let tensor = pointer(capsule, VERSIONED)?.cast::<Versioned>();
                let major = (*tensor).major;
                if major != MAJOR {
                    let text = format!("found DLPack {major}; expected {MAJOR}");
                    return Err(PyBufferError::new_err(text));
                }
                rename(capsule, VERSIONED_USED)?;
                return Ok(Self::Versioned(LentVersioned(tensor)));
            }
            if ffi::PyCapsule_IsValid(capsule.as_ptr(), PLAIN.as_ptr()) == 1 {
                let tensor = pointer(capsule, PLAIN)?.cast::<Plain>();
                rename(capsule, PLAIN_USED)?;
                return Ok(Self::Plain(LentPlain(tensor)));
            }
        }
        Err(PyBufferError::new_err("found no DLPack capsule, or one that was used before"))
    }

    /// The element type.
    pub(crate) fn describe(&self) -> Description {
        // SAFETY: both live until they are given back; so do their arrays.
        unsafe {
            let (tensor, flags) = match self {
                Self::Plain(plain) => (&(*plain.0).tensor, 0),
                Self::Versioned(versioned) => ((&(*versioned.0).tensor), (*versioned.0).flags),
            };
            Description::of(tensor, flags)
        }
    }
}

impl Description {
    /// The description of a tensor.
    ///
    /// # Safety
    /// The arrays of `tensor` are there, and have `ndim` entries.
    pub(crate) unsafe fn of(tensor: &DlTensor, flags: u64) -> Self {
        let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
        let list = |from: *mut i64| match ndim {
            0 => Dims::new(),
            // SAFETY: by this function's contract.
            _ => Dims::from_slice(unsafe { std::slice::from_raw_parts(from, ndim) }),
        };
        let shape = list(tensor.shape);
        let strides =
            if tensor.strides.is_null() { contiguous(&shape) } else { list(tensor.strides) };
        Self {
            data: tensor.data.wrapping_add(tensor.byte_offset as usize),
            code: tensor.dtype,
            dtype: tensor.dtype.dtype(),
            shape,
            strides,
            device: (tensor.device_type, tensor.device_id),
            is_read_only: flags & READ_ONLY != 0,
        }
    }

    /// Whether its elements lie where it says: a wrapper of another tensor has no memory of its own.
    pub(crate) fn has_memory(&self) -> bool {
        !self.data.is_null() || self.shape.contains(&0)
    }
}

/// The strides of a tensor without gaps, in elements.
pub(crate) fn contiguous(shape: &[i64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// # Safety
/// None but what CPython asks for: the capsule is one of this name.
unsafe fn pointer(capsule: &Bound<'_, PyAny>, name: &CStr) -> PyResult<*mut c_void> {
    // SAFETY: by this function's contract.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
    if pointer.is_null() { Err(PyErr::fetch(capsule.py())) } else { Ok(pointer) }
}

/// # Safety
/// `capsule` is one; whoever reads its name next knows the new one.
unsafe fn rename(capsule: &Bound<'_, PyAny>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: by this function's contract; the name lives for ever.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

/// The lengths of a tensor's dimensions, or its strides. Tensors of this package have one to three, so they need no
/// memory of their own: a call makes several tensors.
pub(crate) type Dims = SmallVec<[i64; 4]>;

/// A tensor that leaves, with what keeps its memory.
pub(crate) struct Leaving {
    pub(crate) data: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
    pub(crate) strides: Dims,
    pub(crate) device: (i32, i32),
    /// FP8 leaves as such.
    pub(crate) keeps_fp8: bool,
    /// Dropped by the consumer's deleter: on any thread, with or without the GIL.
    pub(crate) _claim: Box<dyn std::any::Any + Send>,
}

/// A Python object, and what else goes with it, that a consumer's deleter drops.
///
/// torch releases the GIL while it frees memory, and Python collects garbage inside of calls of this package, too. pyo3
/// then believes that this thread has the GIL. So the drop takes it by itself; a thread that has it loses nothing.
pub(crate) struct WithGil<T>(ManuallyDrop<T>);

impl<T> WithGil<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Drop for WithGil<T> {
    fn drop(&mut self) {
        // SAFETY: the calls pair up, and are made while there is an interpreter; without one, the value stays. It is
        // dropped once.
        unsafe {
            if ffi::Py_IsInitialized() == 0 || exit::is_near() {
                return;
            }
            let before = ffi::PyGILState_Ensure();
            // The value stays, too, while the interpreter ends.
            let _dropped = Python::try_attach(|_| ManuallyDrop::drop(&mut self.0));
            ffi::PyGILState_Release(before);
        }
    }
}

/// The target of a tensor's context. It stays where it is, because the tensor has the addresses of its lists.
struct Exported<M> {
    managed: M,
    leaving: Leaving,
}

/// A tensor of one of the two versions.
trait Managed {
    fn parts(&mut self) -> (&mut DlTensor, &mut *mut c_void);
}

impl Managed for Plain {
    fn parts(&mut self) -> (&mut DlTensor, &mut *mut c_void) {
        (&mut self.tensor, &mut self.context)
    }
}

impl Managed for Versioned {
    fn parts(&mut self) -> (&mut DlTensor, &mut *mut c_void) {
        (&mut self.tensor, &mut self.context)
    }
}

impl<M: Managed> Exported<M> {
    /// Gives both memory of their own, which the context points to, and the tensor its lists.
    fn lend(managed: M, leaving: Leaving) -> *mut M {
        let exported = Box::into_raw(Box::new(Self { managed, leaving }));
        // SAFETY: just made, and known here alone.
        unsafe {
            let lists = &mut (*exported).leaving;
            let (shape, strides) = (lists.shape.as_mut_ptr(), lists.strides.as_mut_ptr());
            let (tensor, context) = (*exported).managed.parts();
            (tensor.shape, tensor.strides) = (shape, strides);
            *context = exported.cast();
            &raw mut (*exported).managed
        }
    }
}

impl Leaving {
    /// The tensor, without its lists.
    fn tensor(&self) -> DlTensor {
        DlTensor {
            data: self.data,
            device_type: self.device.0,
            device_id: self.device.1,
            ndim: self.shape.len() as i32,
            dtype: match self.dtype {
                DType::Fp8E4m3 if self.keeps_fp8 => DataType::FP8_E4M3,
                dtype => DataType::of(dtype),
            },
            ..DlTensor::NONE
        }
    }

    /// A versioned tensor that owns it, for whoever calls its deleter.
    pub(crate) fn versioned(self) -> *mut Versioned {
        let managed = Versioned {
            major: MAJOR,
            minor: 0,
            context: std::ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: 0,
            tensor: self.tensor(),
        };
        Exported::lend(managed, self)
    }

    /// A capsule that owns it.
    pub(crate) fn capsule(self, py: Python<'_>, is_versioned: bool) -> PyResult<Py<PyAny>> {
        if is_versioned {
            let managed = self.versioned();
            // SAFETY: the destructor is for capsules of this name, and the pointer is one of its kind.
            return unsafe { capsule(py, managed.cast(), VERSIONED, drop_versioned) };
        }
        let managed = Plain {
            tensor: self.tensor(),
            context: std::ptr::null_mut(),
            deleter: Some(delete_plain),
        };
        let managed = Exported::lend(managed, self);
        // SAFETY: as for the other one.
        unsafe { capsule(py, managed.cast(), PLAIN, drop_plain) }
    }
}

/// # Safety
/// `destructor` frees what `pointer` points to, as long as the capsule is called `name`.
unsafe fn capsule(
    py: Python<'_>,
    pointer: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Py<PyAny>> {
    // SAFETY: by this function's contract. A new reference, or null and an exception.
    unsafe {
        let capsule = ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor));
        let capsule = Bound::from_owned_ptr_or_err(py, capsule)?;
        Ok(capsule.cast_into::<PyCapsule>()?.into_any().unbind())
    }
}

/// # Safety
/// Called once, by whoever took the tensor out of its capsule.
unsafe extern "C" fn delete_plain(managed: *mut Plain) {
    // SAFETY: by this function's contract, the context is what `capsule` put there.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Exported<Plain>>()) });
}

/// # Safety
/// As [`delete_plain`].
unsafe extern "C" fn delete_versioned(managed: *mut Versioned) {
    // SAFETY: by this function's contract, the context is what `capsule` put there.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Exported<Versioned>>()) });
}

/// Frees a tensor that no library took.
///
/// # Safety
/// Called by CPython with a capsule that `Leaving::capsule` made.
unsafe extern "C" fn drop_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: by this function's contract; whoever takes a tensor renames its capsule.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast());
        }
    }
}

/// # Safety
/// As [`drop_plain`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as there.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}
