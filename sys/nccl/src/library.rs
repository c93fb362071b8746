//! The library file and its functions.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use tokenyard_sys_load::{LoadError, functions};

use crate::consts::LEAST_VERSION;
use crate::types::{CommProperties, Config, DevCommRequirements, UniqueId};

/// The file that is opened where no config names one.
const FILE: &str = "libnccl.so.2";

/// A version in its usual written form, from `NCCL_VERSION_CODE`.
fn version_text(code: c_int) -> String {
    // The same rule as NCCL_VERSION: until 2.8 the minor version had one digit.
    let (major, minor) = if code < 10_000 { (1000, 100) } else { (10_000, 100) };
    format!("{}.{}.{}", code / major, code % major / minor, code % minor)
}

functions! {
    /// The functions of NCCL. Handles are NCCL's own pointers; results are values of [`crate::consts`].
    pub struct Nccl {
        version: c_int,
        file: PathBuf,
    }
    expected "NCCL 2.31.2 or newer: upgrade it",
    install "install NCCL 2.31.2 or newer (pip install nvidia-nccl-cu13), or put its lib folder into LD_LIBRARY_PATH";
    pub needed {
    get_version: "ncclGetVersion" fn(*mut c_int) -> c_uint;
    get_error_string: "ncclGetErrorString" fn(c_uint) -> *const c_char;
    get_last_error: "ncclGetLastError" fn(*mut c_void) -> *const c_char;
    get_unique_id: "ncclGetUniqueId" fn(*mut UniqueId) -> c_uint;
    comm_init_rank_config: "ncclCommInitRankConfig" fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_uint;
    comm_get_async_error: "ncclCommGetAsyncError" fn(*mut c_void, *mut c_uint) -> c_uint;
    comm_finalize: "ncclCommFinalize" fn(*mut c_void) -> c_uint;
    comm_destroy: "ncclCommDestroy" fn(*mut c_void) -> c_uint;
    comm_abort: "ncclCommAbort" fn(*mut c_void) -> c_uint;
    comm_query_properties: "ncclCommQueryProperties" fn(*mut c_void, *mut CommProperties) -> c_uint;
    comm_window_register: "ncclCommWindowRegister" fn(*mut c_void, *mut c_void, usize, *mut *mut c_void, c_int) -> c_uint;
    comm_window_deregister: "ncclCommWindowDeregister" fn(*mut c_void, *mut c_void) -> c_uint;
    dev_comm_create: "ncclDevCommCreate" fn(*mut c_void, *const DevCommRequirements, *mut c_void) -> c_uint;
    dev_comm_destroy: "ncclDevCommDestroy" fn(*mut c_void, *const c_void) -> c_uint;
    mem_alloc: "ncclMemAlloc" fn(*mut *mut c_void, usize) -> c_uint;
    mem_free: "ncclMemFree" fn(*mut c_void) -> c_uint;
    }
    optional {}
}

impl Nccl {
    /// Opens the library where the loader finds it. It stays for the life of the process.
    ///
    /// # Errors
    /// It is absent or too old.
    pub fn open() -> Result<Self, LoadError> {
        Self::open_file(Path::new(FILE))
    }

    /// Opens this file.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn open_file(file: &Path) -> Result<Self, LoadError> {
        let name = file.display().to_string();
        // SAFETY: NCCL's initialisers may run on any thread, before any of its calls. The types are those of the
        // headers of NCCL 2.31 and 2.32.
        let mut this = unsafe { Self::load(&name, 0, file.to_owned()) }?;
        // SAFETY: the function writes one `int`.
        unsafe { (this.get_version)(&mut this.version) };
        if this.version < LEAST_VERSION {
            let found = format!("NCCL {}", this.version_text());
            let expected = "2.31.2 or newer, whose waits on the device time out: upgrade it";
            return Err(LoadError::Old { file: name, found, expected });
        }
        Ok(this)
    }

    /// `NCCL_VERSION_CODE` of the library. The headers for device code must have the same version.
    pub fn version(&self) -> c_int {
        self.version
    }

    /// The version in its usual written form.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// The file that was opened.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_people_do() {
        assert_eq!(
            [2708, 21903, 23102, 23203].map(version_text),
            ["2.7.8", "2.19.3", "2.31.2", "2.32.3"]
        );
    }
}
