//! The host's side of the plugin ABI: safe handles over judged tables, the loader and the registry.
//!
//! Tables of plugins are judged here before any of their code runs. Watched by the tests in these files,
//! `core/tests/plugin_handshake.rs`, and `plugins/*/tests/load.rs`.

mod attended;
mod calls;
mod elf;
mod installed;
mod kernels;
mod loader;
mod registry;
pub mod tensors;
mod topology;
mod transport;
mod writable;

pub use attended::ThreadPart;
pub(crate) use attended::{Attended, ColdCall, ThreadContext, attended};
pub use calls::Lookout;
pub(crate) use calls::{Slot, inside};
pub use installed::add_plugin_folder;
#[cfg(test)]
pub(crate) use kernels::NO_OUTPUT;
pub use kernels::{NO_TENSOR, OpenKernels};
pub use loader::{PluginFile, load_file, plugin_files};
pub use registry::{
    BuiltIn, ComponentInfo, ComponentKind, KernelsRef, Registry, TopologyRef, TransportRef,
    add_built_in,
};
pub use topology::discover;
pub use transport::OpenTransport;
pub(crate) use transport::{cold, missing_slot};

use std::ffi::c_void;

use crate::abi;

/// The services given to every component.
static HOST: crate::export::Exported<abi::TyHost> = crate::export::Exported(abi::TyHost {
    size: size_of::<abi::TyHost>(),
    context: std::ptr::null_mut(),
    log: Some(log),
    find_transport: Some(registry::find_transport),
});

/// The host table that components are called with. In a plugin it is the table of the plugin's own
/// host: a component opens other components on behalf of the host.
pub fn services() -> *const abi::TyHost {
    crate::export::services().map_or(&raw const HOST.0, std::ptr::from_ref)
}

/// Writes a component's line to this image's log.
///
/// # Safety
/// Both strings are valid for the call.
pub(crate) unsafe extern "C" fn log(
    _: *mut c_void,
    level: u32,
    target: abi::TyStr,
    message: abi::TyStr,
) {
    // SAFETY: by this function's contract.
    let (component, message) = unsafe { (lossy(target), lossy(message)) };
    match level {
        abi::TY_LOG_ERROR => tracing::error!(component, "{message}"),
        abi::TY_LOG_WARN => tracing::warn!(component, "{message}"),
        abi::TY_LOG_INFO => tracing::info!(component, "{message}"),
        _ => tracing::debug!(component, "{message}"),
    }
}

/// # Safety
/// `text` is valid for the call.
unsafe fn lossy(text: abi::TyStr) -> String {
    if text.data.is_null() || text.bytes == 0 {
        return String::new();
    }
    // SAFETY: by this function's contract.
    let bytes = unsafe { std::slice::from_raw_parts(text.data, text.bytes) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// An empty error structure for a call.
#[must_use]
pub fn blank_error() -> abi::TyError {
    abi::TyError {
        size: size_of::<abi::TyError>(),
        os_errno: 0,
        rank: -1,
        operation: [0; abi::TY_ERROR_OPERATION],
        message: [0; abi::TY_ERROR_MESSAGE],
    }
}

fn as_ty(text: &str) -> abi::TyStr {
    abi::TyStr { data: text.as_ptr(), bytes: text.len() }
}

/// A component's own table in the form of the ABI.
fn config_as_ty(table: &crate::config::ComponentTable) -> abi::TyConfig {
    abi::TyConfig {
        size: size_of::<abi::TyConfig>(),
        text: as_ty(table.text()),
        file: as_ty(table.file()),
    }
}

/// Turns a status into a result; the text is built only on failure.
pub(crate) fn check(
    operation: &'static str,
    status: i32,
    error: &abi::TyError,
) -> crate::Result<()> {
    if status == abi::TY_OK {
        return Ok(());
    }
    Err(failed(operation, status, error))
}

/// The answer to a question that a component need not know: nothing where it says `TY_UNSUPPORTED`.
pub(crate) fn optional<T>(answer: crate::Result<T>) -> crate::Result<Option<T>> {
    match answer {
        Err(error) if error.kind() == crate::ErrorKind::Unsupported => Ok(None),
        answer => answer.map(Some),
    }
}

#[cold]
fn failed(operation: &'static str, status: i32, error: &abi::TyError) -> crate::Error {
    crate::export::read_error(operation, status, error)
}
