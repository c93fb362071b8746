//! Arrays that this package gives: views of memory that a claim keeps.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use smallvec::smallvec;
use tokenyard_core::communicator::{Arriving, CombineInput, Received, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_gpu::driver::{Device, order_streams};

use crate::anchors::Anchor;
use crate::dlpack::{self, Dims, Leaving, WithGil};
use crate::dtype;
use crate::owned::Owned;
use crate::tensor::{Elements, Tensor};

/// Memory of this package. Its drop frees it, on any thread; it takes neither the GIL nor the communicator.
#[expect(dead_code, reason = "held for their drop")]
pub(crate) enum Claim {
    /// An output in the arena.
    Received(Arc<Received>, Held),
    /// The place of an output that is not received yet.
    Arriving(Arc<Arriving>),
    /// Arena memory for the experts' rows.
    Input(CombineInput),
    /// Memory of the host.
    Host(HostMemory),
}

/// Bytes of an output, counted while it lives.
pub(crate) struct Held {
    all: Arc<AtomicU64>,
    bytes: u64,
}

impl Held {
    pub(crate) fn new(all: &Arc<AtomicU64>, bytes: u64) -> Self {
        all.fetch_add(bytes, Ordering::Relaxed);
        Self { all: Arc::clone(all), bytes }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Zeroed memory of the host, aligned for every vector.
pub(crate) struct HostMemory {
    lines: Vec<Line>,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl HostMemory {
    fn new(bytes: usize) -> Self {
        Self { lines: vec![Line([0; 64]); bytes.div_ceil(64).max(1)] }
    }

    fn address(&mut self) -> *mut u8 {
        self.lines.as_mut_ptr().cast()
    }
}

/// A tensor of tokenyard: of the arena, or of the host's memory.
///
/// It has no arithmetic. Take it to a library of your own, without a copy: `torch.from_dlpack(a)`,
/// `jax.dlpack.from_dlpack(a)`, `numpy.asarray(a)`. The memory lives as long as the last tensor over it, on whatever
/// thread that is dropped. bfloat16 is `V2` in numpy (`.view(ml_dtypes.bfloat16)`), and FP8 leaves by DLPack as
/// uint8 (`.view(torch.float8_e4m3fn)`).
#[pyclass(frozen, module = "tokenyard")]
#[derive(Clone)]
pub(crate) struct Array {
    data: *mut u8,
    dtype: DType,
    shape: Dims,
    /// The strides, in elements.
    strides: Dims,
    device: Option<i32>,
    /// The stream in whose order the values get there; none where they are there.
    stream: Option<usize>,
    claim: Arc<Owned<Claim>>,
}

// SAFETY: an address that the claim keeps valid, on any thread.
unsafe impl Send for Array {}
// SAFETY: `&self` only reads it.
unsafe impl Sync for Array {}

impl Array {
    /// A view of a tensor of the arena, in another shape with as many elements.
    pub(crate) fn of_arena(
        tensor: &TensorRef<'_>,
        shape: Dims,
        stream: Option<usize>,
        claim: &Arc<Owned<Claim>>,
    ) -> Option<Self> {
        let claim = Arc::clone(claim);
        let (data, device) = (tensor.address(), tensor.device());
        let strides = dlpack::contiguous(&shape);
        Some(Self { data, dtype: tensor.dtype()?, shape, strides, device, stream, claim })
    }

    /// Arena memory for the experts' rows.
    pub(crate) fn of_input(input: CombineInput) -> Option<Self> {
        let tensor = input.tensor();
        let (data, device, dtype) = (tensor.address(), tensor.device(), tensor.dtype()?);
        let shape = smallvec![tensor.rows() as i64, tensor.cols() as i64];
        let claim = Arc::new(Owned::new(Claim::Input(input)));
        let strides = dlpack::contiguous(&shape);
        Some(Self { data, dtype, shape, strides, device, stream: None, claim })
    }

    /// New memory of the host.
    pub(crate) fn on_host(dtype: DType, shape: Dims) -> Self {
        let elements: i64 = shape.iter().product();
        let mut memory = HostMemory::new(elements as usize * dtype.bytes());
        let data = memory.address();
        let claim = Arc::new(Owned::new(Claim::Host(memory)));
        let strides = dlpack::contiguous(&shape);
        Self { data, dtype, shape, strides, device: None, stream: None, claim }
    }

    /// A new array in host memory with these bytes.
    pub(crate) fn of_bytes(dtype: DType, shape: Dims, bytes: &[u8]) -> Self {
        let array = Self::on_host(dtype, shape);
        // SAFETY: new memory of this length, which no other object has yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), array.data, bytes.len()) };
        array
    }

    /// It, with its last two dimensions in the other order.
    pub(crate) fn transposed(mut self) -> Self {
        for sizes in [&mut self.shape, &mut self.strides] {
            let last = sizes.len().saturating_sub(2);
            sizes[last..].reverse();
        }
        self
    }

    /// The array as an argument.
    pub(crate) fn tensor(&self, name: &'static str) -> Tensor {
        let Self { data, dtype, device, .. } = *self;
        let (shape, strides) = (&self.shape, &self.strides);
        let elements = Elements { data, dtype, device, shape, strides };
        Tensor::of_array(name, elements, Arc::clone(&self.claim))
    }

    /// It, to leave with a claim on its memory.
    pub(crate) fn leaving(self) -> Leaving {
        let device = self.device_pair();
        let Self { data, dtype, shape, strides, claim, .. } = self;
        Leaving { data, dtype, shape, strides, device, keeps_fp8: false, _claim: Box::new(claim) }
    }

    /// It, to leave with a record that is found by its address as long as the memory is used.
    pub(crate) fn leaving_with(self, record: Py<PyAny>) -> Leaving {
        let anchor = Anchor::new(self.data as usize, record);
        // The record goes first: memory that is free may get another one.
        let claim = (anchor, Arc::clone(&self.claim));
        Leaving { _claim: Box::new(WithGil::new(claim)), ..self.leaving() }
    }

    fn device_pair(&self) -> (i32, i32) {
        self.device.map_or((dlpack::CPU, 0), |device| (dlpack::CUDA, device))
    }

    /// Lets a consumer on `stream` read behind the operation.
    fn order_for(&self, stream: Option<i64>) -> PyResult<()> {
        let (Some(own), Some(device)) = (self.stream, self.device) else { return Ok(()) };
        // In DLPack's words for CUDA, 1 is the legacy default stream, and -1 asks for no order.
        let other = match stream {
            Some(-1) => return Ok(()),
            None | Some(1) => 0,
            Some(other) => usize::try_from(other).map_err(|_| {
                PyBufferError::new_err(format!("found stream {other}; expected at least -1"))
            })?,
        };
        let is_legacy = |stream| stream == 0 || stream == 1;
        if own == other || is_legacy(own) && is_legacy(other) {
            return Ok(());
        }
        let [own, other] = [own, other].map(|stream| stream as *mut c_void);
        let ordered = u32::try_from(device).map_or(Ok(()), |device| {
            let device = Device::choose(&tokenyard_cuda::PLATFORM, Some(device))?;
            // SAFETY: the stream of the call lives until its communicator is closed, by the contract of `stream=`;
            // the other one is the consumer's, by DLPack's.
            unsafe { order_streams(device, own, other) }
        });
        ordered.map_err(|error| PyBufferError::new_err(error.to_string()))
    }
}

#[pymethods]
impl Array {
    /// The sizes of its dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The type of its elements, by numpy's or torch's name: `"bfloat16"`, `"float8_e4m3fn"`, `"int32"`, ...
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::name(self.dtype)
    }

    /// `"cpu"`, or `"cuda:0"` for the memory of a device.
    #[getter]
    fn device(&self) -> String {
        self.device.map_or("cpu".to_owned(), |device| format!("cuda:{device}"))
    }

    /// Bytes of all elements. There are no gaps between them.
    #[getter]
    fn nbytes(&self) -> i64 {
        self.shape.iter().product::<i64>() * self.dtype.bytes() as i64
    }

    /// The address of the first element. It is valid while this array or a tensor over it lives.
    fn data_ptr(&self) -> usize {
        self.data as usize
    }

    /// The strides of its dimensions, in elements. Rows follow each other without gaps, but for scales that lie by
    /// columns.
    fn stride<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    /// DLPack's device: the kind of memory and the number of the device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device_pair()
    }

    /// DLPack's capsule, which keeps the memory. Nothing is copied, so `copy=True` is a BufferError, as is another
    /// device. Values of a call on a stream are in the order of that stream, and `stream` waits for its present work;
    /// `stream=-1` asks for no order. Name a stream that reads an output by `Communicator.release_after`, too.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        slf: &Bound<'_, Self>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let this = slf.get();
        if copy == Some(true) {
            return Err(PyBufferError::new_err("found copy=True; expected a consumer that copies"));
        }
        let own = this.device_pair();
        if let Some(other) = dl_device.filter(|other| *other != own) {
            let text = format!("found dl_device={other:?}; expected {own:?}, where the array lies");
            return Err(PyBufferError::new_err(text));
        }
        this.order_for(stream)?;
        this.clone().leaving().capsule(slf.py(), max_version.is_some_and(|(major, _)| major >= 1))
    }

    /// Numpy's description of an array of the host: where it lies. AttributeError for memory of a device.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device.is_some() {
            return Err(PyAttributeError::new_err("numpy cannot read the memory of a device"));
        }
        let about = PyDict::new(py);
        about.set_item("version", 3)?;
        about.set_item("shape", self.shape(py)?)?;
        about.set_item("typestr", dtype::typestr(self.dtype))?;
        about.set_item("data", (self.data as usize, false))?;
        let bytes = self.strides.iter().map(|stride| stride * self.dtype.bytes() as i64);
        about.set_item("strides", PyTuple::new(py, bytes.collect::<Vec<_>>())?)?;
        Ok(about)
    }

    fn __repr__(&self) -> String {
        let device = self.device();
        format!("tokenyard.Array(shape={:?}, dtype={}, device={device})", self.shape, self.dtype())
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(0, |rows| *rows as usize)
    }
}
