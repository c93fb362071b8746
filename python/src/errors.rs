//! Core's errors as Python's.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tokenyard_core::{Error, ErrorKind};

/// The class in `tokenyard.errors` for a kind of error.
fn class(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Config => "ConfigError",
        ErrorKind::InvalidInput => "InvalidInputError",
        ErrorKind::Refused => "RefusedError",
        ErrorKind::Mismatch => "MismatchError",
        ErrorKind::Plugin => "PluginError",
        ErrorKind::Unavailable => "UnavailableError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Full => "FullError",
        ErrorKind::Deadline => "DeadlineError",
        ErrorKind::PeerLost => "PeerLostError",
        ErrorKind::Transport => "TransportError",
        ErrorKind::Protocol => "ProtocolError",
        ErrorKind::System => "SystemCallError",
        ErrorKind::Internal => "InternalError",
        // A kind that this version does not know is still an error.
    }
}

/// The exception for an error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error).unwrap_or_else(|failure| failure)
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = py.import("tokenyard.errors")?.getattr(class(error.kind()))?;
    let fields = PyDict::new(py);
    fields.set_item("kind", error.kind().name())?;
    fields.set_item("rank", error.rank())?;
    fields.set_item("operation", error.operation())?;
    fields.set_item("fix", error.fix())?;
    Ok(PyErr::from_value(class.call((error.to_string(),), Some(&fields))?))
}

/// An argument that this module refuses, in core's words.
pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, "check arguments", message)
}

/// Plain data as dictionaries and lists.
pub(crate) fn to_python(py: Python<'_>, value: &impl serde::Serialize) -> PyResult<Py<PyAny>> {
    let text = serde_json::to_string(value)
        .map_err(|e| pyo3::exceptions::PyValueError::new_err(e.to_string()))?;
    Ok(py.import("json")?.call_method1("loads", (text,))?.unbind())
}
