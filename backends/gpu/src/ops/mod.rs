//! Operations beside MoE, inside one domain whose links map the windows of peers. Copy engines move the bytes of
//! gathers and pipes: streams copy them into windows, and store a word behind them. Entries of tables are loaded by
//! short kernels. No kernel waits for another rank.
//!
//! Watched by the tests in these files, by `tests/exchange.rs` (`table.cpp`), and on GPUs by the cases of L1 to L3 of
//! `gather`, `pipe` and `table`.

pub(crate) mod gather;
pub(crate) mod line;
pub(crate) mod pipe;
pub(crate) mod places;
#[cfg(test)]
mod ranks;
pub(crate) mod table;

use std::sync::Arc;

use tokenyard_core::kernels::{KernelNeeds, KernelShape, Limits, LinkNeeds, NO_KERNEL_NEEDS};
use tokenyard_core::transport::Capabilities;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::config::GpuConfig;
use crate::driver::Context;
use gather::Gather;
use line::Mapped;
use pipe::Pipe;
use places::RankPlaces;
use table::{Table, TableLayout};

pub(crate) use table::TABLE;

/// The operation of an instance, which is not of MoE.
#[derive(Debug)]
pub(crate) enum OtherOperation {
    Gather(Gather),
    Pipe(Pipe),
    Table(Table),
}

impl OtherOperation {
    /// `window`: the device address of this rank's window.
    ///
    /// # Safety
    /// Board and links of the plan outlive the operation.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        config: &GpuConfig,
        shape: &KernelShape,
        window: u64,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        unsafe {
            match shape.runs {
                abi::TY_RUNS_PIPE => Pipe::new(context, shape, window, plan).map(Self::Pipe),
                abi::TY_RUNS_TABLE => {
                    let mapped = Mapped::new(shape, window, plan)?;
                    Table::new(context, config, shape, mapped).map(Self::Table)
                }
                _ => Gather::new(context, shape, window, plan).map(Self::Gather),
            }
        }
    }

    pub(crate) fn gather(&mut self) -> Result<&mut Gather> {
        match self {
            Self::Gather(gather) => Ok(gather),
            _ => Err(other_operation()),
        }
    }

    pub(crate) fn pipe(&mut self) -> Result<&mut Pipe> {
        match self {
            Self::Pipe(pipe) => Ok(pipe),
            _ => Err(other_operation()),
        }
    }

    pub(crate) fn table(&mut self) -> Result<&mut Table> {
        match self {
            Self::Table(table) => Ok(table),
            _ => Err(other_operation()),
        }
    }

    /// See [`KernelSet::flush`](tokenyard_core::kernels::KernelSet::flush).
    pub(crate) fn flush(&mut self) -> Result<()> {
        match self {
            Self::Gather(gather) => gather.flush(),
            Self::Pipe(pipe) => pipe.flush(),
            Self::Table(table) => table.flush(),
        }
    }

    /// Waits until all that it queued has ended. All of it ends without action of another rank.
    pub(crate) fn synchronize(&self) -> Result<()> {
        match self {
            Self::Gather(gather) => gather.flush(),
            Self::Pipe(pipe) => pipe.synchronize(),
            Self::Table(table) => table.synchronize(),
        }
    }
}

/// Checks that these kernel sets run the operations of a shape. `kernels`: their name.
pub(crate) fn check(kernels: &str, shape: &KernelShape) -> Result<()> {
    match shape.runs {
        abi::TY_RUNS_MOE | abi::TY_RUNS_GATHER | abi::TY_RUNS_PIPE | abi::TY_RUNS_TABLE => Ok(()),
        _ => lacks(kernels, "operations of this kind"),
    }
}

/// The level whose link reaches all ranks of one domain, and what the link can do.
fn link(limits: &Limits) -> (u64, &Capabilities) {
    match limits.scale_up.max_queues {
        0 => (abi::TY_LEVEL_SCALE_OUT, &limits.scale_out),
        _ => (abi::TY_LEVEL_SCALE_UP, &limits.scale_up),
    }
}

/// The needs of an operation beside MoE. `memory`: the kind of the device's memory.
pub(crate) fn needs(
    kernels: &str,
    shape: &KernelShape,
    limits: &Limits,
    memory: u32,
) -> Result<KernelNeeds> {
    let (level, link) = link(limits);
    let (name, capabilities) = match shape.runs {
        abi::TY_RUNS_PIPE => ("pipe", abi::TY_KERNELS_CAP_PIPE),
        abi::TY_RUNS_TABLE => ("table", abi::TY_KERNELS_CAP_TABLE),
        _ => ("gather", abi::TY_KERNELS_CAP_GATHER | abi::TY_KERNELS_CAP_STREAMS),
    };
    if shape.domains > 1 {
        return lacks(kernels, &format!("{name} over several domains"));
    }
    if link.flags & abi::TY_CAP_LOAD_STORE == 0 || link.memory_kinds & memory == 0 {
        let text = format!("{name} over a link that does not map memory of peers' devices");
        return lacks(kernels, &text);
    }
    let bytes = match shape.runs {
        abi::TY_RUNS_TABLE => TableLayout::new(shape).bytes(),
        _ => RankPlaces::new(shape).bytes(),
    };
    let Some(bytes) = bytes else { return Err(too_large(shape)) };
    let mut needs = KernelNeeds { windows: 1, capabilities, ..NO_KERNEL_NEEDS };
    needs.window_bytes[0] = bytes;
    needs.window_levels[0] = 1 << level;
    // A level without queues is not opened. Streams of the operation itself move the bytes.
    let used = LinkNeeds { queues: 1, queue_depth: 1, ..needs.scale_up };
    match level {
        abi::TY_LEVEL_SCALE_UP => needs.scale_up = used,
        _ => needs.scale_out = used,
    }
    Ok(needs)
}

