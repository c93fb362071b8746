//! The code of every slot around the component's own code.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi;
use crate::{Error, ErrorKind, Result};

/// An instance behind the ABI's `void *`.
pub(super) struct Instance<T> {
    pub(super) component: T,
    /// Set by the first panic: the component's state is unknown after it.
    poisoned: AtomicBool,
}

impl<T> Instance<T> {
    pub(super) fn into_raw(component: T) -> *mut std::ffi::c_void {
        Box::into_raw(Box::new(Self { component, poisoned: AtomicBool::new(false) })).cast()
    }
}

/// Slots of an open instance: each is the C function of its name, and runs `component` inside the guard for
/// panics that is named first. The structures in brackets have the sizes that this side expects, or the call
/// is refused. A slot returns a status and fills the caller's error. A slot of `silent` cannot report a panic
/// itself: the next call finds the instance poisoned.
macro_rules! slots {
    ($guard:ident, $of:ty: $($name:ident($($argument:ident: $kind:ty),* $(,)?)
        $([$($sized:ident),*])? |$component:ident| $body:expr;)*) => {
        $(unsafe extern "C" fn $name(
            instance: *mut std::ffi::c_void,
            $($argument: $kind,)*
            error: *mut $crate::abi::TyError,
        ) -> i32 {
            // SAFETY: the host passes an open instance of this table, structures that are valid for the
            // call, memory of the stated length, and holds all that the ABI requires it to hold.
            unsafe {
                $crate::export::call::$guard(stringify!($name), instance, error, |$component: $of| {
                    $($($crate::export::call::check_size(
                        stringify!($name), (*$sized).size, size_of_val(&*$sized),
                    )?;)*)?
                    $body
                })
            }
        })*
    };
    (silent $of:ty: $($name:ident($argument:ident: $kind:ty);)*) => {
        $(unsafe extern "C" fn $name(instance: *mut std::ffi::c_void, $argument: $kind) {
            let no_error = std::ptr::null_mut();
            // SAFETY: the host passes an open instance of this table, and a value that it received from
            // it.
            unsafe {
                $crate::export::call::guarded_mut(stringify!($name), instance, no_error, |component: &mut $of| {
                    component.$name($argument);
                    Ok(())
                })
            };
        })*
    };
}
pub(super) use slots;

/// Runs a slot that has no instance yet.
pub(crate) fn guarded(
    name: &'static str,
    error: *mut abi::TyError,
    call: impl FnOnce() -> Result<()>,
) -> i32 {
    let result =
        catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(name, &*panic)));
    finish(result, error)
}

/// Runs a slot of an instance.
///
/// # Safety
/// `instance` came from [`Instance::into_raw`] with the same `T` and was not closed; no other
/// exclusive access to it exists (the ABI's thread rules, upheld by the host).
pub(super) unsafe fn guarded_mut<T>(
    name: &'static str,
    instance: *mut std::ffi::c_void,
    error: *mut abi::TyError,
    call: impl FnOnce(&mut T) -> Result<()>,
) -> i32 {
    // SAFETY: by this function's contract.
    finish(unsafe { caught(name, instance, call) }, error)
}

/// Runs a call of an instance of this image. Its error is that of a call which crosses the ABI.
///
/// # Safety
/// As [`guarded_mut`].
pub(super) unsafe fn typed<T>(
    name: &'static str,
    instance: *mut std::ffi::c_void,
    call: impl FnOnce(&mut T) -> Result<()>,
) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe { caught(name, instance, call) }.map_err(|error| crossed(name, error))
}

/// The error as it comes out of the ABI, so that a component says the same in either form.
#[cold]
fn crossed(name: &'static str, error: Error) -> Error {
    let mut out = crate::host::blank_error();
    let status = finish(Err(error), &mut out);
    read_error(name, status, &out)
}

/// Runs code of an instance, unless it panicked before.
///
/// # Safety
/// As [`guarded_mut`].
unsafe fn caught<T>(
    name: &'static str,
    instance: *mut std::ffi::c_void,
    call: impl FnOnce(&mut T) -> Result<()>,
) -> Result<()> {
    // SAFETY: by this function's contract.
    let instance = unsafe { &mut *instance.cast::<Instance<T>>() };
    if instance.poisoned.load(Ordering::Acquire) {
        return Err(poisoned(name));
    }
    let (component, flag) = (&mut instance.component, &instance.poisoned);
    catch_unwind(AssertUnwindSafe(|| call(component))).unwrap_or_else(|panic| {
        flag.store(true, Ordering::Release);
        Err(panicked(name, &*panic))
    })
}

