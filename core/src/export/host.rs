//! The host from the view of its components: the services that it offers them.

use std::sync::atomic::{AtomicPtr, Ordering};

use super::log;
use crate::abi;
use crate::host::TransportRef;
use crate::{Error, ErrorKind, Result};

/// The services of the host that called this image last; null before the first call.
static SERVICES: AtomicPtr<abi::TyHost> = AtomicPtr::new(std::ptr::null_mut());

/// Stores the host's table, from slots that receive it, for calls that do not receive it.
///
/// # Safety
/// `host` is null or a table that lives as long as the process (the ABI's promise).
pub(super) unsafe fn meet(host: *const abi::TyHost) {
    if !host.is_null() {
        SERVICES.store(host.cast_mut(), Ordering::Release);
    }
    // SAFETY: by this function's contract.
    unsafe { log::forward_to(host) }
}

/// The table of the host, if one has called this image.
pub(crate) fn services() -> Option<&'static abi::TyHost> {
    // SAFETY: null or a table that lives as long as the process, by the contract of `meet`.
    unsafe { SERVICES.load(Ordering::Acquire).as_ref() }
}

/// Finds a transport that the host has loaded, for a component that wraps another: to be called in
/// `probe` or `open`. The host has checked its table; the other rules are those of the host itself.
///
/// # Errors
/// [`ErrorKind::Config`] if the host has no transport of that name; [`ErrorKind::Unsupported`] if it
/// offers no such service.
pub fn find_transport(name: &str) -> Result<TransportRef> {
    const FIND: &str = "find transport";
    let host = services();
    let Some((host, find)) = host.and_then(|host| Some((host, host.find_transport?))) else {
        let message = "the host offers no transports to components";
        return Err(Error::new(ErrorKind::Unsupported, FIND, message)
            .with_fix("use a host of this version"));
    };
    let text = abi::TyStr { data: name.as_ptr(), bytes: name.len() };
    // SAFETY: the host's service; the name is valid for the call. The result is null or a checked table
    // that lives as long as the process.
    let table = unsafe { find(host.context, text).as_ref() };
    table.map(|table| TransportRef { table }).ok_or_else(|| {
        Error::new(ErrorKind::Config, FIND, format!("no transport is called `{name}`")).with_fix(
            "correct the name (`tokenyard plugins CONFIG` lists what there is), or add the plugin \
             that provides it to [plugins] paths",
        )
    })
}
