//! Kernels are compiled at run time, by NVRTC, for the device that is there.
//!
//! The sources are embedded; the face comes from the transport. NVRTC is loaded at run time.

mod cache;
mod program;

pub(crate) use cache::Cache;
pub use program::{Architecture, Compiled, Rows, Up, compile};
pub(crate) use program::{FaceSource, Program};

use tokenyard_core::{Error, ErrorKind, Result};

/// Loads the compiler.
///
/// # Errors
/// [`ErrorKind::Unavailable`] with the fix.
pub(crate) fn load() -> Result<()> {
    // SAFETY: opening the library runs its constructors only.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Ok(());
    }
    let message = "found no libnvrtc.so; expected the run-time compiler of CUDA 13";
    Err(Error::new(ErrorKind::Unavailable, "load compiler", message).with_fix(
        "install it (`pip install nvidia-cuda-nvrtc==13.*`, or the package cuda-nvrtc-13-0) and put \
         its folder into LD_LIBRARY_PATH",
    ))
}
