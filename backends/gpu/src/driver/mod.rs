//! CUDA's driver, as this crate uses it: loaded at run time, every object a type with a drop.
//!
//! Nothing of CUDA is linked. [`load`] must have succeeded before any other call: the bindings panic
//! where the library is missing, and this is the one place that makes sure it is not.

mod device;
mod graph;
mod host;
mod memory;
mod module;
mod stream;

pub(crate) use device::{Context, Device, Reach, Uuid};
pub(crate) use graph::Graph;
pub(crate) use host::HostWindow;
pub(crate) use memory::{Buffer, Pinned, Pooled, Reserved, Vmm, copy, granularity};
pub(crate) use module::{Function, Launch, Module};
pub(crate) use stream::{Event, RawStream, RelaxedCapture, Stream};

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
                format!("cuInit failed: {other:?}"),
                "see what nvidia-smi says; give the container its devices",
            )),
        }
    });
    loaded.clone().map_err(|(message, fix)| {
        Error::new(ErrorKind::Unavailable, "load driver", message).with_fix(fix)
    })
}

/// The version of CUDA that the driver speaks.
pub(crate) fn version() -> Result<i32> {
    load()?;
    let mut version = 0;
    // SAFETY: the driver is loaded.
    check("ask driver", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    Ok(version)
}

/// The version in words, as CUDA numbers it.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
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
    // Never `Full`: that means that all ranks agreed and may go on, and others do not know of this.
    let error =
        Error::new(ErrorKind::System, operation, format!("the CUDA driver says {status:?}"));
    match status {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => error.with_fix(
            "let other users of the device leave it more memory, or lower [kernels.cuda] arena_mib",
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_out_of_memory_does_not_say_that_all_ranks_may_go_on() {
        let error = failed("launch kernel", sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(error.kind(), ErrorKind::System);
        let text = error.to_string();
        assert!(text.contains("OUT_OF_MEMORY") && text.contains("arena_mib"), "{text}");
    }
}
