//! A communicator that its Python object, pending operations and outputs share.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pyo3::prelude::*;
use tokenyard_core::bootstrap::World as CoreWorld;
use tokenyard_core::communicator::{BringUpReport, CallForm, Communicator as CoreCommunicator};
use tokenyard_core::moe::{Layout, Shape};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::errors::raise;
use crate::owned::{Owned, drop_detached};

/// A communicator, and what its operations need. Pending operations keep it.
pub(crate) struct Shared {
    /// The lock is held while an operation waits, so it is taken without the GIL.
    pub(crate) comm: Owned<Mutex<Option<CoreCommunicator>>>,
    pub(crate) world: Arc<Owned<Arc<CoreWorld>>>,
    pub(crate) shape: Shape,
    pub(crate) report: BringUpReport,
    pub(crate) works_on_device: bool,
    pub(crate) forms: Vec<&'static str>,
    /// Bytes of outputs that live.
    pub(crate) held: Arc<AtomicU64>,
}

impl Shared {
    pub(crate) fn new(comm: CoreCommunicator, world: Arc<Owned<Arc<CoreWorld>>>) -> Self {
        Self {
            shape: *comm.shape(),
            report: comm.report().clone(),
            works_on_device: comm.works_on_device(),
            forms: forms(&comm),
            held: Arc::default(),
            comm: Owned::new(Mutex::new(Some(comm))),
            world,
        }
    }

    /// Whether combines of packed rows take weights and ids themselves, without a replay.
    pub(crate) fn takes_packed_sums(&self) -> bool {
        self.forms.contains(&"packed_sums")
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn held(&self) -> &Arc<AtomicU64> {
        &self.held
    }

    /// Calls the communicator, without the GIL.
    pub(crate) fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut CoreCommunicator) -> Result<R> + Send,
    ) -> PyResult<R> {
        let called = py.detach(|| {
            let mut comm = self.comm.get()?.lock().unwrap_or_else(PoisonError::into_inner);
            call(comm.as_mut().ok_or_else(closed)?)
        });
        called.map_err(|error| raise(py, &error))
    }

    /// The same, unless another thread is inside of a call: then `None`.
    pub(crate) fn call_if_free<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut CoreCommunicator) -> Result<R> + Send,
    ) -> PyResult<Option<R>> {
        let called = py.detach(|| {
            let mut comm = match self.comm.get()?.try_lock() {
                Ok(comm) => comm,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(None),
            };
            call(comm.as_mut().ok_or_else(closed)?).map(Some)
        });
        called.map_err(|error| raise(py, &error))
    }

    /// Whether this process opened it.
    pub(crate) fn is_mine(&self) -> bool {
        self.comm.get().is_ok()
    }

    /// Whether a thread is inside of a call.
    pub(crate) fn is_busy(&self) -> bool {
        self.comm.get().is_ok_and(|comm| matches!(comm.try_lock(), Err(TryLockError::WouldBlock)))
    }

    pub(crate) fn report_failure(&self, why: &str) {
        if let Ok(world) = self.world.get() {
            world.report_failure(why);
        }
    }

    pub(crate) fn take(&self) -> Result<Option<CoreCommunicator>> {
        Ok(self.comm.get()?.lock().unwrap_or_else(PoisonError::into_inner).take())
    }

    pub(crate) fn is_closed(&self) -> bool {
        let Ok(comm) = self.comm.get() else { return true };
        match comm.try_lock() {
            Ok(comm) => comm.as_ref().is_none_or(CoreCommunicator::is_closed),
            // A call is under way. If an error ends it, a later check finds the communicator
            // closed.
            Err(_) => false,
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Never collective: ranks collect their garbage at different times.
        if let Ok(Some(comm)) = self.take() {
            drop_detached(comm);
        }
    }
}

/// The words of the calls that a communicator takes.
fn forms(comm: &CoreCommunicator) -> Vec<&'static str> {
    let all = [
        ("streams", comm.has_streams()),
        ("without_sync", comm.has_graphs()),
        ("max_tokens", comm.takes(CallForm::CallTokens)),
        ("round_once", comm.takes(CallForm::RoundOnce)),
        ("sum_weights", comm.takes(CallForm::SumWeights)),
        ("statistics", comm.takes(CallForm::Statistics)),
        ("packed_forms", comm.takes(CallForm::PackedForms)),
        ("logfmt10", comm.takes(CallForm::LogFmt10)),
        ("packed_sums", comm.sends_weights(Layout::Packed)),
        ("rank_major", comm.takes(CallForm::RankMajor)),
    ];
    all.into_iter().filter(|(_, takes)| *takes).map(|(word, _)| word).collect()
}

fn closed() -> Error {
    Error::new(ErrorKind::InvalidInput, "use communicator", "the communicator was closed")
        .with_fix("open a new one")
}
