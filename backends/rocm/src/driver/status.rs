//! HIP's statuses as errors.

use std::ffi::{CStr, c_char, c_uint};

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_hip::{Hip, consts};

use super::library::Loaded;

/// Turns a status into an error that names the call.
pub(super) fn check(loaded: &Loaded, operation: &'static str, status: c_uint) -> Result<()> {
    if status == consts::SUCCESS {
        return Ok(());
    }
    Err(failed(&loaded.hip, operation, status))
}

/// Whether the work that a status asks about has ended.
pub(super) fn is_done(loaded: &Loaded, status: c_uint) -> Result<bool> {
    if status == consts::ERROR_NOT_READY {
        forget(&loaded.hip);
        return Ok(false);
    }
    check(loaded, "run kernel", status).map(|()| true)
}

#[cold]
fn failed(hip: &Hip, operation: &'static str, status: c_uint) -> Error {
    forget(hip);
    // Never a kind on which all ranks agree and continue, such as `Full`: the other ranks do not know of the
    // failure.
    let message = format!("HIP says {}", text_of(hip, status));
    let error = Error::new(ErrorKind::System, operation, message);
    match status {
        consts::ERROR_OUT_OF_MEMORY => error.with_fix(
            "let other users of the device leave it more memory, or lower [kernels.rocm] arena_mib",
        ),
        _ => error,
    }
}

/// Takes the status back that HIP stores for the thread: a framework's next look at it would find ours.
fn forget(hip: &Hip) {
    // SAFETY: HIP is loaded; the call has no argument.
    let _ = unsafe { (hip.get_last_error)() };
}

/// HIP's name of a status, its number, and HIP's text.
pub(super) fn text_of(hip: &Hip, status: c_uint) -> String {
    let words = |call: unsafe extern "C" fn(c_uint) -> *const c_char| {
        // SAFETY: HIP is loaded; its texts are static.
        let text = unsafe { call(status) };
        if text.is_null() {
            return "no text".to_owned();
        }
        // SAFETY: as above; it ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    format!("{} ({status}): {}", words(hip.get_error_name), words(hip.get_error_string))
}