/// Runs a cold slot that only needs shared access: other threads may be in hot slots meanwhile.
///
/// # Safety
/// As [`guarded_mut`], but shared access of several threads is fine.
pub(super) unsafe fn guarded_ref<T>(
    name: &'static str,
    instance: *mut std::ffi::c_void,
    error: *mut abi::TyError,
    call: impl FnOnce(&T) -> Result<()>,
) -> i32 {
    // SAFETY: by this function's contract.
    let instance = unsafe { &*instance.cast::<Instance<T>>() };
    if instance.poisoned.load(Ordering::Acquire) {
        return finish(Err(poisoned(name)), error);
    }
    let result =
        catch_unwind(AssertUnwindSafe(|| call(&instance.component))).unwrap_or_else(|panic| {
            instance.poisoned.store(true, Ordering::Release);
            Err(panicked(name, &*panic))
        });
    finish(result, error)
}

/// Runs a slot that only needs shared access; used by hot slots, so it writes no error text.
///
/// # Safety
/// As [`guarded_mut`], but shared access of several threads is fine.
pub(super) unsafe fn guarded_hot<T>(
    instance: *mut std::ffi::c_void,
    call: impl FnOnce(&T) -> i32,
) -> i32 {
    // SAFETY: by this function's contract.
    let instance = unsafe { &*instance.cast::<Instance<T>>() };
    if instance.poisoned.load(Ordering::Relaxed) {
        return abi::TY_PANIC;
    }
    catch_unwind(AssertUnwindSafe(|| call(&instance.component))).unwrap_or_else(|_| {
        instance.poisoned.store(true, Ordering::Release);
        abi::TY_PANIC
    })
}

/// Ends an instance; a panic in its drop must not cross the ABI.
///
/// # Safety
/// As [`guarded_mut`]; the instance is not used again.
pub(super) unsafe fn close<T>(instance: *mut std::ffi::c_void) {
    if instance.is_null() {
        return;
    }
    // SAFETY: by this function's contract this side owns the box again.
    let instance = unsafe { Box::from_raw(instance.cast::<Instance<T>>()) };
    if catch_unwind(AssertUnwindSafe(|| drop(instance))).is_err() {
        tracing::error!("a component panicked while it was closed");
    }
}

/// The size-prefixed structures of the other side must be at least as long as ours.
pub(super) fn check_size(name: &'static str, found: usize, wanted: usize) -> Result<()> {
    if found < wanted {
        return Err(Error::new(
            ErrorKind::Internal,
            name,
            format!("the caller's structure has {found} bytes; expected at least {wanted}"),
        )
        .with_fix("use a host and a plugin of matching versions"));
    }
    Ok(())
}

/// A borrowed string of the other side.
///
/// # Safety
/// `text` is valid for `'a`.
pub(super) unsafe fn text<'a>(name: &'static str, text: abi::TyStr) -> Result<&'a str> {
    if text.bytes == 0 {
        return Ok("");
    }
    // SAFETY: by this function's contract.
    let bytes = unsafe { std::slice::from_raw_parts(text.data, text.bytes) };
    std::str::from_utf8(bytes)
        .map_err(|e| Error::new(ErrorKind::Protocol, name, format!("text is not UTF-8: {e}")))
}

fn poisoned(name: &'static str) -> Error {
    PanicError::mark(Error::new(
        ErrorKind::Internal,
        name,
        "the component panicked before; it does not answer any more",
    ))
}

fn panicked(name: &'static str, panic: &(dyn std::any::Any + Send)) -> Error {
    PanicError::mark(Error::new(
        ErrorKind::Internal,
        name,
        format!("panicked: {}", panic_text(panic)),
    ))
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no text)".into())
}

/// Marks an error as a caught panic, so that it crosses as `TY_PANIC`.
#[derive(Debug, thiserror::Error)]
#[error("caught at the plugin boundary")]
struct PanicError;

impl PanicError {
    fn mark(error: Error) -> Error {
        error.with_source(Self)
    }
}

fn finish(result: Result<()>, out: *mut abi::TyError) -> i32 {
    match result {
        Ok(()) => abi::TY_OK,
        Err(error) => {
            if !out.is_null() {
                // SAFETY: the caller's structure is valid for the call; its size is checked inside.
                unsafe { write_error(&error, out) };
            }
            status_of(&error)
        }
    }
}

