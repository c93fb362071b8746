//! Tensors of a caller.

mod message;

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use smallvec::smallvec;
use tokenyard_core::communicator::{CallerMemory, TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::{Error, Result};

use crate::anchors::Anchor;
use crate::array::{Array, Claim};
use crate::dlpack::{self, Description, Dims, Leaving, Lent, WithGil};
use crate::dtype;
use crate::errors::invalid;
use crate::exchange::Exchange;
use crate::owned::Owned;

/// The owner of a tensor's memory.
#[expect(dead_code, reason = "held for their drop")]
pub(crate) enum Keeper {
    Object(Py<PyAny>),
    Lent(Lent),
    Claim(Arc<Owned<Claim>>),
    Ids(Vec<i64>),
}

/// A tensor of a caller: its place, and the owner of its memory.
pub(crate) struct Tensor {
    name: &'static str,
    data: *mut u8,
    dtype: DType,
    shape: Dims,
    /// The strides, in elements.
    strides: Dims,
    device: Option<i32>,
    is_read_only: bool,
    /// Held for its drop.
    _keeper: Keeper,
}

// SAFETY: a name for memory that `keeper` keeps; what it keeps may be dropped on any thread.
unsafe impl Send for Tensor {}
// SAFETY: `&self` only reads.
unsafe impl Sync for Tensor {}

/// Elements of an array of this package.
pub(crate) struct Elements<'a> {
    pub(crate) data: *mut u8,
    pub(crate) dtype: DType,
    /// The ordinal of the device; nothing of the host's memory.
    pub(crate) device: Option<i32>,
    pub(crate) shape: &'a [i64],
    /// In elements.
    pub(crate) strides: &'a [i64],
}

/// Whether an object is a view of torch whose memory has the opposite of its values.
pub(crate) fn is_negated(object: &Bound<'_, PyAny>) -> bool {
    let answer = object.call_method0(intern!(object.py(), "is_neg"));
    answer.and_then(|it| it.is_truthy()).unwrap_or(false)
}

fn negated(name: &str) -> Error {
    invalid(format!(
        "{name}: found a view that is negated when it is read; expected its values in memory"
    ))
    .with_fix("make a tensor of the view by its resolve_neg()")
}

impl Tensor {
    /// Reads what an object says of itself. Its memory is not looked at.
    ///
    /// # Errors
    /// An object that is no tensor, or one of a type or a device that is unknown here.
    pub(crate) fn read(name: &'static str, object: &Bound<'_, PyAny>) -> Result<Self> {
        let exchange = Exchange::of(&object.get_type());
        if let Some(tensor) = exchange.and_then(|it| Self::by_exchange(name, object, it)) {
            return if is_negated(object) { Err(negated(name)) } else { Ok(tensor) };
        }
        let py = object.py();
        let has = |attribute: &Bound<'_, PyString>| object.hasattr(attribute).unwrap_or(false);
        if let Ok(array) = object.cast::<Array>() {
            return Ok(array.get().tensor(name));
        }
        let data_ptr = object.getattr(intern!(py, "data_ptr")).ok();
        let methods = data_ptr.zip(object.getattr(intern!(py, "stride")).ok());
        let methods = methods.filter(|_| has(intern!(py, "device")));
        let read = if let Some((data_ptr, stride)) = methods {
            if is_negated(object) {
                return Err(negated(name));
            }
            Self::like_torch(name, object, &data_ptr, &stride)
        } else if has(intern!(py, "__array_interface__")) {
            Self::like_numpy(name, object)
        } else if has(intern!(py, "__dlpack__")) && has(intern!(py, "__dlpack_device__")) {
            Self::from_dlpack(name, object)
        } else if has(intern!(py, "__cuda_array_interface__")) {
            Self::like_cuda(name, object)
        } else {
            let found = object.get_type().name().map_or("an object".into(), |n| n.to_string());
            return Err(invalid(format!(
                "{name}: found {found}; expected a tensor: one of torch, numpy, JAX or CuPy, or anything \
                 with __dlpack__"
            )));
        };
        read.unwrap_or_else(|raised| {
            Err(invalid(format!("{name}: its description cannot be read: {raised}")))
        })
    }

