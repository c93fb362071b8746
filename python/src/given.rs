//! Integers of Python.

use std::convert::Infallible;

use pyo3::prelude::*;
use tokenyard_core::Result;

use crate::errors::invalid;

/// The most characters of a wrong value that a message shows.
const SHOWN: usize = 80;

/// An integer argument as it was given, which may be none or not fit. It is judged with the other arguments of its
/// operation: an error before that would be raised on this rank alone, and the others would wait.
pub(crate) enum Integer<T> {
    Fits(T),
    /// The value that was found instead.
    Wrong(String),
}

/// The unsigned integers of core.
pub(crate) trait Unsigned: Copy {
    const MOST: u64;
}

impl Unsigned for u32 {
    const MOST: u64 = u32::MAX as u64;
}

impl Unsigned for u64 {
    const MOST: u64 = u64::MAX;
}

impl Unsigned for usize {
    const MOST: u64 = usize::MAX as u64;
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Integer<T> {
    type Error = Infallible;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> std::result::Result<Self, Infallible> {
        Ok(object.extract::<T>().map_or_else(|_| Self::Wrong(shown(&object)), Self::Fits))
    }
}

impl<T: Unsigned> Integer<T> {
    /// # Errors
    /// `InvalidInput`, with what was found in the argument `name`.
    pub(crate) fn get(&self, name: &str) -> Result<T> {
        match self {
            Self::Fits(value) => Ok(*value),
            Self::Wrong(found) => Err(invalid(format!(
                "{name}: found {found}; expected an integer from 0 to {}",
                T::MOST
            ))),
        }
    }
}

/// The value as Python shows it, or its type where Python cannot.
fn shown(object: &Bound<'_, PyAny>) -> String {
    let text = object.repr().or_else(|_| object.get_type().repr());
    let text = text.map_or_else(|_| "an object".to_owned(), |text| text.to_string());
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
