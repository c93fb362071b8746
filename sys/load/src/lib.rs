//! Opens the C libraries that the other crates of `sys` bind, at run time: nothing is linked, so a program starts
//! on machines that lack them. [`functions!`] is the way in, [`LoadError`] the one error of its opening.
//!
//! Watched by the tests of the crates that use it.

use std::ffi::OsStr;

pub use libloading::Library;

/// The reason why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// It is not there, or one of its own libraries is not.
    #[error("{file} cannot be loaded: {reason}{}", .install.map(|it| format!("; {it}")).unwrap_or_default())]
    Absent {
        /// The file that was tried; several with commas between them.
        file: String,
        /// The dynamic loader's error.
        reason: String,
        /// How to install it.
        install: Option<&'static str>,
    },
    /// It is too old, or another library with that name.
    #[error("{file} has no function {function}; expected {expected}")]
    Lacks {
        /// The file that was found.
        file: String,
        /// The first function that is missing.
        function: &'static str,
        /// The versions that have it.
        expected: &'static str,
    },
    /// Its version is too old.
    #[error("{file} is {found}; expected {expected}")]
    Old {
        /// The file that was found.
        file: String,
        /// Its name and version.
        found: String,
        /// The versions that can be used.
        expected: &'static str,
    },
}

/// The library that the dynamic loader finds under this name or path. The error is the loader's text.
///
/// # Errors
/// The file is missing or no library, or lacks a library of its own.
///
/// # Safety
/// The library's initialisers may run on this thread and at this time.
pub unsafe fn open_library(file: impl AsRef<OsStr>) -> Result<Library, String> {
    // SAFETY: by this function's contract.
    unsafe { libloading::Library::new(file.as_ref()) }.map_err(|error| {
        // The error itself names only the call that failed.
        std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), |reason| reason.to_string())
    })
}

/// Defines the functions of a library: a structure with a field for each, of the visibility that stands before the
/// word `needed`, and the fields in braces, which `load` gets. `expected` names the versions that have the functions,
/// `install` the way to install one.
#[macro_export]
macro_rules! functions {
    (
        $(#[$doc:meta])*
        pub struct $library:ident {
            $($(#[$field_doc:meta])* $field_vis:vis $field:ident: $field_type:ty,)*
        }
        expected $expected:literal $(, install $install:literal)?;
        $vis:vis needed {
            $($name:ident: $symbol:literal fn($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*
        }
        optional {
            $($may:ident: $may_symbol:literal fn($($may_arg:ty),* $(,)?) $(-> $may_ret:ty)?;)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[allow(missing_docs, reason = "each is documented as the function of its symbol")]
        pub struct $library {
            $($(#[$field_doc])* $field_vis $field: $field_type,)*
            $($vis $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $($vis $may: Option<unsafe extern "C" fn($($may_arg),*) $(-> $may_ret)?>,)*
        }

        impl $library {
            /// The symbols that a library must have, in the order in which they are looked up.
            pub const SYMBOLS: &[&str] = &[$($symbol),*];
            /// The symbols that only later versions have.
            pub const OPTIONAL: &[&str] = &[$($may_symbol),*];

            /// Opens this file and finds the functions. The library stays loaded for the life of the process:
            /// libraries have threads, handlers and thread-local data.
            ///
            /// # Safety
            /// The library's initialisers may run on this thread and at this time. The symbols have these types in
            /// its headers.
            unsafe fn load(file: &str, $($field: $field_type,)*) -> Result<Self, $crate::LoadError> {
                // SAFETY: by this function's contract.
                let library = unsafe { $crate::open_library(file) }.map_err(|reason| {
                    $crate::LoadError::Absent { file: file.to_owned(), reason, install: None$(.or(Some($install)))? }
                })?;
                let lacks = |function| {
                    $crate::LoadError::Lacks { file: file.to_owned(), function, expected: $expected }
                };
                let this = Self {
                    $($field,)*
                    // SAFETY: by this function's contract. The loader gives a symbol's default version, which is
                    // that of the headers.
                    $($name: unsafe { library.get($symbol) }.map(|it| *it).map_err(|_| lacks($symbol))?,)*
                    // SAFETY: as above.
                    $($may: unsafe { library.get($may_symbol) }.map(|it| *it).ok(),)*
                };
                std::mem::forget(library);
                Ok(this)
            }
        }
    };
}
