//! The end of the interpreter.
//!
//! A thread that waits inside of a communicator, a pipe or a gather while the interpreter ends would never come back to
//! Python. So at exit the waits of this process are ended: its ranks leave their worlds, which the others notice.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::log;

/// A thing with calls in which threads wait.
pub(crate) trait Waits: Send + Sync {
    /// Whether a thread is inside of a call.
    fn is_busy(&self) -> bool;

    /// Sends the other ranks the reason why this one goes on no more.
    fn report_failure(&self, why: &str);
}

/// Everything that may be open.
static OPEN: Mutex<Vec<Weak<dyn Waits>>> = Mutex::new(Vec::new());

/// Set at exit, before the interpreter ends.
static ENDS: AtomicBool = AtomicBool::new(false);

/// How long exit waits for threads that leave their calls.
const PATIENCE: Duration = Duration::from_secs(2);

/// Remembers what was opened.
pub(crate) fn remember(opened: Weak<dyn Waits>) {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|known| known.strong_count() > 0);
    open.push(opened);
}

/// Whether the interpreter is about to end. Then a thread without the GIL must not wait for it.
pub(crate) fn is_near() -> bool {
    ENDS.load(Ordering::Acquire)
}

/// Ends the waits of other threads.
#[pyfunction]
fn end_waits(py: Python<'_>) {
    log::flush(py);
    ENDS.store(true, Ordering::Release);
    let open = OPEN.lock().map(|open| open.clone()).unwrap_or_default();
    py.detach(|| {
        let busy: Vec<_> =
            open.iter().filter_map(Weak::upgrade).filter(|it| it.is_busy()).collect();
        for opened in &busy {
            opened.report_failure("the interpreter of this rank ends");
        }
        let end = Instant::now() + PATIENCE;
        while busy.iter().any(|it| it.is_busy()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

/// Has [`end_waits`] called at exit.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let function = wrap_pyfunction!(end_waits, module)?;
    module.py().import("atexit")?.call_method1("register", (function,))?;
    Ok(())
}
