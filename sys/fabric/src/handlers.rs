//! Signal handlers that a library must not keep.

use std::mem::MaybeUninit;

/// Signals whose handlers the libraries of Intel's PSM replace when they are loaded, which libfabric
/// links. Theirs write a file `*.btr` into the working folder and end the process with code 1: no
/// core, no report of a stack overflow, and who waits for the process does not see a crash.
const SIGNALS: [i32; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGINT,
    libc::SIGTERM,
];

/// What was installed.
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
                // SAFETY: the kernel gave this action, and its handler was in use a moment ago.
                unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
            }
        }
    }
}
