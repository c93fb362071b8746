//! Records that belong to memory, and are found by its address.
//!
//! A framework saves the tensors of a handle and nothing else of it. So what a handle stands for belongs to the memory
//! of one of its tensors, and lives exactly as long.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;

/// No call of Python is made while it is locked, so a thread that has the GIL never waits for it.
static RECORDS: Mutex<BTreeMap<usize, Weak<Py<PyAny>>>> = Mutex::new(BTreeMap::new());

fn records() -> MutexGuard<'static, BTreeMap<usize, Weak<Py<PyAny>>>> {
    RECORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A record, which is found by an address while this lives. It is dropped with the GIL.
#[pyclass(frozen, module = "tokenyard", name = "_Anchor")]
pub(crate) struct Anchor {
    address: usize,
    record: Arc<Py<PyAny>>,
}

#[pymethods]
impl Anchor {
    /// `address` is that of the first element of memory which lives as long as this.
    #[new]
    pub(crate) fn new(address: usize, record: Py<PyAny>) -> Self {
        let record = Arc::new(record);
        records().insert(address, Arc::downgrade(&record));
        Self { address, record }
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        let mut records = records();
        // The same memory may have a newer one.
        let found = records.get(&self.address).map(Weak::as_ptr);
        if found == Some(Arc::as_ptr(&self.record)) {
            records.remove(&self.address);
        }
    }
}

/// The record of the memory that begins at an address, or None.
#[pyfunction]
pub(crate) fn _record_at(py: Python<'_>, address: usize) -> Option<Py<PyAny>> {
    let found = records().get(&address).and_then(Weak::upgrade);
    found.map(|record| record.clone_ref(py))
}
