//! The kernels of a table, and their arguments.

use std::ffi::c_void;
use std::sync::Arc;

use tokenyard_core::Result;

use crate::compile::{self, KernelSource};
use crate::config::GpuConfig;
use crate::driver::{Context, Function, Launch, Module, RawStream};

/// The kernels.
pub(crate) const TABLE: KernelSource = KernelSource {
    name: "table.cu",
    text: include_str!("../../../device/ops/table.cu"),
    args_bytes: size_of::<TableArgs>(),
};

/// Threads of a block.
const THREADS: u32 = 256;
/// Units that a thread loads before it stores the first.
const BATCH: u64 = 4;
/// Bytes of the units that entries are moved in.
const UNITS: [u64; 3] = [16, 4, 1];

/// As in `table.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TableArgs {
    pub(crate) windows: u64,
    pub(crate) counts: u64,
    pub(crate) indices: u64,
    pub(crate) part: u64,
    pub(crate) wrong: u64,
    pub(crate) first: u64,
    pub(crate) pitch: u64,
    pub(crate) entries: u64,
    pub(crate) count: u64,
    pub(crate) units: u32,
    pub(crate) index_bytes: u32,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

/// The way of values or scales of entries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    Fetch,
    Write,
}

/// The loaded kernels.
#[derive(Debug)]
pub(crate) struct TableKernels {
    check: Function,
    /// By unit.
    fetch: [Function; UNITS.len()],
    write: [Function; UNITS.len()],
    /// Most blocks of a launch: some for each multiprocessor.
    most_blocks: u32,
}

impl TableKernels {
    pub(crate) fn load(context: &Arc<Context>, config: &GpuConfig) -> Result<Self> {
        let facts = context.device.facts()?;
        let image = compile::beside(context.device.platform, config, facts.architecture, &TABLE)?;
        let module = Module::load(context, &image)?;
        let of = |name: &str| module.function(name);
        Ok(Self {
            check: of("ty_table_check")?,
            fetch: [of("ty_table_fetch_16")?, of("ty_table_fetch_4")?, of("ty_table_fetch_1")?],
            write: [of("ty_table_write_16")?, of("ty_table_write_4")?, of("ty_table_write_1")?],
            most_blocks: 8 * facts.processors,
        })
    }

    /// Queues the check of all indices.
    ///
    /// # Safety
    /// The memory that the arguments name is valid until the stream has passed the kernel.
    pub(crate) unsafe fn check(&self, stream: RawStream, arguments: &TableArgs) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.launch(&self.check, stream, arguments.count, arguments) }
    }

    /// Queues the move of `width` bytes of each entry.
    ///
    /// # Safety
    /// As [`check`](Self::check), and every index has an entry.
    pub(crate) unsafe fn run(
        &self,
        what: Move,
        stream: RawStream,
        width: u64,
        arguments: &TableArgs,
    ) -> Result<()> {
        let TableArgs { part, first, pitch, count, .. } = *arguments;
        let at = unit(&[width, part, first, pitch]);
        let units = width / UNITS[at];
        let arguments = TableArgs { units: units as u32, ..*arguments };
        let kernel = match what {
            Move::Fetch => &self.fetch[at],
            Move::Write => &self.write[at],
        };
        // SAFETY: by this function's contract.
        unsafe { self.launch(kernel, stream, (count * units).div_ceil(BATCH), &arguments) }
    }

    /// # Safety
    /// As [`check`](Self::check).
    unsafe fn launch(
        &self,
        kernel: &Function,
        stream: RawStream,
        threads: u64,
        arguments: &TableArgs,
    ) -> Result<()> {
        let blocks = threads.div_ceil(THREADS.into()).clamp(1, self.most_blocks.into()) as u32;
        let mut pointers = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        let launch = Launch::of_threads(blocks, THREADS, 0);
        // SAFETY: the only parameter of each kernel is of this type; the rest by this function's contract.
        unsafe { kernel.launch(stream, launch, &mut pointers) }
    }
}

/// The number of the largest unit that divides all of these. Windows begin at pages.
fn unit(all: &[u64]) -> usize {
    let divides = |unit: &u64| all.iter().all(|bytes| bytes.is_multiple_of(*unit));
    UNITS.iter().position(divides).unwrap_or(UNITS.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_move_in_the_largest_unit_that_sizes_and_places_allow() {
        assert_eq!(UNITS[unit(&[256, 4096, 0, 256])], 16);
        assert_eq!(UNITS[unit(&[256, 4096 + 8, 0, 256])], 4);
        assert_eq!(UNITS[unit(&[4, 4096, 16, 32])], 4);
        assert_eq!(UNITS[unit(&[7, 4096, 0, 16])], 1);
    }
}
