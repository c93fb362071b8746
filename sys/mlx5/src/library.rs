//! The library file and its functions.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::ffi::{ContextAttr, Device, DevxObj, DevxUar, DevxUmem, DevxUmemIn, Obj, RawContext};

/// The name that every version of rdma-core installs.
const FILE: &str = "libmlx5.so.1";

/// Why libmlx5 cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoadError {
    /// The library is missing, or one of the libraries that it needs.
    #[error("{FILE} cannot be loaded: {reason}; install it: apt-get install ibverbs-providers")]
    Absent {
        /// The message of the dynamic loader.
        reason: String,
    },
    /// The library is too old.
    #[error(
        "{FILE} has no function {function}; expected rdma-core 36 or newer: upgrade ibverbs-providers"
    )]
    Old {
        /// The first function that is missing.
        function: &'static str,
    },
}

/// Defines [`Library`]: one field for each exported function.
macro_rules! functions {
    ($($name:ident: $symbol:literal fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions of libmlx5, found once and never unloaded.
        #[derive(Debug)]
        pub struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Library {
            fn load(file: &str) -> Result<Self, LoadError> {
                // SAFETY: libmlx5's initialisers register it with libibverbs, which expects that at
                // any time before its first list of devices, and allows it later.
                let file = unsafe { libloading::Library::new(file) }
                    .map_err(|e| LoadError::Absent { reason: reason(&e) })?;
                let this = Self {
                    // SAFETY: the symbol has this type in mlx5dv.h. `dlsym` gives its default
                    // version, which is the version of that header.
                    $($name: unsafe { file.get($symbol.as_bytes()) }
                        .map(|found| *found)
                        .map_err(|_| LoadError::Old { function: $symbol })?,)*
                };
                // libibverbs stores pointers to the library, so it is never unloaded.
                std::mem::forget(file);
                Ok(this)
            }
        }
    };
}

functions! {
    is_supported: "mlx5dv_is_supported" fn(*mut Device) -> bool;
    open_device: "mlx5dv_open_device" fn(*mut Device, *mut ContextAttr) -> *mut RawContext;
    init_obj: "mlx5dv_init_obj" fn(*mut Obj, u64) -> c_int;
    general_cmd: "mlx5dv_devx_general_cmd"
        fn(*mut RawContext, *const c_void, usize, *mut c_void, usize) -> c_int;
    obj_create: "mlx5dv_devx_obj_create"
        fn(*mut RawContext, *const c_void, usize, *mut c_void, usize) -> *mut DevxObj;
    obj_modify: "mlx5dv_devx_obj_modify"
        fn(*mut DevxObj, *const c_void, usize, *mut c_void, usize) -> c_int;
    obj_query: "mlx5dv_devx_obj_query"
        fn(*mut DevxObj, *const c_void, usize, *mut c_void, usize) -> c_int;
    obj_destroy: "mlx5dv_devx_obj_destroy" fn(*mut DevxObj) -> c_int;
    umem_reg_ex: "mlx5dv_devx_umem_reg_ex" fn(*mut RawContext, *mut DevxUmemIn) -> *mut DevxUmem;
    umem_dereg: "mlx5dv_devx_umem_dereg" fn(*mut DevxUmem) -> c_int;
    alloc_uar: "mlx5dv_devx_alloc_uar" fn(*mut RawContext, u32) -> *mut DevxUar;
    free_uar: "mlx5dv_devx_free_uar" fn(*mut DevxUar);
    query_eqn: "mlx5dv_devx_query_eqn" fn(*mut RawContext, u32, *mut u32) -> c_int;
}

static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();

impl Library {
    /// The library, opened by the first call in this process.
    ///
    /// # Errors
    /// It is absent or too old; the answer stays the same for the life of the process.
    pub fn get() -> Result<&'static Self, LoadError> {
        LIBRARY.get_or_init(|| Self::load(FILE)).as_ref().map_err(Clone::clone)
    }
}

/// The message of the dynamic loader; the error itself names only the call that failed.
fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_one_is_named_with_its_package() {
        let error = Library::load("libtokenyard_no_such_file.so.1").unwrap_err().to_string();
        assert!(error.starts_with("libmlx5.so.1 cannot be loaded: "), "{error}");
        assert!(error.ends_with("apt-get install ibverbs-providers"), "{error}");
        let error = Library::load("libc.so.6").unwrap_err().to_string();
        let expected = "libmlx5.so.1 has no function mlx5dv_is_supported; expected rdma-core 36 or \
                        newer: upgrade ibverbs-providers";
        assert_eq!(error, expected);
    }
}
