//! How kernels are launched, and their results for the host.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::Result;

use crate::driver::{Buffer, Context, Function, Launch, Pinned, RawStream, copy};
use crate::engine::EngineKernels;
use crate::engine::args::{Outcome, Trace};

/// Memory of the device that kernels of all operations share.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) state: Buffer,
    /// Totals of signals that are waited for: of arrival, and of the end of reading: `[slots, R]` each.
    pub(crate) _expected: [Buffer; 2],
    /// `[R]`: bytes that kernels have put to each rank.
    pub(crate) _put_bytes: Buffer,
    /// `[slots]`: operations that this rank has entered.
    pub(crate) _entered: Buffer,
    /// `[R]`: sums of `_expected` of each rank.
    pub(crate) _tallies: Buffer,
    /// Per slot: the state that its first kernel leaves for the kernels behind it.
    pub(crate) cells: Buffer,
    /// Bytes of the cell of one slot.
    pub(crate) cell_bytes: u64,
}

/// Kernels, their arguments, and their outcomes.
#[derive(Debug)]
pub(crate) struct Launcher {
    pub(crate) kernels: EngineKernels,
    /// `DeviceApi::Params`, in words of 8 bytes for its alignment.
    pub(crate) params: Vec<u64>,
    pub(crate) outcomes: Pinned<Outcome>,
    /// The failure of an operation that no caller waits for; the first one only.
    pub(crate) late: Pinned<Outcome>,
    /// `[slots]` of [`Trace`], on the device: a store to the host at the end of a kernel holds up the next one.
    pub(crate) traces: Buffer,
    pub(crate) memory: DeviceState,
    pub(crate) cap_ns: u64,
}

impl Launcher {
    /// Launches a kernel on a stream.
    ///
    /// # Safety
    /// `arguments` are of the kernel's type; the memory that they name stays valid until the
    /// operation ends.
    pub(crate) unsafe fn run<T>(
        &self,
        kernel: &Function,
        work: RawStream,
        launch: Launch,
        arguments: &T,
    ) -> Result<()> {
        let mut pointers = [
            std::ptr::from_ref(arguments).cast_mut().cast::<c_void>(),
            self.params.as_ptr().cast_mut().cast::<c_void>(),
        ];
        // SAFETY: by this function's contract; the second parameter is the device API's.
        unsafe { kernel.launch(work, launch, &mut pointers) }
    }

    /// The place where the kernels of a slot leave state for the kernels behind them.
    pub(crate) fn cell(&self, slot: usize) -> u64 {
        self.memory.cells.address() + slot as u64 * self.memory.cell_bytes
    }

    /// The epoch of the outcome of a slot's kernel; the kernel writes it last.
    pub(crate) fn epoch(&self, slot: usize) -> u64 {
        let at = self.outcomes.at(slot);
        // SAFETY: pinned memory that lives as long as `self`; the epoch is a word that the kernel
        // writes last, with release order.
        unsafe { AtomicU64::from_ptr(&raw mut (*at).epoch).load(Ordering::Acquire) }
    }

    /// The outcome of a slot's kernel, once its [`epoch`](Self::epoch) says that it is complete.
    pub(crate) fn outcome(&self, slot: usize) -> Outcome {
        // SAFETY: pinned memory that lives as long as `self`; the kernel has written it and does not
        // touch it again.
        unsafe { self.outcomes.at(slot).read_volatile() }
    }

    /// The failure of an operation that no caller waits for.
    pub(crate) fn late_outcome(&self) -> Option<Outcome> {
        let at = self.late.at(0);
        // SAFETY: pinned memory that lives as long as `self`; the kernel writes the word last, with
        // release order, and then nothing more.
        unsafe {
            let epoch = AtomicU64::from_ptr(&raw mut (*at).epoch);
            (epoch.load(Ordering::Acquire) != 0).then(|| at.read_volatile())
        }
    }

    /// The place of the times of a slot.
    pub(crate) fn trace_at(&self, slot: usize) -> u64 {
        self.traces.address() + (slot * size_of::<Trace>()) as u64
    }

    /// The times of the operation of a slot, no kernel of which runs.
    pub(crate) fn trace(&self, context: &Context, slot: usize) -> Result<Trace> {
        let mut trace = Trace::default();
        let at = &raw mut trace as u64;
        copy(context, at, self.trace_at(slot), size_of::<Trace>() as u64)?;
        Ok(trace)
    }
}
