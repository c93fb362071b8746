//! DLPack's functions of a library, which describe a tensor or make one without a call of Python.
//!
//! Types of tensors have them in `__dlpack_c_exchange_api__`, since DLPack 1.3. Libraries without them are asked by
//! attributes, and get capsules. The structures are those of `dlpack.h`.

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use crate::dlpack::{self, Description, DlTensor, Leaving, Versioned};

const NAME: &CStr = c"dlpack_exchange_api";

/// `DLPackExchangeAPIHeader`.
#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    previous: *const Header,
}

type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
type Make = unsafe extern "C" fn(*mut Versioned, *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPI`.
#[repr(C)]
struct ExchangeTable {
    header: Header,
    _allocate: *const c_void,
    _give: *const c_void,
    make: Option<Make>,
    describe: Option<Describe>,
    _current_stream: *const c_void,
}

/// The functions of a type of tensors.
#[derive(Clone, Copy)]
pub(crate) struct Exchange {
    make: Make,
    describe: Describe,
}

/// Types that were asked before, of which libraries have few.
static KNOWN: Mutex<Vec<(Py<PyType>, Option<Exchange>)>> = Mutex::new(Vec::new());
const MOST_KNOWN: usize = 16;

impl Exchange {
    /// The functions of torch's tensors and of types that are made from them, if they have some.
    pub(crate) fn of(kind: &Bound<'_, PyType>) -> Option<Self> {
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known().iter().find(|(known, _)| known.is(kind)) {
            return *found;
        }
        let found = Self::ask(kind).unwrap_or(None);
        let mut known = known();
        if known.len() < MOST_KNOWN {
            known.push((kind.clone().unbind(), found));
        }
        found
    }

    fn ask(kind: &Bound<'_, PyType>) -> PyResult<Option<Self>> {
        // The functions say nothing of memory that may only be read: torch has none.
        let is_of_torch = |base: Bound<'_, PyAny>| {
            let module = base.getattr("__module__").and_then(|name| name.extract::<String>());
            module.is_ok_and(|name| name == "torch")
        };
        if !kind.mro().iter().any(is_of_torch) {
            return Ok(None);
        }
        let Some(capsule) = kind.getattr_opt(intern!(kind.py(), "__dlpack_c_exchange_api__"))?
        else {
            return Ok(None);
        };
        let capsule = capsule.cast::<PyCapsule>()?;
        let mut header =
            capsule.pointer_checked(Some(NAME))?.as_ptr().cast::<Header>().cast_const();
        // SAFETY: a table of this name lives as long as the process, and so do those of older versions behind it. Each
        // begins with a header, and one of this major version has at least the members that are named here.
        unsafe {
            while !header.is_null() && (*header).major != dlpack::MAJOR {
                header = (*header).previous;
            }
            let Some(table) = header.cast::<ExchangeTable>().as_ref() else { return Ok(None) };
            let both = table.make.zip(table.describe);
            Ok(both.map(|(make, describe)| Self { make, describe }))
        }
    }

    /// The description of a tensor, of the type that this is of.
    ///
    /// # Errors
    /// The library has none, and says why.
    pub(crate) fn describe(self, tensor: &Bound<'_, PyAny>) -> PyResult<Description> {
        let mut found = DlTensor::NONE;
        // SAFETY: an object of the right type. The lists of the description live as long as that, and are copied.
        unsafe {
            match (self.describe)(tensor.as_ptr().cast(), &raw mut found) {
                0 => Ok(Description::of(&found, 0)),
                _ => Err(PyErr::fetch(tensor.py())),
            }
        }
    }

    /// A tensor of the library over memory that leaves.
    ///
    /// # Errors
    /// A type or device that the library does not know. Then the memory is not freed.
    pub(crate) fn make<'py>(
        self,
        py: Python<'py>,
        leaving: Leaving,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut object = std::ptr::null_mut();
        // SAFETY: the function takes the tensor over, and gives a new reference.
        unsafe {
            match (self.make)(leaving.versioned(), &raw mut object) {
                0 => Bound::from_owned_ptr_or_err(py, object.cast::<ffi::PyObject>()),
                _ => Err(PyErr::fetch(py)),
            }
        }
    }
}
