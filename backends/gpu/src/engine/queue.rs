//! The queues of an operation's kernels, and the waits of their streams.

use tokenyard_core::call::CallOrder;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::driver::{Function, Launch, RawStream, RelaxedCapture};
use crate::engine::Engine;
use crate::engine::args::{ArriveArgs, THREADS};
use crate::engine::mode::Mode;
use crate::engine::outcome::Refusal;

impl Engine {
    /// The mode that a call asks for.
    pub(crate) fn mode(&self, order: CallOrder) -> Result<Mode> {
        let mode = self.abort_on_fatal(Mode::of(order, self.order.context()))?;
        // Among several domains, and over puts, the host has work to do before all data has arrived.
        let can = self.member.is_whole && !self.member.path.puts();
        Ok(Mode { at_once: mode.at_once && can, ..mode })
    }

    /// See [`Mode::relax`], for a call whose send and receive are separate.
    pub(crate) fn relax(&self, order: CallOrder) -> Result<Option<RelaxedCapture>> {
        self.mode(order.waiting())?.relax(self.order.context())
    }

    /// Launches a kernel of an operation.
    ///
    /// # Safety
    /// `arguments` are of the kernel's type; the memory that they name stays valid until the
    /// operation ends.
    pub(crate) unsafe fn launch<T>(
        &self,
        kernel: &Function,
        launch: Launch,
        arguments: &T,
        slot: usize,
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.launcher.run(kernel, self.order.work(), launch, arguments)? };
        self.order.queued(slot)
    }

    /// Starts an operation that may move data: behind the present work of its stream, and behind the
    /// last use of every region that was taken back.
    pub(crate) fn enter(&mut self, operation: u64, mode: &Mode) -> Result<()> {
        self.latest = operation;
        self.take_back_late();
        self.order.enter(mode)
    }

    /// Ends an operation whose kernels are launched: its stream continues behind them, and the
    /// observer watches that they end; without a stream the host waits.
    pub(crate) fn leave(&mut self, operation: u64, phase: u64, mode: &Mode) -> Result<()> {
        let Some(stream) = mode.stream else { return self.finish(operation, phase) };
        let slot = self.slot(operation);
        if mode.is_recorded() {
            return self.order.join(stream);
        }
        self.order.leave(slot, stream)?;
        if phase == abi::TY_PHASE_DONE || self.member.path.puts() {
            // An operation that ends so reads regions that its caller may drop now, and its own is returned. Where
            // kernels put, the staging of every operation is returned, too.
            self.order.free_behind(slot)?;
        }
        let wait = self.wait(operation, phase);
        self.observer.watch(wait)
    }

    /// Launches the kernel that waits for a signal of every rank.
    pub(crate) fn arrive(&self, operation: u64, phase: u64) -> Result<()> {
        let slot = self.slot(operation);
        let launcher = &self.launcher;
        let arguments = ArriveArgs {
            abort: self.waits.abort.at(0) as u64,
            report: self.waits.report.at(0) as u64,
            cap_ns: launcher.cap_ns,
            cell: launcher.cell(slot),
            ranks: self.member.ranks,
            done: (phase != abi::TY_PHASE_ROWS).into(),
            phase: phase as u32,
            rank: self.member.rank,
            trace: launcher.trace_at(slot),
            state: launcher.memory.state.address(),
        };
        let launch = Launch::of_threads(1, THREADS, 0);
        // SAFETY: the kernel's type; it names memory of the engine only.
        unsafe { self.launch(&launcher.kernels.arrive, launch, &arguments, slot) }
    }

    /// As [`arrive`](Self::arrive), unless the operation's own kernel has waited.
    pub(crate) fn arrive_unless(&self, at_once: bool, operation: u64, phase: u64) -> Result<()> {
        if at_once { Ok(()) } else { self.arrive(operation, phase) }
    }

    /// Continues an operation that was sent.
    pub(crate) fn resume(&mut self, mode: &Mode) -> Result<()> {
        let lasts = self.order.resume(mode);
        if self.abort_on_fatal(lasts)? {
            return Ok(());
        }
        let text =
            "the operation was sent in a capture that has ended; expected its receive in it too";
        Err(Error::new(ErrorKind::InvalidInput, "receive operation", text))
    }

    /// The reason why this rank alone gets an error about its call: no kernel runs in a capture.
    /// The recorded part of the call joins the rest, so that the graph is complete without the
    /// call.
    pub(crate) fn refuse_recorded(&self, mode: &Mode, refusal: &Refusal) -> Error {
        // The operations that it would have followed are ahead of the next one through its stream.
        let joined = mode.stream.map_or(Ok(()), |stream| {
            self.order.join(stream).and_then(|()| self.order.regions.marks.mark(stream))
        });
        if let Err(error) = self.abort_on_fatal(joined) {
            return error;
        }
        let why = refusal.why.as_str();
        Error::new(refusal.kind, "capture operation", why).with_rank(refusal.rank())
    }

    /// Takes a region back.
    pub(crate) fn release(&mut self, region: u64) {
        if self.places.arena.is_captured(region) {
            // Nothing outside of graphs writes there again, and those run one after the other.
            if let Err(error) = self.order.regions.take_back_captured(region) {
                self.observer.fail(error);
            }
            self.places.arena.release(region);
            return;
        }
        match self.order.regions.take_back(region) {
            Ok(true) => self.places.arena.release(region),
            Ok(false) => {}
            // The stream may still read it, and others would write it: no operation may run after
            // this.
            Err(error) => self.observer.fail(error),
        }
    }

    pub(crate) fn take_back_late(&mut self) {
        for region in self.order.regions.late() {
            self.release(region);
        }
    }

    /// Forgets a stream that has ended: no later call may name it.
    pub(crate) fn forget(&mut self, stream: RawStream) {
        self.order.regions.forget(stream);
    }
}