    /// As [`read`](Self::read); `None` is no tensor.
    pub(crate) fn optional(name: &'static str, object: &Bound<'_, PyAny>) -> Result<Option<Self>> {
        if object.is_none() { Ok(None) } else { Self::read(name, object).map(Some) }
    }

    /// A tensor whose library describes it; nothing where its attributes say more, as for a type that is unknown here.
    fn by_exchange(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        exchange: Exchange,
    ) -> Option<Self> {
        let found = exchange.describe(object).ok()?;
        // A wrapper says more by its methods.
        if !found.has_memory() {
            return None;
        }
        let device = match found.device {
            (dlpack::CPU | dlpack::CUDA_HOST, _) => None,
            (dlpack::CUDA, id) => Some(id),
            _ => return None,
        };
        Some(Self {
            name,
            data: found.data,
            dtype: found.dtype?,
            shape: found.shape,
            strides: found.strides,
            device,
            is_read_only: false,
            _keeper: Keeper::Object(object.clone().unbind()),
        })
    }

    /// A tensor of a library whose objects are like torch's, by its `data_ptr` and `stride`.
    fn like_torch(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        data_ptr: &Bound<'_, PyAny>,
        stride: &Bound<'_, PyAny>,
    ) -> PyResult<Result<Self>> {
        let py = object.py();
        let named = object.getattr(intern!(py, "dtype"))?;
        let Some(dtype) = dtype::of_object(&named)? else {
            return Ok(unknown_type(name, &named.str()?.to_string()));
        };
        let device = match torch_device(object)? {
            Ok(device) => device,
            Err(place) => {
                let text = format!("{name}: found device {place}; expected cpu or cuda");
                return Ok(Err(invalid(text)));
            }
        };
        Ok(Ok(Self {
            name,
            data: data_ptr.call0()?.extract::<usize>()? as *mut u8,
            dtype,
            shape: lengths(&object.getattr(intern!(py, "shape"))?)?,
            strides: lengths(&stride.call0()?)?,
            device,
            is_read_only: false,
            _keeper: Keeper::Object(object.clone().unbind()),
        }))
    }

