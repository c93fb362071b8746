//! The names that Python's libraries give to element types.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tokenyard_core::moe::DType;

/// Every type and its name: numpy's, `ml_dtypes`' and torch's.
const NAMES: [(DType, &str); 7] = [
    (DType::Bf16, "bfloat16"),
    (DType::F16, "float16"),
    (DType::F32, "float32"),
    (DType::Fp8E4m3, "float8_e4m3fn"),
    (DType::U8, "uint8"),
    (DType::I32, "int32"),
    (DType::I64, "int64"),
];

/// The name of a type.
pub(crate) fn name(dtype: DType) -> &'static str {
    NAMES.iter().find(|(known, _)| *known == dtype).map_or("unknown", |(_, name)| name)
}

/// The type of a name, `torch.` in front or not.
pub(crate) fn parse(name: &str) -> Option<DType> {
    let name = name.strip_prefix("torch.").unwrap_or(name);
    NAMES.iter().find(|(_, known)| *known == name).map(|(dtype, _)| *dtype)
}

/// Type objects of libraries that were named before, of which libraries have few.
static KNOWN: Mutex<Vec<(Py<PyAny>, DType)>> = Mutex::new(Vec::new());
const MOST_KNOWN: usize = 16;

/// The type of a library's type object. It is asked for its name once: to make the text costs more than the rest of
/// an argument.
pub(crate) fn of_object(object: &Bound<'_, PyAny>) -> PyResult<Option<DType>> {
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, dtype)) = known().iter().find(|(known, _)| known.is(object)) {
        return Ok(Some(*dtype));
    }
    let dtype = parse(&object.str()?.to_string());
    let mut known = known();
    if let (Some(dtype), true) = (dtype, known.len() < MOST_KNOWN) {
        known.push((object.clone().unbind(), dtype));
    }
    Ok(dtype)
}

/// All names, for messages.
pub(crate) fn names() -> String {
    NAMES.map(|(_, name)| name).join(", ")
}

/// The type of a `typestr` of numpy's array interface.
pub(crate) fn from_typestr(text: &str) -> Option<DType> {
    match text {
        "<f2" => Some(DType::F16),
        "<f4" => Some(DType::F32),
        "|u1" => Some(DType::U8),
        "<i4" => Some(DType::I32),
        "<i8" => Some(DType::I64),
        _ => None,
    }
}

/// The `typestr` of a type. numpy has no bfloat16 and no FP8: they are 2 opaque bytes, and plain bytes.
pub(crate) fn typestr(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "|V2",
        DType::F16 => "<f2",
        DType::F32 => "<f4",
        DType::Fp8E4m3 | DType::U8 => "|u1",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
    }
}