fn status_of(error: &Error) -> i32 {
    use std::error::Error as _;
    if error.source().is_some_and(|s| s.is::<PanicError>()) {
        return abi::TY_PANIC;
    }
    match error.kind() {
        ErrorKind::Config => abi::TY_CONFIG,
        ErrorKind::Unavailable => abi::TY_UNAVAILABLE,
        ErrorKind::Unsupported => abi::TY_UNSUPPORTED,
        ErrorKind::Full => abi::TY_FULL,
        ErrorKind::Deadline => abi::TY_DEADLINE,
        ErrorKind::PeerLost => abi::TY_PEER_LOST,
        ErrorKind::Transport => abi::TY_TRANSPORT,
        ErrorKind::Protocol => abi::TY_PROTOCOL,
        ErrorKind::Mismatch => abi::TY_MISMATCH,
        ErrorKind::System => abi::TY_SYSTEM,
        ErrorKind::Refused | ErrorKind::InvalidInput => abi::TY_REFUSED,
        ErrorKind::Plugin | ErrorKind::Internal => abi::TY_INTERNAL,
    }
}

/// The error kind of a negative status.
pub(crate) fn kind_of(status: i32) -> ErrorKind {
    match status {
        abi::TY_UNAVAILABLE => ErrorKind::Unavailable,
        abi::TY_UNSUPPORTED => ErrorKind::Unsupported,
        abi::TY_CONFIG => ErrorKind::Config,
        abi::TY_SYSTEM => ErrorKind::System,
        abi::TY_PEER_LOST => ErrorKind::PeerLost,
        abi::TY_TRANSPORT => ErrorKind::Transport,
        abi::TY_DEADLINE | abi::TY_ABORTED => ErrorKind::Deadline,
        abi::TY_PROTOCOL => ErrorKind::Protocol,
        abi::TY_MISMATCH => ErrorKind::Mismatch,
        abi::TY_FULL => ErrorKind::Full,
        abi::TY_REFUSED => ErrorKind::Refused,
        abi::TY_INTERNAL | abi::TY_PANIC => ErrorKind::Internal,
        // No status of the ABI: the component breaks its contract.
        _ => ErrorKind::Plugin,
    }
}

/// Fills the caller's error structure.
///
/// # Safety
/// `out` points to a `TyError` whose `size` the caller set.
unsafe fn write_error(error: &Error, out: *mut abi::TyError) {
    // SAFETY: by this function's contract.
    let out = unsafe { &mut *out };
    if out.size < size_of::<abi::TyError>() {
        return;
    }
    use std::error::Error as _;
    let os = error.source().and_then(|s| s.downcast_ref::<std::io::Error>());
    out.os_errno = os.and_then(std::io::Error::raw_os_error).unwrap_or(0);
    out.rank = error.rank().map_or(-1, |rank| rank as i32);
    fill(&mut out.operation, error.operation());
    fill(&mut out.message, &error.detail());
}

/// Copies as much of a text as fits, and fills the rest with zeros.
pub(super) fn fill(out: &mut [u8], text: &str) {
    let mut end = text.len().min(out.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out[..end].copy_from_slice(&text.as_bytes()[..end]);
    out[end..].fill(0);
}

/// A component's error, as an error of core. `operation` is core's operation.
pub(crate) fn read_error(operation: &'static str, status: i32, error: &abi::TyError) -> Error {
    let inner = bounded_text(&error.operation);
    let message = bounded_text(&error.message);
    let message = match (inner.is_empty(), message.is_empty()) {
        (_, true) => format!("status {status} without a message"),
        (true, false) => message,
        (false, false) if inner == operation => message,
        (false, false) => format!("{inner}: {message}"),
    };
    // The text ends as `Error::detail` writes it: `: system error. Fix: fix`. It is split, so that
    // `Error::fix` finds the fix and no part is repeated.
    let (message, fix) = match message.rsplit_once(". Fix: ") {
        Some((message, fix)) => (message, Some(fix)),
        None => (message.as_str(), None),
    };
    let os = (error.os_errno != 0).then(|| std::io::Error::from_raw_os_error(error.os_errno));
    let cause = os.as_ref().map(|os| format!(": {os}")).unwrap_or_default();
    let message = message.strip_suffix(cause.as_str()).unwrap_or(message);
    let mut out = Error::new(kind_of(status), operation, message);
    if out.kind() == ErrorKind::Plugin {
        let statuses = format!("{status}; expected 0, or {} to -1", abi::TY_MISMATCH);
        out = out.with_context("found status", statuses);
    }
    if let Some(os) = os {
        out = out.with_source(os);
    }
    if let Some(fix) = fix {
        out = out.with_fix(fix);
    }
    if error.rank >= 0 {
        out = out.with_rank(error.rank as u32);
    }
    out
}

fn bounded_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