    /// An array of numpy. DLPack does not pass on that its type is one of `ml_dtypes`.
    fn like_numpy(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Result<Self>> {
        let about = object.getattr("__array_interface__")?;
        let typestr: String = about.get_item("typestr")?.extract()?;
        let type_name = match object.getattr("dtype") {
            Ok(dtype) => dtype.getattr("name")?.extract()?,
            Err(_) => typestr.clone(),
        };
        let is_swapped = typestr.starts_with('>');
        let found = dtype::parse(&type_name).or_else(|| dtype::from_typestr(&typestr));
        let Some(dtype) = found.filter(|_| !is_swapped) else {
            return Ok(unknown_type(name, if is_swapped { &typestr } else { &type_name }));
        };
        let keeper = Keeper::Object(object.clone().unbind());
        Self::from_interface(name, &about, dtype, None, keeper)
    }

    /// An array that says where on a CUDA device it lies.
    fn like_cuda(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Result<Self>> {
        let about = object.getattr("__cuda_array_interface__")?;
        let typestr: String = about.get_item("typestr")?.extract()?;
        let Some(dtype) = dtype::from_typestr(&typestr) else {
            return Ok(unknown_type(name, &typestr));
        };
        // The interface does not name the device. A library with several says it in an attribute, or uses the current
        // one.
        let current = || tokenyard_cuda::current_device().unwrap_or(0);
        let device = match object.getattr("device") {
            Ok(device) => match device.getattr("id") {
                Ok(id) => id.extract()?,
                Err(_) => device.extract().unwrap_or_else(|_| current()),
            },
            Err(_) => current(),
        };
        let keeper = Keeper::Object(object.clone().unbind());
        Self::from_interface(name, &about, dtype, Some(device), keeper)
    }

    /// The common part of both array interfaces.
    fn from_interface(
        name: &'static str,
        about: &Bound<'_, PyAny>,
        dtype: DType,
        device: Option<i32>,
        keeper: Keeper,
    ) -> PyResult<Result<Self>> {
        let (data, is_read_only): (usize, bool) = about.get_item("data")?.extract()?;
        let shape = lengths(&about.get_item("shape")?)?;
        let bytes = match about.get_item("strides") {
            Ok(strides) if !strides.is_none() => Some(lengths(&strides)?),
            _ => None,
        };
        let size = dtype.bytes() as i64;
        if bytes.iter().flatten().any(|stride| stride % size != 0) {
            let text = format!("{name}: found strides {bytes:?} bytes; expected whole elements");
            return Ok(Err(invalid(text)));
        }
        let strides = bytes
            .map(|bytes| bytes.iter().map(|stride| stride / size).collect())
            .unwrap_or_else(|| dlpack::contiguous(&shape));
        let data = data as *mut u8;
        Ok(Ok(Self { name, data, dtype, shape, strides, device, is_read_only, _keeper: keeper }))
    }

    /// A tensor of any other library.
    fn from_dlpack(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Result<Self>> {
        let (kind, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        let ask = PyDict::new(object.py());
        if kind == dlpack::CUDA && !is_of_jax(object) {
            // No synchronisation: the order is the caller's, as for every other tensor.
            ask.set_item("stream", -1)?;
        }
        let versioned = ask.copy()?;
        versioned.set_item("max_version", (1, 0))?;
        let capsule = match object.call_method("__dlpack__", (), Some(&versioned)) {
            // A library of the first version does not know the keyword.
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(object.py()) => {
                object.call_method("__dlpack__", (), Some(&ask))?
            }
            other => other?,
        };
        let lent = Lent::take(&capsule)?;
        let Description { data, dtype, shape, strides, device, is_read_only, .. } = lent.describe();
        let Some(dtype) = dtype else { return Ok(unknown_type(name, "a type of DLPack")) };
        let device = match device {
            (dlpack::CPU | dlpack::CUDA_HOST, _) => None,
            (dlpack::CUDA, id) => Some(id),
            (kind, _) => {
                let text = format!("{name}: found DLPack device {kind}; expected CPU or CUDA");
                return Ok(Err(invalid(text)));
            }
        };
        let keeper = Keeper::Lent(lent);
        Ok(Ok(Self { name, data, dtype, shape, strides, device, is_read_only, _keeper: keeper }))
    }

    /// A tensor of this package.
    pub(crate) fn of_array(
        name: &'static str,
        elements: Elements<'_>,
        claim: Arc<Owned<Claim>>,
    ) -> Self {
        let Elements { data, dtype, device, shape, strides } = elements;
        let (shape, strides) = (Dims::from_slice(shape), Dims::from_slice(strides));
        let keeper = Keeper::Claim(claim);
        Self { name, data, dtype, shape, strides, device, is_read_only: false, _keeper: keeper }
    }

    /// Elements of a list without gaps, from `first` on, as rows and columns; one column is a list again. `object` is
    /// the one that was read.
    ///
    /// # Errors
    /// Memory of another form, or too few elements.
    pub(crate) fn cut(
        &self,
        object: &Bound<'_, PyAny>,
        name: &'static str,
        first: i64,
        [rows, cols]: [i64; 2],
    ) -> Result<Self> {
        let count = rows * cols;
        let fits = |length: i64| first >= 0 && count >= 0 && first + count <= length;
        if !matches!((&self.shape[..], &self.strides[..]), (&[length], &[1]) if fits(length)) {
            let (shape, strides) = (&self.shape, &self.strides);
            return Err(invalid(format!(
                "{}: found shape {shape:?} with strides {strides:?}; expected a list without gaps, of {} elements \
                 or more",
                self.name,
                first + count
            )));
        }
        Ok(Self {
            name,
            data: self.data.wrapping_add(first as usize * self.dtype.bytes()),
            dtype: self.dtype,
            shape: if cols == 1 { smallvec![rows] } else { smallvec![rows, cols] },
            strides: if cols == 1 { smallvec![1] } else { smallvec![cols, 1] },
            device: self.device,
            is_read_only: self.is_read_only,
            _keeper: Keeper::Object(object.clone().unbind()),
        })
    }

    /// The tensor, to leave. A record is found by its address as long as the memory is used. With `columns`, the
    /// elements of a list are rows of as many equal ones.
    pub(crate) fn leaving(self, record: Option<Py<PyAny>>, columns: Option<i64>) -> Leaving {
        let device = self.device.map_or((dlpack::CPU, 0), |device| (dlpack::CUDA, device));
        let (data, dtype) = (self.data, self.dtype);
        let (mut shape, mut strides) = (self.shape.clone(), self.strides.clone());
        shape.extend(columns);
        strides.extend(columns.map(|_| 0));
        // The record goes first: memory that is free may get another one.
        let claim = (record.map(|record| Anchor::new(data as usize, record)), self);
        let _claim = Box::new(WithGil::new(claim));
        Leaving { data, dtype, shape, strides, device, keeps_fp8: false, _claim }
    }

    /// Elements.
    pub(crate) fn length(&self) -> i64 {
        self.shape.iter().product()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn is_on_device(&self) -> bool {
        self.device.is_some()
    }

    /// Expert ids as core reads them: i64. Those of 32 bits are copied where the host can read them.
    ///
    /// # Errors
    /// Ids of 32 bits on a device.
    pub(crate) fn into_ids(self) -> Result<Self> {
        if self.dtype != DType::I32 {
            return Ok(self);
        }
        if self.is_on_device() {
            let text = format!("{}: found int32 on a device; expected int64 there", self.name);
            return Err(invalid(text).with_fix("convert it, as by .to(torch.int64)"));
        }
        let memory = self.matrix()?;
        // SAFETY: `self` holds the caller's tensor, and its elements lie where its strides say.
        let tensor = unsafe { TensorRef::from_memory(&memory)? };
        let [row, column] = tensor.strides();
        let bytes = tensor.memory();
        let at = |index: usize| {
            let bytes = bytes.get(4 * index..).and_then(|rest| rest.first_chunk::<4>());
            bytes.map_or(-1, |bytes| i64::from(i32::from_ne_bytes(*bytes)))
        };
        let places = (0..tensor.rows()).flat_map(|r| (0..tensor.cols()).map(move |c| (r, c)));
        let mut ids: Vec<i64> = places.map(|(r, c)| at(r * row + c * column)).collect();
        Ok(Self {
            data: ids.as_mut_ptr().cast(),
            dtype: DType::I64,
            strides: dlpack::contiguous(&self.shape),
            _keeper: Keeper::Ids(ids),
            ..self
        })
    }

    /// Rows and columns: `[n]` is `[n, 1]`, and of three dimensions the first two are rows.
    fn matrix(&self) -> Result<CallerMemory> {
        let wrong = |expected: &str| {
            Err(invalid(format!(
                "{}: found shape {:?} with strides {:?}; expected {expected}",
                self.name, self.shape, self.strides
            )))
        };
        let (shape, stride) = match (&self.shape[..], &self.strides[..]) {
            (&[n], &[step]) => ([n, 1], [step, 1]),
            (&[n, m], &[row, column]) => ([n, m], [row, column]),
            (&[a, b, m], &[first, row, column]) => {
                let is_one = a <= 1 || b == 0 || m == 0 || first == b * row;
                if !is_one {
                    return wrong("blocks that follow each other without a gap");
                }
                ([a * b, m], [row, column])
            }
            _ => return wrong("one to three dimensions"),
        };
        if shape.iter().chain(&stride).any(|n| *n < 0) {
            return wrong("strides that are not negative");
        }
        let (shape, mut stride) = (shape.map(|n| n as usize), stride.map(|n| n as usize));
        // The stride of a dimension with one element is never used, so it may have any value.
        if shape[1] <= 1 || shape[0] == 0 {
            stride[1] = 1;
        }
        if shape[0] <= 1 {
            stride[0] = shape[1];
        }
        Ok(CallerMemory { data: self.data, dtype: self.dtype, shape, stride, device: self.device })
    }

    /// One value after the other, whatever the shape: `[n, 1]`.
    fn column(&self) -> Result<CallerMemory> {
        let memory = self.matrix()?;
        let [rows, cols] = memory.shape;
        if memory.stride != [cols, 1] {
            return Err(invalid(format!(
                "{}: found strides {:?}; expected values that follow each other",
                self.name, self.strides
            )));
        }
        Ok(CallerMemory { shape: [rows * cols, 1], stride: [1, 1], ..memory })
    }

    /// The tensor, for core.
    ///
    /// # Safety
    /// `self` lives, and no thread writes its memory, while the result is used.
    ///
    /// # Errors
    /// A shape of other dimensions, or an address that cannot be.
    pub(crate) unsafe fn get(&self) -> Result<TensorRef<'static>> {
        // SAFETY: by this function's contract; the object states that its elements are there.
        unsafe { TensorRef::from_memory(&self.matrix()?).map_err(|e| self.named(&e)) }
    }

    /// As [`get`](Self::get), as one column.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there; gaps.
    pub(crate) unsafe fn get_column(&self) -> Result<TensorRef<'static>> {
        // SAFETY: as in `get`.
        unsafe { TensorRef::from_memory(&self.column()?).map_err(|e| self.named(&e)) }
    }

    /// The tensor, to be written.
    ///
    /// # Safety
    /// `self` lives, and no other code uses its memory, while the result is used.
    ///
    /// # Errors
    /// As [`get`](Self::get); memory that may not be written.
    pub(crate) unsafe fn get_mut(&self) -> Result<TensorMut<'static>> {
        // SAFETY: by this function's contract.
        unsafe { self.writable(&self.matrix()?) }
    }

    /// As [`get_mut`](Self::get_mut), as one column.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there; gaps.
    pub(crate) unsafe fn get_column_mut(&self) -> Result<TensorMut<'static>> {
        // SAFETY: by this function's contract.
        unsafe { self.writable(&self.column()?) }
    }

    /// # Safety
    /// As [`get_mut`](Self::get_mut).
    unsafe fn writable(&self, memory: &CallerMemory) -> Result<TensorMut<'static>> {
        if self.is_read_only {
            let text = format!("{}: found memory that may only be read", self.name);
            return Err(invalid(text + "; expected some that may be written"));
        }
        // SAFETY: by this function's contract.
        unsafe { TensorMut::from_memory(memory).map_err(|e| self.named(&e)) }
    }

