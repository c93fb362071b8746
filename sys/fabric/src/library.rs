//! Opens `libfabric.so.1` at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use tokenyard_sys_load::{LoadError, functions};

use crate::consts::{API_VERSION, NEWEST_API};
use crate::handlers::Handlers;
use crate::types::{fi_fabric_attr, fi_info, fid_fabric};

/// The name that the dynamic loader looks for.
const SONAME: &str = "libfabric.so.1";

functions! {
    /// The functions of libfabric that are symbols. The library is never closed.
    pub struct Library {
        version: u32,
    }
    expected "libfabric 1.17 or newer";
    needed {
        get_version: "fi_version" fn() -> u32;
        getinfo: "fi_getinfo"
            fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;
        freeinfo: "fi_freeinfo" fn(*mut fi_info);
        dupinfo: "fi_dupinfo" fn(*const fi_info) -> *mut fi_info;
        fabric: "fi_fabric" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
        strerror: "fi_strerror" fn(c_int) -> *const c_char;
    }
    optional {}
}

impl Library {
    /// The library of this process. It is opened once; a later call returns the same result.
    ///
    /// # Errors
    /// It is not there, or older than 1.17.
    pub fn open() -> Result<&'static Self, LoadError> {
        static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
        LIBRARY.get_or_init(Self::load_checked).as_ref().map_err(Clone::clone)
    }

    fn load_checked() -> Result<Self, LoadError> {
        let handlers = Handlers::now();
        // SAFETY: libfabric's constructors have no preconditions. The types are those of libfabric's headers, checked
        // by the layout test.
        let loaded = unsafe { Self::load(SONAME, 0) };
        handlers.restore();
        let mut loaded = loaded?;
        // SAFETY: the function has no conditions.
        loaded.version = unsafe { (loaded.get_version)() };
        let (major, minor) = loaded.version();
        if loaded.version < API_VERSION {
            let (file, found) = (SONAME.to_owned(), format!("libfabric {major}.{minor}"));
            return Err(LoadError::Old { file, found, expected: "1.17 or newer" });
        }
        Ok(loaded)
    }

    /// Major and minor version.
    pub fn version(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }

    /// The name that this library has for a provider. The provider of reliable datagrams directly over TCP is
    /// called `tcp` from 1.18 on and `net` in 1.17. The `tcp` of 1.17 needs the layer `ofi_rxm`, which is
    /// slower, and whose progress crashed when peers left. It is still available as `tcp;ofi_rxm`.
    pub fn provider<'a>(&self, name: &'a str) -> &'a str {
        if name == "tcp" && self.version() < (1, 18) { "net" } else { name }
    }

    /// The version of the API that is used: the library's, up to the newest that this crate
    /// supports. From 1.18 on the provider efa accepts device memory and options as in its manual,
    /// from 1.20 on dmabufs.
    fn api(&self) -> u32 {
        self.version.clamp(API_VERSION, NEWEST_API)
    }

    /// `fi_getinfo` of the library's API, at most [`NEWEST_API`], with neither node nor service.
    ///
    /// # Errors
    /// The positive error number.
    ///
    /// # Safety
    /// `hints` comes from [`Library::allocinfo`]. The result is freed by [`Library::freeinfo`].
    pub unsafe fn getinfo(&self, hints: *const fi_info) -> Result<*mut fi_info, i32> {
        let mut list = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: by this function's contract; `list` is written on success.
        let status = unsafe { (self.getinfo)(self.api(), none, none, 0, hints, &mut list) };
        if status == 0 { Ok(list) } else { Err(-status) }
    }

    /// An empty `fi_info`, or null if memory is short.
    pub fn allocinfo(&self) -> *mut fi_info {
        // SAFETY: null asks for a fresh structure.
        unsafe { (self.dupinfo)(std::ptr::null()) }
    }

    /// `fi_dupinfo`: a copy of one entry, or null if memory is short.
    ///
    /// # Safety
    /// `info` is valid.
    pub unsafe fn dupinfo(&self, info: *const fi_info) -> *mut fi_info {
        // SAFETY: by this function's contract.
        unsafe { (self.dupinfo)(info) }
    }

    /// `fi_freeinfo`: frees a list.
    ///
    /// # Safety
    /// `info` came from this library, and nothing uses it any more.
    pub unsafe fn freeinfo(&self, info: *mut fi_info) {
        // SAFETY: by this function's contract.
        unsafe { (self.freeinfo)(info) }
    }

    /// `fi_fabric`.
    ///
    /// # Errors
    /// The positive error number.
    ///
    /// # Safety
    /// `attr` is that of an entry that `getinfo` returned.
    pub unsafe fn fabric(&self, attr: *mut fi_fabric_attr) -> Result<*mut fid_fabric, i32> {
        let mut fabric = std::ptr::null_mut();
        // SAFETY: by this function's contract.
        let status = unsafe { (self.fabric)(attr, &mut fabric, std::ptr::null_mut()) };
        if status == 0 { Ok(fabric) } else { Err(-status) }
    }

    /// libfabric's text for a positive error number.
    pub fn strerror(&self, error: i32) -> String {
        // SAFETY: any number is allowed; the result is a static text.
        let text = unsafe { (self.strerror)(error) };
        if text.is_null() {
            return format!("error {error}");
        }
        // SAFETY: libfabric returns text that ends with a zero byte.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_is_the_librarys_as_far_as_it_is_known() {
        let mut library = match Library::load_checked() {
            Ok(library) => library,
            Err(error) => panic!("the tests need libfabric: {error}"),
        };
        for (version, api) in [((1, 17), (1, 17)), ((1, 18), (1, 18)), ((2, 1), (1, 20))] {
            library.version = version.0 << 16 | version.1;
            assert_eq!(library.api(), api.0 << 16 | api.1);
        }
    }
}
