//! Operations that no host waits for, and those that graphs launch: what they stage, and who is told when
//! one fails.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::moe::Region;
use tokenyard_core::{Error, ErrorKind, Result};

use super::engine::Engine;
use super::exchange::Scope;
use super::mode::Mode;
use super::outcome::{Refusal, numbered, told_late};
use crate::driver::RelaxedCapture;

impl Engine {
    /// What a call asks for.
    pub(super) fn mode(&self, stream: (u32, *mut c_void), flags: [u32; 2]) -> Result<Mode> {
        let mode = self.abort_on_fatal(Mode::of(stream, flags, self.stream.context()))?;
        // Else the host has something to do before everything has arrived.
        let can = self.exchange.scope == Scope::Flat && self.sizes.longest_put.is_none();
        Ok(Mode { at_once: mode.at_once && can, ..mode })
    }

    /// See [`Mode::relax`], for a call that is apart.
    pub(super) fn relax(&self, stream: (u32, *mut c_void)) -> Result<Option<RelaxedCapture>> {
        self.mode(stream, [0; 2])?.relax(self.stream.context())
    }

    /// Why this rank alone is told what is wrong with its call: nothing runs in a capture. What the call
    /// has recorded so far joins the rest, so that the graph is whole without it.
    pub(super) fn refuse_recorded(&self, mode: &Mode, refusal: &Refusal) -> Error {
        let joined = mode.stream.map_or(Ok(()), |stream| self.order.join(&self.recorded, stream));
        if let Err(error) = self.abort_on_fatal(joined) {
            return error;
        }
        let why = refusal.why.as_str();
        Error::new(refusal.kind, "capture operation", why).with_rank(refusal.rank())
    }

    /// Whether something has failed that nobody waited for.
    ///
    /// # Errors
    /// What it was; the communicator cannot go on.
    pub(super) fn check(&self) -> Result<()> {
        self.observer.check()?;
        let at = self.late.at(0);
        // SAFETY: pinned memory that lives as long as `self`; the kernel writes the word last, with
        // release order, and then nothing more.
        let outcome = unsafe {
            let epoch = AtomicU64::from_ptr(&raw mut (*at).epoch);
            (epoch.load(Ordering::Acquire) != 0).then(|| at.read_volatile())
        };
        let Some(outcome) = outcome else { return Ok(()) };
        let called = self.called(numbered(outcome.epoch, self.latest));
        let refusal = Refusal::of(&outcome, &called, &self.shape);
        self.abort_on_fatal(refusal.map_or(Ok(()), |refusal| Err(told_late(&refusal.error()))))
    }

    /// Keeps for later calls what this rank refused of one that nobody waits for: the others do not go on
    /// behind it.
    pub(super) fn report_no_host_sync<T>(&self, mode: &Mode, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|error| {
            if mode.no_host_sync {
                self.observer.fail(told_late(error));
            }
        })
    }

    /// Starts to tell a call that comes later what goes wrong with one that nobody waits for.
    pub(super) fn go_unheard(&mut self) -> Result<()> {
        let stood = self.observer.stand();
        self.abort_on_fatal(stood)
    }

    /// Goes on with an operation that was sent.
    pub(super) fn resume(&mut self, mode: &Mode) -> Result<()> {
        self.select_stream(Some(mode));
        let Some(stream) = mode.stream.filter(|_| self.is_recording) else { return Ok(()) };
        if self.abort_on_fatal(stream.is_captured(self.stream.context()))? {
            return Ok(());
        }
        let text =
            "the operation was sent in a capture that has ended; expected its receive in it too";
        Err(Error::new(ErrorKind::InvalidInput, "receive operation", text))
    }

    pub(super) fn take_back_late(&mut self) {
        for region in self.order.late() {
            self.release(region);
        }
    }

    /// What an operation was staged in is free, behind it; that of one which may run again stays with
    /// the handle.
    pub(super) fn unstage(&mut self, staging: Option<Region>, handle: u32, mode: &Mode) {
        let Some(region) = staging else { return };
        if mode.is_recorded() {
            self.order.give(region.id, mode.stream);
            self.handles[handle as usize].kept.push(region);
        } else {
            self.arena.release(region.id);
        }
    }

    /// A handle slot is used for another dispatch, so graphs of the last one run no more.
    pub(super) fn renew(&mut self, handle: u32) {
        for region in std::mem::take(&mut self.handles[handle as usize].kept) {
            self.release(region.id);
        }
    }
}