    fn named(&self, error: &tokenyard_core::Error) -> tokenyard_core::Error {
        invalid(format!("{}: {}", self.name, error.message()))
    }
}

/// A sequence of integers. Nearly all are tuples, whose elements need no iterator of Python.
fn lengths(object: &Bound<'_, PyAny>) -> PyResult<Dims> {
    match object.cast::<PyTuple>() {
        Ok(tuple) => tuple.iter_borrowed().map(|length| length.extract()).collect(),
        Err(_) => object.extract().map(Dims::from_vec),
    }
}

/// Whether a tensor, as torch's are, has one of the types and the shape; None stands for any length.
#[pyfunction]
pub(crate) fn _fits(
    tensor: &Bound<'_, PyAny>,
    dtypes: &Bound<'_, PyTuple>,
    shape: &Bound<'_, PyTuple>,
) -> PyResult<bool> {
    let py = tensor.py();
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let found = tensor.getattr(intern!(py, "shape"))?.cast_into::<PyTuple>()?;
    if found.len() != shape.len() || !dtypes.iter().any(|one| one.is(&dtype)) {
        return Ok(false);
    }
    for (length, wanted) in found.iter().zip(shape.iter()) {
        if !wanted.is_none() && !wanted.is(&length) && !wanted.eq(length)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// JAX takes -1 for a stream, and asks the driver for it.
fn is_of_jax(object: &Bound<'_, PyAny>) -> bool {
    let module = object.get_type().getattr("__module__").and_then(|name| name.extract::<String>());
    module.is_ok_and(|name| name.starts_with("jax"))
}

fn unknown_type(name: &str, found: &str) -> Result<Tensor> {
    Err(invalid(format!("{name}: found type {found}; expected one of {}", dtype::names())))
}

/// The ordinal of a tensor's CUDA device, or nothing for the host's memory; the name of any other device is an error.
/// A tensor of torch is asked for a number, because its device has no name before one is made.
fn torch_device(object: &Bound<'_, PyAny>) -> PyResult<std::result::Result<Option<i32>, String>> {
    let py = object.py();
    let is_cuda = object.getattr(intern!(py, "is_cuda")).and_then(|found| found.extract());
    if is_cuda.unwrap_or(false) {
        return Ok(Ok(Some(object.call_method0(intern!(py, "get_device"))?.extract()?)));
    }
    let place = object.getattr(intern!(py, "device"))?.str()?.to_string();
    Ok(match place.split_once(':') {
        None if place == "cpu" => Ok(None),
        None if place == "cuda" => Ok(Some(0)),
        Some(("cpu", _)) => Ok(None),
        Some(("cuda", index)) => index.parse().map(Some).map_err(|_| place.clone()),
        _ => Err(place),
    })
}
