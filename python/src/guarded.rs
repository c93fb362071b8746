//! A communicator, a pipe, a gather or a table of core, whose calls wait for other ranks.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pyo3::prelude::*;
use tokenyard_core::bootstrap::World as CoreWorld;
use tokenyard_core::communicator::{Communicator, CommunicatorOptions};
use tokenyard_core::config::Config;
use tokenyard_core::ops::gather::{Gather, GatherOptions};
use tokenyard_core::ops::pipe::{Pipe, PipeOptions};
use tokenyard_core::ops::table::{Table, TableOptions};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::errors::raise;
use crate::exit::{self, Waits};
use crate::owned::{Owned, drop_detached};
use crate::world::World;

/// A thing that core opens on all ranks of a world.
pub(crate) trait Opened: Send + 'static {
    /// Its name, and its use by a caller, for messages.
    const NAME: &'static str;
    const USE: &'static str;
    type Options: Send;

    fn open(world: &Arc<CoreWorld>, config: &Config, options: Self::Options) -> Result<Self>
    where
        Self: Sized;

    /// Takes part in the opening of the other ranks with a refusal, and returns what to raise.
    fn refuse_open(world: &CoreWorld, why: Error) -> Error;

    fn is_closed(&self) -> bool;

    fn close(self) -> Result<()>;
}

macro_rules! opened {
    ($kind:ty, $options:ty, $name:literal) => {
        impl Opened for $kind {
            const NAME: &'static str = $name;
            const USE: &'static str = concat!("use ", $name);
            type Options = $options;

            fn open(world: &Arc<CoreWorld>, config: &Config, options: $options) -> Result<Self> {
                <$kind>::open(world, config, options)
            }

            fn refuse_open(world: &CoreWorld, why: Error) -> Error {
                <$kind>::refuse_open(world, why)
            }

            fn is_closed(&self) -> bool {
                self.is_closed()
            }

            fn close(self) -> Result<()> {
                self.close()
            }
        }
    };
}

opened!(Communicator, CommunicatorOptions, "communicator");
opened!(Pipe, PipeOptions, "pipe");
opened!(Gather, GatherOptions, "gather");
opened!(Table, TableOptions, "table");

/// Opens one on all ranks of `world`, with the arguments of a Python call. Those that cannot be read are refused on all
/// ranks.
pub(crate) fn open<T: Opened>(
    py: Python<'_>,
    world: &World,
    read: impl FnOnce() -> Result<(Config, T::Options)>,
) -> PyResult<(T, Arc<Owned<Arc<CoreWorld>>>)> {
    let world = world.core().map_err(|error| raise(py, &error))?;
    let read = read();
    let opened = py.detach(|| {
        let world = world.get()?;
        match read {
            Ok((config, options)) => T::open(world, &config, options),
            Err(why) => Err(T::refuse_open(world, why)),
        }
    });
    Ok((opened.map_err(|error| raise(py, &error))?, world))
}

/// The methods that every class over a [`Guarded`] has: the class, its fields with the `Guarded` and with the report.
macro_rules! methods_of_opened {
    ($class:ident, $($core:ident).+, $($report:ident).+) => {
        #[pymethods]
        impl $class {
            /// The choices and their reasons, as a dictionary: kernel set, transports, domains, places of all ranks,
            /// window bytes.
            fn report(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
                $crate::errors::to_python(py, &self.$($report).+)
            }

            /// This rank.
            #[getter]
            fn rank(&self, py: Python<'_>) -> PyResult<u32> {
                self.$($core).+.rank().map_err(|error| $crate::errors::raise(py, &error))
            }

            /// Whether it was closed on this rank: by `close`, or by an error, which every later call then raises.
            #[getter]
            fn closed(&self) -> bool {
                self.$($core).+.is_closed()
            }

            fn __enter__(slf: Py<Self>) -> Py<Self> {
                slf
            }

            #[pyo3(signature = (kind=None, value=None, traceback=None))]
            fn __exit__(
                &self,
                py: Python<'_>,
                kind: Option<&Bound<'_, PyAny>>,
                value: Option<&Bound<'_, PyAny>>,
                traceback: Option<&Bound<'_, PyAny>>,
            ) -> PyResult<()> {
                let _ = (kind, traceback);
                self.$($core).+.leave(py, value)
            }
        }
    };
}
pub(crate) use methods_of_opened;

