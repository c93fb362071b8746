//! Tensors of a call: one, or those of a list. Its outputs are the caller's, or new ones of the library of the inputs.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::moe::DType;
use tokenyard_core::{Error, Result};

use crate::array::Array;
use crate::dlpack::Dims;
use crate::errors::invalid;
use crate::tensor::Tensor;

/// The tensors of an argument: those of a list or a tuple, or one.
pub(crate) struct Tensors {
    name: &'static str,
    all: Vec<Tensor>,
    is_list: bool,
}

impl Tensors {
    fn read(name: &'static str, object: &Bound<'_, PyAny>) -> Result<Self> {
        let (items, is_list) = items(object);
        let read = |(index, item)| match Tensor::read(name, item) {
            Err(why) if is_list => Err(of_item(index, name, &why)),
            read => read,
        };
        let all = items.iter().enumerate().map(read).collect::<Result<_>>()?;
        Ok(Self { name, all, is_list })
    }

    /// The result of `give` for each tensor, for core.
    fn give<T>(&self, give: impl Fn(&Tensor) -> Result<T>) -> Result<Vec<T>> {
        let given = |(index, tensor)| match give(tensor) {
            Err(why) if self.is_list => Err(of_item(index, self.name, &why)),
            given => given,
        };
        self.all.iter().enumerate().map(given).collect()
    }
}

/// The objects of a list or a tuple, or the one; and whether it is a list.
pub(crate) fn items<'py>(object: &Bound<'py, PyAny>) -> (Vec<Bound<'py, PyAny>>, bool) {
    match (object.cast::<PyList>(), object.cast::<PyTuple>()) {
        (Ok(list), _) => (list.iter().collect(), true),
        (_, Ok(tuple)) => (tuple.iter().collect(), true),
        _ => (vec![object.clone()], false),
    }
}

/// The error of a tensor in a list, with its place.
fn of_item(index: usize, name: &str, why: &Error) -> Error {
    let text = why.message();
    let named = invalid(format!("{name}[{index}]{}", text.strip_prefix(name).unwrap_or(text)));
    match why.fix() {
        Some(fix) => named.with_fix(fix),
        None => named,
    }
}

/// The form of an output for an input.
struct OutputForm {
    /// The input. Its library makes the output.
    object: Py<PyAny>,
    dtype: DType,
    shape: Dims,
}

impl OutputForm {
    /// New memory: a tensor of torch or numpy, else an array of this package.
    fn make(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let (object, shape) = (self.object.bind(py), self.shape.clone());
        let is_of_numpy = || {
            let module = object.get_type().getattr(intern!(py, "__module__"));
            module.and_then(|name| name.extract::<String>()).is_ok_and(|name| name == "numpy")
        };
        if let Ok(new_empty) = object.getattr(intern!(py, "new_empty")) {
            return Ok(new_empty.call1((PyTuple::new(py, shape)?,))?.unbind());
        }
        if is_of_numpy() {
            let (shape, dtype) = (PyTuple::new(py, shape)?, object.getattr(intern!(py, "dtype"))?);
            return Ok(py.import("numpy")?.call_method1("empty", (shape, dtype))?.unbind());
        }
        Ok(Py::new(py, Array::on_host(self.dtype, shape))?.into_any())
    }
}

/// The inputs of a call.
pub(crate) struct CallInputs {
    /// Held while core uses `given`.
    _kept: Tensors,
    pub(crate) given: Vec<TensorRef<'static>>,
    pub(crate) forms: OutputForms,
}

/// The forms of the outputs of a call.
pub(crate) struct OutputForms {
    all: Vec<OutputForm>,
    is_list: bool,
    /// Whether some input lies on a device.
    on_device: bool,
}

impl CallInputs {
    /// `shape`: that of the output for an input of a shape.
    pub(crate) fn read(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        shape: impl Fn(&[i64]) -> Dims,
    ) -> Result<Self> {
        let kept = Tensors::read(name, object)?;
        // SAFETY: the tensors are held during the call. That no thread writes their memory until then is asked of the
        // caller.
        let given = kept.give(|tensor| unsafe { tensor.get_message() })?;
        let is_list = kept.is_list;
        let form = |(index, tensor): (usize, &Tensor)| {
            let item = if is_list { object.get_item(index) } else { Ok(object.clone()) };
            let object = item.map_err(|error| invalid(format!("{name}: {error}")))?.unbind();
            Ok(OutputForm { object, dtype: tensor.dtype(), shape: shape(tensor.shape()) })
        };
        let all = kept.all.iter().enumerate().map(form).collect::<Result<_>>()?;
        let on_device = kept.all.iter().any(Tensor::is_on_device);
        Ok(Self { _kept: kept, given, forms: OutputForms { all, is_list, on_device } })
    }
}

/// The outputs of a call.
pub(crate) struct Outputs {
    /// Held while core uses `given`.
    pub(crate) kept: Tensors,
    pub(crate) given: Vec<TensorMut<'static>>,
    /// For the caller.
    pub(crate) object: Py<PyAny>,
}

impl Outputs {
    /// The caller's, or new ones.
    pub(crate) fn read(
        object: Option<&Bound<'_, PyAny>>,
        forms: &OutputForms,
        py: Python<'_>,
    ) -> Result<Self> {
        let made = match object {
            Some(object) => Ok(object.clone()),
            // A library gives new memory to the work that is queued on its own stream, which may use it still.
            None if forms.on_device => {
                let why = "outs: found none; expected outputs, because the inputs lie on a device";
                return Err(invalid(why).with_fix(
                    "make them behind the work of your stream, as torch.empty does, and pass them",
                ));
            }
            None => forms.make(py),
        };
        let object = made.map_err(|error| invalid(format!("outs: cannot be made: {error}")))?;
        let kept = Tensors::read("outs", &object)?;
        // SAFETY: the tensors are held during the call. That no thread uses their memory until then is asked of the
        // caller.
        let given = kept.give(|tensor| unsafe { tensor.get_message_mut() })?;
        Ok(Self { kept, given, object: object.unbind() })
    }
}

impl OutputForms {
    fn make<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut made = Vec::new();
        for form in &self.all {
            made.push(form.make(py)?.into_bound(py));
        }
        match made.pop() {
            Some(one) if !self.is_list => Ok(one),
            last => {
                made.extend(last);
                Ok(PyList::new(py, made)?.into_any())
            }
        }
    }
}