#[cold]
fn other_operation() -> Error {
    Error::new(ErrorKind::Internal, "run operation", "the instance was planned for another one")
}

#[cold]
fn lacks<T>(kernels: &str, what: &str) -> Result<T> {
    let text = format!("kernel set `{kernels}` has no {what}");
    Err(Error::new(ErrorKind::Unsupported, "open kernels", text)
        .with_fix("use kernel set `cpu`, which has each operation"))
}

#[cold]
fn too_large(shape: &KernelShape) -> Error {
    let KernelShape { message_bytes, in_flight, ranks, entries, layers, .. } = shape;
    let found = match shape.runs {
        abi::TY_RUNS_TABLE => {
            format!("{entries} entries of {message_bytes} bytes in each of {layers} layers")
        }
        _ => {
            format!("{message_bytes} bytes, {in_flight} times in flight, for each of {ranks} ranks")
        }
    };
    let text = format!("found {found}; expected a window of less than 2^47 bytes");
    let error = Error::new(ErrorKind::InvalidInput, "plan needs", text);
    error.with_fix("name fewer bytes, slots or entries")
}

#[cfg(test)]
mod tests {
    use tokenyard_core::kernels::kernel_shape;
    use tokenyard_core::moe::Shape;
    use tokenyard_core::transport::NO_CAPABILITIES;

    use super::*;

    const WORLD: Shape = Shape { ranks: 4, experts: 4, topk: 1, hidden: 1, max_tokens: 1 };
    const MEMORY: u32 = abi::TY_MEMORY_CUDA;

    fn gather(domains: u32) -> KernelShape {
        let shape = kernel_shape(&WORLD, domains, 2, 1);
        KernelShape { runs: abi::TY_RUNS_GATHER, message_bytes: 100, ..shape }
    }

    fn limits(flags: u64, memory_kinds: u32) -> Limits {
        let scale_up = Capabilities { flags, memory_kinds, max_queues: 4, ..NO_CAPABILITIES };
        Limits { size: size_of::<Limits>(), scale_up, scale_out: NO_CAPABILITIES }
    }

    #[test]
    fn a_gather_needs_one_window_of_the_link_that_maps_peers_and_no_signals() {
        let needs = needs("x", &gather(1), &limits(abi::TY_CAP_LOAD_STORE, MEMORY), MEMORY);
        let needs = needs.unwrap();
        assert_eq!((needs.windows, needs.window_levels[0]), (1, 1 << abi::TY_LEVEL_SCALE_UP));
        assert_eq!(Some(needs.window_bytes[0]), RankPlaces::new(&gather(1)).bytes());
        assert_eq!((needs.scale_up.queues, needs.scale_up.signals), (1, 0));
        assert_eq!(needs.scale_out.queues, 0);
        assert_ne!(needs.capabilities & abi::TY_KERNELS_CAP_GATHER, 0);
    }

    #[test]
    fn what_the_kernel_sets_of_gpus_lack_is_refused_by_name() {
        let text = |result: Result<()>| result.unwrap_err().to_string();
        let of_runs = |runs| KernelShape { runs, ..gather(1) };
        let refused = text(check("x", &of_runs(77)));
        assert!(refused.contains("kernel set `x` has no operations of this kind"), "{refused}");
        for runs in [abi::TY_RUNS_GATHER, abi::TY_RUNS_PIPE, abi::TY_RUNS_TABLE] {
            assert!(check("x", &of_runs(runs)).is_ok(), "{runs}");
        }
        let pipe = KernelShape { domains: 2, ..of_runs(abi::TY_RUNS_PIPE) };
        let of = |shape: &KernelShape, limits: &Limits| {
            let needs = needs("x", shape, limits, MEMORY);
            text(needs.map(|_| ()))
        };
        let maps = limits(abi::TY_CAP_LOAD_STORE, MEMORY);
        assert!(of(&gather(2), &maps).contains("`x` has no gather over several domains"));
        assert!(of(&pipe, &maps).contains("`x` has no pipe over several domains"));
        for limits in [limits(0, MEMORY), limits(abi::TY_CAP_LOAD_STORE, abi::TY_MEMORY_HOST)] {
            assert!(of(&gather(1), &limits).contains("`x` has no gather over a link"));
        }
        let table = KernelShape { entries: 1 << 40, layers: 2, ..of_runs(abi::TY_RUNS_TABLE) };
        let refused = of(&table, &maps);
        assert!(refused.contains("found 1099511627776 entries of 100 bytes in each of 2 layers"));
        let huge = KernelShape { message_bytes: 1 << 46, ..gather(1) };
        assert!(of(&huge, &maps).contains("expected a window of less than 2^47 bytes"));
    }
}
