//! The library file and its functions.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use tokenyard_sys_load::{LoadError, functions};

use crate::ffi::{ContextAttr, Device, DevxObj, DevxUar, DevxUmem, DevxUmemIn, Obj, RawContext};

/// The name that every version of rdma-core installs.
const FILE: &str = "libmlx5.so.1";

functions! {
    /// The functions of libmlx5, found once and never unloaded.
    pub struct Library {}
    expected "rdma-core 36 or newer: upgrade ibverbs-providers",
    install "install it: apt-get install ibverbs-providers";
    pub(crate) needed {
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
    optional {}
}

static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();

impl Library {
    /// The library, opened by the first call in this process.
    ///
    /// # Errors
    /// It is absent or too old; the answer stays the same for the life of the process.
    pub fn get() -> Result<&'static Self, LoadError> {
        // SAFETY: libmlx5's initialisers register it with libibverbs, which expects that at any time before its
        // first list of devices, and allows it later. The types are those of mlx5dv.h.
        LIBRARY.get_or_init(|| unsafe { Self::load(FILE) }).as_ref().map_err(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_one_is_named_with_its_package() {
        // SAFETY: there is no such file.
        let error = unsafe { Library::load("libtokenyard_no_such_file.so.1") };
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("libtokenyard_no_such_file.so.1 cannot be loaded: "), "{error}");
        assert!(error.ends_with("apt-get install ibverbs-providers"), "{error}");
        // SAFETY: it is loaded, and has none of the functions.
        let error = unsafe { Library::load("libc.so.6") }.unwrap_err().to_string();
        let expected = "libc.so.6 has no function mlx5dv_is_supported; expected rdma-core 36 or \
                        newer: upgrade ibverbs-providers";
        assert_eq!(error, expected);
    }
}
