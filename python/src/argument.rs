//! Numbers, truth values and words of Python, as they were given.

use std::borrow::Cow;
use std::convert::Infallible;

use pyo3::prelude::*;
use tokenyard_core::Result;

use crate::errors::invalid;

/// The most characters of a wrong value that a message shows.
const SHOWN: usize = 80;

/// An argument as it was given, which may be of another type or not fit. It is judged with the other arguments of its
/// operation: an error before that would be raised on this rank alone, and the others would wait.
#[derive(Clone)]
pub(crate) enum Argument<T> {
    Fits(T),
    /// The value that was found instead.
    Wrong(String),
}

/// A word, such as the name of a layout.
pub(crate) type Word<'a> = Argument<Cow<'a, str>>;

/// A word that is the default of an argument.
pub(crate) const fn word(text: &'static str) -> Word<'static> {
    Argument::Fits(Cow::Borrowed(text))
}

/// A type of arguments.
pub(crate) trait Kind: Clone {
    /// The values that it has, for messages.
    fn expected() -> String;
}

macro_rules! integers {
    ($($kind:ty),+) => {$(
        impl Kind for $kind {
            fn expected() -> String {
                format!("an integer from 0 to {}", <$kind>::MAX)
            }
        }
    )+};
}

integers!(u32, u64, usize);

impl Kind for bool {
    fn expected() -> String {
        "True or False".to_owned()
    }
}

impl Kind for f64 {
    fn expected() -> String {
        "a number".to_owned()
    }
}

impl Kind for Cow<'_, str> {
    fn expected() -> String {
        "a str".to_owned()
    }
}

impl Kind for Vec<u8> {
    fn expected() -> String {
        "bytes".to_owned()
    }
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Argument<T> {
    type Error = Infallible;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> std::result::Result<Self, Infallible> {
        Ok(object.extract::<T>().map_or_else(|_| Self::Wrong(shown(&object)), Self::Fits))
    }
}

impl<T: Kind> Argument<T> {
    /// # Errors
    /// `InvalidInput`, with what was found in the argument `name`.
    pub(crate) fn get(&self, name: &str) -> Result<T> {
        self.clone().take(name)
    }

    /// As [`get`](Self::get), without a copy.
    ///
    /// # Errors
    /// As those of `get`.
    pub(crate) fn take(self, name: &str) -> Result<T> {
        match self {
            Self::Fits(value) => Ok(value),
            Self::Wrong(found) => {
                Err(invalid(format!("{name}: found {found}; expected {}", T::expected())))
            }
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
