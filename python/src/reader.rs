//! Arrays of this package as tensors of a library, without a copy.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple, PyType};

use crate::array::Array;
use crate::dlpack::Leaving;
use crate::errors::raise;
use crate::exchange::Exchange;
use crate::output::Received;
use crate::tensor::Tensor;

/// Makes tensors of a library. The order of their values with streams is the caller's.
///
/// `kind` is the type of the tensors, and `from_capsule` makes one of a capsule, where the type itself has no functions
/// for it. FP8 leaves as such if the library `reads_fp8`, else as bytes.
#[pyclass(frozen, module = "tokenyard", name = "_Reader")]
pub(crate) struct Reader {
    exchange: Option<Exchange>,
    /// Whether the functions have failed once, as for a device that the library does not know.
    has_failed: AtomicBool,
    from_capsule: Py<PyAny>,
    reads_fp8: bool,
}

impl Reader {
    pub(crate) fn make<'py>(
        &self,
        py: Python<'py>,
        leaving: Leaving,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.exchange.filter(|_| !self.has_failed.load(Ordering::Relaxed)) {
            Some(exchange) => exchange.make(py, leaving).inspect_err(|_| {
                // A capsule frees its memory where the library does not take it.
                self.has_failed.store(true, Ordering::Relaxed);
            }),
            None => self.from_capsule.bind(py).call1((leaving.capsule(py, false)?,)),
        }
    }
}

#[pymethods]
impl Reader {
    #[new]
    fn new(kind: &Bound<'_, PyType>, from_capsule: Py<PyAny>, reads_fp8: bool) -> Self {
        Self {
            exchange: Exchange::of(kind),
            has_failed: AtomicBool::new(false),
            from_capsule,
            reads_fp8,
        }
    }

    /// A tensor over an array.
    fn array<'py>(&self, py: Python<'py>, array: &Array) -> PyResult<Bound<'py, PyAny>> {
        self.make(py, array.clone().leaving())
    }

    /// Tensors over arrays of an output, by their names; None for what is not there. `keeps_fp8`: FP8 is not wanted as
    /// bytes. `record` is found by the address of the last one as long as its memory is used.
    #[pyo3(signature = (received, names, keeps_fp8=false, record=None))]
    pub(crate) fn output<'py>(
        &self,
        received: &Bound<'py, Received>,
        names: &Bound<'py, PyTuple>,
        keeps_fp8: bool,
        mut record: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let py = received.py();
        let last = names.len().saturating_sub(1);
        let mut tensors = Vec::with_capacity(names.len());
        for (place, name) in names.iter_borrowed().enumerate() {
            let found = received.get().array(name.cast::<PyString>()?.to_str()?);
            let Some(array) = found.map_err(|error| raise(py, &error))? else {
                tensors.push(py.None().into_bound(py));
                continue;
            };
            let mut leaving = match record.take_if(|_| place == last) {
                Some(record) => array.leaving_with(record),
                None => array.leaving(),
            };
            leaving.keeps_fp8 = keeps_fp8 && self.reads_fp8;
            tensors.push(self.make(py, leaving)?);
        }
        PyTuple::new(py, tensors)
    }

    /// A tensor over the memory of another, by whose address `record` is found as long as it is used.
    fn anchored<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        record: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = tensor.py();
        let read = Tensor::read("tensor", tensor).map_err(|error| raise(py, &error))?;
        self.make(py, read.leaving(Some(record), None))
    }
}
