//! Where kernels of an operation are queued, and in what order with callers' streams.

use std::ffi::c_void;

use tokenyard_core::{Result, abi};

use super::args::{ArriveArgs, WARPS};
use super::engine::Engine;
use super::exchange::Scope;
use super::mode::Mode;
use super::waits::{KEEP_TENSORS, see_end};
use crate::driver::{Function, Launch, RawStream};

impl Engine {
    /// Where the kernels of the operation at hand are queued.
    pub(super) fn work(&self) -> RawStream {
        let own = if self.is_recording { &self.recorded } else { &self.stream };
        self.direct.unwrap_or(own.name())
    }

    /// The operation at hand is of a mode; without one it is told to others only.
    pub(super) fn select_stream(&mut self, mode: Option<&Mode>) {
        self.is_recording = mode.is_some_and(Mode::is_recorded);
        self.direct = mode.and_then(Mode::direct);
    }

    /// Launches a kernel of an operation.
    ///
    /// # Safety
    /// `arguments` are of the kernel's type; what they name stays valid until the operation ends.
    pub(super) unsafe fn launch<T>(
        &self,
        kernel: &Function,
        (blocks, warps, shared): (u32, u32, u32),
        arguments: &T,
        slot: usize,
    ) -> Result<()> {
        let mut pointers = [
            std::ptr::from_ref(arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        let launch = Launch { blocks, threads: 32 * warps, shared };
        let work = self.work();
        // SAFETY: by this function's contract; the second parameter is the device API's.
        unsafe { kernel.launch(work, launch, &mut pointers)? };
        // A mark in a capture is the graph's, and none that calls outside it can wait for.
        if self.is_recording {
            return Ok(());
        }
        let event = &self.events[slot];
        event.record(work)?;
        self.last.set(Some((work, slot)));
        // Who waits for this stream waits for what callers' streams got, too.
        if self.direct.is_some() { event.hold(self.stream.name()) } else { Ok(()) }
    }

    /// Starts an operation that may move rows: behind what its stream has got by now, and behind the
    /// last use of every region that was taken back.
    pub(super) fn enter(&mut self, operation: u64, mode: &Mode) -> Result<()> {
        self.latest = operation;
        self.take_back_late();
        self.select_stream(Some(mode));
        self.has_recorded |= self.is_recording;
        let work = self.work();
        if self.is_recording {
            // What was sent apart in this capture comes first.
            if self.direct.is_some() {
                self.order.join(&self.recorded, work)?;
            }
        } else if let Some((last, slot)) = self.last.get()
            && last != work
        {
            self.events[slot].hold(work)?;
        }
        self.order.enter(work, mode)
    }

    /// Ends an operation whose kernels are launched: its stream goes on behind them, and somebody
    /// watches that they end; without a stream the host waits.
    pub(super) fn leave(&mut self, operation: u64, phase: u64, mode: &Mode) -> Result<()> {
        // Among several domains the host has waited for a component already, so it may as well for the rest.
        let stream = mode.stream.filter(|_| self.exchange.scope == Scope::Flat);
        let Some(stream) = stream else { return self.finish(operation, phase) };
        let slot = self.slot(operation);
        if mode.is_recorded() {
            return self.order.join(&self.recorded, stream);
        }
        if self.direct.is_none() {
            self.events[slot].hold(stream)?;
        }
        if phase == abi::TY_PHASE_DONE || self.sizes.longest_put.is_some() {
            // A combine reads regions that its caller may drop now, and its own is given back; where
            // kernels put, so is what a dispatch has staged.
            self.order.free_behind(&self.events[slot], self.work())?;
        }
        let wait = self.wait(operation, phase);
        self.observer.watch(wait)
    }

    /// Lets the stream of a refused call go on behind its kernel, which takes a turn: what the caller
    /// queues there next, a graph too, must find the next one. Without a stream the host waits: the kernel
    /// has told what it came to, but blocks of it may still look at the call's tensors.
    pub(super) fn order_refused(&self, operation: u64, mode: &Mode) {
        if mode.is_recorded() {
            return;
        }
        let event = &self.events[self.slot(operation)];
        let Some(stream) = mode.stream else {
            if !see_end(&|| event.is_done()) {
                tracing::warn!("the kernel of a refused call still runs: {KEEP_TENSORS}");
            }
            return;
        };
        if let Err(error) = event.hold(stream) {
            tracing::warn!("a stream does not wait for a call that was refused: {error}");
        }
    }

    /// Launches the kernel that waits for a signal of every rank.
    pub(super) fn arrive(&self, operation: u64, phase: u64) -> Result<()> {
        let (slot, ranks) = (self.slot(operation), self.shape.ranks);
        let arguments = ArriveArgs {
            abort: self.waits.abort.at(0) as u64,
            report: self.waits.report.at(0) as u64,
            cap_ns: self.cap_ns,
            cell: self.cell(slot),
            ranks,
            done: (phase != abi::TY_PHASE_ROWS).into(),
            phase: phase as u32,
            rank: self.exchange.rank,
            trace: self.traces.at(self.slot(operation)) as u64,
            state: self.state.address(),
        };
        // SAFETY: the kernel's type; it names memory of the engine only.
        unsafe { self.launch(&self.kernels.arrive, (1, WARPS, 0), &arguments, slot) }
    }

    /// The same, but where the operation's own kernel has waited.
    pub(super) fn arrive_unless(
        &self,
        at_once: bool,
        (operation, phase): (u64, u64),
    ) -> Result<()> {
        if at_once { Ok(()) } else { self.arrive(operation, phase) }
    }
}
