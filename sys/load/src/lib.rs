//! Opens the C libraries that the other crates of `sys` bind, at run time: nothing is linked, so a program starts
//! on machines that lack them. The errors belong to those crates, because each names its own fix.
//!
//! Watched by the tests of the crates that use it.

use std::ffi::OsStr;

pub use libloading::Library;

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
/// word `needed`, and the fields in braces, which `look_up` gets.
#[macro_export]
macro_rules! functions {
    (
        $(#[$doc:meta])*
        pub struct $library:ident {
            $($(#[$field_doc:meta])* $field_vis:vis $field:ident: $field_type:ty,)*
        }
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

            /// Finds the functions, and leaves the library loaded for the life of the process: libraries have threads,
            /// handlers and thread-local data. The error is the first symbol that is missing.
            ///
            /// # Safety
            /// The symbols have these types in the library's headers.
            unsafe fn look_up(
                library: $crate::Library,
                $($field: $field_type,)*
            ) -> Result<Self, &'static str> {
                let this = Self {
                    $($field,)*
                    // SAFETY: by this function's contract. The loader gives a symbol's default version, which is
                    // that of the headers.
                    $($name: unsafe { library.get($symbol) }.map(|it| *it).map_err(|_| $symbol)?,)*
                    // SAFETY: as above.
                    $($may: unsafe { library.get($may_symbol) }.map(|it| *it).ok(),)*
                };
                std::mem::forget(library);
                Ok(this)
            }
        }
    };
}
