//! CUDA's driver, as this crate uses it: loaded at run time, every object a type with a drop.
//!
//! Nothing of CUDA is linked. [`load`] must have succeeded before any other call: the bindings panic
//! where the library is missing, and this is the one place that makes sure it is not.

mod device;
mod memory;
mod module;
mod stream;

pub(crate) use device::{Context, Device};
pub(crate) use memory::{Buffer, Pinned, Reserved, Vmm, copy, granularity};
pub(crate) use module::{Function, Launch, Module};
pub(crate) use stream::{Event, Stream};

use std::ffi::CStr;
use std::sync::OnceLock;

pub(crate) use cudarc::driver::sys;
use tokenyard_core::{Error, ErrorKind, Result};

/// The oldest driver whose calls the bindings know: CUDA 13.0.
const OLDEST: i32 = 13_000;

/// Loads and initialises the driver, once per process.
///
/// # Errors
/// [`ErrorKind::Unavailable`]: no driver, too old a driver, or no device, with the fix.
pub(crate) fn load() -> Result<()> {
    static LOADED: OnceLock<std::result::Result<(), (String, &'static str)>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        // SAFETY: opening the driver's library runs its constructors only.
        if !unsafe { sys::is_culib_present() } {
            return Err((
                "found no libcuda.so; expected NVIDIA's driver".to_owned(),
                "install the driver, or give the container its libraries (NVIDIA container toolkit)",
            ));
        }
        let mut version = 0;
        // SAFETY: the library is there; the version may be asked before initialisation.
        let status = unsafe { sys::cuDriverGetVersion(&mut version) };
        if status != sys::CUresult::CUDA_SUCCESS || version < OLDEST {
            return Err((
                format!("found a driver for CUDA {}; expected 13.0", version_text(version)),
                "install driver 580 or later",
            ));
        }
        // SAFETY: the library is there.
        match unsafe { sys::cuInit(0) } {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            other => Err((
                format!("cuInit failed: {}", name_of(other)),
                "see what nvidia-smi says; give the container its devices",
            )),
        }
    });
    loaded.clone().map_err(|(message, fix)| {
        Error::new(ErrorKind::Unavailable, "load driver", message).with_fix(fix)
    })
}

/// The version in words, as CUDA numbers it.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn name_of(status: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, as for whoever has a status; the text is static.
    let found = unsafe { sys::cuGetErrorName(status, &mut text) };
    if found != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("status {}", status as i32);
    }
    // SAFETY: a text of the driver, ended by zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Turns a status into an error that names the call.
pub(crate) fn check(operation: &'static str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(failed(operation, status))
}

#[cold]
fn failed(operation: &'static str, status: sys::CUresult) -> Error {
    let kind = match status {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::Full,
        _ => ErrorKind::System,
    };
    Error::new(kind, operation, format!("the CUDA driver says {}", name_of(status)))
}
