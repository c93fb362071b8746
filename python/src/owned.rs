//! Objects that belong to one process.
//!
//! A forked child has a copy of its parent's memory and none of its threads. A communicator there would write into
//! windows that the parent and its peers still use, and wait for threads that do not exist. So the child may neither
//! use nor drop what its parent has opened.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use tokenyard_core::{Error, ErrorKind, Result};

/// The id of this process. Each operation needs it several times, and to ask the system takes longer than to read it.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The id of this process.
pub(crate) fn process() -> u32 {
    PROCESS.load(Ordering::Relaxed)
}

/// Asks for the id of this process.
extern "C" fn note_process() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
}

/// Has [`note_process`] called now, and in each forked child before any other code of it runs: hooks of Python come
/// later, in the order in which modules were imported, and a fork by another library runs none.
pub(crate) fn register() -> PyResult<()> {
    note_process();
    // SAFETY: the handler calls `getpid` and stores a word, which is allowed in a child of a process with threads. It
    // stays loaded, because Python unloads no module.
    match unsafe { libc::pthread_atfork(None, None, Some(note_process)) } {
        0 => Ok(()),
        status => Err(std::io::Error::from_raw_os_error(status).into()),
    }
}

/// A value that only the process that made it uses and drops.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<T>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: process() }
    }

    fn is_mine(&self) -> bool {
        self.process == process()
    }

    /// The value.
    ///
    /// # Errors
    /// In a forked child.
    pub(crate) fn get(&self) -> Result<&T> {
        if self.is_mine() {
            return Ok(&self.value);
        }
        let text = format!(
            "found process {}, forked from {} which has joined the world; expected the process that joined",
            std::process::id(),
            self.process
        );
        Err(Error::new(ErrorKind::InvalidInput, "use tokenyard", text)
            .with_fix("start processes before the world is joined, or with the start method spawn"))
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.is_mine() {
            // SAFETY: dropped once, here, and not used after it.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

/// Drops what may wait, without the GIL while it does. For destructors, which hold it; while the interpreter ends,
/// no other thread wants it.
pub(crate) fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    Python::try_attach(|py| py.detach(|| drop(value.take())));
}
