//! Signal handlers of the process, which a library must not replace.

use std::mem::MaybeUninit;

/// Signals whose handlers the libraries of Intel's PSM, which libfabric links, replace when they are loaded.
/// Their handlers write a file `*.btr` into the working folder and end the process with code 1. So there is
/// no core and no report of a stack overflow, and the parent of the process does not see a crash.
const SIGNALS: [i32; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGINT,
    libc::SIGTERM,
];

/// The installed handlers.
pub(crate) struct Handlers([Option<libc::sigaction>; SIGNALS.len()]);

impl Handlers {
    pub(crate) fn now() -> Self {
        Self(SIGNALS.map(|signal| {
            let mut action = MaybeUninit::uninit();
            // SAFETY: it only reads, and writes the action if it returns 0.
            unsafe {
                let status = libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
                (status == 0).then(|| action.assume_init())
            }
        }))
    }

    /// Installs them again.
    pub(crate) fn restore(self) {
        for (signal, action) in SIGNALS.into_iter().zip(self.0) {
            if let Some(action) = action {
                // SAFETY: the kernel returned this action, and its handler was installed before the
                // library was loaded.
                unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
            }
        }
    }
}