/// See the [module](self). One thread at a time is inside of a call.
pub(crate) struct Guarded<T: Opened> {
    /// The lock is held while a call waits, so it is taken without the GIL.
    core: Owned<Mutex<Option<T>>>,
    world: Arc<Owned<Arc<CoreWorld>>>,
}

impl<T: Opened> Guarded<T> {
    pub(crate) fn new(core: T, world: Arc<Owned<Arc<CoreWorld>>>) -> Arc<Self> {
        let guarded = Arc::new(Self { core: Owned::new(Mutex::new(Some(core))), world });
        let waits: Arc<dyn Waits> = Arc::<Self>::clone(&guarded);
        exit::remember(Arc::downgrade(&waits));
        guarded
    }

    /// Calls it, without the GIL.
    pub(crate) fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut T) -> Result<R> + Send,
    ) -> PyResult<R> {
        let called = py.detach(|| {
            let mut core = self.core.get()?.lock().unwrap_or_else(PoisonError::into_inner);
            call(core.as_mut().ok_or_else(closed::<T>)?)
        });
        called.map_err(|error| raise(py, &error))
    }

    /// The same, unless another thread is inside of a call: then `None`.
    pub(crate) fn call_if_free<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut T) -> Result<R> + Send,
    ) -> PyResult<Option<R>> {
        let called = py.detach(|| {
            let mut core = match self.core.get()?.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(None),
            };
            call(core.as_mut().ok_or_else(closed::<T>)?).map(Some)
        });
        called.map_err(|error| raise(py, &error))
    }

    /// Whether this process opened it.
    pub(crate) fn is_mine(&self) -> bool {
        self.core.get().is_ok()
    }

    /// This rank.
    ///
    /// # Errors
    /// In a forked child.
    pub(crate) fn rank(&self) -> Result<u32> {
        self.world.get().map(|world| world.rank())
    }

    /// Closes it on all ranks together; again is no error.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py, |core| core.map_or(Ok(()), T::close))
    }

    /// The end of a `with`: closed, or after an exception in its body dropped. The others may be elsewhere then: to
    /// close is collective, to drop is not.
    pub(crate) fn leave(&self, py: Python<'_>, raised: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        match raised {
            None => self.close(py),
            Some(_) => self.end(py, |core| {
                drop(core);
                Ok(())
            }),
        }
    }

    /// Under the lock, because the end may wait for other ranks: a second thread waits for it, and the exit of the
    /// interpreter ends that wait.
    fn end(
        &self,
        py: Python<'_>,
        end: impl FnOnce(Option<T>) -> Result<()> + Send,
    ) -> PyResult<()> {
        let ended = py.detach(|| {
            let mut core = self.core.get()?.lock().unwrap_or_else(PoisonError::into_inner);
            end(core.take())
        });
        ended.map_err(|error| raise(py, &error))
    }

    pub(crate) fn is_closed(&self) -> bool {
        let Ok(core) = self.core.get() else { return true };
        match core.try_lock() {
            Ok(core) => core.as_ref().is_none_or(T::is_closed),
            // A call is under way. If an error ends it, a later check finds it closed.
            Err(_) => false,
        }
    }
}

impl<T: Opened> Waits for Guarded<T> {
    fn is_busy(&self) -> bool {
        self.core.get().is_ok_and(|core| matches!(core.try_lock(), Err(TryLockError::WouldBlock)))
    }

    fn report_failure(&self, why: &str) {
        if let Ok(world) = self.world.get() {
            world.report_failure(why);
        }
    }
}

impl<T: Opened> Drop for Guarded<T> {
    fn drop(&mut self) {
        // Never collective: ranks collect their garbage at different times.
        let Ok(core) = self.core.get() else { return };
        let core = core.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(core) = core {
            drop_detached(core);
        }
    }
}

fn closed<T: Opened>() -> Error {
    Error::new(ErrorKind::InvalidInput, T::USE, format!("the {} was closed", T::NAME))
        .with_fix("open a new one")
}
